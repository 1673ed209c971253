"""Measured records -> the tensors that routers see, over the scored positions of one split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import pyarrow as pa
import safetensors
import torch
from jaxtyping import Float
from torch import Tensor

from lastcall.errors import OutputError
from lastcall.records import SCALARS, STATES, RunFolder, read_tables
from lastcall.routing.features import position
from lastcall.study import Part, Study


@final
@dataclass(frozen=True)
class Dataset:
    """One part of one checkpoint's measurements, blocks in book order; n scored positions a block."""

    books: tuple[str, ...]
    """Book id of each block."""
    scalars: dict[str, Float[Tensor, "blocks n"]]
    """Scalar features by name (section 3), float32."""
    states: dict[str, Float[Tensor, "blocks n d"]]
    """`bypass` and `incoming`, in the type they were stored in."""
    utility: Float[Tensor, "blocks n"]
    """ℓ0 − ℓ1, nats, float32."""


def read(run: RunFolder, study: Study, checkpoint: str, part: Part, books: Sequence[str]) -> Dataset:
    """The scored positions of `books`, in their order. Raises OutputError where a file is missing or torn."""
    names = [column.name for column in SCALARS]
    paths = [run.measured(checkpoint, part, book) for book in books]
    tables = [read_tables([path], ["position", "loss_full", "loss_bypass", *names]) for path in paths]
    horizon, context = study.blocks.horizon, study.blocks.context
    for path, found in zip(paths, tables, strict=True):
        _require(path, "rows", len(study.blocks.starts) * horizon, found.num_rows)
    table = pa.concat_tables(tables)
    columns = {
        name: torch.from_numpy(table[name].to_numpy().astype(np.float32)).reshape(-1, horizon)[:, context:]
        for name in table.column_names
    }
    t = columns.pop("position")
    utility = columns.pop("loss_bypass") - columns.pop("loss_full")
    states = [_states(run.states(checkpoint, part, book), study) for book in books]
    return Dataset(
        books=tuple(book for book in books for _ in study.blocks.starts),
        scalars={**columns, **position(t, horizon)},
        states={name: torch.cat([s[name] for s in states]) for name in STATES},
        utility=utility,
    )


def _states(path: Path, study: Study) -> dict[str, Tensor]:
    shape = [len(study.blocks.starts), study.blocks.horizon]
    try:
        with safetensors.safe_open(path, "pt") as file:
            stored = {name: file.get_slice(name) for name in STATES}
            for tensor in stored.values():
                _require(path, "blocks and positions", shape, tensor.get_shape()[:2])
            return {name: tensor[:, study.blocks.context :] for name, tensor in stored.items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise OutputError(
            f"cannot read {path}", got=str(error), todo="run `lastcall measure` again"
        ) from None


def _require(path: Path, what: str, expected: object, found: object) -> None:
    if found != expected:
        raise OutputError(
            f"{path} should have {expected} {what}", got=str(found), todo="delete it and measure again"
        )
