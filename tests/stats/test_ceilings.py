"""Ceilings, the full branch's calibration, and what ranking and the sign are worth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lastcall.errors import InputError
from lastcall.stats.bootstrap import Draws, draw_clusters, partition
from lastcall.stats.ceilings import allocations, best_gains, fit_scale, knowable_ceiling, reliability
from lastcall.stats.policies import largest
from tests.reference import routing as picking
from tests.reference import stats as reference

PAIRS = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "w")]
BOOKS = [book for book, _ in PAIRS]
SHAPE = (len(BOOKS), 2, 12)
ALPHA = 0.1


def drawn() -> tuple[Draws, list[list[str]]]:
    """The same draws for the software and for its twin."""
    draws = draw_clusters(partition(PAIRS), 200, rng=np.random.default_rng(5))
    return draws, reference.drawn_books(dict(PAIRS), 200, np.random.default_rng(5))


def measured(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Utility and KL, the one a noisy share of the other."""
    rng = np.random.default_rng(seed)
    kl = rng.exponential(0.1, SHAPE)
    return 0.7 * kl + 0.2 * rng.standard_t(4, SHAPE), kl


VALUES = arrays(np.float64, (2, 2, 7), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0]))


@given(VALUES, VALUES)
def test_gains_at_every_budget_are_those_of_the_calls(values: np.ndarray, utility: np.ndarray) -> None:
    gains = best_gains(values, utility, range(1, 8))
    for k in range(1, 8):
        np.testing.assert_allclose(
            gains[:, k - 1], np.where(largest(values, k), utility, 0).mean((1, 2)), atol=1e-12
        )
    for book, block_values, block_utility in zip(gains, values, utility, strict=True):
        made = [picking.largest(v.tolist(), 3) for v in block_values]
        expected = np.mean([u[m].sum() / 7 for u, m in zip(block_utility, made, strict=True)])
        assert book[2] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("calls", [[0], [1, 13]])
def test_an_impossible_budget_is_refused(calls: list[int]) -> None:
    with pytest.raises(ValueError, match="calls must be 1 to 12"):
        best_gains(*measured(), calls)


def test_no_order_gains_more_than_the_oracle_and_the_oracle_no_more_than_the_sign() -> None:
    utility, kl = measured()
    oracle, knowable = (best_gains(v, utility, range(1, 13)) for v in (utility, kl))
    assert (oracle >= knowable - 1e-12).all()
    sign = np.maximum(utility, 0).mean((1, 2))
    assert (oracle <= sign[:, None] + 1e-12).all()
    np.testing.assert_allclose(oracle[:, -1], utility.mean((1, 2)))


def test_the_scale_is_least_squares_through_the_origin() -> None:
    utility, kl = measured()
    expected = np.linalg.lstsq(kl.reshape(-1, 1), utility.ravel(), rcond=None)[0][0]
    assert fit_scale(kl, utility) == pytest.approx(expected)
    errors = [((utility - a * kl) ** 2).sum() for a in (expected - 1e-3, expected, expected + 1e-3)]
    assert errors[1] == min(errors)
    assert fit_scale(kl, 0.25 * kl) == pytest.approx(0.25)


def test_branches_that_never_differ_have_no_calibration() -> None:
    with pytest.raises(InputError, match="never differs from the bypass: got KL 0 at 120 positions"):
        fit_scale(np.zeros(SHAPE), np.zeros(SHAPE))
    with pytest.raises(InputError, match="never differs"):
        reliability(np.zeros(SHAPE), np.zeros(SHAPE), drawn()[0], ALPHA)


def test_a_calibrated_branch_gains_what_it_expects() -> None:
    """u = log p(x) − log q(x) with x drawn from p itself: mean utility is mean KL, in every tenth."""
    rng = np.random.default_rng(0)
    shape = (60, 2, 300)
    p, q = rng.dirichlet([0.7] * 5, shape), rng.dirichlet([2.0] * 5, shape)
    q = 0.5 * p + 0.5 * q
    kl = (p * np.log(p / q)).sum(-1)
    x = (p.cumsum(-1) > rng.random((*shape, 1))).argmax(-1)[..., None]
    utility = np.log(np.take_along_axis(p, x, -1) / np.take_along_axis(q, x, -1))[..., 0]
    draws = draw_clusters(partition([(str(i), str(i)) for i in range(60)]), 500, rng=rng)
    found = reliability(utility, kl, draws, 0.01)
    for value in (found["slope"], found["ratio"]):
        assert value["low"] < 1 < value["high"]
        assert value["high"] - value["low"] < 0.1
    assert len(found["bins"]) == 10
    inside = [b["realised"]["low"] <= b["predicted"] <= b["realised"]["high"] for b in found["bins"]]
    assert sum(inside) >= 9
    halved = reliability(0.5 * utility, kl, draws, 0.01)
    assert halved["slope"]["high"] < 0.6
    assert fit_scale(kl, 0.5 * utility) == pytest.approx(0.5, abs=0.05)


