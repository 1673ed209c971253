"""Measured splits without a model: random features and states, utilities that one of them may tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch

from lastcall.records import SCALARS, RunFolder, atomic, local_loss, measured_columns, write_table
from lastcall.study import Split, Study


def write_split(
    run: RunFolder,
    study: Study,
    checkpoint: str,
    split: Split,
    books: Sequence[str],
    rng: np.random.Generator,
    *,
    d: int = 6,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.0,
    told_by: str = "margin",
    source: str = "",
) -> None:
    """Write the record and the states of every book.

    Utility is 0.02 + `strength` · x + noise of deviation 0.1, where x, standard normal, is the scalar feature
    `told_by`, or the first coordinate of the state of that name (`bypass` or `incoming`).
    """
    for book in books:
        shape = (len(study.blocks.starts), study.blocks.horizon)
        states = {name: rng.normal(size=(*shape, d)) for name in ("bypass", "incoming")}
        scalars = {column.name: rng.normal(size=shape) for column in SCALARS}
        signal = states[told_by][..., 0] if told_by in states else scalars[told_by]
        utility = 0.02 + strength * signal + 0.1 * rng.normal(size=shape)
        _write_states(run, checkpoint, split, book, states, dtype)
        columns = _columns(study, book, scalars, utility, rng)
        described = measured_columns(study.measure.local_windows)
        write_table(run.measured(checkpoint, split, book), described, columns, source)


def _write_states(
    run: RunFolder,
    checkpoint: str,
    split: Split,
    book: str,
    states: dict[str, np.ndarray],
    dtype: torch.dtype,
) -> None:
    with atomic(run.states(checkpoint, split, book)) as temporary:
        stored = {name: torch.from_numpy(values).to(dtype) for name, values in states.items()}
        safetensors.torch.save_file(stored, temporary)


def _columns(
    study: Study, book: str, scalars: dict[str, np.ndarray], utility: np.ndarray, rng: np.random.Generator
) -> dict[str, Any]:
    """Columns of a measured record (lastcall.records.MEASURED)."""
    blocks, horizon = utility.shape
    position = np.tile(np.arange(horizon), blocks)
    bypass = rng.gamma(2.0, 1.5, utility.shape) + 3.0
    tokens = rng.integers(0, 1000, (blocks, horizon + 1))
    return {
        "book": [book] * position.size,
        "block": np.repeat(np.arange(blocks), horizon),
        "start": np.repeat(np.arange(blocks) * 2 * (horizon + 1), horizon),
        "position": position,
        "token": tokens[:, :-1].ravel(),
        "target": tokens[:, 1:].ravel(),
        "scored": position >= study.blocks.context,
        "loss_full": (bypass - utility).ravel(),
        "loss_bypass": bypass.ravel(),
        "kl": np.abs(0.1 * rng.normal(size=position.size)),
        **{name: values.ravel() for name, values in scalars.items()},
        **{local_loss(w): (bypass - 0.6 * utility).ravel() for w in study.measure.local_windows},
    }
