"""PG-19 as the hub lays it out, read by `datasets` from a local copy of that layout: columns, file names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lastcall.errors import BookError, InputError
from lastcall.measure import hub
from lastcall.measure.corpus import load_corpus
from lastcall.measure.hub import book_id
from lastcall.study import SPLITS, Books, Counts, Lists

pytest.importorskip("datasets")


def put(path: Path, ids: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "short_book_title": pa.array([f"Title {i}" for i in ids]),
        "publication_date": pa.array([1900] * len(ids), pa.int32()),
        "url": pa.array([f"http://www.gutenberg.org/ebooks/{i}" for i in ids]),
        "text": pa.array([f"Text of {i}.\r\n" for i in ids]),
    }
    pq.write_table(pa.table(columns), path, row_group_size=7)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four train files of 30 books, 5 validation and 6 test books."""
    root = tmp_path_factory.mktemp("pg19")
    for file in range(4):
        ids = list(range(1000 * file + 1, 1000 * file + 31))
        put(root / "data" / f"train-{file:05d}-of-00004-2b13c68dbeba63b5.parquet", ids)
    put(root / "data" / "validation-00000-of-00001-0d1ee4c5f0a3b9a7.parquet", [9004, 9001, 9000, 9002, 9003])
    put(root / "data" / "test-00000-of-00001-29a571947c0b5ccc.parquet", list(range(9100, 9106)))
    return root


def load(copy: Path, fit: int, seed: int = 217) -> dict[str, list[str]]:
    counts = Counts(fit=fit, calibration=5, test=6)
    corpus = load_corpus(Books(source="pg19-hub", path=copy, counts=counts, split_seed=seed))
    return {split: [book.id for book in corpus.split(split)] for split in SPLITS}


def test_whole_validation_and_test_and_a_draw_of_train(copy: Path) -> None:
    ids = load(copy, 20)
    assert ids["calibration"] == ["9000", "9001", "9002", "9003", "9004"]
    assert ids["test"] == [str(i) for i in range(9100, 9106)]
    assert len(ids["fit"]) == len(set(ids["fit"])) == 20
    assert ids == load(copy, 20)
    assert ids["fit"] != load(copy, 20, seed=1)["fit"]


@pytest.mark.parametrize(("fit", "files"), [(20, 1), (25, 1), (26, 2), (60, 3), (100, 4), (115, 4)])
def test_a_draw_reads_one_file_for_every_25_books(copy: Path, fit: int, files: int) -> None:
    drawn = load(copy, fit)["fit"]
    assert len(drawn) == fit
    assert len({int(book) // 1000 for book in drawn}) == files


def test_the_seed_draws_the_files(copy: Path) -> None:
    assert len({int(load(copy, 1, seed)["fit"][0]) // 1000 for seed in range(8)}) > 1


def test_a_draw_goes_on_to_more_files_where_files_are_small(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "BOOKS_A_FILE", 1000)
    assert len({int(book) // 1000 for book in load(copy, 70)["fit"]}) == 3


def test_texts_and_ids_are_the_rows_own(copy: Path) -> None:
    lists = Lists(fit=("2007", "1"), calibration=("9002",), test=("9105",))
    corpus = load_corpus(Books(source="pg19-hub", path=copy, lists=lists))
    assert [(b.id, b.split, b.author, b.text) for b in corpus.books] == [
        ("1", "fit", None, "Text of 1.\r\n"),
        ("2007", "fit", None, "Text of 2007.\r\n"),
        ("9002", "calibration", None, "Text of 9002.\r\n"),
        ("9105", "test", None, "Text of 9105.\r\n"),
    ]


def test_refuses_more_train_books_than_there_are(copy: Path) -> None:
    with pytest.raises(BookError) as caught:
        load(copy, 121)
    assert str(caught.value) == (
        f"{copy} has too few books for counts.fit = 121: got 120 left for it; ask for fewer or add books"
    )


def test_refuses_to_fetch_the_whole_of_train() -> None:
    with pytest.raises(BookError) as caught:
        load_corpus(Books(source="pg19-hub"))
    assert str(caught.value) == (
        'source = "pg19-hub" would fetch all of PG-19\'s train books: got neither counts nor lists; '
        "add books.counts or books.lists"
    )


def test_refuses_the_hub_without_datasets(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError) as caught:
        load(copy, 20)
    assert str(caught.value) == (
        "source = \"pg19-hub\" needs the datasets package; pip install 'lastcall[hub]'"
    )


def test_names_the_repository_where_the_hub_is_out_of_reach() -> None:
    code = (
        "from lastcall.measure.corpus import load_corpus; from lastcall.study import Books, Counts\n"
        "try: load_corpus(Books(source='pg19-hub', counts=Counts(fit=1, calibration=1, test=1)))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=offline, check=True
    )
    assert done.stdout.startswith("BookError cannot read emozilla/pg19: got ")
    assert done.stdout.endswith("; check the network, or set books.path to a copy of its parquet files\n")


def test_names_the_copy_where_its_files_are_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_text("no", encoding="utf-8")
    with pytest.raises(BookError, match=rf"^cannot read {tmp_path}: got \w+: .*; check the network, or set"):
        load(tmp_path, 1)


def test_an_id_is_the_number_a_url_ends_in() -> None:
    assert book_id("http://www.gutenberg.org/ebooks/860") == "860"
    assert book_id("http://www.gutenberg.org/etext19/files/860/") == "860"
    with pytest.raises(BookError) as caught:
        book_id("http://example.org/")
    assert str(caught.value) == 'a row of PG-19 has no book id: got url "http://example.org/"; mend its url'
