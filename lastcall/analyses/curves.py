"""Quota curves: what every router gains at any quota, from its stored scores (section 8).

At a quota of q, k is the whole number nearest q · n; τ is the (1 − k / n) quantile of the router's own
calibration scores, and the deadline rule makes exactly k calls (section 5), as at the planned quota. A policy
without calibration scores (random, by-position) takes the k largest of each block. Exploratory: no quota here
but the planned one was locked. Arrays are as in `lastcall.stats.loading`: [seeds, books, blocks, scored].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float32, Float64

from lastcall.results import Interval
from lastcall.routing.quota import threshold
from lastcall.secondary import QuotaCurves, QuotaPoint
from lastcall.stats.bootstrap import Draws, mean_intervals, ratio_intervals
from lastcall.stats.ceilings import best_gains
from lastcall.stats.loading import Policy
from lastcall.stats.policies import book_gains

QUOTAS = (*(i / 100 for i in range(1, 21)), *(i / 100 for i in range(24, 101, 4)))
"""40 quotas: every 1% to 20%, every 4% to 100%."""


@final
@dataclass(frozen=True, eq=False)
class Scored:
    """A router's scores on the test split, and what its thresholds come from."""

    name: str
    seeds: tuple[int, ...]
    scores: Float32[np.ndarray, "seeds books blocks scored"]
    calibration: Float32[np.ndarray, "seeds calibration"] | None
    """Scores of the calibration split, pooled over positions; None where the k largest are taken."""


def deadline_mask(
    above: Bool[np.ndarray, "*blocks scored"], calls: int
) -> Bool[np.ndarray, "*blocks scored"]:
    """`quota.deadline_calls` without a loop over positions; `above` is score > τ, compared in float64.

    With A(i) positions above τ before i, an unforced position i calls where it is above and A(i) < k. The
    deadline is due where calls left ≥ positions left, k − A(i) ≥ n − i. From i to i + 1 the right side falls
    by 1 and the left by at most 1: once due it stays due, the rest of the block is called whatever A counts,
    and before that A(i) is the number of calls made. So

        call(i) = (above(i) and A(i) < k) or A(i) + n − i ≤ k.
    """
    positions = above.shape[-1]
    before = np.cumsum(above, axis=-1, dtype=np.int32) - above
    made: Bool[np.ndarray, "*blocks scored"] = above & (before < calls)
    made |= before + np.arange(positions, 0, -1, dtype=np.int32) <= calls
    return made


def quota_curves(
    routers: Sequence[Scored],
    utility: Float64[np.ndarray, "books blocks scored"],
    kl: Float64[np.ndarray, "books blocks scored"],
    draws: Draws,
    alpha: float,
    *,
    quotas: Sequence[float] = QUOTAS,
) -> QuotaCurves:
    """The curve of every router over `quotas`, beside chance and both ceilings; whole-book intervals.

    Raises ValueError where a quota is not in (0, 1].
    """
    positions = utility.shape[-1]
    calls = calls_at(quotas, positions)
    oracle, knowable = (best_gains(values, utility, calls) for values in (utility, kl))
    chance = utility.mean((1, 2))[:, None] * np.array(calls) / positions
    return {
        "calls": calls,
        "positions": positions,
        "chance": _intervals(chance, draws, alpha),
        "knowable": _intervals(knowable, draws, alpha),
        "oracle": _intervals(oracle, draws, alpha),
        "routers": {
            r.name: _points(router_gains(r, utility, calls), oracle, knowable, draws, alpha) for r in routers
        },
    }


def calls_at(quotas: Sequence[float], positions: int) -> list[int]:
    """k of each quota: the nearest whole number (of two, the even one), at least 1.

    Raises ValueError where a quota is not in (0, 1].
    """
    if not all(0 < quota <= 1 for quota in quotas):
        raise ValueError(f"quotas must be above 0 and at most 1, got {list(quotas)}")
    return [max(1, round(quota * positions)) for quota in quotas]


def router_gains(
    router: Scored, utility: Float64[np.ndarray, "books blocks scored"], calls: Sequence[int]
) -> Float64[np.ndarray, "books quotas"]:
    """Each book's gain over `never` at every number of calls, mean over seeds."""
    if router.calibration is None:
        gains = [best_gains(scores, utility, calls) for scores in router.scores]
        return np.asarray(np.mean(gains, axis=0))
    scores, positions = router.scores.astype(np.float64), utility.shape[-1]
    columns = []
    for k in calls:
        tau = np.array([threshold(of, k, positions) for of in router.calibration])
        made = deadline_mask(scores > tau[:, None, None, None], k)
        policy = Policy(router.name, "learned", router.seeds, made)
        columns.append(book_gains(policy, utility).mean(axis=0))
    return np.stack(columns, axis=1)


def _points(
    gains: Float64[np.ndarray, "books quotas"],
    oracle: Float64[np.ndarray, "books quotas"],
    knowable: Float64[np.ndarray, "books quotas"],
    draws: Draws,
    alpha: float,
) -> list[QuotaPoint]:
    columns = zip(
        _intervals(gains, draws, alpha),
        _shares(gains, oracle, draws, alpha),
        _shares(gains, knowable, draws, alpha),
        strict=True,
    )
    return [{"gain": gain, "oracle_share": of, "knowable_share": share} for gain, of, share in columns]


def _intervals(values: Float64[np.ndarray, "books quotas"], draws: Draws, alpha: float) -> list[Interval]:
    return list(mean_intervals(draws, dict(enumerate(values.T)), alpha).values())


def _shares(
    gains: Float64[np.ndarray, "books quotas"],
    ceiling: Float64[np.ndarray, "books quotas"],
    draws: Draws,
    alpha: float,
) -> list[Interval | None]:
    """Ratios of the sums over books; a ceiling that is not positive has no share."""
    some = ceiling.sum(0) > 0
    shares: list[Interval | None] = [None] * gains.shape[1]
    if some.any():
        found = ratio_intervals(draws, gains[:, some], ceiling[:, some], alpha)
        for i, share in zip(np.flatnonzero(some), found, strict=True):
            shares[i] = share
    return shares
