"""Blocks: where they are cut, what becomes of books too short for them; against the literal twin."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lastcall.errors import BookError
from lastcall.measure import corpus as module
from lastcall.measure.corpus import Blocked, Book, Corpus, LeftOut, common_books, cut_blocks
from lastcall.study import SPLITS, Blocks
from tests.reference import blocks as reference


def characters(texts: list[str]) -> list[list[int]]:
    """A tokenizer: a character is a token."""
    return [[ord(c) for c in text] for text in texts]


def made(**lengths: int) -> Corpus:
    """A corpus of fit_…, calibration_… and test_… books of so many characters."""
    books = []
    for name, length in lengths.items():
        split = next(s for s in SPLITS if name.startswith(s))
        text = "".join(chr(0x4E00 + (i * 7 + len(books)) % 5000) for i in range(length))
        books.append(Book(name, split, None, text, name))
    return Corpus(tuple(books))


fractions = st.lists(st.integers(0, 100), min_size=1, max_size=5, unique=True).map(
    lambda hundredths: tuple(h / 100 for h in sorted(hundredths))
)


@given(fractions, st.integers(4, 600), st.integers(0, 5000))
def test_from_the_minimum_on_blocks_are_in_the_book_and_never_overlap(
    starts: tuple[float, ...], horizon: int, more: int
) -> None:
    blocks = Blocks(horizon=horizon, context=3, starts=starts)
    n = blocks.minimum_tokens + more
    found = blocks.block_starts(n)
    assert set(found) <= set(range(n - horizon))
    assert all(after - before >= horizon + 1 for before, after in pairwise(found))
    assert not reference.overlap(found, horizon)


def test_the_protocols_own_minimum_and_starts() -> None:
    assert Blocks().minimum_tokens == 1539
    assert Blocks().block_starts(1539) == (256, 769)
    assert Blocks(horizon=4096, starts=(0.5,)).block_starts(10_000) == ((10_000 - 4097) // 2,)


@given(st.integers(60, 400), st.sampled_from([(0.25, 0.75), (0.5,), (0.0, 0.5, 1.0)]), st.integers(4, 18))
def test_cut_blocks_are_the_literal_ones(length: int, starts: tuple[float, ...], horizon: int) -> None:
    blocks = Blocks(horizon=horizon, context=3, starts=starts)
    assume(length >= blocks.minimum_tokens)
    corpus = made(fit_1=length, calibration_1=length, test_1=length)
    for cut, book in zip(cut_blocks(corpus, characters, blocks, "refuse").books, corpus.books, strict=True):
        assert cut.tokens.dtype == np.int32
        assert cut.tokens.tolist() == reference.cut([ord(c) for c in book.text], horizon, starts)
        assert list(cut.starts) == reference.block_starts(length, horizon, starts)
        assert (cut.id, cut.split, cut.n_tokens) == (book.id, book.split, length)


def test_books_are_tokenised_whole_in_batches_and_keep_their_order() -> None:
    lengths = {f"fit_{i}": 40 + i for i in range(10)} | {"calibration_1": 40, "test_1": 41}
    batches: list[int] = []

    def tokenize(texts: list[str]) -> list[list[int]]:
        batches.append(len(texts))
        return characters(texts)

    cut = cut_blocks(made(**lengths), tokenize, Blocks(horizon=12, context=3), "refuse")
    assert batches == [8, 4]
    assert {b.id: b.n_tokens for b in cut.books} == lengths
    assert list(lengths) == [b.id for b in cut.books]


SMALL = Blocks(horizon=9, context=3)  # blocks of 10 tokens, books of 30


def test_refuses_every_book_too_short_by_name() -> None:
    corpus = made(fit_1=30, fit_2=29, calibration_1=40, test_1=30, test_2=8)
    with pytest.raises(BookError) as caught:
        cut_blocks(corpus, characters, SMALL, "refuse")
    assert str(caught.value) == (
        "too short for blocks of 10 tokens: got 29 tokens in book fit_2, 8 tokens in book test_2; "
        'a book needs 30; set books.too_short = "leave out" or remove it'
    )


def test_leaves_a_book_too_short_out_and_lists_it() -> None:
    corpus = made(fit_1=30, fit_2=29, calibration_1=40, test_1=30)
    blocked = cut_blocks(corpus, characters, SMALL, "leave out")
    assert [b.id for b in blocked.books] == ["fit_1", "calibration_1", "test_1"]
    assert [b.id for b in blocked.corpus.books] == ["fit_1", "calibration_1", "test_1"]
    assert blocked.corpus.left_out == (LeftOut("fit_2", "too short: 29 tokens, its blocks need 30"),)


def test_refuses_to_leave_a_split_without_books() -> None:
    with pytest.raises(BookError) as caught:
        cut_blocks(made(fit_1=30, calibration_1=29, test_1=30), characters, SMALL, "leave out")
    assert str(caught.value) == (
        "no book long enough for its blocks is in split calibration; give every split a book"
    )


def test_blocks_that_overlap_raise() -> None:
    with pytest.raises(BookError) as caught:
        module._apart("7", (0, 10, 19), 10)
    assert str(caught.value) == (
        "blocks of book 7 overlap: got starts 0, 10, 19 of 10 tokens each; spread blocks.starts wider"
    )
    module._apart("7", (0, 10, 20), 10)


def test_a_book_too_short_for_one_checkpoint_is_left_out_for_all() -> None:
    corpus = made(fit_1=60, fit_2=50, calibration_1=60, test_1=60)
    long = cut_blocks(corpus, characters, SMALL, "leave out")
    halved = cut_blocks(corpus, lambda ts: [i[::2] for i in characters(ts)], SMALL, "leave out")
    common = common_books([long, halved])
    names = ["fit_1", "calibration_1", "test_1"]
    left_out = (LeftOut("fit_2", "too short: 25 tokens, its blocks need 30"),)
    for each, tokens in zip(common, (60, 30), strict=True):
        assert isinstance(each, Blocked)
        assert [b.id for b in each.books] == [b.id for b in each.corpus.books] == names
        assert {b.n_tokens for b in each.books} == {tokens}
        assert each.corpus.left_out == left_out
