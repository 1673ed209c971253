"""The secondary questions of a study, answered from its records and fitted routers (section 8).

Each section of `analyses.json` is written as soon as it is known, so that a kill loses the one in hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import final

import numpy as np
from jaxtyping import Float32

from lastcall.analyses.actions import third_action, with_local
from lastcall.analyses.curves import Scored, quota_curves, router_gains
from lastcall.analyses.gains import planned_of_learned
from lastcall.analyses.independence import independence, of_dataset
from lastcall.analyses.learners import fit_gains
from lastcall.records import RunFolder
from lastcall.results import Family
from lastcall.routing import dataset
from lastcall.routing.controllers import (
    CalibrationRanks,
    Controller,
    IntegralControl,
    OnlineQuantile,
    TokenBucket,
    controlled_calls,
)
from lastcall.routing.dataset import Dataset
from lastcall.routing.features import TRAJECTORY
from lastcall.routing.fitting import position_profile
from lastcall.routing.replay import Policies, random_scores
from lastcall.secondary import (
    Ceilings,
    ControllerResult,
    HorizonResult,
    IndependenceFeature,
    IndependenceResult,
    QuotaCurves,
    ThirdActionResult,
)
from lastcall.stats.bootstrap import Draws, draw_clusters, mean_intervals, partition
from lastcall.stats.ceilings import allocations, best_gains, fit_scale, knowable_ceiling, reliability
from lastcall.stats.horizon import at_horizon
from lastcall.stats.judging import family
from lastcall.stats.loading import CheckpointRecords, Policy, read_checkpoint, read_losses
from lastcall.stats.policies import book_gains
from lastcall.study import LEARNED_ROUTERS, SPLITS, Split, Study

BUCKET = 16.0
"""Tokens a bucket holds: calls stay within 8 of the rate."""
STEP = 0.05
"""By which the tracked quantile moves, of the ranks' range."""
LIMIT, GAIN = 8.0, 0.2
"""Calls by which integral control may be off the rate, and how hard it answers."""
FOLDS = 5
"""Of whole clusters, for cross-fitting."""
RANK = 32
"""Of the projection through which the independence test is given the state."""


@final
class Material:
    """What the answers are made from: one draw of clusters, and one checkpoint's records at a time."""

    def __init__(
        self,
        study: Study,
        run: RunFolder,
        books: Mapping[Split, Sequence[str]],
        test_books: Sequence[tuple[str, str]],
        longer: Sequence[str] = (),
    ) -> None:
        """`test_books` are (book id, cluster id); `books` the ids of every split, in order; `longer` the test
        books with a longer block."""
        self.study, self.run, self._books, self.longer = study, run, books, longer
        self.clusters = partition(test_books)
        rng = np.random.default_rng(study.inference.seed)
        self.draws: Draws = draw_clusters(self.clusters, study.inference.draws, rng=rng)

    def of(self, checkpoint: str) -> CheckpointMaterial:
        return CheckpointMaterial(self, checkpoint, self._books)


@final
@dataclass(frozen=True)
class CheckpointMaterial:
    """One checkpoint's records and routers, read when first asked for."""

    whole: Material
    name: str
    books: Mapping[Split, Sequence[str]]

    @cached_property
    def records(self) -> CheckpointRecords:
        return read_checkpoint(self.whole.study, self.whole.run, self.name, self.whole.clusters.books)

    @cached_property
    def calibration(self) -> Dataset:
        return self.data("calibration")

    @cached_property
    def calibration_scores(self) -> dict[str, Float32[np.ndarray, "seeds scores"]]:
        """Of every learned router, seeds by pooled positions."""
        decided = Policies(self.whole.run, self.whole.study, self.name).decide(self.calibration)
        return {
            name: np.stack([decided[name, seed][0].ravel() for seed in self.whole.study.routers.seeds])
            for name in self.whole.study.routers.names
            if name in LEARNED_ROUTERS
        }

    def data(self, split: Split) -> Dataset:
        study, run = self.whole.study, self.whole.run
        return dataset.read(run, study, self.name, split, self.books[split])

    @cached_property
    def scored(self) -> list[Scored]:
        """Every policy that ranks positions: the learned routers, random and by-position."""
        found = []
        for policy in self.records.routers:
            if policy.scores is not None:
                of = self.calibration_scores[policy.name]
                found.append(Scored(policy.name, policy.seeds, policy.scores, of))
            elif policy.name == "random":
                found.append(Scored("random", policy.seeds, self._random(policy), None))
            elif policy.name == "by-position":
                profile = position_profile(self.whole.run.fitted(self.name))
                shape = (1, *self.records.utility.shape)
                found.append(
                    Scored("by-position", policy.seeds, np.broadcast_to(profile, shape).copy(), None)
                )
        return found

    def _random(self, policy: Policy) -> Float32[np.ndarray, "seeds books blocks scored"]:
        shape = self.records.utility.shape
        books = [book for book in self.whole.clusters.books for _ in range(shape[1])]
        return np.stack([random_scores(books, seed, shape[2]).reshape(shape) for seed in policy.seeds])


def curves(of: CheckpointMaterial) -> QuotaCurves:
    """Gain against budget for every router, beside both ceilings."""
    study = of.whole.study
    return quota_curves(
        of.scored,
        of.records.utility,
        of.records.kl,
        of.whole.draws,
        study.inference.alpha,
        quotas=study.analyses.quotas,
    )


