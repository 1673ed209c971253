"""What a folder of books would give: splits, blocks and every refusal (the command `lastcall books`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import final

from lastcall.errors import BookError
from lastcall.measure.corpus import BATCH_BOOKS, LeftOut, Tokenize, short_reason
from lastcall.measure.sources import Entry, Layout, Source, decode, detect_layout, folder_source, pg19_source
from lastcall.study import SPLITS, Blocks

BYTES_A_TOKEN = 4.2
"""UTF-8 bytes a token of English, the estimate where no tokenizer is given."""


@final
@dataclass(frozen=True)
class SplitSummary:
    """Usable books of one split: how many, and their characters, tokens and blocks."""

    name: str
    books: int
    characters: int
    tokens: int
    blocks: int


@final
@dataclass(frozen=True)
class FolderSummary:
    """A folder of books. `exact` is false where tokens and blocks are estimated from bytes.

    A folder in PG-19's layout has a summary a split; a plain one has one, `all`.
    """

    path: Path
    layout: Layout
    exact: bool
    splits: tuple[SplitSummary, ...]
    refused: tuple[LeftOut, ...]


def describe_folder(path: Path, tokenize: Tokenize | None, blocks: Blocks) -> FolderSummary:
    """What `path` would give, with every book that a study would refuse or leave out, and the reason.

    Tokens are exact with a tokenizer; without one they are bytes / 4.2, an estimate. Raises BookError only
    where there is no folder or no book in it.
    """
    layout = detect_layout(path)
    source = folder_source(path) if layout == "folder" else pg19_source(path)
    refused: list[LeftOut] = []
    usable: list[_Sized] = []
    for book in _sized(_readable(source, refused), tokenize):
        if book.tokens < blocks.minimum_tokens:
            estimate = "" if tokenize else ", estimated"
            refused.append(LeftOut(book.entry.id, short_reason(book.tokens, blocks) + estimate))
        else:
            usable.append(book)
    names = ("all",) if layout == "folder" else SPLITS
    splits = tuple(_summary(name, usable, blocks) for name in names)
    return FolderSummary(path, layout, tokenize is not None, splits, tuple(refused))


@final
@dataclass(frozen=True)
class _Sized:
    entry: Entry
    characters: int
    tokens: int


def _summary(name: str, books: Sequence[_Sized], blocks: Blocks) -> SplitSummary:
    own = [book for book in books if name in ("all", book.entry.split)]
    characters, tokens = sum(book.characters for book in own), sum(book.tokens for book in own)
    return SplitSummary(name, len(own), characters, tokens, len(own) * len(blocks.starts))


def _readable(source: Source, refused: list[LeftOut]) -> Iterator[tuple[Entry, str]]:
    """Entries and texts of the books that can be read and belong in one split; the others join `refused`."""
    texts: dict[str, str] = {}
    places: dict[tuple[str, str], Entry] = {}
    for entry in source.entries:
        try:
            text = next(decode(e.where, data) for e, data in source.read([entry]))
        except BookError as error:
            refused.append(LeftOut(entry.id, str(error)))
            continue
        twin = texts.setdefault(hashlib.sha256(text.encode()).hexdigest(), entry.where)
        keys = [("book", entry.id), *([("author", entry.author)] if entry.author else [])]
        clashes = [
            f"{kind} {name} is in two splits: also {places[kind, name].where}"
            for kind, name in keys
            if places.setdefault((kind, name), entry).split != entry.split
        ]
        if twin != entry.where:
            clashes.insert(0, f"has the same text as {twin}")
        if clashes:
            refused.append(LeftOut(entry.id, clashes[0]))
        else:
            yield entry, text


def _sized(books: Iterator[tuple[Entry, str]], tokenize: Tokenize | None) -> Iterator[_Sized]:
    """The size of each book, BATCH_BOOKS in memory at a time."""
    while batch := list(islice(books, BATCH_BOOKS)):
        texts = [text for _, text in batch]
        if tokenize is None:
            tokens = [round(len(text.encode()) / BYTES_A_TOKEN) for text in texts]
        else:
            tokens = [len(ids) for ids in tokenize(texts)]
        for (entry, text), n in zip(batch, tokens, strict=True):
            yield _Sized(entry, len(text), n)
