"""A run folder's test records -> dense arrays of the scored positions, checked on the way.

Test books are in the order they are given in, blocks and positions in their own. What is not as `records`
describes it is refused by file; nothing is reordered, filled in or left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, final

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Float64

from lastcall.errors import NonFiniteError, OutputError
from lastcall.records import ROUTED, RunFolder, local_loss, measured_columns, read_json, read_tables
from lastcall.study import LEARNED_ROUTERS, Part, Study

_AGAIN = "delete it and measure again"


@final
@dataclass(frozen=True, eq=False)
class Policy:
    """Which scored test predictions call the operation, under one name."""

    name: str
    kind: Literal["learned", "fixed", "reference", "ceiling"]
    seeds: tuple[int, ...]
    """Empty for a reference or a ceiling, which have one row of calls."""
    calls: Bool[np.ndarray, "seeds books blocks scored"]
    scores: Float32[np.ndarray, "seeds books blocks scored"] | None = None
    """Predicted utility, nats; None but for a learned router."""
    thresholds: tuple[float, ...] | None = None
    """τ of each seed, nats; None where there is none."""


@final
@dataclass(frozen=True, eq=False)
class CheckpointRecords:
    """One checkpoint's test split at the scored positions; losses in nats."""

    loss_full: Float64[np.ndarray, "books blocks scored"]
    loss_bypass: Float64[np.ndarray, "books blocks scored"]
    kl: Float64[np.ndarray, "books blocks scored"]
    loss_local: dict[int, Float64[np.ndarray, "books blocks scored"]]
    """By local window."""
    routers: tuple[Policy, ...]
    """The study's, in its order."""

    @cached_property
    def utility(self) -> Float64[np.ndarray, "books blocks scored"]:
        """u = ℓ0 − ℓ1."""
        utility: Float64[np.ndarray, "books blocks scored"] = self.loss_bypass - self.loss_full
        return utility


def read_checkpoint(
    study: Study, run: RunFolder, checkpoint: str, books: Sequence[str], part: Part = "test"
) -> CheckpointRecords:
    """The test records of one checkpoint, or those of the longer blocks with the study of these.

    Raises OutputError, naming the file, where one is missing, torn, of another shape or order, or calls
    another number of times a block than the budget; NonFiniteError where a loss or score is not finite.
    """
    measured = read_losses(study, run, checkpoint, books, part)
    return CheckpointRecords(
        loss_full=measured["loss_full"],
        loss_bypass=measured["loss_bypass"],
        kl=measured["kl"],
        loss_local={w: measured[local_loss(w)] for w in study.measure.local_windows},
        routers=_read_routers(study, run, checkpoint, books, part),
    )


def read_losses(
    study: Study, run: RunFolder, checkpoint: str, books: Sequence[str], part: Part
) -> dict[str, Float64[np.ndarray, "books blocks scored"]]:
    """Losses and KL of the scored positions by column name, nats; raises as `read_checkpoint`."""
    blocks, horizon = len(study.blocks.starts), study.blocks.horizon
    types = {c.name: c.type for c in measured_columns(study.measure.local_windows)}
    losses = ("loss_full", "loss_bypass", "kl", *map(local_loss, study.measure.local_windows))
    position = np.tile(np.arange(horizon), blocks)
    expected = {
        "block": np.repeat(np.arange(blocks), horizon),
        "position": position,
        "scored": position >= study.blocks.context,
    }
    arrays = {name: np.empty((len(books), blocks, study.blocks.scored)) for name in losses}
    for i, book in enumerate(books):
        path = run.measured(checkpoint, part, book)
        table = _read_rows(path, {n: types[n] for n in ("book", *expected, *losses)}, book, expected)
        for name in losses:
            values = table.column(name).to_numpy().reshape(blocks, horizon)[:, study.blocks.context :]
            arrays[name][i] = _finite(path, name, values)
    return arrays


def _read_routers(
    study: Study, run: RunFolder, checkpoint: str, books: Sequence[str], part: Part
) -> tuple[Policy, ...]:
    thresholds = _read_thresholds(study, run, checkpoint)
    seeds = {name: study.seeds_of(name) for name in study.routers.names}
    calls, scores = _read_routed(study, run, checkpoint, books, seeds, part)
    ends = np.cumsum([len(of) for of in seeds.values()])
    policies = []
    for (name, of), end in zip(seeds.items(), ends, strict=True):
        rows = slice(end - len(of), end)
        if name in thresholds:
            policies.append(Policy(name, "learned", of, calls[rows], scores[rows], thresholds[name]))
        else:
            policies.append(Policy(name, "fixed", of, calls[rows]))
    return tuple(policies)


