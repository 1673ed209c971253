"""Slow, literal twins of `lastcall.stats`: loops over rows, draws and books, as the protocol words them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pyarrow.parquet as pq

Row = dict[str, object]


def rows(path: Path) -> list[Row]:
    """A record's rows, one dictionary each."""
    return pq.read_table(path, partitioning=None).to_pylist()


def drawn_books(cluster_of: Mapping[str, str], draws: int, rng: np.random.Generator) -> list[list[str]]:
    """The books of every draw: whole clusters with replacement, as many as there are."""
    clusters = list(dict.fromkeys(cluster_of.values()))
    picks = rng.integers(len(clusters), size=(draws, len(clusters)))
    return [[b for i in pick for b, c in cluster_of.items() if c == clusters[i]] for pick in picks]


def means(value_of: Mapping[str, float], draws: Sequence[Sequence[str]]) -> list[float]:
    """The mean over the drawn books of every draw."""
    return [fmean(value_of[book] for book in draw) for draw in draws]


def percentile(values: Sequence[float], share: float) -> float:
    """The linearly interpolated order statistic at `share`."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def interval(
    statistic: Callable[[Sequence[str]], float],
    books: Sequence[str],
    draws: Sequence[Sequence[str]],
    alpha: float,
) -> dict[str, float]:
    """A statistic of a list of books, and its percentile interval."""
    drawn = [statistic(draw) for draw in draws]
    low, high = percentile(drawn, alpha / 2), percentile(drawn, 1 - alpha / 2)
    return {"estimate": statistic(books), "low": low, "high": high}


def one_sided(delta: float, drawn: Sequence[float]) -> float:
    """p = (1 + #{Δ* − Δ ≥ Δ}) / (draws + 1)."""
    return (1 + sum(star - delta >= delta for star in drawn)) / (len(drawn) + 1)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, by their definition: the largest of the steps up to one's own."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted = [0.0] * len(p)
    for step, i in enumerate(order):
        adjusted[i] = max(min(1.0, (len(p) - s) * p[order[s]]) for s in range(step + 1))
    return adjusted


def simultaneous(
    deltas: Sequence[float], drawn: Sequence[Sequence[float]], alpha: float
) -> list[tuple[float, float]]:
    """Δ ± q·se, q the 1 − alpha percentile over draws of the family's largest |Δ* − Δ| / se."""
    se = [stdev(stars) for stars in drawn]
    largest = [
        max(abs(stars[d] - delta) / s for delta, stars, s in zip(deltas, drawn, se, strict=True))
        for d in range(len(drawn[0]))
    ]
    q = percentile(largest, 1 - alpha)
    return [(delta - q * s, delta + q * s) for delta, s in zip(deltas, se, strict=True)]


def verdict(p_holm: float, high: float, alpha: float, threshold: float) -> str:
    """The first word that holds."""
    held = {
        "gain": p_holm <= alpha,
        "loss": high < 0,
        "no gain of practical size": high < threshold,
        "undecided": True,
    }
    return next(word for word, holds in held.items() if holds)


def book_loss(measured: Sequence[Row], called: set[tuple[int, int]]) -> float:
    """A book's loss: full at the (block, position) pairs of `called`, bypass elsewhere."""
    blocks: dict[int, list[float]] = {}
    for row in measured:
        if row["scored"]:
            here = (row["block"], row["position"]) in called
            blocks.setdefault(row["block"], []).append(row["loss_full"] if here else row["loss_bypass"])
    return fmean(fmean(losses) for losses in blocks.values())


def best_calls(measured: Sequence[Row], worth: Callable[[Row], float], calls: int) -> set[tuple[int, int]]:
    """Each block's `calls` most worthy scored positions, the earlier of equals."""
    chosen = set()
    for block in {row["block"] for row in measured}:
        scored = [row for row in measured if row["scored"] and row["block"] == block]
        scored.sort(key=lambda row: (-worth(row), row["position"]))
        chosen |= {(block, row["position"]) for row in scored[:calls]}
    return chosen


def quota(scores: Sequence[float], threshold: float, calls: int) -> list[bool]:
    """Section 5, one position at a time."""
    left, made = calls, []
    for i, score in enumerate(scores):
        call = left > 0 and (score > threshold or left >= len(scores) - i)
        left -= call
        made.append(call)
    return made
