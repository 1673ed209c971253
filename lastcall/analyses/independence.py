"""Does the trajectory tell anything of the utility that the rest does not? A test, without any router.

The generalised covariance measure (Shah and Peters 2020, "The hardness of conditional independence testing
and the generalised covariance measure", Annals of Statistics 48). Where utility ⟂ trajectory | Z, residuals

    ε = u − α_block − E[u | Z]        ξ_j = trajectory_j − α_j,block − E[trajectory_j | Z]

have products of mean 0. A quota has every block for itself, so that what a whole block shares is of no use
to it and is no evidence here: each block has a level of its own, and residuals are taken about their block's
mean. Expectations are fitted on other clusters (cross-fitting over whole clusters), and products are summed
within a cluster, so that only clusters count as independent: serial dependence within a book is in the
variance. z_j is the cluster sums' mean over its standard error, with p from Student's t with one degree less
than there are clusters; the features together are judged by the largest |z_j| under random signs of the
clusters (the wild cluster bootstrap with the null imposed, studentised).

It sees a dependence whose residual covariance is not 0 on average. Where a regression leaves out a part of Z
that moves both sides, that part passes for dependence: a rejection is as good as the regressions are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from scipy import stats

from lastcall.analyses.regressors import Predict, fit_ridge, fit_trees
from lastcall.errors import BookError, NonFiniteError
from lastcall.routing.dataset import Dataset
from lastcall.routing.features import DISPLACEMENT, POSITION, TRAJECTORY, UNCERTAINTY
from lastcall.routing.fitting import projection

Regression = Literal["trees", "ridge"]
"""Ridge regression; or gradient-boosted trees on what a ridge regression leaves, since trees alone are slow
to find a direction across many columns."""

HOLD_OUT_EVERY = 6
"""Every so-manieth of the clusters that a regression is fitted on chooses its size or penalty."""
FEWEST_CLUSTERS = 4
PASSES = 3
"""Times that trees are fitted in turn with the blocks' levels."""


@final
@dataclass(frozen=True, eq=False)
class Independence:
    """What the test found; arrays are [features], the trajectory features in their order."""

    z: Float64[np.ndarray, " features"]
    """Positive where utility and feature go together."""
    p: Float64[np.ndarray, " features"]
    """Two-sided, each feature by itself, not corrected."""
    correlation: Float64[np.ndarray, " features"]
    """Of the residuals, over positions: the size of what is left."""
    largest: float
    """max |z|."""
    p_largest: float
    """Of the features together: p = (1 + #{max |z*| ≥ max |z|}) / (draws + 1)."""
    explained_utility: float
    """Share of the utility's variance within blocks that Z explains on clusters it was not fitted on."""
    explained: Float64[np.ndarray, " features"]
    """The same of each trajectory feature. These shares may be negative."""
    clusters: int


def independence(
    utility: Float64[np.ndarray, "blocks n"],
    trajectory: Float64[np.ndarray, "blocks n features"],
    given: Float64[np.ndarray, "blocks n p"],
    clusters: Int64[np.ndarray, " blocks"],
    folds: int,
    learner: Regression,
    rng: np.random.Generator,
    *,
    draws: int = 10_000,
) -> Independence:
    """Test utility ⟂ trajectory | given, with `clusters` the number of each block's cluster (of any coding).

    Raises BookError where there are too
    few clusters for the folds, NonFiniteError where a value is not finite.
    """
    numbers = np.unique(clusters, return_inverse=True)[1]
    count = int(numbers.max()) + 1
    if not 2 <= folds <= count or count < FEWEST_CLUSTERS:
        raise BookError(
            f"independence needs at least {max(folds, FEWEST_CLUSTERS)} clusters and 2 folds",
            got=f"{count} clusters and {folds} folds",
            todo="measure more books, or ask for fewer folds",
        )
    fold_of = (rng.permutation(count) % folds)[numbers]
    targets = np.concatenate([utility[..., None], trajectory], axis=-1)
    left = _residuals(targets, given, numbers, fold_of, learner, int(rng.integers(2**31)))
    explained = 1 - np.square(left).mean(axis=(0, 1)) / _variances(targets)
    sums = _cluster_sums(left[..., :1] * left[..., 1:], numbers)
    z = _studentised(sums.mean(axis=0), sums)
    largest = float(np.abs(z).max())
    return Independence(
        z=z,
        p=2 * stats.t.sf(np.abs(z), count - 1),
        correlation=_correlations(left),
        largest=largest,
        p_largest=_p_largest(sums, largest, draws, rng),
        explained_utility=float(explained[0]),
        explained=explained[1:],
        clusters=count,
    )


def of_dataset(
    data: Dataset, rank: int, seed: int
) -> tuple[
    Float64[np.ndarray, "blocks n"],
    Float64[np.ndarray, "blocks n features"],
    Float64[np.ndarray, "blocks n p"],
]:
    """Utility, trajectory and Z of measured books.

    Z is uncertainty, displacement, position, the state's norm, and the state through one seeded Gaussian
    projection of rank `rank`, of deviation d^−1/2, never trained.
    """
    states = data.states["bypass"]
    drawn = projection(states.shape[-1], rank, seed)
    read = [torch.cat([s.float().norm(dim=-1, keepdim=True), s.float() @ drawn], dim=-1) for s in states]
    given = torch.cat([_columns(data, (*UNCERTAINTY, *DISPLACEMENT, *POSITION)), torch.stack(read)], dim=-1)
    return (
        data.utility.double().numpy(),
        _columns(data, TRAJECTORY).double().numpy(),
        given.double().numpy(),
    )


