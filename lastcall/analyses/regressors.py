"""Regressors whose size or penalty is chosen on the held-out rows that the caller names: whole books.

Both minimise squared error on the other rows, and keep the candidate with the least held-out Huber loss
(squared error where δ is infinite). The same rows and seed give the same bytes on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

import numpy as np
from jaxtyping import Bool, Float, Float64
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from lastcall.errors import NonFiniteError

Predict = Callable[[np.ndarray], np.ndarray]
"""Predictions, float64 [rows], of inputs [rows, columns]."""

MOST_TREES, PATIENCE = 600, 50
"""Trees are added until none of the last `PATIENCE` lowers the held-out squared error."""
LEARNING_RATE = 0.05
LEAVES = 8
"""Of a tree, at most: interactions of a few columns."""
COLUMN_SHARE = 0.5
"""Share of the columns that a split of a tree may choose from, drawn by the seed."""
PENALTIES = tuple(10.0**power for power in range(-6, 3))
"""Ridge penalties on standardised columns, as a share of the number of rows."""


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted regressor and how it was chosen."""

    predict: Predict
    held_out_loss: tuple[float, ...]
    """Of every candidate: after each tree, or at each penalty."""

    @property
    def kept(self) -> int:
        """The candidate that was kept, from 1: of equals the first."""
        return 1 + _least(self.held_out_loss)


def huber(errors: Float[np.ndarray, " rows"], delta: float) -> float:
    """Mean Huber loss; half the mean square where δ is infinite."""
    if math.isinf(delta):
        return float(np.square(errors).mean() / 2)
    size = np.abs(errors)
    return float(np.where(size <= delta, size**2 / 2, delta * (size - delta / 2)).mean())


def fit_trees(
    x: Float[np.ndarray, "rows columns"],
    y: Float[np.ndarray, " rows"],
    held: Bool[np.ndarray, " rows"],
    *,
    delta: float,
    seed: int,
) -> Fitted:
    """Gradient-boosted histogram trees; raises NonFiniteError where x or y is not finite."""
    _check(x, y)
    model = HistGradientBoostingRegressor(
        learning_rate=LEARNING_RATE,
        max_leaf_nodes=LEAVES,
        max_features=COLUMN_SHARE,
        max_iter=MOST_TREES,
        early_stopping=True,  # on the rows given: of its own accord it would hold out random ones
        n_iter_no_change=PATIENCE,
        random_state=seed,
    )
    with threadpool_limits(1, "openmp"):
        model.fit(x[~held], y[~held], X_val=x[held], y_val=y[held])
        losses = [huber(predicted - y[held], delta) for predicted in model.staged_predict(x[held])]
    trees = 1 + _least(losses)

    def predict(inputs: np.ndarray) -> np.ndarray:
        with threadpool_limits(1, "openmp"):
            staged: np.ndarray = next(islice(model.staged_predict(inputs), trees - 1, None))
        return staged

    return Fitted(predict, tuple(losses))


def fit_ridge(
    x: Float[np.ndarray, "rows columns"],
    y: Float[np.ndarray, " rows"],
    held: Bool[np.ndarray, " rows"],
    *,
    delta: float,
    seed: int,
) -> Fitted:
    """Ridge regression on columns standardised by the rows not held out; it draws nothing, so `seed` is idle.

    Raises NonFiniteError where x or y is not finite.
    """
    _check(x, y)
    mean, deviation = _moments(x[~held])
    level = float(y[~held].mean(dtype=np.float64))
    z = (x[~held] - mean) / deviation
    gram, moment = z.T @ z / len(z), z.T @ (y[~held] - level) / len(z)
    values, vectors = np.linalg.eigh(gram)
    weights = [vectors @ ((vectors.T @ moment) / (values + penalty)) for penalty in PENALTIES]

    def predictor(of: Float64[np.ndarray, " columns"]) -> Predict:
        return lambda inputs: level + ((inputs - mean) / deviation) @ of

    losses = [huber(predictor(of)(x[held]) - y[held], delta) for of in weights]
    return Fitted(predictor(weights[_least(losses)]), tuple(losses))


REGRESSORS = {"trees": fit_trees, "ridge": fit_ridge}


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each column, float64; a column that never varies has deviation 1."""
    deviation = x.std(axis=0, dtype=np.float64)
    return x.mean(axis=0, dtype=np.float64), np.where(deviation > 0, deviation, 1.0)


def _check(x: np.ndarray, y: np.ndarray) -> None:
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise NonFiniteError(
            "an input or a target of a regression is not finite", todo="delete its records and measure again"
        )


def _least(losses: Sequence[float]) -> int:
    return min(range(len(losses)), key=losses.__getitem__, default=0)
