"""Does the independence test keep its level, and has it power? Simulated books of known truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float64, Int64

from lastcall.analyses.independence import Regression, independence


@final
@dataclass(frozen=True)
class World:
    """Simulated books in which the truth is known.

    Z, the utility's own noise and each feature's own noise are first-order autoregressions with a level of
    their own a cluster. Utility and all features follow Z, by `linear` or bent functions: they go together.
    """

    clusters: int = 40
    blocks_a_cluster: int = 2
    positions: int = 60
    given: int = 4
    features: int = 3
    autoregression: float = 0.7
    """Of every series, from one position to the next."""
    level: float = 0.5
    """Deviation of a cluster's level in each series, independent of the others."""
    shared_level: float = 0.0
    """Deviation of an unseen level of a cluster that moves utility and every feature alike: it is dependence,
    but none within a block."""
    effect: float = 0.0
    """Of the first feature's own noise on the utility: 0 is independence given Z."""
    confounding: float = 0.5
    """How strongly the utility follows what all features follow."""
    linear: bool = False


def simulate(
    world: World, *, rng: np.random.Generator
) -> tuple[
    Float64[np.ndarray, "blocks n"],
    Float64[np.ndarray, "blocks n features"],
    Float64[np.ndarray, "blocks n p"],
    Int64[np.ndarray, " blocks"],
]:
    """Utility, trajectory, Z and clusters of one simulated set of books."""
    z = _series(world, world.given, rng)
    noise = _series(world, 1 + world.features, rng)
    shared = np.repeat(rng.normal(size=world.clusters), world.blocks_a_cluster) * world.shared_level
    follows = z.mean(axis=-1) * 2
    if not world.linear:
        follows = follows / 2 + np.sin(2 * z[..., 0]) + np.abs(z[..., 1])
    trajectory = follows[..., None] + noise[..., 1:] + shared[:, None, None]
    utility = world.confounding * follows + noise[..., 0] + world.effect * noise[..., 1] + shared[:, None]
    return utility, trajectory, z, np.repeat(np.arange(world.clusters), world.blocks_a_cluster)


def _series(world: World, count: int, rng: np.random.Generator) -> Float64[np.ndarray, "blocks n count"]:
    """`count` stationary autoregressions of deviation 1 a block, about a level of each cluster."""
    blocks = world.clusters * world.blocks_a_cluster
    fresh = rng.normal(size=(blocks, world.positions, count))
    series = fresh.copy()
    a = world.autoregression
    for t in range(1, world.positions):
        series[:, t] = a * series[:, t - 1] + math.sqrt(1 - a * a) * fresh[:, t]
    levels = rng.normal(size=(world.clusters, 1, count)) * world.level
    return series + np.repeat(levels, world.blocks_a_cluster, axis=0)


def rejection_rate(
    world: World,
    learner: Regression,
    rng: np.random.Generator,
    *,
    repetitions: int,
    alpha: float = 0.05,
    folds: int = 2,
    draws: int = 999,
) -> float:
    """Share of simulated sets of books on which the features together are judged dependent at `alpha`.

    Where `world.effect` is 0 it is the level, else the power.
    """
    rejected = 0
    for _ in range(repetitions):
        simulated = simulate(world, rng=rng)
        found = independence(*simulated, folds, learner, rng, draws=draws)
        rejected += found.p_largest <= alpha
    return rejected / repetitions
