"""The bootstrap against its literal twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.errors import BookError
from lastcall.stats import bootstrap
from lastcall.stats.bootstrap import draw_clusters, mean_intervals, partition, percentiles, ratio_intervals
from tests.reference import stats as reference

PAIRS = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "x"), ("f", "w")]
BOOKS = [book for book, _ in PAIRS]


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(len(PAIRS), 4))


def test_drawn_means_are_over_the_books_of_the_drawn_clusters(values: np.ndarray) -> None:
    drawn = draw_clusters(partition(PAIRS), 200, rng=np.random.default_rng(5)).means(values)
    draws = reference.drawn_books(dict(PAIRS), 200, np.random.default_rng(5))
    for column in range(values.shape[1]):
        expected = reference.means(dict(zip(BOOKS, values[:, column], strict=True)), draws)
        np.testing.assert_allclose(drawn[column], expected, rtol=1e-12)


def test_one_big_cluster_weighs_by_its_books() -> None:
    pairs = [*((f"big{i}", "big") for i in range(9)), ("small", "small")]
    ones = np.array([[1.0]] * 9 + [[0.0]])
    draws = draw_clusters(partition(pairs), 4000, rng=np.random.default_rng(0))
    assert set(np.round(draws.means(ones)[0], 9)) == {0.0, 0.9, 1.0}
    assert mean_intervals(draws, {"ones": ones[:, 0]}, 0.05)["ones"]["estimate"] == pytest.approx(0.9)


def test_chunks_change_neither_draws_nor_sums(values: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw_clusters(partition(PAIRS), 301, rng=np.random.default_rng(5))
    sums = whole.sums(values)
    monkeypatch.setattr(bootstrap, "_CELLS", 40)
    parts = draw_clusters(partition(PAIRS), 301, rng=np.random.default_rng(5))
    np.testing.assert_array_equal(parts.counts, whole.counts)
    np.testing.assert_allclose(parts.sums(values), sums, rtol=1e-12)


def test_every_draw_takes_as_many_clusters_as_there_are() -> None:
    draws = draw_clusters(partition(PAIRS), 500, rng=np.random.default_rng(1))
    assert (draws.counts.sum(axis=1) == 4).all()
    assert draws.counts.mean(axis=0) == pytest.approx(1.0, abs=0.15)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_percentiles_are_linear(values: list[float], alpha: float) -> None:
    low, high = percentiles(np.array([values]), alpha)
    assert low[0] == pytest.approx(reference.percentile(values, alpha / 2), abs=1e-9)
    assert high[0] == pytest.approx(reference.percentile(values, 1 - alpha / 2), abs=1e-9)


def test_a_ratio_is_of_the_drawn_means(values: np.ndarray) -> None:
    above, below = values[:, :1], np.abs(values[:, 1:2]) + 0.1
    draws = draw_clusters(partition(PAIRS), 300, rng=np.random.default_rng(2))
    [found] = ratio_intervals(draws, above, below, 0.1)
    of = dict(zip(BOOKS, zip(above[:, 0], below[:, 0], strict=True), strict=True))

    def ratio(books: list[str]) -> float:
        return sum(of[b][0] for b in books) / sum(of[b][1] for b in books)

    drawn = reference.drawn_books(dict(PAIRS), 300, np.random.default_rng(2))
    assert found == pytest.approx(reference.interval(ratio, BOOKS, drawn, 0.1), rel=1e-9)


def test_draws_without_a_denominator_are_left_out_of_a_ratio() -> None:
    above, below = np.full((6, 1), 3.0), np.array([[0.0], [1.0], [0.0], [0.0], [0.0], [0.0]])
    draws = draw_clusters(partition(PAIRS), 300, rng=np.random.default_rng(2))
    drawn_above, drawn_below = draws.sums(above)[0], draws.sums(below)[0]
    some = drawn_below > 0
    assert not some.all()
    ratios = (drawn_above[some] / drawn_below[some]).tolist()
    low, high = (reference.percentile(ratios, share) for share in (0.025, 0.975))
    [found] = ratio_intervals(draws, above, below, 0.05)
    assert found == pytest.approx({"estimate": 18.0, "low": low, "high": high})


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", "x"), ("", "y")], "no id"),
        ([("a", "x"), ("b", "")], "no id"),
        ([("a", "x"), ("a", "y")], "comes twice: got a"),
        ([("a", "x"), ("b", "x")], "at least 2 test clusters: got 1"),
        ([], "at least 2 test clusters: got 0"),
    ],
)
def test_books_that_cannot_be_resampled_are_refused(pairs: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(BookError, match=message):
        partition(pairs)
