"""The cluster bootstrap: one draw of clusters serves every figure, comparison and checkpoint (section 6).

The estimand is a mean over books. A draw takes as many clusters as there are, with replacement, and carries
all the books of each; its estimate is the mean over the drawn books, so that a cluster weighs by its books.
A draw is a row of counts over clusters, which makes drawn sums one matrix product.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, final

import numpy as np
from jaxtyping import Float64, Int64, UInt32

from lastcall.errors import BookError
from lastcall.results import Interval

_CELLS = 1 << 22
"""Cells of the counts matrix that are handled at once; bounds memory."""

Key = TypeVar("Key", bound=Hashable)


@final
@dataclass(frozen=True, eq=False)
class Clusters:
    """The test books and the cluster of each: the one definition of cluster."""

    books: tuple[str, ...]
    of_book: Int64[np.ndarray, " books"]
    """Number of each book's cluster, from 0 in order of appearance."""

    @property
    def sizes(self) -> Int64[np.ndarray, " clusters"]:
        """Books a cluster."""
        sizes: Int64[np.ndarray, " clusters"] = np.bincount(self.of_book)
        return sizes

    def sums(self, values: Float64[np.ndarray, "books columns"]) -> Float64[np.ndarray, "clusters columns"]:
        """`values` summed over the books of each cluster."""
        sums = np.zeros((len(self.sizes), values.shape[1]))
        np.add.at(sums, self.of_book, values)
        return sums


def partition(test_books: Sequence[tuple[str, str]]) -> Clusters:
    """The clusters of (book id, cluster id) pairs.

    Raises BookError where an id is missing, a book comes twice or there are fewer than two clusters, between
    which nothing can be resampled.
    """
    books = tuple(book for book, _ in test_books)
    for book, cluster in test_books:
        if not book or not cluster:
            raise BookError(
                "a test book or its cluster has no id", got=f"({book!r}, {cluster!r})", todo="name it"
            )
    if len(set(books)) < len(books):
        twice = sorted({b for b in books if books.count(b) > 1})
        raise BookError("a test book comes twice", got=", ".join(twice), todo="list each book once")
    numbers = {cluster: i for i, cluster in enumerate(dict.fromkeys(c for _, c in test_books))}
    if len(numbers) < 2:
        raise BookError(
            "resampling needs at least 2 test clusters", got=str(len(numbers)), todo="add test books"
        )
    return Clusters(books, np.array([numbers[c] for _, c in test_books], dtype=np.int64))


@final
@dataclass(frozen=True, eq=False)
class Draws:
    """Bootstrap draws: how often each draw took each cluster."""

    clusters: Clusters
    counts: UInt32[np.ndarray, "draws clusters"]

    @cached_property
    def _books(self) -> Float64[np.ndarray, " draws"]:
        """Drawn books."""
        books: Float64[np.ndarray, " draws"] = self.sums(np.ones((len(self.clusters.books), 1)))[0]
        return books

    def sums(self, values: Float64[np.ndarray, "books columns"]) -> Float64[np.ndarray, "columns draws"]:
        """`values` summed over the drawn books."""
        sums = self.clusters.sums(values).T
        drawn = np.empty((len(sums), len(self.counts)))
        for rows in _row_chunks(*self.counts.shape):
            drawn[:, rows] = sums @ self.counts[rows].T.astype(np.float64)
        return drawn

    def means(self, values: Float64[np.ndarray, "books columns"]) -> Float64[np.ndarray, "columns draws"]:
        """`values` averaged over the drawn books."""
        means: Float64[np.ndarray, "columns draws"] = self.sums(values) / self._books
        return means


def draw_clusters(clusters: Clusters, draws: int, *, rng: np.random.Generator) -> Draws:
    """`draws` draws of as many whole clusters as there are, with replacement."""
    n = len(clusters.sizes)
    counts = np.empty((draws, n), dtype=np.uint32)
    for rows in _row_chunks(draws, n):
        size = len(counts[rows])
        cells = rng.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts[rows] = np.bincount(cells.ravel(), minlength=size * n).reshape(size, n)
    return Draws(clusters, counts)


def _row_chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CELLS // width)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def percentiles(
    drawn: Float64[np.ndarray, "columns draws"], alpha: float
) -> Float64[np.ndarray, "2 columns"]:
    """Lower and upper end of the plain interval at 1 − alpha of each column: linear percentiles."""
    ends: Float64[np.ndarray, "2 columns"] = np.quantile(drawn, (alpha / 2, 1 - alpha / 2), axis=-1)
    return ends


def mean_intervals(
    draws: Draws, columns: Mapping[Key, Float64[np.ndarray, " books"]], alpha: float
) -> dict[Key, Interval]:
    """Mean over books of each column, with its plain interval."""
    values = np.stack(list(columns.values()), axis=1)
    low, high = percentiles(draws.means(values), alpha)
    return {key: interval(*ends) for key, *ends in zip(columns, values.mean(0), low, high, strict=True)}


def ratio_intervals(
    draws: Draws,
    numerators: Float64[np.ndarray, "books columns"],
    denominators: Float64[np.ndarray, "books columns"],
    alpha: float,
) -> list[Interval]:
    """Ratio of the sums over books of each column, with the plain interval of the ratio of drawn sums.

    Denominators must be positive in sum. A draw whose denominator is not positive has no ratio and is left
    out of its column's interval.
    """
    below = draws.sums(denominators)
    ratios = np.divide(draws.sums(numerators), below, out=np.full_like(below, np.nan), where=below > 0)
    low, high = np.nanquantile(ratios, (alpha / 2, 1 - alpha / 2), axis=-1)
    estimates = numerators.sum(0) / denominators.sum(0)
    return [interval(*ends) for ends in zip(estimates, low, high, strict=True)]


def interval(estimate: float, low: float, high: float) -> Interval:
    return {"estimate": float(estimate), "low": float(low), "high": float(high)}