def ceilings(of: CheckpointMaterial) -> Ceilings:
    """Both ceilings, how far the knowable one can be trusted, and ranking against sign."""
    study, records, draws = of.whole.study, of.records, of.whole.draws
    alpha = study.inference.alpha
    cut = read_losses(study, of.whole.run, of.name, of.books["calibration"], "calibration")
    scale = fit_scale(cut["kl"], cut["loss_bypass"] - cut["loss_full"])
    scores = {p.name: p.scores for p in records.routers if p.scores is not None}
    named = "by-position" in study.routers.names
    profile = position_profile(of.whole.run.fitted(of.name)) if named else None
    return {
        "reliability": reliability(records.utility, records.kl, draws, alpha),
        "knowable": knowable_ceiling(records.utility, records.kl, study.calls, scale, draws, alpha),
        "allocations": allocations(
            records.utility, records.kl, scores, study.calls, draws, alpha, fit_profile=profile
        ),
    }


def controllers(of: CheckpointMaterial) -> list[ControllerResult]:
    """Every controller on every learned router."""
    study = of.whole.study
    rate = Fraction(study.calls, study.blocks.scored)
    made: dict[str, Controller] = {
        "token-bucket": TokenBucket(rate, BUCKET),
        "online-quantile": OnlineQuantile(rate, STEP),
        "integral": IntegralControl(rate, LIMIT, GAIN),
    }
    return [
        _controlled(of, name, made[name], scored)
        for name in study.analyses.controllers
        for scored in of.scored
        if scored.calibration is not None
    ]


def _controlled(of: CheckpointMaterial, name: str, rule: Controller, scored: Scored) -> ControllerResult:
    """One controller on one router, beside deadline rule and oracle at the share that it really called."""
    assert scored.calibration is not None
    utility, positions = of.records.utility, of.records.utility.shape[-1]
    calls = np.stack(
        [
            controlled_calls(rule, CalibrationRanks(own)(scores))
            for own, scores in zip(scored.calibration, scored.scores, strict=True)
        ]
    )
    called = float(calls.mean())
    k = [max(1, round(called * positions))]
    columns = {
        "gain": book_gains(Policy(scored.name, "learned", scored.seeds, calls), utility).mean(axis=0),
        "deadline": router_gains(scored, utility, k)[:, 0],
        "oracle": best_gains(utility, utility, k)[:, 0],
    }
    found = mean_intervals(of.whole.draws, columns, of.whole.study.inference.alpha)
    return {
        "controller": name,
        "router": scored.name,
        "slack": float(rule.slack),
        "called": called,
        "gain": found["gain"],
        "deadline_gain": found["deadline"],
        "oracle_gain": found["oracle"],
    }


def longer(of: CheckpointMaterial) -> HorizonResult:
    """The longer blocks of the test books that are long enough, under the frozen thresholds."""
    whole = of.whole
    return at_horizon(whole.study, whole.run, of.name, whole.clusters, whole.longer)


def learners(material: Material, names: Sequence[str]) -> list[Family]:
    """The planned comparisons judged anew by each learner, each a family of its own."""
    study = material.study
    kinds = study.analyses.learners
    gains: dict[str, dict[str, dict[str, np.ndarray]]] = {kind: {} for kind in kinds}
    for name in names:
        of = material.of(name)
        fit, calibration, test = of.data("fit"), of.calibration, of.data("test")
        folder = material.run.fitted(name)
        for kind in kinds:
            gains[kind][name] = fit_gains(kind, study, folder, fit, calibration, test)
    compared = planned_of_learned(study)
    return [family(study, f"learner: {kind}", compared, gains[kind], material.draws) for kind in kinds]


def three_actions(of: CheckpointMaterial) -> ThirdActionResult:
    """Bypass, local and full under one cost budget."""
    study, run = of.whole.study, of.whole.run
    fit, calibration, test = (
        with_local(study, run, of.name, split, of.books[split], of.data(split)) for split in SPLITS
    )
    return third_action(study, of.name, run.fitted(of.name), fit, calibration, test, of.whole.draws)


def independent(of: CheckpointMaterial) -> IndependenceResult:
    """Utility against the trajectory given everything else, on the test books."""
    study = of.whole.study
    utility, trajectory, given = of_dataset(of.data("test"), RANK, study.routers.projection_seed)
    clusters = np.repeat(of.whole.clusters.of_book, len(study.blocks.starts))
    rng = np.random.default_rng(study.inference.seed)
    folds = min(FOLDS, len(of.whole.clusters.sizes))
    found = independence(
        utility, trajectory, given, clusters, folds, "trees", rng, draws=study.inference.draws
    )
    features = [
        IndependenceFeature(
            name=name,
            z=float(found.z[i]),
            p=float(found.p[i]),
            correlation=float(found.correlation[i]),
            explained=float(found.explained[i]),
        )
        for i, name in enumerate(TRAJECTORY)
    ]
    return {
        "checkpoint": of.name,
        "learner": "trees",
        "folds": folds,
        "features": features,
        "p_together": found.p_largest,
        "explained_utility": found.explained_utility,
    }
