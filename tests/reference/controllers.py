"""Slow, literal twins of `lastcall.routing.controllers`: their own variables, in exact fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Ranks = Sequence[float]


def rank(calibration: Sequence[float], score: float) -> Fraction:
    """The share of calibration scores below, and half the share of equal ones."""
    below = sum(c < score for c in calibration)
    equal = sum(c == score for c in calibration)
    return Fraction(2 * below + equal, 2 * len(calibration))


def token_bucket(rate: Fraction, capacity: float, ranks: Ranks) -> list[bool]:
    """Tokens: in at the rate, out a call; none kept beyond the capacity, so the surplus is called away."""
    tokens, made = Fraction(capacity) / 2, []
    for u in ranks:
        tokens += rate
        call = tokens >= 1 and (Fraction(u) > 1 - rate or tokens > Fraction(capacity))
        tokens -= call
        made.append(call)
    return made


def online_quantile(rate: Fraction, step: float, ranks: Ranks) -> list[bool]:
    """The threshold's recursion, and nothing else."""
    theta, made = 1 - rate, []
    for u in ranks:
        call = Fraction(u) > theta
        theta += Fraction(step) * (call - rate)
        made.append(call)
    return made


def integral_control(rate: Fraction, limit: float, gain: float, ranks: Ranks) -> list[bool]:
    """The summed error, its saturating answer, and the two walls."""
    error, made = Fraction(0), []
    ends = Fraction(Fraction(limit) * rate.denominator // 1 + 1, rate.denominator)
    for u in ranks:
        theta = 1 - rate + Fraction(gain) * error / (ends - abs(error))
        barred, forced = error + 1 - rate > Fraction(limit), error - rate < -Fraction(limit)
        call = forced or (not barred and Fraction(u) > theta)
        error += call - rate
        made.append(call)
    return made
