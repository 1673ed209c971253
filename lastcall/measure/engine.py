"""Books over the model, batch by batch, each batch resumable: the unit of work and of loss at a kill.

A batch writes its states, then its records; a batch whose files are all there and were measured from the
same things (`source`) is not measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from torch import Tensor

from lastcall.errors import ModelError, NonFiniteError
from lastcall.measure.branches import Branches
from lastcall.measure.corpus import BookBlocks
from lastcall.measure.loading import Loaded
from lastcall.measure.scoring import Scores, score
from lastcall.operation import Operation
from lastcall.records import SOURCE, RunFolder, atomic, local_loss, measured_columns, write_table
from lastcall.routing.features import INCOMING, trajectory
from lastcall.study import Part, Study

Batch = tuple[BookBlocks, ...]


@final
@dataclass(frozen=True)
class Measured:
    """One measured book: its record's columns and its states."""

    book: str
    columns: dict[str, Any]
    states: dict[str, Tensor]


def batches(books: Sequence[BookBlocks], size: int) -> list[Batch]:
    """`books` in runs of `size`, in order: fixed by the study, whoever measures them."""
    return [tuple(books[i : i + size]) for i in range(0, len(books), size)]


def check_fits(loaded: Loaded, books: Sequence[BookBlocks], positions: int = 0) -> None:
    """Raise ModelError where a block does not fit the model's context or a token its vocabulary.

    `positions` is the horizon of longer blocks to come, if any.
    """
    site, name = loaded.site, loaded.checkpoint.name
    needed = max(books[0].tokens.shape[1] - 1, positions) + (loaded.tokenizer.bos is not None)
    if needed > site.context:
        raise ModelError(
            f"{name}: its context is shorter than a block",
            got=f"{site.context} positions where {needed} are needed",
            todo="choose a shorter blocks.horizon",
        )
    for book in books:
        if (largest := int(book.tokens.max())) >= site.head.vocabulary:
            raise ModelError(
                f"{name}: book {book.id} has a token outside the model's vocabulary",
                got=f"id {largest} where the vocabulary has {site.head.vocabulary}",
                todo="give the tokenizer that belongs to this checkpoint",
            )


def is_done(run: RunFolder, checkpoint: str, part: Part, batch: Batch, source: dict[str, str]) -> bool:
    """Whether every book of `batch` has a record and states measured from `source` (book id to digest)."""
    for book in batch:
        record = run.measured(checkpoint, part, book.id)
        if not record.is_file() or not run.states(checkpoint, part, book.id).is_file():
            return False
        if _source_of(record) != source[book.id]:
            return False
    return True


def _source_of(record: Path) -> str:
    """The digest of what a record was measured from; empty where the file is torn."""
    try:
        return str((pq.read_schema(record).metadata or {}).get(SOURCE, b""), "utf-8")
    except (OSError, pa.ArrowException):
        return ""


@torch.inference_mode()
def measure_batch(loaded: Loaded, study: Study, batch: Batch) -> list[Measured]:
    """Measure the blocks of `batch` together (sections 2 and 3).

    Raises NonFiniteError, naming book, block and position, where a loss or a feature is NaN or infinite.
    """
    tokens = torch.from_numpy(np.concatenate([b.tokens for b in batch])).to(loaded.site.device).long()
    scores, states = _run(loaded, study, tokens)
    columns = {**_loss_columns(scores), **_state_columns(states)}
    table = {name: value.reshape(len(tokens), -1).cpu().numpy() for name, value in columns.items()}
    stored = {name: value.cpu() for name, value in states.items()}
    measured, first = [], 0
    for book in batch:
        at = slice(first, first + len(book.starts))
        first = at.stop
        own = {name: value[at] for name, value in table.items()}
        _refuse_non_finite(book, own, loaded.checkpoint.name)
        rows = {**_identity(book, study), **{name: value.ravel() for name, value in own.items()}}
        measured.append(Measured(book.id, rows, {n: s[at].contiguous() for n, s in stored.items()}))
    return measured


def _run(loaded: Loaded, study: Study, tokens: Tensor) -> tuple[Scores, dict[str, Tensor]]:
    """Scores [blocks · horizon] and states [blocks, horizon, d] of `tokens` [blocks, horizon + 1]."""
    inputs, skip = tokens[:, :-1], 0
    if loaded.tokenizer.bos is not None:
        inputs, skip = torch.nn.functional.pad(inputs, (1, 0), value=loaded.tokenizer.bos), 1
    branches = Branches(loaded.site, inputs)
    bypass = branches.bypass(Operation.parse(study.operation))
    states = {"bypass": bypass[:, skip:], "incoming": branches.incoming[:, skip:]}
    scores = score(
        loaded.site.head,
        branches.full()[:, skip:].flatten(0, 1),
        states["bypass"].flatten(0, 1),
        {w: branches.local(w)[:, skip:].flatten(0, 1) for w in study.measure.local_windows},
        tokens[:, 1:].flatten(),
    )
    return scores, states


def _loss_columns(scores: Scores) -> dict[str, Tensor]:
    names = ("loss_full", "loss_bypass", "kl", "entropy", "top_logprob", "margin")
    local = {local_loss(w): loss for w, loss in scores.loss_local.items()}
    return {**{name: getattr(scores, name) for name in names}, **local}


def _state_columns(states: dict[str, Tensor]) -> dict[str, Tensor]:
    incoming = trajectory(states["incoming"])
    return {**trajectory(states["bypass"]), **{INCOMING + name: value for name, value in incoming.items()}}


def _identity(book: BookBlocks, study: Study) -> dict[str, Any]:
    """Columns that say which prediction a row is."""
    blocks, horizon = len(book.starts), study.blocks.horizon
    position = np.tile(np.arange(horizon), blocks)
    return {
        "book": [book.id] * (blocks * horizon),
        "block": np.repeat(np.arange(blocks), horizon),
        "start": np.repeat(book.starts, horizon),
        "position": position,
        "token": book.tokens[:, :-1].ravel(),
        "target": book.tokens[:, 1:].ravel(),
        "scored": position >= study.blocks.context,
    }


def _refuse_non_finite(book: BookBlocks, table: dict[str, np.ndarray], name: str) -> None:
    for column, values in table.items():
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            block, position = (int(i) for i in bad[0])
            raise NonFiniteError(
                f"{name}: {column} is not finite in book {book.id}, block {block}, position {position}",
                got=str(values[block, position]),
                todo="try dtype float32 or leave the book out; the batch was not written",
            )


def write(run: RunFolder, study: Study, checkpoint: str, part: Part, measured: Measured, source: str) -> None:
    """Write one book's states, then its record: a record's presence means that its own states are there."""
    record = run.measured(checkpoint, part, measured.book)
    with atomic(run.states(checkpoint, part, measured.book)) as temporary:
        record.unlink(missing_ok=True)
        temporary.write_bytes(safetensors.torch.save(measured.states))  # a full disk is an OSError so
    columns = measured_columns(study.measure.local_windows)
    write_table(record, columns, measured.columns, source)