def _read_routed(
    study: Study,
    run: RunFolder,
    checkpoint: str,
    books: Sequence[str],
    seeds: Mapping[str, tuple[int, ...]],
    part: Part,
) -> tuple[Bool[np.ndarray, "arms books blocks scored"], Float32[np.ndarray, "arms books blocks scored"]]:
    """Calls and scores by arm: every router's every seed, in order."""
    arms = [(name, seed) for name, of in seeds.items() for seed in of]
    learned = np.array([name in LEARNED_ROUTERS for name, _ in arms])
    shape = (len(arms), len(study.blocks.starts), study.blocks.scored)
    types, expected = {c.name: c.type for c in ROUTED}, _routed_order(study, arms)
    calls = np.empty((shape[0], len(books), *shape[1:]), dtype=np.bool_)
    scores = np.empty(calls.shape, dtype=np.float32)
    for i, book in enumerate(books):
        path = run.routed(checkpoint, book, part)
        table = _read_rows(path, types, book, expected)
        calls[:, i] = _at_budget(path, table.column("call").to_numpy().reshape(shape), study.calls)
        scores[:, i] = table.column("score").to_numpy().reshape(shape)
        _finite(path, "score", scores[learned, i])
    return calls, scores


def _routed_order(study: Study, arms: Sequence[tuple[str, int]]) -> dict[str, np.ndarray]:
    """What the ordering columns of a routed file hold: rows go by arm, block and position."""
    blocks = study.blocks
    shape = (len(arms), len(blocks.starts), blocks.scored)
    columns = {
        "router": np.array([name for name, _ in arms])[:, None, None],
        "seed": np.array([seed for _, seed in arms])[:, None, None],
        "block": np.arange(shape[1])[:, None],
        "position": np.arange(blocks.context, blocks.horizon),
    }
    return {name: np.broadcast_to(values, shape).ravel() for name, values in columns.items()}


def _read_rows(
    path: Path, types: Mapping[str, pa.DataType], book: str, expected: Mapping[str, np.ndarray]
) -> pa.Table:
    """The columns `types` of one file, once `expected` columns hold exactly what they must."""
    table = read_tables([path], list(types))
    for name, kind in types.items():
        if table.schema.field(name).type != kind:
            raise OutputError(
                f"{path}: column {name} is no {kind}", got=str(table.schema.field(name).type), todo=_AGAIN
            )
    rows = len(expected["block"])
    if table.num_rows != rows:
        raise OutputError(f"{path} should have {rows} rows", got=str(table.num_rows), todo=_AGAIN)
    if (found := table.column("book").unique().to_pylist()) != [book]:
        raise OutputError(f"{path} should be of book {book}", got=", ".join(found), todo=_AGAIN)
    for name, values in expected.items():
        _check_column(path, name, _values(table.column(name)), values)
    return table


def _values(column: pa.ChunkedArray) -> np.ndarray:
    """A column as an array; text comes as a dictionary's codes spelled out."""
    if not pa.types.is_dictionary(column.type):
        return np.asarray(column.to_numpy())
    array = column.unify_dictionaries().combine_chunks()
    spelled: np.ndarray = np.array(array.dictionary.to_pylist())[array.indices.to_numpy()]
    return spelled


def _check_column(path: Path, name: str, found: np.ndarray, expected: np.ndarray) -> None:
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        row = wrong[0]
        raise OutputError(
            f"{path}: row {row} should have {name} {expected[row]}", got=str(found[row]), todo=_AGAIN
        )


def _finite(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise NonFiniteError(f"{path}: column {name} is not finite", todo=_AGAIN)
    return values


def _at_budget(path: Path, calls: Bool[np.ndarray, "arms blocks scored"], budget: int) -> np.ndarray:
    """`calls`, every block of which spends the budget exactly: else gains are not comparable."""
    spent = calls.sum(-1)
    if (spent != budget).any():
        found = f"{spent.min()} to {spent.max()}"
        raise OutputError(f"{path}: a block should have {budget} calls", got=found, todo=_AGAIN)
    return calls


def _read_thresholds(study: Study, run: RunFolder, checkpoint: str) -> dict[str, tuple[float, ...]]:
    """τ of every learned router of the study, by its seeds in order."""
    path = run.fitted(checkpoint) / "thresholds.json"
    found = read_json(path)
    learned = [name for name in study.routers.names if name in LEARNED_ROUTERS]
    thresholds = {}
    for name in learned:
        try:
            thresholds[name] = tuple(float(found[name][str(seed)]) for seed in study.routers.seeds)
        except (KeyError, TypeError, ValueError):
            raise OutputError(
                f"{path} should have a number for {name} and each of its seeds", todo="fit again"
            ) from None
        if not all(map(math.isfinite, thresholds[name])):
            raise NonFiniteError(f"{path}: a threshold of {name} is not finite", todo="fit again")
    return thresholds
