"""Every figure of one checkpoint that the report draws, but the comparisons.

Means are over seeds, then blocks, then books; intervals are of whole clusters (section 6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Float64, Int64

from lastcall.results import CalibrationBin, CheckpointResult, Histogram, Interval, PositionBin, RouterResult
from lastcall.stats.bootstrap import Draws, mean_intervals, ratio_intervals
from lastcall.stats.loading import CheckpointRecords, Policy
from lastcall.stats.policies import exceeds, forced_share, spending, unforced
from lastcall.study import Study

EDGES = tuple(i / 20 for i in range(-30, 31))
"""Edges of the utility histogram, nats: fixed, so that checkpoints can be laid side by side."""
_POSITIONS = 15
"""About so many positions a bin of `by_position`."""
_BINS = 10
"""Bins of `calibration`."""


def summarise(
    study: Study,
    name: str,
    records: CheckpointRecords,
    policies: Sequence[Policy],
    gains: Mapping[str, Float64[np.ndarray, "seeds books"]],
    draws: Draws,
) -> CheckpointResult:
    """The result of the checkpoint `name`, given its policies and their gains by name."""
    alpha, utility = study.inference.alpha, records.utility
    columns = {
        "full": records.loss_full,
        "bypass": records.loss_bypass,
        "utility": utility,
        "positive": (utility > 0).astype(np.float64),
        **{str(w): loss for w, loss in records.loss_local.items()},
    }
    books = {key: values.mean(axis=(1, 2)) for key, values in columns.items()}
    means = mean_intervals(draws, books, alpha)
    return {
        "name": name,
        "nll_full": means["full"],
        "nll_bypass": means["bypass"],
        "nll_local": {str(w): means[str(w)] for w in records.loss_local},
        "gain_full": means["utility"],
        "share_positive": means["positive"],
        "local_recovery": _local_recovery(records, draws, alpha),
        "routers": _routers(records, policies, gains, draws, alpha),
        "histogram": _histogram(utility),
        "by_position": _by_position(utility, study.blocks.context, draws, alpha),
        "calibration": {
            p.name: _calibration(p.scores, utility, draws, alpha) for p in policies if p.scores is not None
        },
    }


def _local_recovery(records: CheckpointRecords, draws: Draws, alpha: float) -> dict[str, Interval]:
    """The ratio of the drawn means by local window; empty where a drawn mean utility is not positive."""
    whole = records.utility.mean(axis=(1, 2))[:, None]
    if not records.loss_local or (draws.means(whole) <= 0).any():
        return {}
    regained = [(records.loss_bypass - loss).mean(axis=(1, 2)) for loss in records.loss_local.values()]
    numerators = np.stack(regained, axis=1)
    ratios = ratio_intervals(draws, numerators, np.broadcast_to(whole, numerators.shape), alpha)
    return dict(zip(map(str, records.loss_local), ratios, strict=True))


def _routers(
    records: CheckpointRecords,
    policies: Sequence[Policy],
    gains: Mapping[str, Float64[np.ndarray, "seeds books"]],
    draws: Draws,
    alpha: float,
) -> list[RouterResult]:
    never = records.loss_bypass.mean(axis=(1, 2))
    books = {policy.name: gains[policy.name].mean(axis=0) for policy in policies}
    gain = mean_intervals(draws, books, alpha)
    nll = mean_intervals(draws, {name: never - of for name, of in books.items()}, alpha)
    return [
        _router(p, records, nll[p.name], gain[p.name], gain["oracle"], gain["knowable"]) for p in policies
    ]


def _router(
    policy: Policy,
    records: CheckpointRecords,
    nll: Interval,
    gain: Interval,
    oracle: Interval,
    knowable: Interval,
) -> RouterResult:
    fewest, most = spending(policy)
    above = exceeds(policy)
    return {
        "name": policy.name,
        "kind": policy.kind,
        "seeds": list(policy.seeds),
        "nll": nll,
        "gain": gain,
        "oracle_share": _share(gain, oracle),
        "knowable_share": _share(gain, knowable),
        "calls_min": fewest,
        "calls_max": most,
        "forced_share": None if above is None else forced_share(policy, above),
        "unforced": None if above is None else unforced(above, records),
    }


def _share(gain: Interval, ceiling: Interval) -> float | None:
    return gain["estimate"] / ceiling["estimate"] if ceiling["estimate"] > 0 else None


def _histogram(utility: Float64[np.ndarray, "books blocks scored"]) -> Histogram:
    counts, _ = np.histogram(utility, EDGES)
    return {
        "edges": list(EDGES),
        "shares": [float(share) for share in counts / utility.size],
        "below": float((utility < EDGES[0]).mean()),
        "above": float((utility > EDGES[-1]).mean()),
    }


def _by_position(
    utility: Float64[np.ndarray, "books blocks scored"], context: int, draws: Draws, alpha: float
) -> list[PositionBin]:
    scored = utility.shape[-1]
    runs = np.array_split(np.arange(scored), max(1, round(scored / _POSITIONS)))
    columns = {
        (context + int(run[0]), context + int(run[-1])): utility[..., run].mean(axis=(1, 2)) for run in runs
    }
    means = mean_intervals(draws, columns, alpha)
    return [{"first": first, "last": last, "utility": means[first, last]} for first, last in columns]


def _calibration(
    scores: Float32[np.ndarray, "seeds books blocks scored"],
    utility: Float64[np.ndarray, "books blocks scored"],
    draws: Draws,
    alpha: float,
) -> list[CalibrationBin]:
    """Bins of equally many predictions, seeds pooled; a bin that ties leave empty is dropped."""
    books = utility.shape[0]
    cells = _BINS * np.arange(books)[:, None, None] + tenths(scores)
    counts, predicted, realised = (
        np.bincount(cells.ravel(), weights, books * _BINS).reshape(books, _BINS)
        for weights in (
            np.ones(scores.size),
            scores.ravel(),
            np.broadcast_to(utility, scores.shape).ravel(),
        )
    )
    some = counts.sum(0) > 0
    intervals = ratio_intervals(draws, realised[:, some], counts[:, some], alpha)
    means = predicted.sum(0)[some] / counts.sum(0)[some]
    return [{"predicted": float(p), "realised": r} for p, r in zip(means, intervals, strict=True)]


def tenths(scores: Float32[np.ndarray, ...]) -> Int64[np.ndarray, ...]:
    """Tenth of each score among all, from 0; equal scores share the lowest that any of them reaches."""
    edges = np.quantile(scores, np.arange(1, _BINS) / _BINS, method="inverted_cdf")
    above: Int64[np.ndarray, ...] = np.sum([scores > edge for edge in edges], axis=0)
    return above
