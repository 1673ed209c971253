"""The causal quota against its literal twin: exact, causal, ties by position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.routing.quota import Deadline, deadline_calls, evenly, largest, threshold
from tests.reference import routing as reference

FLOATS = st.one_of(
    st.sampled_from([-1.0, 0.0, -0.0, 0.5]),  # so that scores tie with each other and with τ
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([np.finfo(float).max, -np.finfo(float).max, 5e-324]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, float, int]:
    """Scores, τ (often one of them) and a number of calls."""
    scores = draw(st.lists(FLOATS, min_size=1, max_size=40))
    tau = draw(st.one_of(FLOATS, st.sampled_from(scores)))
    return np.array(scores), tau, draw(st.integers(1, len(scores)))


@given(cases())
def test_machine_and_array_are_the_twin(case: tuple[np.ndarray, float, int]) -> None:
    scores, tau, k = case
    machine = Deadline(k, len(scores), tau)
    expected = reference.quota(scores.tolist(), tau, k)
    assert [machine.step(score) for score in scores.tolist()] == expected
    assert deadline_calls(scores, tau, k).tolist() == expected


@given(cases())
def test_no_prefix_overspends_or_falls_behind(case: tuple[np.ndarray, float, int]) -> None:
    scores, tau, k = case
    made = np.cumsum(deadline_calls(scores, tau, k))
    left = len(scores) - np.arange(1, len(scores) + 1)
    assert (made <= k).all()
    assert (made >= k - left).all()
    assert made[-1] == k


@given(cases(), st.data())
def test_a_call_is_decided_by_its_prefix_alone(
    case: tuple[np.ndarray, float, int], data: st.DataObject
) -> None:
    scores, tau, k = case
    at = data.draw(st.integers(0, len(scores) - 1))
    later = data.draw(st.lists(FLOATS, min_size=len(scores) - at - 1, max_size=len(scores) - at - 1))
    changed = np.concatenate([scores[: at + 1], later])
    np.testing.assert_array_equal(
        deadline_calls(changed, tau, k)[: at + 1], deadline_calls(scores, tau, k)[: at + 1]
    )


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 3))
def test_blocks_are_decided_each_by_itself(seed: int, k: int, blocks: int) -> None:
    scores = np.random.default_rng(seed).normal(size=(2, blocks, 12)).astype(np.float32)
    made = deadline_calls(scores, 0.4, k)
    for index in np.ndindex(2, blocks):
        assert made[index].tolist() == reference.quota(scores[index].tolist(), 0.4, k)


def test_a_single_precision_score_is_compared_with_the_whole_threshold() -> None:
    score = np.float32(0.1)
    just_below = float(score) - 1e-12
    assert np.float32(just_below) == score
    assert deadline_calls(np.array([score, 1, 1], dtype=np.float32), just_below, 1).tolist()[0]
    assert Deadline(1, 3, just_below).step(float(score))


def test_the_protocols_budget_is_99_of_495() -> None:
    scores = np.random.default_rng(0).normal(size=(20, 495))
    for tau in (-9.0, 0.0, 0.84, 9.0):
        assert (deadline_calls(scores, tau, 99).sum(axis=1) == 99).all()
    assert deadline_calls(scores[0], 9.0, 99).tolist() == [False] * 396 + [True] * 99
    assert deadline_calls(scores[0], -9.0, 99).tolist() == [True] * 99 + [False] * 396


def test_a_score_at_the_threshold_does_not_call() -> None:
    assert deadline_calls(np.array([0.5, 0.5, 0.6, 0.5]), 0.5, 1).tolist() == [False, False, True, False]


def test_the_horizon_is_the_end() -> None:
    machine = Deadline(1, 2, 0.0)
    machine.step(1.0)
    machine.step(1.0)
    with pytest.raises(ValueError, match="the horizon is over"):
        machine.step(1.0)


@pytest.mark.parametrize("calls", [0, -1, 4])
def test_an_impossible_budget_is_refused(calls: int) -> None:
    with pytest.raises(ValueError, match=f"calls must be 1 to 3, got {calls}"):
        Deadline(calls, 3, 0.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 20))
def test_threshold_is_the_interpolated_order_statistic(scores: list[float], k: int, more: int) -> None:
    found = threshold(np.array(scores), k, k + more)
    assert found == pytest.approx(reference.threshold(scores, k, k + more), rel=1e-9, abs=1e-9)


def test_the_budgets_share_of_calibration_scores_passes_the_threshold() -> None:
    scores = np.random.default_rng(0).standard_t(3, (30, 495)).astype(np.float32)
    assert np.mean(scores.astype(float) > threshold(scores, 99, 495)) == pytest.approx(0.2, abs=1e-4)
    assert threshold(np.arange(6.0), 1, 5) == 4.0
    assert threshold(np.array([0.0, 1.0]), 99, 495) == pytest.approx(0.8)


@given(st.lists(FLOATS, min_size=1, max_size=30), st.data())
def test_the_largest_are_the_twins_ties_to_the_earlier(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    expected = reference.largest(values, k)
    assert largest(np.array([values, values[::-1]]), k)[0].tolist() == expected
    assert largest(np.array(values), k).tolist() == expected


def test_every_fifth_of_495_is_99() -> None:
    assert evenly(99, 495).tolist() == reference.every_fifth(495)
    assert np.flatnonzero(evenly(5, 13)).tolist() == [0, 3, 6, 9, 12]
    assert np.flatnonzero(evenly(5, 12)).tolist() == [0, 2, 4, 7, 9]


@given(st.integers(1, 400), st.data())
def test_evenly_makes_exactly_its_calls_and_spreads_them(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    assert evenly(k, n).tolist() == reference.evenly(k, n)
    at = np.flatnonzero(evenly(k, n))
    assert len(at) == k
    assert at[0] == 0
    gaps = np.diff([*at, n])
    assert gaps[:-1].max(initial=0) - gaps[:-1].min(initial=n) <= 1
    assert gaps[-1] <= 2 * max(gaps[:-1].max(initial=0), n / k)
