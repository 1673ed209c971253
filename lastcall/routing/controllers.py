"""Controllers that know only the prefix: a rate of calls kept without a horizon (section 8).

Scores become calibration ranks first (`CalibrationRanks`). With a rate of k calls in n positions (lowest
terms), the state of every controller is one whole number, the excess E = n · calls − k · t after t positions:
n times the calls made beyond the rate. A position is decided by

    call if E < due or (E ≤ spent and rank > threshold(E)):

below `due` the call is forced, above `spent` it is barred, between them the rank decides.

Guarantee. For every t and any sequence of ranks, also one that answers to the calls,
|calls − rate · t| ≤ slack. Proof, by induction from E = 0: every controller has due ≤ spent + 1, so a
position calls only where E ≤ spent, and leaves E ≤ spent + n − k; it does not call only where E ≥ due, and
leaves E ≥ due − k. Calling raises E and not calling lowers it, so neither end is passed otherwise, and
slack = max(spent + n − k, k − due) / n. Nothing in it is rounded: excess and ends are whole numbers.

Pure state machines over ranks; no torch, no data, no randomness.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeVar, final

import numpy as np
from jaxtyping import Bool, Float, Float64

Number = TypeVar("Number", float, np.ndarray)
"""One excess, or one of every block: the same arithmetic in the same order, hence the same bits."""


@final
class CalibrationRanks:
    """Where a score stands among the router's calibration scores: 0 below all of them, 1 above all.

    A score that ties with some has the middle of their places: (#below + #at or below) / 2m of m. Frozen
    from the calibration split, per router and seed.
    """

    def __init__(self, calibration: Float[np.ndarray, " *any"]) -> None:
        """Raises ValueError where there is no calibration score, or one is not finite."""
        if not calibration.size or not np.isfinite(calibration).all():
            raise ValueError("calibration scores must be finite, and at least one")
        self._sorted = np.sort(calibration.astype(np.float64), axis=None)
        self._sorted.setflags(write=False)

    def __call__(self, scores: Float[np.ndarray, "*any"]) -> Float64[np.ndarray, "*any"]:
        """Ranks of `scores`, in [0, 1]; raises ValueError where one is NaN."""
        wide = scores.astype(np.float64)
        if np.isnan(wide).any():
            raise ValueError("a score is NaN: it has no rank")
        below = np.searchsorted(self._sorted, wide, side="left")
        ranks: Float64[np.ndarray, "*any"] = np.asarray(
            (below + np.searchsorted(self._sorted, wide, side="right")) / (2 * len(self._sorted))
        )
        return ranks


class Controller(ABC):
    """A rule over ranks; what it remembers is the excess alone. `rate` is in (0, 1): at 1 it is `always`."""

    rate: Fraction

    @property
    @abstractmethod
    def spent(self) -> int:
        """The largest excess at which a call may be made."""

    @property
    @abstractmethod
    def due(self) -> int:
        """The least excess at which a call may be left out."""

    @abstractmethod
    def threshold(self, excess: Number) -> Number:
        """The rank above which a position calls, for `due` ≤ excess ≤ `spent`."""

    @property
    def slack(self) -> Fraction:
        """The most calls by which any prefix of any sequence is above or below the rate."""
        k, n = self.rate.numerator, self.rate.denominator
        return Fraction(max(self.spent + n - k, k - self.due), n)

    @cached_property
    def start(self) -> float:
        """The threshold at no excess: 1 − rate, as calibration has it."""
        return (self.rate.denominator - self.rate.numerator) / self.rate.denominator


@final
@dataclass(frozen=True)
class TokenBucket(Controller):
    """Call above the (1 − rate) rank while there is a token, and where a token would be lost.

    A bucket that holds `capacity` tokens starts half full, gains `rate` tokens a position and pays one a
    call: after t positions it holds capacity / 2 + rate · t − calls. A call without a whole token is barred;
    a call is forced where the gain would overflow. So 0 ≤ tokens ≤ capacity, and slack ≤ capacity / 2.
    Forced calls are what makes the bound two-sided: a bucket that spills has one from above alone.
    """

    rate: Fraction
    capacity: float
    """Tokens, ≥ 1."""

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_at_least("capacity", self.capacity, 1)

    @property
    def spent(self) -> int:
        return _within(self.rate, Fraction(self.capacity) / 2)[1]

    @property
    def due(self) -> int:
        return _within(self.rate, Fraction(self.capacity) / 2)[0]

    def threshold(self, excess: Number) -> Number:
        constant: Number = excess * 0 + self.start
        return constant


@final
@dataclass(frozen=True)
class OnlineQuantile(Controller):
    """Follow the (1 − rate) quantile of the ranks: θ moves by step · (called − rate) after each position.

    This is adaptive conformal inference (Gibbs and Candès, 2021) with calls for errors, from θ = 1 − rate.
    The moves add up, so θ = 1 − rate + step · (calls − rate · t): a constant step is linear integral control.
    No rank is above θ ≥ 1 and every rank is above θ < 0, so θ stays in
    [−step · rate, 1 + step · (1 − rate)] and calls − rate · t in
    [−(1 − rate) / step − rate, rate / step + 1 − rate]: nothing is forced or barred but by that range, and
    `spent` and `due` only restate it in whole numbers. slack ≤ max(rate, 1 − rate) / step + 1.
    """

    rate: Fraction
    step: float
    """How far the threshold moves, in ranks, for one call in excess."""

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not 0 < self.step < math.inf:
            raise ValueError(f"step must be positive and finite, got {self.step}")

    @property
    def spent(self) -> int:
        return math.ceil(self.rate.numerator / Fraction(self.step)) - 1

    @property
    def due(self) -> int:
        return -math.floor((self.rate.denominator - self.rate.numerator) / Fraction(self.step))

    def threshold(self, excess: Number) -> Number:
        moved: Number = self.start + self.step * excess / self.rate.denominator
        return moved


@final
@dataclass(frozen=True)
class IntegralControl(Controller):
    """The threshold answers to the summed error D = calls − rate · t through a saturating function.

    θ = 1 − rate + gain · D / (L − |D|), L the limit in whole n-ths and one more: gentle near the rate,
    without bound near the limit. (Conformal PID control, Angelopoulos, Candès and Tibshirani, 2023, has a
    tangent here; a quotient is exact in either form.) Nothing calls at θ ≥ 1, from
    D = L · rate / (gain + rate) up, and all do at θ < 0, below D = −L · (1 − rate) / (gain + 1 − rate); the
    bound is that range. Where it would not keep |D| ≤ limit (a gain near 0), calls are barred and forced at
    the limit itself; without gain this is a token bucket of capacity 2 · limit. slack ≤ limit.
    """

    rate: Fraction
    limit: float
    """The most slack allowed, in calls, ≥ 1/2."""
    gain: float
    """How far the threshold moves, in ranks, where half of the limit is used up; ≥ 0."""

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_at_least("limit", self.limit, 0.5)
        _check_at_least("gain", self.gain, 0)

    @property
    def spent(self) -> int:
        k, n = self.rate.numerator, self.rate.denominator
        of_range = math.ceil(k * self._end / (Fraction(self.gain) * n + k)) - 1
        wall = _within(self.rate, Fraction(self.limit))[1]
        return max(min(of_range, wall), self.due - 1)

    @property
    def due(self) -> int:
        k, n = self.rate.numerator, self.rate.denominator
        of_range = -math.floor((n - k) * self._end / (Fraction(self.gain) * n + n - k))
        wall, barred = _within(self.rate, Fraction(self.limit))
        return min(max(of_range, wall), barred + 1)

    @cached_property
    def _end(self) -> int:
        """L · n."""
        return math.floor(Fraction(self.limit) * self.rate.denominator) + 1

    def threshold(self, excess: Number) -> Number:
        moved: Number = self.start + self.gain * (excess / (self._end - abs(excess)))
        return moved


def _within(rate: Fraction, slack: Fraction) -> tuple[int, int]:
    """`due` and `spent` that keep |calls − rate · t| ≤ slack; due ≤ spent + 1 since slack ≥ 1/2."""
    most = math.floor(slack * rate.denominator)
    return rate.numerator - most, most - (rate.denominator - rate.numerator)


def _check_rate(rate: Fraction) -> None:
    if not 0 < rate < 1:
        raise ValueError(f"rate must be above 0 and below 1, got {rate}")


def _check_at_least(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least {least}, got {value}")


@final
class Stream:
    """A controller at work on one sequence, a position at a time, without end."""

    def __init__(self, controller: Controller) -> None:
        self._threshold = controller.threshold
        self._due, self._spent = controller.due, controller.spent
        self._k, self._n = controller.rate.numerator, controller.rate.denominator
        self._excess = 0

    def step(self, rank: float) -> bool:
        """Whether the next position calls; raises ValueError where the rank is not in [0, 1]."""
        if not 0 <= rank <= 1:
            raise ValueError(f"a rank must be within [0, 1], got {rank}")
        excess = self._excess
        call = excess < self._due or (excess <= self._spent and float(rank) > self._threshold(float(excess)))
        self._excess += self._n - self._k if call else -self._k
        return call


def controlled_calls(
    controller: Controller, ranks: Float[np.ndarray, "*blocks positions"]
) -> Bool[np.ndarray, "*blocks positions"]:
    """What a `Stream` decides in every block at once, each from its own start.

    Raises ValueError where a rank is not in [0, 1].
    """
    if not ((ranks >= 0) & (ranks <= 1)).all():
        raise ValueError("ranks must be within [0, 1]")
    k, n = controller.rate.numerator, controller.rate.denominator
    due, spent = controller.due, controller.spent
    by_position = ranks.reshape(-1, ranks.shape[-1]).T.astype(np.float64, order="C")
    made = np.empty(by_position.shape, dtype=np.bool_)
    excess = np.zeros(by_position.shape[1:])
    for rank, call in zip(by_position, made, strict=True):
        np.greater(rank, controller.threshold(excess), out=call)
        call &= excess <= spent
        call |= excess < due
        excess += n * call
        excess -= k
    return np.ascontiguousarray(made.T).reshape(ranks.shape)
