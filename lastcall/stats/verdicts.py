"""From book differences to verdicts: one-sided p, Holm, simultaneous intervals, four words (section 6).

Δ is the mean over books of NLL(B) − NLL(A), so that positive favours A; Δ* is its value in a draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Float64

from lastcall.results import Verdict
from lastcall.stats.bootstrap import Draws, percentiles

_ROUNDING = 1e-12
"""A deviation under this share of |Δ| is rounding: every cluster has the same difference."""


@final
@dataclass(frozen=True, eq=False)
class Inference:
    """What is inferred of one family; each array is [comparisons], in nats a token but the p-values."""

    delta: Float64[np.ndarray, " comparisons"]
    low: Float64[np.ndarray, " comparisons"]
    high: Float64[np.ndarray, " comparisons"]
    """The plain interval."""
    simultaneous_low: Float64[np.ndarray, " comparisons"]
    simultaneous_high: Float64[np.ndarray, " comparisons"]
    se: Float64[np.ndarray, " comparisons"]
    p: Float64[np.ndarray, " comparisons"]
    p_holm: Float64[np.ndarray, " comparisons"]
    verdicts: tuple[Verdict, ...]


def infer(
    draws: Draws,
    differences: Float64[np.ndarray, "books comparisons"],
    *,
    alpha: float,
    practical_threshold: float,
) -> Inference:
    """The verdicts on one family, corrected together.

    A comparison whose draws do not vary (two routers that make the same calls) has its point as interval.
    Raises ValueError where `differences` is empty, not finite or not of the drawn books.
    """
    _check(draws, differences)
    delta, drawn = differences.mean(0), draws.means(differences)
    se = _deviations(delta, drawn)
    reach = _critical(delta, drawn, se, alpha) * se
    p = one_sided(delta, drawn)
    p_holm = holm(p)
    low, high = percentiles(drawn, alpha)
    highs = delta + reach
    verdicts = (verdict(*both, alpha, practical_threshold) for both in zip(p_holm, highs, strict=True))
    return Inference(delta, low, high, delta - reach, highs, se, p, p_holm, tuple(verdicts))


def _check(draws: Draws, differences: Float64[np.ndarray, "books comparisons"]) -> None:
    if differences.shape[0] != len(draws.clusters.books) or not differences.size:
        raise ValueError(f"differences must be [{len(draws.clusters.books)}, ≥ 1], not {differences.shape}")
    if not np.isfinite(differences).all():
        raise ValueError("differences must be finite")


def one_sided(
    delta: Float64[np.ndarray, " comparisons"], drawn: Float64[np.ndarray, "comparisons draws"]
) -> Float64[np.ndarray, " comparisons"]:
    """p = (1 + #{Δ* − Δ ≥ Δ}) / (draws + 1), against Δ ≤ 0."""
    exceed = (drawn - delta[:, None] >= delta[:, None]).sum(-1)
    p: Float64[np.ndarray, " comparisons"] = (1 + exceed) / (drawn.shape[1] + 1)
    return p


def holm(p: Float64[np.ndarray, " comparisons"]) -> Float64[np.ndarray, " comparisons"]:
    """Holm's adjusted p-values, from statsmodels, which takes a second to import."""
    from statsmodels.stats.multitest import multipletests

    adjusted: Float64[np.ndarray, " comparisons"] = multipletests(p, method="holm")[1]
    return adjusted


def verdict(p_holm: float, simultaneous_high: float, alpha: float, practical_threshold: float) -> Verdict:
    """The first verdict that holds."""
    if p_holm <= alpha:
        return "gain"
    if simultaneous_high < 0:
        return "loss"
    if simultaneous_high < practical_threshold:
        return "no gain of practical size"
    return "undecided"


def _deviations(
    delta: Float64[np.ndarray, " comparisons"], drawn: Float64[np.ndarray, "comparisons draws"]
) -> Float64[np.ndarray, " comparisons"]:
    """Deviation of Δ*; exactly zero where only rounding is left of it."""
    se = drawn.std(axis=-1, ddof=1)
    return np.where(se > _ROUNDING * np.abs(delta), se, 0.0)


def _critical(
    delta: Float64[np.ndarray, " comparisons"],
    drawn: Float64[np.ndarray, "comparisons draws"],
    se: Float64[np.ndarray, " comparisons"],
    alpha: float,
) -> float:
    """q: the 1 − alpha quantile over draws of the family's largest |Δ* − Δ| / se; 0 where nothing varies."""
    varies = se > 0
    distances = np.abs(drawn[varies] - delta[varies, None]) / se[varies, None]
    return float(np.quantile(distances.max(axis=0), 1 - alpha)) if varies.any() else 0.0
