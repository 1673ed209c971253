"""Controllers without a horizon: their bound on any ranks, and both forms against literal twins."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.routing.controllers import (
    CalibrationRanks,
    Controller,
    IntegralControl,
    OnlineQuantile,
    Stream,
    TokenBucket,
    controlled_calls,
)
from tests.reference import controllers as reference

RATES = st.builds(lambda n, k: Fraction(1 + k % (n - 1), n), st.integers(2, 60), st.integers(0, 58))
CONTROLLERS = st.one_of(
    st.builds(TokenBucket, RATES, st.floats(1, 20)),
    st.builds(OnlineQuantile, RATES, st.floats(0.01, 3)),
    st.builds(IntegralControl, RATES, st.floats(0.5, 12), st.floats(0, 2)),
)
EXAMPLES: list[Controller] = [
    TokenBucket(Fraction(99, 495), 16),
    OnlineQuantile(Fraction(99, 495), 0.05),
    IntegralControl(Fraction(99, 495), 8, 0.2),
]
RANKS = st.one_of(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.8])), min_size=1, max_size=200),
    st.integers(1, 400).map(lambda n: [0.0] * n),
    st.integers(1, 400).map(lambda n: [1.0] * n),
    st.integers(1, 400).map(lambda n: [float(i % 2) for i in range(n)]),
    st.integers(2, 400).map(lambda n: np.linspace(0, 1, n).tolist()),
    st.integers(2, 400).map(lambda n: np.linspace(1, 0, n).tolist()),
    st.integers(1, 200).map(lambda n: [0.0] * n + [1.0] * n + [0.0] * n),
)
ADVERSARIES: dict[str, Callable[[Fraction], float]] = {
    "drives it up, then away": lambda excess: float(excess > 0),
    "pushes it down, then lets go": lambda excess: float(excess < 0),
    "always calls": lambda excess: 1.0,
    "never calls": lambda excess: 0.0,
}
"""Ranks that answer to calls − rate · t."""


def stream(controller: Controller, ranks: list[float]) -> list[bool]:
    machine = Stream(controller)
    return [machine.step(rank) for rank in ranks]


def strays(controller: Controller, calls: list[bool]) -> list[Fraction]:
    """calls − rate · t after every position, exactly."""
    made = np.cumsum(calls).tolist()
    return [m - controller.rate * t for t, m in enumerate(made, start=1)]


@given(CONTROLLERS, RANKS)
def test_any_prefix_of_any_ranks_is_within_the_slack(controller: Controller, ranks: list[float]) -> None:
    assert max(map(abs, strays(controller, stream(controller, ranks)))) <= controller.slack


@given(CONTROLLERS, st.sampled_from(sorted(ADVERSARIES)))
def test_ranks_that_answer_to_the_calls_gain_nothing(controller: Controller, adversary: str) -> None:
    machine, stray = Stream(controller), Fraction(0)
    for _ in range(300):
        stray += machine.step(ADVERSARIES[adversary](stray)) - controller.rate
        assert abs(stray) <= controller.slack


@given(RATES, st.floats(1, 20), st.floats(0.01, 3), st.floats(0, 2))
def test_the_slack_is_at_most_what_the_words_say(rate: Fraction, c: float, step: float, gain: float) -> None:
    assert TokenBucket(rate, c).slack <= Fraction(c) / 2
    assert IntegralControl(rate, c, gain).slack <= Fraction(c)
    assert OnlineQuantile(rate, step).slack <= max(rate, 1 - rate) / Fraction(step) + 1


@pytest.mark.parametrize("controller", EXAMPLES, ids=lambda c: type(c).__name__)
def test_the_slack_is_no_larger_than_constant_ranks_make_it(controller: Controller) -> None:
    ends = [max(map(abs, strays(controller, stream(controller, [rank] * 4000)))) for rank in (0.0, 1.0)]
    assert controller.slack - 1 <= max(ends) <= controller.slack


@pytest.mark.parametrize(
    ("controller", "least", "most"),
    [
        (OnlineQuantile(Fraction(1, 2), 0.25), Fraction(-5, 2), Fraction(2)),
        (OnlineQuantile(Fraction(3, 4), 0.25), Fraction(-7, 4), Fraction(3)),
        (TokenBucket(Fraction(1, 4), 6), Fraction(-3), Fraction(3)),
        (IntegralControl(Fraction(1, 2), 3, 0.5), Fraction(-2), Fraction(2)),
    ],
)
def test_constant_ranks_reach_the_ends_worked_out_on_paper(
    controller: Controller, least: Fraction, most: Fraction
) -> None:
    assert min(strays(controller, stream(controller, [0.0] * 100))) == least
    assert max(strays(controller, stream(controller, [1.0] * 100))) == most
    assert controller.slack == max(-least, most)


@pytest.mark.parametrize("controller", EXAMPLES, ids=lambda c: type(c).__name__)
def test_high_ranks_are_called(controller: Controller) -> None:
    ranks = np.random.default_rng(0).random((100, 495))
    calls = controlled_calls(controller, ranks)
    assert calls.mean() == pytest.approx(0.2, abs=0.02)
    assert ranks[calls].mean() > 0.85


@given(CONTROLLERS, st.integers(0, 2**32), st.sampled_from([(3,), (2, 2), ()]), st.booleans())
def test_many_blocks_are_so_many_streams(
    controller: Controller, seed: int, blocks: tuple[int, ...], coarse: bool
) -> None:
    ranks = np.random.default_rng(seed).random((*blocks, 90))
    ranks = np.round(ranks * 5) / 5 if coarse else ranks  # so that ranks tie with thresholds
    calls = controlled_calls(controller, ranks)
    assert calls.shape == ranks.shape
    for index in np.ndindex(*blocks):
        assert calls[index].tolist() == stream(controller, ranks[index].tolist())


def test_single_precision_ranks_are_decided_alike_in_both_forms() -> None:
    ranks = np.random.default_rng(1).random((4, 300)).astype(np.float32)
    for controller in EXAMPLES:
        streams = [stream(controller, [float(rank) for rank in row]) for row in ranks]
        assert controlled_calls(controller, ranks).tolist() == streams


@given(RATES, st.floats(1, 20), st.integers(0, 2**32))
def test_without_gain_integral_control_is_a_token_bucket(rate: Fraction, limit: float, seed: int) -> None:
    ranks = np.random.default_rng(seed).random((2, 90))
    bucket = controlled_calls(TokenBucket(rate, 2 * limit), ranks)
    np.testing.assert_array_equal(controlled_calls(IntegralControl(rate, limit, 0.0), ranks), bucket)


DYADIC = st.builds(lambda k: Fraction(k, 16), st.integers(1, 15))
SIXTEENTHS = st.lists(st.integers(0, 16).map(lambda i: i / 16), min_size=1, max_size=150)
"""With rates and steps of sixteenths no float rounds, so that ties with the threshold are exact as well."""


@given(DYADIC, st.integers(8, 100), SIXTEENTHS)
def test_the_bucket_is_the_twin(rate: Fraction, eighths: int, ranks: list[float]) -> None:
    expected = reference.token_bucket(rate, eighths / 8, ranks)
    assert stream(TokenBucket(rate, eighths / 8), ranks) == expected


@given(DYADIC, st.integers(1, 40), SIXTEENTHS)
def test_the_quantile_is_the_twins_recursion(rate: Fraction, sixteenths: int, ranks: list[float]) -> None:
    expected = reference.online_quantile(rate, sixteenths / 16, ranks)
    assert stream(OnlineQuantile(rate, sixteenths / 16), ranks) == expected


@given(RATES, st.floats(0.5, 12), st.one_of(st.just(0.0), st.floats(0.01, 2)), st.integers(0, 2**32))
def test_integral_control_is_the_twin(rate: Fraction, limit: float, gain: float, seed: int) -> None:
    ranks = np.random.default_rng(seed).random(150).tolist()  # almost never on the threshold
    expected = reference.integral_control(rate, limit, gain, ranks)
    assert stream(IntegralControl(rate, limit, gain), ranks) == expected


@given(CONTROLLERS, RANKS, st.data())
def test_a_call_depends_on_nothing_later(
    controller: Controller, ranks: list[float], data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, len(ranks)))
    changed = ranks[:at] + [1 - rank for rank in ranks[at:]]
    both = controlled_calls(controller, np.array([ranks, changed]))
    assert both[0, :at].tolist() == both[1, :at].tolist()


def test_a_rate_in_other_terms_is_the_same_rate() -> None:
    ranks = np.random.default_rng(0).random((5, 300))
    assert IntegralControl(Fraction(99, 495), 8, 0.2).slack == IntegralControl(Fraction(1, 5), 8, 0.2).slack
    calls = [controlled_calls(IntegralControl(Fraction(*r), 8, 0.2), ranks) for r in ((99, 495), (1, 5))]
    assert (calls[0] == calls[1]).all()


@pytest.mark.parametrize("rank", [-0.1, 1.1, float("nan")])
def test_what_is_no_rank_is_refused(rank: float) -> None:
    with pytest.raises(ValueError, match=r"a rank must be within \[0, 1\]"):
        Stream(EXAMPLES[0]).step(rank)
    with pytest.raises(ValueError, match="ranks must be within"):
        controlled_calls(EXAMPLES[0], np.array([0.5, rank]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenBucket(Fraction(0), 4), "rate must be above 0"),
        (lambda: OnlineQuantile(Fraction(1), 0.1), "rate must be above 0 and below 1, got 1"),
        (lambda: TokenBucket(Fraction(1, 5), 0.9), "capacity must be finite and at least 1"),
        (lambda: OnlineQuantile(Fraction(1, 5), 0.0), "step must be positive"),
        (lambda: IntegralControl(Fraction(1, 5), 0.4, 1.0), "limit must be finite and at least 0.5"),
        (lambda: IntegralControl(Fraction(1, 5), 4, float("inf")), "gain must be finite"),
    ],
)
def test_an_impossible_controller_is_refused(make: Callable[[], Controller], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


SCORES = st.one_of(st.sampled_from([-1.0, 0.0, 0.5]), st.floats(-1e6, 1e6))


@given(st.lists(SCORES, min_size=1, max_size=40), st.lists(SCORES, min_size=1, max_size=20))
def test_ranks_are_the_twins(calibration: list[float], scores: list[float]) -> None:
    found = CalibrationRanks(np.array(calibration))(np.array(scores))
    assert found.tolist() == [float(reference.rank(calibration, score)) for score in scores]


def test_ranks_at_the_ends_and_of_ties() -> None:
    ranks = CalibrationRanks(np.array([[1.0, 2.0], [2.0, 3.0]], dtype=np.float32))
    assert ranks(np.array([0.0, 1.0, 2.0, 2.5, 3.0, 9.0])).tolist() == [0.0, 0.125, 0.5, 0.75, 0.875, 1.0]
    assert ranks(np.array(2.0)).shape == ()


def test_ranks_are_frozen_from_the_calibration_scores() -> None:
    calibration = np.array([1.0, 2.0, 3.0])
    ranks = CalibrationRanks(calibration)
    calibration[:] = 0.0
    assert ranks(np.array([1.5])).tolist() == [1 / 3]


@pytest.mark.parametrize("calibration", [[], [0.0, float("nan")], [float("inf")]])
def test_calibration_scores_that_rank_nothing_are_refused(calibration: list[float]) -> None:
    with pytest.raises(ValueError, match="calibration scores must be finite, and at least one"):
        CalibrationRanks(np.array(calibration, dtype=np.float64))


def test_a_score_that_is_nan_has_no_rank() -> None:
    with pytest.raises(ValueError, match="NaN"):
        CalibrationRanks(np.array([0.0]))(np.array([float("nan")]))
