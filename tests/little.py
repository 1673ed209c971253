"""A whole study in seconds: little books, tiny models, a short horizon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tomlkit

from tests.tiny import save

WORDS = ("the", "a", "of", "and", "to", "in", "that", "it", "was", "for", "on", "as", "with", "his", "they")
SPLITS = {"fit": 6, "calibration": 2, "test": 4}


def write_books(folder: Path, count: int = 12, letters: int = 200, seed: int = 0) -> Path:
    """`count` books of random words, at least `letters` bytes each, named 1.txt, 2.txt, …"""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(1, count + 1):
        text = f"Book {i}."
        while len(text) < letters:
            text += f" {rng.choice(WORDS)}"
        (folder / f"{i}.txt").write_text(text)
    return folder


def write_study(root: Path, models: Mapping[str, str], **changes: Callable[[Any], None] | Any) -> Path:
    """A study file in `root` over books and `models` (checkpoint name to tiny model), all made there.

    Top-level tables in `changes` are merged into the study's.
    """
    write_books(root / "books")
    for name, model in models.items():
        if not (root / name).exists():
            save(model, root / name)
    study: dict[str, Any] = {
        "name": "little",
        "books": {"source": "folder", "path": "books", "counts": dict(SPLITS)},
        "checkpoints": [
            {"name": n, "model": f"./{n}", "tokenizer": "bytes", "device": "cpu"} for n in models
        ],
        "blocks": {"horizon": 40, "context": 5},
        "measure": {"local_windows": [3], "batch_books": 2},
        "routers": {"epochs": 2, "seeds": [0, 1]},
        "inference": {"draws": 200},
    }
    for section, values in changes.items():
        merged = isinstance(values, dict)
        study[section] = {**study.get(section, {}), **values} if merged else values
    path = root / "study.toml"
    path.write_text("# A little study.\n" + tomlkit.dumps(study))
    return path


def flip(path: Path, at: int = -1) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
