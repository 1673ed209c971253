"""The causal quota (section 5): exactly k calls of n scored positions, decided from the prefix alone.

Pure state machines over scores; no torch, no data, no randomness of their own.
"""

from __future__ import annotations

from typing import final

import numpy as np
from jaxtyping import Bool, Float


@final
class Deadline:
    """Call where the score passes τ while calls are left, and where all calls left must be made now.

    With b calls left and r = n − i positions left, position i calls if b > 0 and (score > τ or b ≥ r). The
    horizon n is known; so k calls are made, never more, never fewer. A step is one position.
    """

    def __init__(self, calls: int, positions: int, threshold: float) -> None:
        if not 0 < calls <= positions:
            raise ValueError(f"calls must be 1 to {positions}, got {calls}")
        self._calls_left, self._positions_left, self._threshold = calls, positions, float(threshold)

    def step(self, score: float) -> bool:
        """Whether the next position calls; raises ValueError past the horizon."""
        if self._positions_left == 0:
            raise ValueError("the horizon is over: every position has been decided")
        due = self._calls_left >= self._positions_left
        call = self._calls_left > 0 and (float(score) > self._threshold or due)
        self._calls_left -= call
        self._positions_left -= 1
        return call


def deadline_calls(
    scores: Float[np.ndarray, "*blocks positions"], threshold: float, calls: int
) -> Bool[np.ndarray, "*blocks positions"]:
    """What `Deadline` decides in every block at once."""
    positions = scores.shape[-1]
    made = np.zeros(scores.shape, dtype=bool)
    left = np.full(scores.shape[:-1], calls)
    above = scores.astype(np.float64) > threshold
    for i in range(positions):
        made[..., i] = (left > 0) & (above[..., i] | (left >= positions - i))
        left = left - made[..., i]
    return made


def threshold(scores: Float[np.ndarray, " *any"], calls: int, positions: int) -> float:
    """τ: the (1 − k/n) quantile of calibration scores, pooled over positions, linear interpolation."""
    return float(np.quantile(scores.astype(np.float64), 1 - calls / positions, method="linear"))


def largest(
    values: Float[np.ndarray, "*blocks positions"], calls: int
) -> Bool[np.ndarray, "*blocks positions"]:
    """The `calls` largest of each block; ties go to the earlier position."""
    order = np.argsort(-values, axis=-1, kind="stable")[..., :calls]
    made = np.zeros(values.shape, dtype=bool)
    np.put_along_axis(made, order, True, axis=-1)
    return made


def evenly(calls: int, positions: int) -> Bool[np.ndarray, " positions"]:
    """Every m-th position, m = round(n / k), where that is k of them (i mod 5 = 0 at 99 of 495); else the
    k positions floor(j · n / k)."""
    made = np.zeros(positions, dtype=bool)
    every = np.arange(0, positions, round(positions / calls))
    made[every if len(every) == calls else np.arange(calls) * positions // calls] = True
    return made
