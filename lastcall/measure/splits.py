"""Which of a source's books a study uses, and in which split (section 1): by lists, CSV or seeded draw."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from lastcall.errors import BookError
from lastcall.measure.sources import Entry, Source, id_key, read_splits
from lastcall.study import SPLITS, Books, Counts, Lists, Split


def choose(books: Books, source: Source) -> tuple[list[Entry], list[tuple[str, str]]]:
    """The entries a study uses, each with its split; and (id, reason) of those that a splits CSV omits."""
    listed_once(((entry.id, entry.split or "") for entry in source.entries), source.name)
    if books.lists is not None:
        return by_lists(books.lists, source), []
    if books.splits_csv is not None:
        return by_csv(books.splits_csv, source)
    if books.counts is None:
        return list(source.entries), []
    owned = any(entry.split is not None for entry in source.entries)
    return (capped if owned else drawn)(books.counts, books.split_seed, source), []


def listed_once(listed: Iterable[tuple[str, str]], where: str) -> None:
    """Raises BookError where two pairs of (id, split) have one id."""
    seen: dict[str, str] = {}
    for book, split in listed:
        if book in seen:
            got = f"{seen[book]} and {split}"
            raise BookError(f"book {book} is listed twice in {where}", got=got, todo="keep it in one split")
        seen[book] = split


def by_lists(lists: Lists, source: Source) -> list[Entry]:
    """The books named one by one."""
    wanted = [(book, split) for split in SPLITS for book in getattr(lists, split)]
    listed_once(wanted, "books.lists")
    return [replace(_find(book, source, "books.lists"), split=split) for book, split in wanted]


def by_csv(path: Path, source: Source) -> tuple[list[Entry], list[tuple[str, str]]]:
    """The books a CSV lists, and the files that it does not."""
    rows = read_splits(path)
    entries = [
        replace(_find(book, source, str(path)), split=split, author=author)
        for book, (split, author) in rows.items()
    ]
    unlisted = [e.id for e in source.entries if e.id not in rows]
    return entries, [(book, f"not listed in {path.name}") for book in unlisted]


def _find(book: str, source: Source, listed_in: str) -> Entry:
    for entry in source.entries:
        if entry.id == book:
            return entry
    near = difflib.get_close_matches(book, [entry.id for entry in source.entries], n=1)
    todo = f"did you mean {near[0]}?" if near else "mend the id or add the book"
    raise BookError(
        f"{listed_in} names a book that is not there", got=f'"{book}" of {source.name}', todo=todo
    )


def capped(counts: Counts, seed: int, source: Source) -> list[Entry]:
    """So many books of each of the source's own splits, drawn apart: a split's draw depends on no other's."""
    entries: list[Entry] = []
    for number, split in enumerate(SPLITS):
        own = [entry for entry in source.entries if entry.split == split]
        wanted = getattr(counts, split)
        if wanted > len(own):
            _too_few(split, wanted, len(own), source)
        order = np.random.default_rng((seed, number)).permutation(len(own))
        entries += [own[i] for i in order[:wanted]]
    return entries


def drawn(counts: Counts, seed: int, source: Source) -> list[Entry]:
    """Splits filled one after the other with whole authors in drawn order; a book without one stands alone.

    Where an author has more books than a split still needs, some are drawn and the others are not used.
    """
    rng = np.random.default_rng(seed)
    groups = _by_author(source.entries)
    order = iter(rng.permutation(len(groups)).tolist())
    entries: list[Entry] = []
    for split in SPLITS:
        room = wanted = getattr(counts, split)
        while room:
            group = next((groups[i] for i in order), None)
            if group is None:
                _too_few(split, wanted, wanted - room, source)
            picked = rng.permutation(len(group))[:room]
            entries += [replace(group[i], split=split) for i in picked]
            room -= len(picked)
    return entries


def _by_author(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in sorted(entries, key=lambda e: id_key(e.id)):
        key = ("author", entry.author) if entry.author else ("book", entry.id)
        groups.setdefault(key, []).append(entry)
    return list(groups.values())


def _too_few(split: Split, wanted: int, found: int, source: Source) -> NoReturn:
    what = f"{source.name} has too few books for counts.{split} = {wanted}"
    raise BookError(what, got=f"{found} left for it", todo="ask for fewer or add books")
