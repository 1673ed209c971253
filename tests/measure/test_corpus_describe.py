"""`lastcall books DIR`: sizes, and every refusal at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastcall.errors import BookError
from lastcall.measure.corpus import LeftOut
from lastcall.measure.describe import SplitSummary, describe_folder
from lastcall.study import Blocks

SHARED = Path(os.environ.get("LASTCALL_SHARED", Path(__file__).parents[2].parent / "shared")) / "corpus"
SMALL = Blocks(horizon=9, context=3)  # blocks of 10 tokens, books of 30


def characters(texts: list[str]) -> list[list[int]]:
    return [[ord(c) for c in text] for text in texts]


def test_a_plain_folder_is_one_summary_with_exact_tokens(tmp_path: Path) -> None:
    for book, length in (("1", 30), ("2", 40)):
        (tmp_path / f"{book}.txt").write_text(book * length, encoding="utf-8")
    summary = describe_folder(tmp_path, characters, SMALL)
    assert (summary.path, summary.layout, summary.exact, summary.refused) == (tmp_path, "folder", True, ())
    assert summary.splits == (SplitSummary("all", books=2, characters=70, tokens=70, blocks=4),)


def test_without_a_tokenizer_tokens_are_bytes_over_4_2_and_said_to_be_estimated(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("é" * 210, encoding="utf-8")
    (tmp_path / "2.txt").write_text("e" * 84, encoding="utf-8")
    summary = describe_folder(tmp_path, None, SMALL)
    assert not summary.exact
    assert summary.splits == (SplitSummary("all", books=1, characters=210, tokens=100, blocks=2),)
    assert summary.refused == (LeftOut("2", "too short: 20 tokens, its blocks need 30, estimated"),)


def test_every_refusal_is_listed_and_the_rest_counted(tmp_path: Path) -> None:
    texts = {
        "train": {"1": b"a" * 30, "2": b"\xff", "3": b"x\0", "4": b" ", "5": b"a" * 30, "6": b"short"},
        "validation": {"20": b"b" * 31},
        "test": {"30": b"c" * 32, "31": b"d" * 33, "1": b"e" * 34},
    }
    for split, books in texts.items():
        (tmp_path / split).mkdir()
        for book, data in books.items():
            (tmp_path / split / f"{book}.txt").write_bytes(data)
    (tmp_path / "metadata.csv").write_text("_id,author\n20,Ann\n31,Ann\n", encoding="utf-8")
    summary = describe_folder(tmp_path, characters, SMALL)
    assert summary.splits == (
        SplitSummary("fit", books=1, characters=30, tokens=30, blocks=2),
        SplitSummary("calibration", books=1, characters=31, tokens=31, blocks=2),
        SplitSummary("test", books=1, characters=32, tokens=32, blocks=2),
    )
    train = tmp_path / "train"
    assert {(one.id, one.reason) for one in summary.refused} == {
        ("1", f"book 1 is in two splits: also {train / '1.txt'}"),
        ("2", f"{train / '2.txt'} is not UTF-8: got byte 0xff at offset 0; convert it to UTF-8"),
        ("3", f"{train / '3.txt'} is binary: got a NUL byte at offset 1; give plain UTF-8 text"),
        ("4", f"{train / '4.txt'} is empty: got 1 bytes without a word; leave it out"),
        ("5", f"has the same text as {train / '1.txt'}"),
        ("6", "too short: 5 tokens, its blocks need 30"),
        ("31", f"author Ann is in two splits: also {tmp_path / 'validation' / '20.txt'}"),
    }
    assert len(summary.refused) == 7


def test_a_split_without_books_is_shown_empty(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1.txt").write_text("a" * 30, encoding="utf-8")
    summary = describe_folder(tmp_path, characters, SMALL)
    assert [(split.name, split.books) for split in summary.splits] == [
        ("fit", 0),
        ("calibration", 0),
        ("test", 1),
    ]


def test_a_folder_without_books_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BookError, match=r"^there are no books in "):
        describe_folder(tmp_path, None, SMALL)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the shared corpus is not at {SHARED}")
def test_the_shared_corpus_has_no_refusal() -> None:
    summary = describe_folder(SHARED, None, Blocks())
    assert summary.refused == ()
    assert [(s.name, s.books, s.blocks) for s in summary.splits] == [
        ("fit", 90, 180),
        ("calibration", 29, 58),
        ("test", 99, 198),
    ]
