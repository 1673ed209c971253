"""Verdicts against their literal twin, and where nothing varies."""

from __future__ import annotations

from statistics import stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from lastcall.stats.bootstrap import Draws, draw_clusters, partition
from lastcall.stats.verdicts import Inference, holm, infer, verdict
from tests.reference import stats as reference

PAIRS = [(f"book{i}", f"cluster{i % 9}") for i in range(14)]
ALPHA, THRESHOLD = 0.05, 0.005


def draws(n: int = 400) -> Draws:
    return draw_clusters(partition(PAIRS), n, rng=np.random.default_rng(217))


def inferred(differences: np.ndarray, n: int = 400) -> Inference:
    return infer(draws(n), differences, alpha=ALPHA, practical_threshold=THRESHOLD)


@pytest.mark.parametrize("seed", range(5))
def test_a_family_is_judged_as_its_twin_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    differences = rng.normal([0.02, 0.0, -0.02, 0.002, 0.004], [0.01, 0.01, 0.01, 0.001, 0.02], (14, 5))
    found = inferred(differences)
    books = [book for book, _ in PAIRS]
    picked = reference.drawn_books(dict(PAIRS), 400, np.random.default_rng(217))
    drawn = [reference.means(dict(zip(books, column, strict=True)), picked) for column in differences.T]
    deltas = [float(np.mean(column)) for column in differences.T]
    p = [reference.one_sided(delta, stars) for delta, stars in zip(deltas, drawn, strict=True)]
    adjusted = reference.holm(p)
    lows, highs = zip(*reference.simultaneous(deltas, drawn, ALPHA), strict=True)
    np.testing.assert_allclose(found.delta, deltas, rtol=1e-12)
    np.testing.assert_allclose(found.se, [stdev(stars) for stars in drawn], rtol=1e-9)
    np.testing.assert_array_equal(found.p, p)
    np.testing.assert_allclose(found.p_holm, adjusted, rtol=1e-12)
    np.testing.assert_allclose(found.simultaneous_low, lows, rtol=1e-9)
    np.testing.assert_allclose(found.simultaneous_high, highs, rtol=1e-9)
    np.testing.assert_allclose(found.low, [reference.percentile(s, ALPHA / 2) for s in drawn], rtol=1e-9)
    np.testing.assert_allclose(found.high, [reference.percentile(s, 1 - ALPHA / 2) for s in drawn], rtol=1e-9)
    words = [reference.verdict(a, h, ALPHA, THRESHOLD) for a, h in zip(adjusted, highs, strict=True)]
    assert list(found.verdicts) == words


def test_each_verdict_can_be_reached() -> None:
    rng = np.random.default_rng(0)
    differences = rng.normal([0.05, -0.05, 0.0, 0.0], [0.01, 0.01, 0.001, 0.05], (14, 4))
    assert inferred(differences).verdicts == ("gain", "loss", "no gain of practical size", "undecided")


@given(
    st.floats(0.001, 1), st.floats(-0.1, 0.1), st.sampled_from([0.01, 0.05]), st.sampled_from([0.005, 0.02])
)
def test_the_first_verdict_that_holds(p: float, high: float, alpha: float, threshold: float) -> None:
    assert verdict(p, high, alpha, threshold) == reference.verdict(p, high, alpha, threshold)


def test_the_bounds_of_the_verdicts() -> None:
    assert verdict(0.05, -1.0, 0.05, 0.005) == "gain"
    assert verdict(0.051, 0.0, 0.05, 0.005) == "no gain of practical size"
    assert verdict(0.051, 0.005, 0.05, 0.005) == "undecided"


@settings(max_examples=20, deadline=None)  # multipletests collects garbage at every call
@given(st.lists(st.floats(1e-4, 1), min_size=1, max_size=12))
def test_holm_is_that_of_statsmodels_and_of_the_definition(p: list[float]) -> None:
    found = holm(np.array(p))
    np.testing.assert_allclose(found, multipletests(p, method="holm")[1], rtol=1e-12)
    np.testing.assert_allclose(found, reference.holm(p), rtol=1e-12)


def test_holm_of_four_by_hand() -> None:
    np.testing.assert_allclose(holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02])


def test_routers_that_make_the_same_calls_have_a_point_and_no_gain() -> None:
    rng = np.random.default_rng(0)
    same, other = np.zeros(14), rng.normal(0.05, 0.01, 14)
    found = inferred(np.stack([same, other], axis=1))
    assert found.se[0] == found.simultaneous_low[0] == found.simultaneous_high[0] == 0
    assert found.p[0] == found.p_holm[0] == 1
    assert found.verdicts == ("no gain of practical size", "gain")
    alone = inferred(other[:, None])
    assert found.simultaneous_high[1] == pytest.approx(alone.simultaneous_high[0], rel=1e-12)


def test_a_family_in_which_nothing_varies() -> None:
    found = inferred(np.tile([0.01, -0.01, 1 / 3], (14, 1)))
    np.testing.assert_array_equal(found.se, 0)
    np.testing.assert_array_equal(found.simultaneous_low, found.delta)
    assert found.verdicts == ("gain", "loss", "gain")


@pytest.mark.parametrize("shape", [(14, 0), (13, 2)])
def test_differences_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="differences must be"):
        inferred(np.zeros(shape))


def test_a_difference_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        inferred(np.full((14, 1), np.nan))
