"""Slow, literal twins of `lastcall.analyses`: loops over rows, positions, books and clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean

import numpy as np

from tests.reference.routing import quota, threshold

Weights = Mapping[str, np.ndarray]


def gelu(x: float) -> float:
    """x · Φ(x)."""
    return x * NormalDist().cdf(x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def recurrent_scores(weights: Weights, raw: np.ndarray, states: np.ndarray) -> list[float]:
    """out(hidden + GRU) of one block, a position at a time; `weights` by their names in the module."""
    w = {name: np.asarray(value, dtype=np.float64) for name, value in weights.items()}
    memory = np.zeros(w["gru.weight_hh_l0"].shape[1])
    scores = []
    for row, state in zip(raw.astype(np.float64), states.astype(np.float64), strict=True):
        x = (row - w["router.scaling.mean"]) / w["router.scaling.deviation"]
        if "router.state_map" in w:
            x = np.concatenate([x, state / w["router.scaling.rms"] @ w["router.state_map"]])
        before = w["router.hidden.weight"] @ x + w["router.hidden.bias"]
        hidden = np.array([gelu(value) for value in before])
        of_input = np.split(w["gru.weight_ih_l0"] @ hidden + w["gru.bias_ih_l0"], 3)
        of_memory = np.split(w["gru.weight_hh_l0"] @ memory + w["gru.bias_hh_l0"], 3)
        reset, keep = (sigmoid(of_input[i] + of_memory[i]) for i in (0, 1))
        fresh = np.tanh(of_input[2] + reset * of_memory[2])
        memory = (1 - keep) * fresh + keep * memory
        scores.append(float(w["router.out.weight"][0] @ (hidden + memory) + w["router.out.bias"][0]))
    return scores


def book_gains(
    scores: np.ndarray,
    thresholds: Mapping[str, float],
    utility: np.ndarray,
    books: Sequence[str],
    calls: int,
) -> list[float]:
    """Mean over a book's blocks of the mean over positions of the utility where called; τ by book."""
    gains = []
    for book in dict.fromkeys(books):
        blocks = [i for i, of in enumerate(books) if of == book]
        means = []
        for i in blocks:
            made = quota(scores[i].tolist(), thresholds[book], calls)
            means.append(fmean(float(u) if call else 0.0 for u, call in zip(utility[i], made, strict=True)))
        gains.append(fmean(means))
    return gains


def left_out_thresholds(scores: np.ndarray, books: Sequence[str], calls: int) -> dict[str, float]:
    """τ of each book: the quantile of all scores of the other books."""
    return {
        book: threshold(
            [float(s) for row, of in zip(scores, books, strict=True) if of != book for s in row],
            calls,
            scores.shape[1],
        )
        for book in dict.fromkeys(books)
    }


def covariance_z(utility: np.ndarray, feature: np.ndarray, clusters: Sequence[int]) -> float:
    """The measure on residuals, [blocks, n] each: mean of the cluster sums of products over its error."""
    sums: dict[int, float] = {}
    for u, f, cluster in zip(utility, feature, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + sum(float(a) * float(b) for a, b in zip(u, f, strict=True))
    values = list(sums.values())
    mean = fmean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean / math.sqrt(variance / len(values))


def sign_p(sums: np.ndarray) -> float:
    """Share of all 2^C ways to sign the clusters whose largest |mean| / error reaches the unsigned one."""

    def largest(signed: np.ndarray) -> float:
        columns = signed.T.tolist()
        return max(
            abs(fmean(c)) / math.sqrt(sum((v - fmean(c)) ** 2 for v in c) / (len(c) - 1) / len(c))
            for c in columns
        )

    found = largest(sums)
    ways = list(itertools.product([-1.0, 1.0], repeat=len(sums)))
    return sum(largest(sums * np.array(way)[:, None]) >= found * (1 - 1e-9) for way in ways) / len(ways)


def cluster_deviation(values: Sequence[float], clusters: Sequence[str]) -> float:
    """σ of the module docstring of `lastcall.analyses.power`, cluster by cluster."""
    names = sorted(set(clusters))
    delta = fmean(values)
    square = 0.0
    for name in names:
        own = [v for v, c in zip(values, clusters, strict=True) if c == name]
        square += (sum(own) - delta * len(own)) ** 2
    return math.sqrt(square / (len(names) - 1)) / (len(values) / len(names))
