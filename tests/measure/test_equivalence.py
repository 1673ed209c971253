"""The gate: every check holds on every architecture, and each of them fails where it should."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastcall.errors import CheckError, EquivalenceError
from lastcall.measure import equivalence
from lastcall.measure.anatomy import Head, Site
from lastcall.measure.branches import Branches
from lastcall.measure.bypass import replaced
from lastcall.measure.equivalence import Check, check_all, full_is_stock, gate
from lastcall.measure.loading import Loaded, load
from tests.tiny import TINY, checkpoint, token_blocks

Tiny = Callable[..., Loaded]
TOKENS = token_blocks()
FULL, RAN, ZEROED, AFTER, CACHED, BATCH, BACKEND, ROTARY = range(8)


def failed(site: Site) -> list[int]:
    """Rows of the table that did not pass."""
    return [i for i, check in enumerate(check_all(site, TOKENS, "float32")) if not check.passed]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY)
def test_every_check_passes(name: str, backend: str, tiny: Tiny) -> None:
    checks = check_all(tiny(name, backend).site, TOKENS, "float32")
    assert [check.name for check in checks] == [
        "full branch = stock loss (max |Δ|)",
        "modules of the bypassed attention that ran",
        "bypass = attention times zero (max |Δ|)",
        "logits unchanged after the patches (max |Δ|)",
        "cached continuation = whole (max |Δ| of loss)",
        "alone = in a batch (max |Δ| of loss)",
        *["torch's choice of attention = its plain one (max |Δ| of loss)"] * (backend == "sdpa"),
        *["final block's rotary positions not as its interval says"] * (name == "smollm3"),
    ]
    assert [check.name for check in checks if not check.passed] == []
    assert [check.allowed for check in checks][:6] == [1e-5, 0, 1e-5, 0, 1e-4, 1e-4]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_held_to_their_mean(dtype: str, tiny_folder: Callable[[str], Path]) -> None:
    site = load(checkpoint("tiny", tiny_folder("smollm3"), dtype=dtype)).site
    check = full_is_stock(site, TOKENS, dtype)
    assert check.passed
    assert check.allowed == 1e-3
    assert "mean" in check.name
    assert check_all(site, TOKENS, dtype)[AFTER].passed


@pytest.mark.parametrize("found", [float("nan"), 2e-5])
def test_what_is_not_within_the_tolerance_did_not_pass(found: float) -> None:
    assert not Check("any", found, 1e-5, "nats").passed
    assert Check("any", 1e-5, 1e-5, "nats").passed


# --- sabotage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_noise_in_the_patched_path_is_found(name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    site, own = tiny(name).site, Branches.full
    assert failed(site) == []

    def noisy(self: Branches) -> torch.Tensor:
        state = own(self)
        generator = torch.Generator().manual_seed(0)
        return state + 1e-4 * torch.randn(state.shape[1:], generator=generator)  # the same in each block

    monkeypatch.setattr(Branches, "full", noisy)  # which the bypass branch calls too
    assert failed(site) == [FULL, ZEROED]
    with pytest.raises(EquivalenceError) as caught:
        gate(site, TOKENS, "float32", name)
    assert isinstance(caught.value, CheckError)
    assert caught.value.exit_code == 1
    assert str(caught.value).startswith(
        f"{name}: the full branch does not equal the stock model's loss: got |Δ| = "
    )
    assert str(caught.value).endswith(
        " nats where 1e-05 is allowed; nothing was measured; run `lastcall check` on this checkpoint"
    )


def test_the_gate_gives_its_row_where_it_passes(tiny: Tiny) -> None:
    assert gate(tiny("llama").site, TOKENS, "float32", "llama").passed


@pytest.mark.parametrize("wrong", ["norm", "softcap", "bias", "weight"])
def test_a_row_of_the_table_that_names_the_wrong_thing_is_found(wrong: str, tiny: Tiny) -> None:
    site = tiny("gemma3-softcap").site
    head = site.head
    mended = {
        "norm": {"norm": site.block.input_layernorm},
        "softcap": {"head": Head(head.weight, None, None)},
        "bias": {"head": Head(head.weight, torch.randn(head.vocabulary) / 100, head.softcap)},
        "weight": {"head": Head(head.weight.roll(1, 0), None, head.softcap)},
    }[wrong]
    assert failed(dataclasses.replace(site, **mended)) == [FULL, ZEROED]


def test_an_attention_that_is_not_bypassed_is_found(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def nothing(_: Site) -> Iterator[None]:
        yield

    monkeypatch.setattr("lastcall.measure.bypass.attention_skipped", nothing)
    assert failed(tiny("smollm3").site) == [RAN, ZEROED]
    monkeypatch.setattr(equivalence, "attention_skipped", nothing)
    ran = check_all(tiny("smollm3").site, TOKENS, "float32")[RAN]
    assert ran.found == 2 * 4  # four projections, in the branch and in the stock model


def test_a_bypass_that_leaves_something_in_the_residual_is_found(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def nearly(site: Site) -> Iterator[None]:
        with replaced(site.attention, lambda hidden_states, **_: (hidden_states * 1e-3, None)):
            yield

    monkeypatch.setattr("lastcall.measure.bypass.attention_skipped", nearly)
    for name in ("llama", "qwen3_5", "gemma3-full"):
        assert failed(tiny(name).site) == [ZEROED]


def test_a_patch_that_stays_is_found(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = load(checkpoint("tiny", tiny_folder("llama"))).site
    own = Branches.bypass

    def staying(self: Branches) -> torch.Tensor:
        state = own(self)
        site.block.mlp.down_proj.weight.mul_(1.0001)
        return state

    monkeypatch.setattr(Branches, "bypass", staying)
    assert AFTER in failed(site)


def test_a_cache_that_forgets_is_found(tiny_folder: Callable[[str], Path]) -> None:
    site = load(checkpoint("tiny", tiny_folder("smollm3"))).site
    own: Any = type(site.attention).forward

    def forgetful(hidden_states: torch.Tensor, **arguments: Any) -> Any:
        for name in ("cache", "past_key_values"):
            arguments.pop(name, None)
        arguments["attention_mask"] = None
        return own(site.attention, hidden_states, **arguments)

    site.attention.forward = forgetful
    assert failed(site) == [CACHED]


def test_checking_leaves_hooks_and_forwards_as_they_were(tiny: Tiny) -> None:
    for name in TINY:
        site = tiny(name).site
        modules: list[nn.Module] = list(site.model.modules())

        def worn(modules: list[nn.Module] = modules) -> list[tuple[list[int], list[int], bool]]:
            return [
                (list(m._forward_hooks), list(m._forward_pre_hooks), "forward" in vars(m)) for m in modules
            ]

        before = worn()  # not empty: transformers hooks its blocks once hidden states were asked for
        check_all(site, TOKENS, "float32")
        assert worn() == before
        assert not any(patched for *_, patched in before)
