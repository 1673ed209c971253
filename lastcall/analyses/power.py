"""Could the study see it? Power of the planned comparisons, from the fit and calibration books alone.

The between-book deviation of each Δ is estimated on calibration books, which the routers were not fitted on.
The thresholds were cut on them, so that here τ is cut anew for each book on the others. With S_c the sum of Δ
over the n_c books of cluster c and n̄ the mean of n_c,

    deviation  σ² = Σ_c (S_c − Δ·n_c)² / (C − 1) / n̄²
    error      se = σ / √(test clusters)    as if test clusters held as many books as these

and Δ* is taken for Gaussian. A gain needs Δ / se > z(1 − a), where Holm's a is alpha / m for the family's
least p and alpha for its last: the truth lies between. `No gain of practical size` needs Δ + q·se under the
practical threshold, q being Šidák's two-sided value for m comparisons, which dependent comparisons do not
exceed. Few calibration clusters know σ badly: every figure is also given at the ends of σ's χ² interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Float64
from scipy import stats

from lastcall.analyses.gains import Gains, differences, gains_of
from lastcall.errors import BookError
from lastcall.records import RunFolder
from lastcall.results import Interval
from lastcall.routing import dataset
from lastcall.routing.dataset import Dataset
from lastcall.routing.quota import deadline_calls, threshold
from lastcall.routing.replay import Policies
from lastcall.stats.bootstrap import Clusters, interval
from lastcall.stats.judging import FEW_CLUSTERS
from lastcall.study import LEARNED_ROUTERS, Study

POWER = 0.8


class PowerRow(TypedDict):
    """What one planned comparison can be expected to show; nats a token but for the clusters and shares.

    The ends of each interval are its figure at the ends of the deviation's interval.
    """

    checkpoint: str
    a: str
    b: str
    delta: float
    """On the calibration books: an estimate for planning, no result."""
    calibration_clusters: int
    test_clusters: int
    books_a_cluster: float
    """Of the calibration books; what clusters are to be multiplied by to give books."""
    deviation: Interval
    """σ of a cluster's Δ, with its χ² interval at 1 − alpha."""
    se: Interval
    """Standard error of Δ at `test_clusters`."""
    detectable_best: Interval
    """Smallest Δ judged a gain with 80% power, were it the last of Holm's steps (at alpha)."""
    detectable_worst: Interval
    """The same, were it the first of Holm's steps (at alpha / m)."""
    clusters_best: Interval
    """Test clusters with which a true Δ of the practical threshold is so judged with 80% power (at alpha)."""
    clusters_worst: Interval
    """The same at alpha / m."""
    clusters_no_gain: Interval
    """Test clusters with which a true Δ of 0 is judged no gain of practical size with 80% power."""
    power_threshold: Interval
    """Chance at `test_clusters` that a true Δ of the practical threshold is judged a gain (at alpha / m)."""
    power_no_gain: Interval
    """Chance at `test_clusters` that a true Δ of 0 is judged no gain of practical size."""
    warning: str
    """Why the row is to be taken with care; empty where it is not."""


def power(
    study: Study,
    gains_by_checkpoint: Mapping[str, Gains],
    clusters: Sequence[str],
    test_clusters: int,
) -> list[PowerRow]:
    """A row a planned comparison and checkpoint, in the order of the family.

    `gains_by_checkpoint` are those of `calibration_gains`, `clusters` the cluster id of each calibration
    book. Raises BookError where there are fewer than 2 calibration clusters, between which nothing varies, or
    fewer than 2 test clusters.
    """
    if len(set(clusters)) < 2 or test_clusters < 2:
        raise BookError(
            "power needs at least 2 calibration clusters and 2 test clusters",
            got=f"{len(set(clusters))} and {test_clusters}",
            todo="give more books",
        )
    family = differences(study.inference.planned, gains_by_checkpoint)
    of_book = np.unique(np.array(clusters), return_inverse=True)[1]
    grouped = Clusters(tuple(map(str, range(len(clusters)))), of_book)
    deviations = cluster_deviations(family.values, grouped)
    rows = zip(family.pairs, family.values.mean(axis=0), deviations, strict=True)
    return [
        _row(study, pair, float(d), float(s), len(family.pairs), grouped, test_clusters)
        for pair, d, s in rows
    ]


def cluster_deviations(
    values: Float64[np.ndarray, "books comparisons"], clusters: Clusters
) -> Float64[np.ndarray, " comparisons"]:
    """σ of each column: its mean over books has the standard error σ / √clusters, whatever their sizes."""
    sizes = clusters.sizes
    about = clusters.sums(values) - values.mean(axis=0) * sizes[:, None]
    spread = np.sqrt(np.square(about).sum(axis=0) / (len(sizes) - 1))
    found: Float64[np.ndarray, " comparisons"] = spread / sizes.mean()
    return found


