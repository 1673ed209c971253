"""The longer blocks (section 8): the same routers and thresholds, frozen, where the horizon is another.

The rule score > τ alone is no matched budget: what it calls is a finding, not a setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float64

from lastcall.errors import BookError
from lastcall.records import RunFolder, read_tables
from lastcall.results import Interval, PositionBin
from lastcall.secondary import HorizonResult, HorizonRouter
from lastcall.stats.bootstrap import Clusters, Draws, draw_clusters, mean_intervals, partition
from lastcall.stats.loading import CheckpointRecords, Policy, read_checkpoint
from lastcall.stats.policies import book_gains, exceeds
from lastcall.study import Study

BINS = 32
"""Runs of positions along a longer block."""


def at_horizon(
    study: Study, run: RunFolder, checkpoint: str, clusters: Clusters, books: Sequence[str]
) -> HorizonResult:
    """Forced and unforced routing of the longer blocks of `books`, beside the core blocks of the same books.

    `clusters` are of all test books, `books` those with a longer block. BookError where these are of fewer
    than two clusters, ValueError where `study` asks for no longer blocks.
    """
    if (longer := study.longer) is None:
        raise ValueError("the study asks for no longer blocks")
    if (draws := draws_of(study, clusters, books)) is None:
        raise BookError("fewer than two test clusters have a longer block", todo="nothing can be resampled")
    records = read_checkpoint(longer, run, checkpoint, books, "horizon")
    core = {p.name: p for p in read_checkpoint(study, run, checkpoint, books).routers}
    alpha = study.inference.alpha
    nll = {
        "never": records.loss_bypass.mean(axis=(1, 2)),
        "always": records.loss_full.mean(axis=(1, 2)),
    }
    found = mean_intervals(draws, nll, alpha)
    return {
        "checkpoint": checkpoint,
        "horizon": longer.blocks.horizon,
        "calls": longer.calls,
        "scored": longer.blocks.scored,
        "books": len(books),
        "left_out": [book for book in clusters.books if book not in books],
        "overlap": _overlap(study, longer, run, checkpoint, books),
        "nll_never": found["never"],
        "nll_always": found["always"],
        "routers": [
            _router(policy, core[policy.name], records, longer, draws, alpha)
            for policy in records.routers
            if policy.thresholds is not None
        ],
    }


def activation(
    study: Study,
    run: RunFolder,
    checkpoint: str,
    name: str,
    clusters: Clusters,
    books: Sequence[str] | None,
) -> Interval | str:
    """Share of the longer blocks' positions that router `name` calls by the rule score > τ alone; or why it
    is not known. `books` are the test books with a longer block, None where not all are measured."""
    if (longer := study.longer) is None or books is None:
        return "the longer blocks are not measured"
    if (draws := draws_of(study, clusters, books)) is None:
        return "fewer than two clusters have a longer block"
    records = read_checkpoint(longer, run, checkpoint, books, "horizon")
    above = next((exceeds(policy) for policy in records.routers if policy.name == name), None)
    if above is None:
        return f"{name} has no threshold"
    shares = {name: above.mean(axis=(0, 2, 3))}
    return mean_intervals(draws, shares, study.inference.alpha)[name]


def draws_of(study: Study, clusters: Clusters, books: Sequence[str]) -> Draws | None:
    """The study's draws over the clusters of some of the test books; None where these are fewer than two."""
    own = dict(zip(clusters.books, clusters.of_book, strict=True))
    if len({own[book] for book in books}) < 2:
        return None
    rng = np.random.default_rng(study.inference.seed)
    few = partition([(book, str(own[book])) for book in books])
    return draw_clusters(few, study.inference.draws, rng=rng)


def _router(
    policy: Policy,
    core: Policy,
    records: CheckpointRecords,
    longer: Study,
    draws: Draws,
    alpha: float,
) -> HorizonRouter:
    above, above_core = exceeds(policy), exceeds(core)
    assert above is not None  # a learned router has scores and thresholds
    assert above_core is not None
    never = records.loss_bypass.mean(axis=(1, 2))
    free = book_gains(Policy(policy.name, "learned", policy.seeds, above), records.utility).mean(axis=0)
    forced = book_gains(policy, records.utility).mean(axis=0)
    columns = {
        "forced": never - forced,
        "gain": forced,
        "unforced": never - free,
        "activation": above.mean(axis=(0, 2, 3)),
        "core": above_core.mean(axis=(0, 2, 3)),
    }
    found = mean_intervals(draws, columns, alpha)
    return {
        "name": policy.name,
        "forced": found["forced"],
        "forced_gain": found["gain"],
        "unforced": found["unforced"],
        "activation": found["activation"],
        "activation_core": found["core"],
        "drift": _drift(above, longer.blocks.context, draws, alpha),
    }


def _drift(
    above: Bool[np.ndarray, "seeds books blocks scored"], context: int, draws: Draws, alpha: float
) -> list[PositionBin]:
    runs = np.array_split(np.arange(above.shape[-1]), min(BINS, above.shape[-1]))
    columns: Mapping[tuple[int, int], Float64[np.ndarray, " books"]] = {
        (context + int(run[0]), context + int(run[-1])): above[..., run].mean(axis=(0, 2, 3)) for run in runs
    }
    means = mean_intervals(draws, columns, alpha)
    return [{"first": first, "last": last, "utility": means[first, last]} for first, last in columns]


def _overlap(study: Study, longer: Study, run: RunFolder, checkpoint: str, books: Sequence[str]) -> float:
    """Share of the longer blocks' scored predictions that a core block scores too, by token index."""
    shared = 0
    for book in books:
        core, long = (
            _scored_tokens(run, checkpoint, part, book, of.blocks.horizon)
            for part, of in (("test", study), ("horizon", longer))
        )
        shared += len(np.intersect1d(core, long))
    return shared / (len(books) * longer.blocks.scored)


def _scored_tokens(run: RunFolder, checkpoint: str, part: str, book: str, horizon: int) -> np.ndarray:
    """Index in the book of every scored target's predecessor."""
    table = read_tables([run.measured(checkpoint, part, book)], ["start", "position", "scored"])
    start, position, scored = (table.column(n).to_numpy() for n in ("start", "position", "scored"))
    at: np.ndarray = (start.astype(np.int64) + position)[scored]
    return at