def test_reliability_is_the_twins() -> None:
    utility, kl = measured()
    draws, books = drawn()
    found = reliability(utility, kl, draws, ALPHA)
    at = {book: i for i, book in enumerate(BOOKS)}

    def ratio(above: np.ndarray, below: np.ndarray, of: list[str]) -> float:
        return sum(above[at[b]].sum() for b in of) / sum(below[at[b]].sum() for b in of)

    for key, above, below in (("slope", utility * kl, kl * kl), ("ratio", utility, kl)):
        expected = reference.interval(lambda of, a=above, b=below: ratio(a, b, of), BOOKS, books, ALPHA)
        assert found[key] == pytest.approx(expected, rel=1e-9)
    order = np.argsort(kl.ravel())
    for b, members in zip(found["bins"], order.reshape(10, -1), strict=True):
        assert b["predicted"] == pytest.approx(kl.ravel()[members].mean())
        assert b["realised"]["estimate"] == pytest.approx(utility.ravel()[members].mean())


def test_bins_that_tie_are_one() -> None:
    utility, kl = measured()
    kl[...] = np.where(kl > np.median(kl), 0.5, 0.125)
    found = reliability(utility, kl, drawn()[0], ALPHA)["bins"]
    assert [b["predicted"] for b in found] == [0.125, 0.5]


def test_a_scale_moves_the_claim_and_not_the_gain() -> None:
    utility, kl = measured()
    draws, books = drawn()
    one, half = (knowable_ceiling(utility, kl, 3, scale, draws, ALPHA) for scale in (1.0, 0.5))
    assert one["corrected"] == one["claimed"] == half["claimed"]
    assert half["corrected"]["estimate"] == pytest.approx(0.5 * one["claimed"]["estimate"])
    assert half["realised"] == one["realised"]
    made = largest(kl, 3)
    for key, values in (("claimed", kl), ("realised", utility)):
        of_book = dict(zip(BOOKS, np.where(made, values, 0).mean((1, 2)), strict=True))
        expected = reference.interval(lambda of, v=of_book: np.mean([v[b] for b in of]), BOOKS, books, ALPHA)
        assert one[key] == pytest.approx(expected, rel=1e-9)


def test_allocations_are_what_their_words_say() -> None:
    utility, kl = measured()
    rng = np.random.default_rng(1)
    scores = (utility + rng.normal(size=(3, *SHAPE))).astype(np.float32)
    profile = rng.normal(size=SHAPE[-1])
    found = allocations(utility, kl, {"B": scores}, 3, drawn()[0], ALPHA, fit_profile=profile)

    def gain(called: np.ndarray) -> float:
        return float(np.where(called, utility, 0).mean())

    by_hand = {
        "always": np.ones(SHAPE, bool),
        "knowable": largest(kl, 3),
        "oracle": largest(utility, 3),
        "hindsight_sign": utility > 0,
        "fixed_fit": np.isin(np.arange(12), np.argsort(-profile)[:3]),
        "fixed_hindsight": np.isin(np.arange(12), np.argsort(-utility.mean((0, 1)))[:3]),
    }
    for key, called in by_hand.items():
        assert found[key]["gain"]["estimate"] == pytest.approx(gain(called), abs=1e-12), key
        assert found[key]["called"] == pytest.approx(called.mean()), key
    assert found["chance"]["gain"]["estimate"] == pytest.approx(utility.mean() * 3 / 12)
    b = found["routers"]["B"]
    assert b["sign"]["gain"]["estimate"] == pytest.approx(np.mean([gain(of > 0) for of in scores]))
    assert b["sign"]["called"] == pytest.approx((scores > 0).mean())
    best = np.mean([gain(largest(of.astype(np.float64), 3)) for of in scores])
    assert b["ranking"]["gain"]["estimate"] == pytest.approx(best)
    assert b["ranking"]["called"] == 0.25


def test_chance_is_the_mean_of_random_calls() -> None:
    utility, kl = measured()
    chance = allocations(utility, kl, {}, 3, drawn()[0], ALPHA)["chance"]["gain"]["estimate"]
    rng = np.random.default_rng(0)
    gains = [best_gains(rng.random(SHAPE), utility, [3]).mean() for _ in range(4000)]
    assert chance == pytest.approx(np.mean(gains), abs=4 * np.std(gains) / 4000**0.5)


def test_without_a_fit_profile_there_are_no_fixed_positions_of_the_fit_split() -> None:
    assert allocations(*measured(), {}, 3, drawn()[0], ALPHA)["fixed_fit"] is None
