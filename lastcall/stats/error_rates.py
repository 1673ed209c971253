"""Does the procedure keep its promises? Simulated books of known effect, judged as real ones are (section 6).

The errors the verdicts promise to bound are a gain where the true Δ is not positive, and `no gain of
practical size` or `loss` where it is at least the threshold. Books are Gaussian: heavier tails and fewer
clusters are for the caller to vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float64

from lastcall.stats.bootstrap import Clusters, draw_clusters
from lastcall.stats.verdicts import Inference, infer


@final
@dataclass(frozen=True)
class Scenario:
    """A world to judge; effects and deviations in nats a token."""

    effects: tuple[float, ...]
    """True Δ of each comparison of the family."""
    clusters: int
    books_a_cluster: int = 1
    book_deviation: float = 0.02
    """Of a book's Δ about its cluster's."""
    cluster_deviation: float = 0.0
    """Of a cluster's Δ about the true one: what makes its books dependent."""
    correlation: float = 0.0
    """Between any two comparisons, of both deviations."""


@final
@dataclass(frozen=True)
class ErrorRates:
    """Shares of simulations."""

    false_gain: float
    """Some comparison with Δ ≤ 0 is judged a gain: the family-wise error."""
    false_dismissal: float
    """Some comparison with Δ ≥ the practical threshold is judged a loss or no gain of practical size."""
    plain_coverage: tuple[float, ...]
    """The plain interval holds Δ, by comparison."""
    simultaneous_coverage: float
    """All simultaneous intervals hold their Δ."""
    gains: tuple[float, ...]
    """Judged a gain, by comparison: the power where Δ > 0."""


def error_rates(
    scenario: Scenario,
    *,
    simulations: int,
    draws: int,
    alpha: float,
    practical_threshold: float,
    rng: np.random.Generator,
) -> ErrorRates:
    """Judge `simulations` independent sets of books, each with its own draws."""
    if not scenario.effects or scenario.clusters < 2 or scenario.books_a_cluster < 1 or simulations < 1:
        raise ValueError(f"nothing to simulate in {scenario}, {simulations} times")
    if not 0 <= scenario.correlation <= 1:
        raise ValueError(f"correlation must be within [0, 1], not {scenario.correlation}")
    of_book = np.repeat(np.arange(scenario.clusters), scenario.books_a_cluster)
    clusters = Clusters(tuple(map(str, range(len(of_book)))), of_book)
    inferences = [
        infer(
            draw_clusters(clusters, draws, rng=rng),
            differences(scenario, rng=rng),
            alpha=alpha,
            practical_threshold=practical_threshold,
        )
        for _ in range(simulations)
    ]
    return _rates(np.array(scenario.effects), inferences, practical_threshold)


def differences(scenario: Scenario, *, rng: np.random.Generator) -> Float64[np.ndarray, "books comparisons"]:
    """One simulated set of books: each book's Δ of each comparison."""

    def correlated(rows: int) -> Float64[np.ndarray, "rows comparisons"]:
        shared, own = rng.normal(size=(rows, 1)), rng.normal(size=(rows, len(scenario.effects)))
        noise: Float64[np.ndarray, "rows comparisons"] = (
            np.sqrt(scenario.correlation) * shared + np.sqrt(1 - scenario.correlation) * own
        )
        return noise

    of_cluster = np.repeat(correlated(scenario.clusters), scenario.books_a_cluster, axis=0)
    of_book = correlated(len(of_cluster))
    noise = scenario.cluster_deviation * of_cluster + scenario.book_deviation * of_book
    return np.array(scenario.effects) + noise


def _rates(
    effects: Float64[np.ndarray, " comparisons"], inferences: Sequence[Inference], threshold: float
) -> ErrorRates:
    gains = _judged(inferences, "gain")
    dismissals = _judged(inferences, "loss", "no gain of practical size")
    plain = np.array([(i.low <= effects) & (effects <= i.high) for i in inferences])
    joint = np.array([(i.simultaneous_low <= effects) & (effects <= i.simultaneous_high) for i in inferences])
    return ErrorRates(
        false_gain=float(gains[:, effects <= 0].any(axis=1).mean()),
        false_dismissal=float(dismissals[:, effects >= threshold].any(axis=1).mean()),
        plain_coverage=tuple(plain.mean(axis=0).tolist()),
        simultaneous_coverage=float(joint.all(axis=1).mean()),
        gains=tuple(gains.mean(axis=0).tolist()),
    )


def _judged(inferences: Sequence[Inference], *words: str) -> Bool[np.ndarray, "simulations comparisons"]:
    return np.array([[verdict in words for verdict in i.verdicts] for i in inferences])
