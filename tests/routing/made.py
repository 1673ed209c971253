"""Datasets in memory."""

from __future__ import annotations

import numpy as np
import torch

from lastcall.routing.dataset import Dataset
from tests.reference import routing as reference

SCALARS = sorted({name for names in reference.SEES.values() for name in names})


def made(
    seed: int, books: int = 12, n: int = 8, d: int = 5, *, strength: float = 0.0, told_by: str = "margin"
) -> Dataset:
    """Two blocks a book; utility is `strength` · `told_by` (a scalar, or a state's first coordinate) and
    noise of deviation 0.1. Scalars have odd means and deviations; states are far from unit size."""
    rng = np.random.default_rng(seed)
    shape = (2 * books, n)
    scalars = {name: rng.normal(size=shape) for name in SCALARS}
    states = {name: rng.normal(size=(*shape, d)) for name in ("bypass", "incoming")}
    signal = scalars[told_by] if told_by in scalars else states[told_by][..., 0]
    utility = strength * signal + 0.1 * rng.normal(size=shape)
    return Dataset(
        books=tuple(f"book{i // 2:03d}" for i in range(2 * books)),
        scalars={name: _float(3 * i + (1 + i) * x) for i, (name, x) in enumerate(scalars.items())},
        states={name: _float(20 * x) for name, x in states.items()},
        utility=_float(utility),
    )


def _float(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).float()
