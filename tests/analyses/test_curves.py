"""Quota curves: the deadline rule without a loop, and every figure against literal twins."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.analyses.curves import QUOTAS, Scored, calls_at, deadline_mask, quota_curves, router_gains
from lastcall.routing.quota import deadline_calls, threshold
from lastcall.stats.bootstrap import draw_clusters, partition
from tests.reference import routing, stats

PAIRS = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "w")]
BOOKS = [book for book, _ in PAIRS]
SHAPE = (len(BOOKS), 2, 12)
QUARTERS = (0.25, 0.5, 1.0)
FLOATS = st.one_of(st.sampled_from([-1.0, 0.0, -0.0, 0.5]), st.floats(allow_nan=False))


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, float, int]:
    """Scores, τ (often one of them) and a number of calls."""
    scores = draw(st.lists(FLOATS, min_size=1, max_size=40))
    tau = draw(st.one_of(FLOATS, st.sampled_from(scores)))
    return np.array(scores), tau, draw(st.integers(1, len(scores)))


@given(cases())
def test_the_mask_is_the_deadline_rule(case: tuple[np.ndarray, float, int]) -> None:
    scores, tau, k = case
    made = deadline_mask(scores > tau, k)
    assert made.tolist() == deadline_calls(scores, tau, k).tolist()
    assert made.tolist() == routing.quota(scores.tolist(), tau, k)


@pytest.mark.parametrize("k", [1, 50, 99, 494, 495])
def test_the_mask_is_the_deadline_rule_on_long_blocks(k: int) -> None:
    rng = np.random.default_rng(k)
    coarse = np.round(rng.normal(size=(3, 20, 495)), 1).astype(np.float32)  # many ties with τ
    rising = np.sort(rng.normal(size=(3, 20, 495)), axis=-1)
    for scores in (coarse, rising, rising[..., ::-1], np.zeros((1, 1, 495))):
        for tau in (-9.0, 0.0, 0.5, threshold(scores, k, 495), 9.0):
            made = deadline_mask(scores > np.float64(tau), k)
            np.testing.assert_array_equal(made, deadline_calls(scores, tau, k))
            assert (made.sum(-1) == k).all()


def made(seed: int = 0) -> tuple[list[Scored], np.ndarray, np.ndarray]:
    """A learned router of two seeds and one without a threshold; utility and KL."""
    rng = np.random.default_rng(seed)
    kl = rng.exponential(0.1, SHAPE)
    utility = 0.5 * kl + 0.1 * rng.normal(size=SHAPE)
    scores = (utility + 0.1 * rng.normal(size=(2, *SHAPE))).astype(np.float32)
    learned = Scored("B", (0, 1), scores, rng.normal(0.05, 0.15, (2, 90)).astype(np.float32))
    return [learned, Scored("random", (0,), rng.random((1, *SHAPE), np.float32), None)], utility, kl


def book_gain(utility: np.ndarray, calls: list[list[bool]]) -> float:
    """Gain over `never` of one book: the mean over its blocks of called utility a token."""
    return fmean(
        sum(u for u, call in zip(block, of, strict=True) if call) / len(block)
        for block, of in zip(utility.tolist(), calls, strict=True)
    )


def twin(router: Scored, utility: np.ndarray, k: int) -> dict[str, float]:
    """Gain of each book, mean over seeds."""
    gains: dict[str, list[float]] = {book: [] for book in BOOKS}
    for s, scores in enumerate(router.scores):
        for book, of, u in zip(BOOKS, scores.tolist(), utility, strict=True):
            if router.calibration is None:
                calls = [routing.largest(block, k) for block in of]
            else:
                tau = routing.threshold(router.calibration[s].tolist(), k, SHAPE[-1])
                calls = [routing.quota(block, tau, k) for block in of]
            gains[book].append(book_gain(u, calls))
    return {book: fmean(of) for book, of in gains.items()}


def test_curves_are_the_twins() -> None:
    routers, utility, kl = made()
    draws = draw_clusters(partition(PAIRS), 200, rng=np.random.default_rng(5))
    books = stats.drawn_books(dict(PAIRS), 200, np.random.default_rng(5))
    found = quota_curves(routers, utility, kl, draws, 0.1, quotas=QUARTERS)
    assert found["calls"] == [3, 6, 12]
    assert found["positions"] == 12
    ceilings = {
        "oracle": Scored("oracle", (0,), utility[None].astype(np.float32), None),
        "knowable": Scored("knowable", (0,), kl[None].astype(np.float32), None),
    }
    for i, k in enumerate(found["calls"]):
        best = {name: twin(of, utility, k) for name, of in ceilings.items()}
        for name, values in best.items():
            expected = stats.interval(lambda of, v=values: fmean(v[b] for b in of), BOOKS, books, 0.1)
            assert found[name][i] == pytest.approx(expected, rel=1e-9)
        for router in routers:
            own, point = twin(router, utility, k), found["routers"][router.name][i]
            expected = stats.interval(lambda of, v=own: fmean(v[b] for b in of), BOOKS, books, 0.1)
            assert point["gain"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
            for name, values in best.items():
                expected = stats.interval(
                    lambda of, a=own, v=values: sum(a[b] for b in of) / sum(v[b] for b in of),
                    BOOKS,
                    books,
                    0.1,
                )
                assert point[f"{name}_share"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_at_the_whole_budget_everything_is_always() -> None:
    routers, utility, kl = made()
    draws = draw_clusters(partition(PAIRS), 50, rng=np.random.default_rng(5))
    found = quota_curves(routers, utility, kl, draws, 0.1, quotas=[1.0])
    always = pytest.approx(utility.mean())
    points = [found["routers"][r.name][0]["gain"] for r in routers]
    for value in (*points, found["chance"][0], found["knowable"][0], found["oracle"][0]):
        assert value["estimate"] == always


def test_a_ceiling_that_gains_nothing_has_no_share() -> None:
    routers, utility, kl = made()
    draws = draw_clusters(partition(PAIRS), 50, rng=np.random.default_rng(5))
    found = quota_curves(routers, utility - 0.1, kl, draws, 0.1, quotas=[0.25, 1.0])
    first, whole = found["routers"]["B"]
    assert whole["oracle_share"] is None
    assert whole["knowable_share"] is None
    assert first["oracle_share"] is not None


def test_a_seed_is_cut_at_its_own_threshold() -> None:
    routers, utility, _ = made()
    learned = routers[0]
    assert learned.calibration is not None
    alone = [
        router_gains(Scored("B", (s,), learned.scores[s][None], learned.calibration[s][None]), utility, [3])
        for s in range(2)
    ]
    both = router_gains(learned, utility, [3])
    np.testing.assert_allclose(both, np.mean(alone, axis=0), rtol=1e-12)
    assert (alone[0] != alone[1]).any()


def test_the_quotas_and_their_calls() -> None:
    assert len(QUOTAS) == 40
    assert calls_at(QUOTAS, 495)[0] == 5
    assert calls_at(QUOTAS, 495)[-1] == 495
    assert calls_at([0.2], 495) == [99]
    assert calls_at([0.2], 4079) == [816]
    assert calls_at([0.01], 10) == [1]


@pytest.mark.parametrize("quota", [0.0, 1.2, -0.1, float("nan")])
def test_a_quota_that_is_no_share_is_refused(quota: float) -> None:
    with pytest.raises(ValueError, match="quotas must be above 0 and at most 1"):
        calls_at([0.2, quota], 495)
