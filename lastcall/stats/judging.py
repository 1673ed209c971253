"""A run folder's test records -> every figure and verdict, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from lastcall.comparing import Comparison
from lastcall.records import RunFolder
from lastcall.results import CheckpointResult, ComparisonResult, Family, PublishedFigure
from lastcall.stats.bootstrap import Draws, draw_clusters, interval, partition
from lastcall.stats.loading import read_checkpoint
from lastcall.stats.policies import Gains, all_policies, book_gains
from lastcall.stats.published import checkpoint_figures, study_figures
from lastcall.stats.summaries import summarise
from lastcall.stats.verdicts import infer
from lastcall.study import Study

FEW_CLUSTERS = 20
"""Under so many test clusters the procedure is unproven (section 6)."""


@final
@dataclass(frozen=True)
class Judgement:
    """What the records say: the part of `judged.json` that is computed from them."""

    checkpoints: list[CheckpointResult]
    families: list[Family]
    """`planned` first."""
    clusters: int
    """Test clusters, the units of resampling."""
    warnings: list[str]
    published: list[PublishedFigure]
    """Published figures beside ours, where the study names any."""


def judge(
    study: Study,
    run: RunFolder,
    test_books: Sequence[tuple[str, str]],
    longer: tuple[str, ...] | None = None,
) -> Judgement:
    """Judge the test records of every checkpoint.

    `test_books` are (book id, cluster id) in the study's order, `longer` those with a measured longer block.
    One draw of clusters, seeded by the study, serves everything. Raises OutputError or NonFiniteError for
    records that are not as they should be, and BookError for books that cannot be resampled.
    """
    clusters = partition(test_books)
    rng = np.random.default_rng(study.inference.seed)
    draws = draw_clusters(clusters, study.inference.draws, rng=rng)
    results, gains, published = [], {}, []
    for checkpoint in study.checkpoints:
        records = read_checkpoint(study, run, checkpoint.name, clusters.books)
        policies = all_policies(records, study.calls)
        gains[checkpoint.name] = {p.name: book_gains(p, records.utility) for p in policies}
        results.append(summarise(study, checkpoint.name, records, policies, gains[checkpoint.name], draws))
        published += checkpoint_figures(
            study, run, longer, results[-1], policies, gains[checkpoint.name], draws
        )
    families = [family(study, name, over, gains, draws) for name, over in study.families.items()]
    published += study_figures(study, families)
    count = len(clusters.sizes)
    return Judgement(results, families, count, _warnings(results, count), published)


def family(
    study: Study, name: str, compared: Sequence[Comparison], gains: Mapping[str, Gains], draws: Draws
) -> Family:
    """The comparisons of all checkpoints, corrected together, as the family `name`."""
    pairs = [(c, over.a, over.b) for c in gains for over in compared]
    seeds = [gains[c][a] - gains[c][b] for c, a, b in pairs]
    inference = infer(
        draws,
        np.stack([of.mean(axis=0) for of in seeds], axis=1),
        alpha=study.inference.alpha,
        practical_threshold=study.inference.practical_threshold,
    )
    comparisons: list[ComparisonResult] = [
        {
            "checkpoint": checkpoint,
            "a": a,
            "b": b,
            "delta": interval(inference.delta[i], inference.low[i], inference.high[i]),
            "simultaneous_low": float(inference.simultaneous_low[i]),
            "simultaneous_high": float(inference.simultaneous_high[i]),
            "se": float(inference.se[i]),
            "p": float(inference.p[i]),
            "p_holm": float(inference.p_holm[i]),
            "per_seed": [float(delta) for delta in seeds[i].mean(axis=1)],
            "verdict": inference.verdicts[i],
        }
        for i, (checkpoint, a, b) in enumerate(pairs)
    ]
    return {"name": name, "planned": name == "planned", "comparisons": comparisons}


def _warnings(results: Sequence[CheckpointResult], clusters: int) -> list[str]:
    few = [
        f"{clusters} test clusters, fewer than {FEW_CLUSTERS}: the procedure is unproven there, its "
        "intervals are likely too narrow and its p-values too small"
    ]
    ratios = [
        f"{r['name']}: local recovery is not given, since full over bypass is not surely a gain"
        for r in results
        if r["nll_local"] and not r["local_recovery"]
    ]
    return few * (clusters < FEW_CLUSTERS) + ratios