def deviation_interval(deviation: float, clusters: int, alpha: float) -> Interval:
    """σ with its χ² interval at 1 − alpha, for Gaussian cluster means."""
    freedom = clusters - 1
    low, high = (math.sqrt(freedom / stats.chi2.ppf(share, freedom)) for share in (1 - alpha / 2, alpha / 2))
    return interval(deviation, deviation * low, deviation * high)


def _row(
    study: Study,
    pair: tuple[str, str, str],
    delta: float,
    deviation: float,
    m: int,
    clusters: Clusters,
    test_clusters: int,
) -> PowerRow:
    alpha, practical = study.inference.alpha, study.inference.practical_threshold
    count, root = len(clusters.sizes), math.sqrt(test_clusters)
    best, worst, bound = _critical(alpha, m)
    reach = float(stats.norm.ppf(POWER))
    sigma = deviation_interval(deviation, count, alpha)

    def at(figure: Callable[[float], float]) -> Interval:
        return interval(*(figure(s) for s in (sigma["estimate"], sigma["low"], sigma["high"])))

    return {
        "checkpoint": pair[0],
        "a": pair[1],
        "b": pair[2],
        "delta": delta,
        "calibration_clusters": count,
        "test_clusters": test_clusters,
        "books_a_cluster": float(clusters.sizes.mean()),
        "deviation": sigma,
        "se": at(lambda s: s / root),
        "detectable_best": at(lambda s: (best + reach) * s / root),
        "detectable_worst": at(lambda s: (worst + reach) * s / root),
        "clusters_best": at(lambda s: _clusters((best + reach) * s / practical)),
        "clusters_worst": at(lambda s: _clusters((worst + reach) * s / practical)),
        "clusters_no_gain": at(lambda s: _clusters((bound + reach) * s / practical)),
        "power_threshold": at(lambda s: _chance(practical * root, s, worst)),
        "power_no_gain": at(lambda s: _chance(practical * root, s, bound)),
        "warning": _warning(count, test_clusters),
    }


def _critical(alpha: float, m: int) -> tuple[float, float, float]:
    """z of Holm's last and first step, and Šidák's two-sided value for m simultaneous intervals."""
    sidak = (1 + (1 - alpha) ** (1 / m)) / 2
    best, worst, bound = (float(stats.norm.ppf(share)) for share in (1 - alpha, 1 - alpha / m, sidak))
    return best, worst, bound


def _clusters(ratio: float) -> float:
    """The fewest clusters N with ratio ≤ √N, and at least the 2 that resampling needs."""
    return float(max(2, math.ceil(ratio**2)))


def _chance(reached: float, deviation: float, critical: float) -> float:
    """P(N(reached / deviation, 1) > critical); 1 where nothing varies."""
    return float(stats.norm.cdf(reached / deviation - critical)) if deviation > 0 else 1.0


def _warning(calibration: int, test: int) -> str:
    few = [
        f"{n} {split} clusters"
        for n, split in ((calibration, "calibration"), (test, "test"))
        if n < FEW_CLUSTERS
    ]
    if not few:
        return ""
    return f"{' and '.join(few)}, fewer than {FEW_CLUSTERS}: the normal approximation is rough there"


def calibration_gains(
    run: RunFolder, study: Study, checkpoint: str, books: Sequence[str]
) -> dict[str, Float64[np.ndarray, "seeds books"]]:
    """NLL(never) − NLL(router) on the calibration `books`, by every router a planned comparison names.

    τ is cut for each book on the other books. Raises OutputError where a record or a fitted file is missing,
    BookError where there is no other book.
    """
    data = dataset.read(run, study, checkpoint, "calibration", books)
    if len(books) < 2:
        raise BookError(
            "a threshold that leaves a book out needs another one",
            got=f"{len(books)} calibration book",
            todo="give at least 2",
        )
    decided = Policies(run, study, checkpoint).decide(data)
    compared = dict.fromkeys(name for over in study.inference.planned for name in (over.a, over.b))
    return {name: gains_of(_calls(study, name, decided, data), data) for name in compared}


def _calls(
    study: Study, name: str, decided: Mapping[tuple[str, int], tuple[np.ndarray, Any]], data: Dataset
) -> Bool[np.ndarray, "seeds blocks n"]:
    """Calls of each seed; those of a policy without τ as they were decided."""
    seeds = study.seeds_of(name)
    if name not in LEARNED_ROUTERS:
        return np.stack([decided[name, seed][1] for seed in seeds])
    return np.stack([leave_one_out_calls(decided[name, seed][0], data.books, study.calls) for seed in seeds])


def leave_one_out_calls(
    scores: Float[np.ndarray, "blocks n"], books: Sequence[str], calls: int
) -> Bool[np.ndarray, "blocks n"]:
    """The deadline quota in each book's blocks, τ cut on the blocks of all other books."""
    made, order = np.zeros(scores.shape, dtype=np.bool_), np.array(books)
    for book in dict.fromkeys(books):
        own = order == book
        tau = threshold(scores[~own], calls, scores.shape[1])
        made[own] = deadline_calls(scores[own], tau, calls)
    return made
