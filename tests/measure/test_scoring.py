"""Tiled scores against whole-vocabulary float64, whatever the tile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastcall.measure import scoring
from lastcall.measure.anatomy import Head
from lastcall.measure.scoring import Scores, score
from tests.reference import measure as twin

ROWS, D, VOCABULARY = 23, 16, 61
TILES = [(1, 1), (5, 7), (7, 61), (23, 60), (100, 1000), (4, 2)]


def drawn(
    seed: int, *, bias: bool, softcap: float | None, scale: float = 1.0
) -> tuple[Head, dict, torch.Tensor]:
    """A random head, states by branch and targets that touch both ends of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    head = Head(scale * normal(VOCABULARY, D), 3 * normal(VOCABULARY) if bias else None, softcap)
    states = {name: normal(ROWS, D) for name in ("full", "bypass", "near", "nearer")}
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[0], targets[1] = 0, VOCABULARY - 1
    return head, states, targets


def scored(head: Head, states: dict[str, torch.Tensor], targets: torch.Tensor) -> Scores:
    return score(head, states["full"], states["bypass"], {8: states["near"], 2: states["nearer"]}, targets)


def literal(head: Head, states: dict[str, torch.Tensor], targets: torch.Tensor) -> dict[str, torch.Tensor]:
    log_p = {
        name: twin.normalised(head.weight, head.bias, head.softcap, state) for name, state in states.items()
    }
    return {
        "loss_full": twin.losses(log_p["full"], targets),
        "loss_bypass": twin.losses(log_p["bypass"], targets),
        "loss_8": twin.losses(log_p["near"], targets),
        "loss_2": twin.losses(log_p["nearer"], targets),
        "kl": twin.kl(log_p["full"], log_p["bypass"]),
        **twin.uncertainty(log_p["bypass"]),
    }


def flat(scores: Scores) -> dict[str, torch.Tensor]:
    names = ("loss_full", "loss_bypass", "kl", "entropy", "top_logprob", "margin")
    local = {f"loss_{w}": loss for w, loss in scores.loss_local.items()}
    return {**{name: getattr(scores, name) for name in names}, **local}


def same(scores: Scores, want: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    got = flat(scores)
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), want[name], atol=tolerance, rtol=1e-6, msg=name)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("bias", "softcap"), [(False, None), (True, None), (False, 3.0), (True, 30.0)])
def test_tiles_agree_with_the_whole_vocabulary(
    tile: tuple[int, int], bias: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_TILES", {"cpu": tile})
    drawing = drawn(sum(tile), bias=bias, softcap=softcap)
    same(scored(*drawing), literal(*drawing))


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, ROWS + 1),
    width=st.integers(1, VOCABULARY + 1),
    scale=st.sampled_from([1e-3, 0.3, 1.0, 3.0]),
)
@settings(max_examples=25, deadline=None)
def test_any_tile_and_any_scale(seed: int, rows: int, width: int, scale: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_TILES", {"cpu": (rows, width)})
        drawing = drawn(seed, bias=True, softcap=None, scale=scale)
        same(scored(*drawing), literal(*drawing), tolerance=1e-4)


def test_peaked_distributions_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_TILES", {"cpu": (5, 7)})
    drawing = drawn(0, bias=False, softcap=None, scale=1e3)
    same(scored(*drawing), literal(*drawing), tolerance=5e-2)  # float32 logits of some 10^4


def test_a_distribution_and_itself_have_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_TILES", {"cpu": (5, 7)})
    head, states, targets = drawn(0, bias=True, softcap=None)
    found = score(head, states["full"], states["full"], {}, targets)
    assert torch.equal(found.loss_full, found.loss_bypass)
    assert found.kl.max() < 1e-6
    assert (found.kl >= 0).all()
    assert found.loss_local == {}


def test_a_uniform_head_has_the_entropy_of_its_vocabulary() -> None:
    head = Head(torch.zeros(VOCABULARY, D), None, None)
    zeros = torch.zeros(ROWS, D)
    found = score(head, zeros, zeros, {4: zeros}, torch.arange(ROWS))
    for value in (found.entropy, -found.top_logprob, found.loss_full, found.loss_local[4]):
        torch.testing.assert_close(value, torch.full((ROWS,), math.log(VOCABULARY)))
    assert (found.margin == 0).all()
    assert (found.kl == 0).all()


def test_a_vocabulary_of_two_in_tiles_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_TILES", {"cpu": (1, 1)})
    head = Head(torch.tensor([[1.0], [0.0]]), None, None)
    found = score(head, torch.ones(1, 1), torch.ones(1, 1), {}, torch.tensor([1]))
    assert float(found.margin) == 1
    assert float(found.loss_full) == pytest.approx(math.log(1 + math.e), abs=1e-6)


def test_a_head_is_computed_in_its_own_type_and_scored_in_float32() -> None:
    head, states, targets = drawn(0, bias=True, softcap=None)
    half = Head(head.weight.bfloat16(), None if head.bias is None else head.bias.bfloat16(), None)
    found = scored(half, {name: state.bfloat16() for name, state in states.items()}, targets)
    want = torch.nn.functional.linear(states["full"].bfloat16(), half.weight, half.bias).float()
    loss = torch.nn.functional.cross_entropy(want, targets, reduction="none")
    torch.testing.assert_close(found.loss_full, loss, atol=1e-5, rtol=0)
    assert found.loss_full.dtype == torch.float32
