"""PG-19 from the hub, streamed: only the books that a study names or draws are kept.

`deepmind/pg19` is a loading script, which `datasets` runs no more from 4.0 on, and has no parquet
conversion; the same rows lie as plain parquet in HUB_REPOSITORY, read at one commit. Its rows have a
title, a year, a url, which ends in the Gutenberg id, and the text; no author, so none is checked.

The draw of fit books avoids most of the train split: the url column alone is read first (a few MB), then
whole files are drawn by `split_seed`, one for every BOOKS_A_FILE books, and the books among theirs. A file
is a run of ids, not a random sample: books of one file were often digitised in the same years.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from lastcall.errors import BookError, InputError
from lastcall.measure.sources import PG19_SPLITS, Entry, Source, id_key
from lastcall.study import Books

HUB_REPOSITORY = "emozilla/pg19"
"""PG-19 as parquet."""
HUB_REVISION = "c021754c8e01c5b1cc83a1f549c1f97fbbb756b8"
"""The commit read: 28,602 train books in 23 files of about 300 MB, 50 validation books, 100 test books."""
BOOKS_A_FILE = 25
"""Train books for which one of its files is drawn."""


def hub_source(books: Books) -> Source:
    """PG-19 from the hub, or from `path`, a folder with a copy of the repository's parquet files.

    Raises InputError where `datasets` is missing, BookError where the hub cannot be read or neither
    `counts` nor `lists` says which train books are wanted.
    """
    if books.counts is None and books.lists is None:
        what = 'source = "pg19-hub" would fetch all of PG-19\'s train books'
        raise BookError(what, got="neither counts nor lists", todo="add books.counts or books.lists")
    rows = _Rows(HUB_REPOSITORY if books.path is None else str(books.path), local=books.path is not None)
    files: dict[str, tuple[str, int]] = {}
    entries = []
    for name, split in PG19_SPLITS.items():
        wanted = books.counts.fit if books.counts is not None and split == "fit" else None
        for book, file in rows.ids(name, wanted, books.split_seed):
            entries.append(Entry(book, f"book {book} of {rows.where}, {name}", None, split))
            files[book] = (name, file)
    entries.sort(key=lambda entry: id_key(entry.id))
    return Source(rows.where, tuple(entries), lambda wanted: rows.read(wanted, files))


def book_id(url: str) -> str:
    """The Gutenberg id a url ends in: `860` of `http://www.gutenberg.org/ebooks/860`."""
    found = re.search(r"(\d+)\D*$", url)
    if found is None:
        raise BookError("a row of PG-19 has no book id", got=f'url "{url}"', todo="mend its url")
    return found[1]


@final
class _Rows:
    """The repository's rows, by split and file."""

    def __init__(self, where: str, *, local: bool) -> None:
        self.where = where
        self._revision = None if local else HUB_REVISION
        self._open: dict[tuple[str, bool], Any] = {}

    def _dataset(self, name: str, *, text: bool) -> Any:
        """The streamed split `name`, urls and, where asked for, texts. Raises BookError where it cannot."""
        key = (name, text)
        if key not in self._open:
            load_dataset = _load_dataset()
            columns = ["url", "text"] if text else ["url"]
            with self._named():
                self._open[key] = load_dataset(
                    self.where, split=name, streaming=True, columns=columns, revision=self._revision
                )
        return self._open[key]

    def _stream(self, name: str, file: int, *, text: bool) -> Iterator[dict[str, Any]]:
        """The rows of one file. Raises BookError where it cannot be read."""
        dataset = self._dataset(name, text=text)
        with self._named():
            yield from dataset.shard(num_shards=dataset.num_shards, index=file)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turns whatever the network or a file raises into a BookError that names the repository."""
        try:
            yield
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            todo = "check the network, or set books.path to a copy of its parquet files"
            raise BookError(f"cannot read {self.where}", got=got, todo=todo) from error

    def ids(self, name: str, wanted: int | None, seed: int) -> list[tuple[str, int]]:
        """Book id and file of the rows of a split: of all its files, or of so many drawn ones that `wanted`
        books can be drawn from them, BOOKS_A_FILE from each or more where there are not files enough."""
        files = self._dataset(name, text=False).num_shards
        order = np.random.default_rng(seed).permutation(files).tolist()
        least = files if wanted is None else math.ceil(wanted / BOOKS_A_FILE)
        found: list[tuple[str, int]] = []
        for taken, file in enumerate(order):
            if taken >= least and len(found) >= (wanted or 0):
                break
            found += [(book_id(row["url"]), file) for row in self._stream(name, file, text=False)]
        return found

    def read(
        self, entries: Sequence[Entry], files: dict[str, tuple[str, int]]
    ) -> Iterator[tuple[Entry, bytes]]:
        """The texts of `entries`, file by file, each streamed to its end before its texts are given out: a
        stream left midway can abort the interpreter at its exit."""
        wanted = {entry.id: entry for entry in entries}
        for name, file in sorted({files[book] for book in wanted}):
            rows = ((book_id(row["url"]), row["text"]) for row in self._stream(name, file, text=True))
            yield from [(wanted[book], text.encode()) for book, text in rows if book in wanted]


def _load_dataset() -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        todo = "pip install 'lastcall[hub]'"
        raise InputError('source = "pg19-hub" needs the datasets package', todo=todo) from None
    return load_dataset
