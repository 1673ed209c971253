"""Patches: undone whatever happens, in order, down to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from lastcall.measure.anatomy import Site
from lastcall.measure.branches import Branches
from lastcall.measure.bypass import attention_skipped, replaced, run_trunk
from lastcall.measure.loading import Loaded
from tests.tiny import TINY, token_blocks

Tiny = Callable[..., Loaded]
TOKENS = token_blocks(1)[:, :-1]


class Unplugged(Exception):
    """What the tests throw."""


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def logits(site: Site) -> torch.Tensor:
    return site.model(input_ids=TOKENS, use_cache=False).logits


def patched(site: Site) -> list[str]:
    return [name for name, module in site.model.named_modules() if "forward" in module.__dict__]


def unplug(*_: object, **__: object) -> torch.Tensor:
    raise Unplugged


@pytest.mark.parametrize("name", TINY)
def test_logits_are_bit_identical_after_an_exception_inside_a_patch(name: str, tiny: Tiny) -> None:
    site = tiny(name).site
    before = logits(site)

    def skip_and_fail() -> None:
        with attention_skipped(site):
            assert patched(site)
            assert not torch.equal(logits(site), before)
            unplug()

    def defer_skip_and_fail() -> None:
        with replaced(site.norm, unplug):
            run_trunk(site, TOKENS)  # stops before the norm
        with replaced(site.model.model.layers[0], unplug), attention_skipped(site):
            run_trunk(site, TOKENS)

    for fails in (skip_and_fail, defer_skip_and_fail):
        with pytest.raises(Unplugged):
            fails()
        assert patched(site) == []
        assert torch.equal(logits(site), before)


@pytest.mark.parametrize("inside", ["mlp", "self_attn", "input_layernorm"])
@pytest.mark.parametrize("at", [1, 3])
def test_a_branch_that_fails_midway_leaves_the_model_as_it_was(at: int, inside: str, tiny: Tiny) -> None:
    site = tiny("smollm3").site
    before = logits(site)
    broken = getattr(site.model.model.layers[at], inside)

    def branch() -> None:
        with replaced(broken, unplug):
            branches = Branches(site, TOKENS)
            branches.full() if inside == "self_attn" else branches.bypass()

    with pytest.raises(Unplugged):
        branch()
    assert patched(site) == []
    assert torch.equal(logits(site), before)


def test_nested_patches_unwind_in_order() -> None:
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    own = module(x)

    def nest() -> None:
        with replaced(module, lambda x: x + 2):
            with replaced(module, lambda x: x + 3):
                assert torch.equal(module(x), x + 3)
            assert torch.equal(module(x), x + 2)
            unplug()

    with replaced(module, lambda x: x + 1):
        with pytest.raises(Unplugged):
            nest()
        assert torch.equal(module(x), x + 1)
    assert "forward" not in module.__dict__
    assert torch.equal(module(x), own)


def test_a_forward_that_was_on_the_instance_comes_back() -> None:
    module = nn.Linear(2, 2)
    own = module.forward

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        return -own(x)

    def fail() -> None:
        with replaced(module, unplug):
            module(torch.ones(1, 2))

    module.forward = wrapped
    with pytest.raises(Unplugged):
        fail()
    assert module.__dict__["forward"] is wrapped


def test_the_trunk_stops_at_the_final_block_and_keeps_what_it_was_given(tiny: Tiny) -> None:
    site = tiny("llama").site
    stock = site.model(input_ids=TOKENS, use_cache=False, output_hidden_states=True)
    with replaced(site.attention, unplug), replaced(site.block.mlp, unplug), replaced(site.norm, unplug):
        call = run_trunk(site, TOKENS)
    assert torch.equal(call.hidden, stock.hidden_states[3])
    assert "position_embeddings" in call.arguments
    assert "hidden_states" not in call.arguments


def test_skipped_attention_in_the_stock_model_is_the_bypass_branch(tiny: Tiny) -> None:
    for name in TINY:
        site = tiny(name).site
        with attention_skipped(site):
            skipped = site.trunk(input_ids=TOKENS, use_cache=False).last_hidden_state
        assert torch.equal(skipped, Branches(site, TOKENS).bypass())