def _columns(data: Dataset, names: tuple[str, ...]) -> torch.Tensor:
    return torch.stack([data.scalars[name] for name in names], dim=-1)


def _residuals(
    targets: Float64[np.ndarray, "blocks n k"],
    given: Float64[np.ndarray, "blocks n p"],
    numbers: Int64[np.ndarray, " blocks"],
    fold_of: Int64[np.ndarray, " blocks"],
    learner: Regression,
    seed: int,
) -> Float64[np.ndarray, "blocks n k"]:
    """Each target less its prediction from Z by a regression that never saw the block's cluster."""
    if not (np.isfinite(targets).all() and np.isfinite(given).all()):
        raise NonFiniteError(
            "a utility or a feature is not finite", todo="delete its records and measure again"
        )
    left = np.empty_like(targets)
    for fold in range(int(fold_of.max()) + 1):
        train, test = fold_of != fold, fold_of == fold
        order = np.unique(numbers[train])
        chooses = order[min(HOLD_OUT_EVERY, len(order)) - 1 :: HOLD_OUT_EVERY]
        held = np.isin(numbers[train], chooses)
        for k in range(targets.shape[-1]):
            predict = _fit_with_levels(targets[train, :, k], given[train], held, learner, seed)
            left[test, :, k] = targets[test, :, k] - predict(_rows(given[test])).reshape(-1, targets.shape[1])
    return _about_levels(left)


def _fit_with_levels(
    y: Float64[np.ndarray, "blocks n"],
    given: Float64[np.ndarray, "blocks n p"],
    held: Bool[np.ndarray, " blocks"],
    learner: Regression,
    seed: int,
) -> Predict:
    """E[y − level of its block | Z], but for a constant, fitted on the blocks not `held`.

    The linear part is fitted about block means, which is exact; trees in turn with the levels (backfitting).
    """
    x, held_rows = _rows(given), np.repeat(held, y.shape[1])
    about, centred = _rows(_about_levels(given)), _about_levels(y[..., None]).ravel()
    linear = fit_ridge(about, centred, held_rows, delta=math.inf, seed=seed).predict
    if learner == "ridge":
        return linear
    left = y - linear(x).reshape(y.shape)
    levels = left.mean(axis=1, keepdims=True)
    for _ in range(PASSES):
        trees = fit_trees(x, (left - levels).ravel(), held_rows, delta=math.inf, seed=seed).predict
        levels = (left - trees(x).reshape(y.shape)).mean(axis=1, keepdims=True)
    return lambda rows: linear(rows) + trees(rows)


def _rows(given: Float64[np.ndarray, "blocks n p"]) -> Float64[np.ndarray, "rows p"]:
    return given.reshape(-1, given.shape[-1])


def _about_levels(values: Float64[np.ndarray, "*blocks n k"]) -> Float64[np.ndarray, "*blocks n k"]:
    """`values` less the mean of each block."""
    about: Float64[np.ndarray, "*blocks n k"] = values - values.mean(axis=-2, keepdims=True)
    return about


def _variances(targets: Float64[np.ndarray, "blocks n k"]) -> Float64[np.ndarray, " k"]:
    """Within blocks; infinite where nothing varies."""
    found: Float64[np.ndarray, " k"] = np.square(_about_levels(targets)).mean(axis=(0, 1))
    return np.where(found > 0, found, np.inf)


def _cluster_sums(
    products: Float64[np.ndarray, "blocks n features"], numbers: Int64[np.ndarray, " blocks"]
) -> Float64[np.ndarray, "clusters features"]:
    sums = np.zeros((int(numbers.max()) + 1, products.shape[-1]))
    np.add.at(sums, numbers, products.sum(axis=1))
    return sums


def _studentised(
    means: Float64[np.ndarray, "*draws features"], sums: Float64[np.ndarray, "clusters features"]
) -> Float64[np.ndarray, "*draws features"]:
    """Means over clusters of (signed) sums, over their standard errors; signs change no square.

    0 where all is 0, as of a feature that never varies.
    """
    count = len(sums)
    variance = (np.square(sums).sum(axis=0) / count - np.square(means)).clip(min=0) / (count - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(means == 0, 0.0, means / np.sqrt(variance))


def _p_largest(
    sums: Float64[np.ndarray, "clusters features"], largest: float, draws: int, rng: np.random.Generator
) -> float:
    signs = rng.choice(np.array([-1.0, 1.0]), size=(draws, len(sums)))
    drawn = np.abs(_studentised(signs @ sums / len(sums), sums)).max(axis=1)
    reached = drawn >= largest * (1 - 1e-9)  # all signs alike give the very same figure, but for rounding
    return float((1 + reached.sum()) / (draws + 1))


def _correlations(left: Float64[np.ndarray, "blocks n k"]) -> Float64[np.ndarray, " features"]:
    """Of the first column's residuals with each other column's, about 0; 0 where one never varies."""
    utility, rest = left[..., :1], left[..., 1:]
    size = np.sqrt(np.square(utility).sum() * np.square(rest).sum(axis=(0, 1)))
    found: Float64[np.ndarray, " features"] = (utility * rest).sum(axis=(0, 1)) / np.where(
        size > 0, size, np.inf
    )
    return found
