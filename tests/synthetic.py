"""Synthetic runs: plausible test records of a study, written in seconds and without a model.

Utilities are heavy-tailed with a small positive mean; each learned router predicts a part of them, as large
as its skill. Calls obey the causal quota. States, and splits other than the test's, are not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lastcall.records import ROUTED, RunFolder, local_loss, measured_columns, write_json, write_table
from lastcall.study import LEARNED_ROUTERS, Study


def make_study(*, test: Sequence[str], checkpoints: Sequence[str] = ("one",), **sections: Any) -> Study:
    """A study of these test books; `sections` are those of the study file, the protocol's where left out."""
    lists = {"fit": [], "calibration": [], "test": list(test)}
    return Study.model_validate(
        {
            "name": "synthetic",
            "books": {"source": "folder", "path": "books", "lists": lists},
            "checkpoints": [{"name": name, "model": "random:synthetic"} for name in checkpoints],
            **sections,
        }
    )


def make_run(
    folder: Path,
    study: Study,
    rng: np.random.Generator,
    *,
    books: Sequence[str],
    skill: Mapping[str, float] | None = None,
    mean_utility: float = 0.04,
) -> RunFolder:
    """Write test records and thresholds of every checkpoint.

    A router's skill is 0.3 where not given; `mean_utility` is in nats a token.
    """
    run = RunFolder(folder)
    for checkpoint in (c.name for c in study.checkpoints):
        signal = rng.standard_t(4, (len(books), len(study.blocks.starts), study.blocks.horizon))
        _write_measured(run, study, checkpoint, books, signal, mean_utility, rng)
        arms, scores, calls, thresholds = _route(study, signal[..., study.blocks.context :], skill or {}, rng)
        write_json(run.fitted(checkpoint) / "thresholds.json", thresholds)
        for i, book in enumerate(books):
            columns = routed_columns(study, book, arms, scores[:, i], calls[:, i])
            write_table(run.routed(checkpoint, book), ROUTED, columns)
    return run


def quota(scores: np.ndarray, threshold: np.ndarray, calls: int) -> np.ndarray:
    """The causal quota along the last axis: call while any is left, above τ or forced by the deadline."""
    n = scores.shape[-1]
    left = np.full(scores.shape[:-1], calls)
    called = np.zeros(scores.shape, dtype=bool)
    for i in range(n):
        called[..., i] = (left > 0) & ((scores[..., i] > threshold) | (left >= n - i))
        left -= called[..., i]
    return called


def routed_columns(
    study: Study, book: str, arms: Sequence[tuple[str, int]], scores: np.ndarray, calls: np.ndarray
) -> dict[str, Any]:
    """One book's ROUTED columns from scores and calls of shape [arms, blocks, scored]."""
    each = scores[0].size
    routers = list(dict.fromkeys(name for name, _ in arms))
    blocks, scored = scores.shape[1:]
    return {
        "book": _dictionary(np.zeros(scores.size, dtype=np.int32), [book]),
        "block": np.tile(np.repeat(np.arange(blocks), scored), len(arms)),
        "position": np.tile(np.arange(study.blocks.context, study.blocks.horizon), len(arms) * blocks),
        "router": _dictionary(np.repeat([routers.index(name) for name, _ in arms], each), routers),
        "seed": np.repeat([seed for _, seed in arms], each),
        "score": scores.ravel(),
        "call": calls.ravel(),
    }


def _dictionary(codes: np.ndarray, values: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(codes.astype(np.int32), list(values))


def _write_measured(
    run: RunFolder,
    study: Study,
    checkpoint: str,
    books: Sequence[str],
    signal: np.ndarray,
    mean_utility: float,
    rng: np.random.Generator,
) -> None:
    blocks, horizon = signal.shape[1:]
    of_book = mean_utility * rng.normal(1, 0.25, (len(books), 1, 1))
    bypass = rng.gamma(2.0, 1.5, signal.shape) + 1.0
    full = np.maximum(bypass - of_book - 0.15 * signal - 0.2 * rng.standard_t(4, signal.shape), 0.01)
    kl = np.abs(0.15 * signal) + 0.02 * rng.exponential(size=signal.shape)
    names = measured_columns(study.measure.local_windows)
    position = np.tile(np.arange(horizon), blocks)
    for i, book in enumerate(books):
        columns: dict[str, Any] = {
            "book": [book] * position.size,
            "block": np.repeat(np.arange(blocks), horizon),
            "position": position,
            "scored": position >= study.blocks.context,
            "loss_full": full[i].ravel(),
            "loss_bypass": bypass[i].ravel(),
            "kl": kl[i].ravel(),
        }
        for window in study.measure.local_windows:
            columns[local_loss(window)] = (0.6 * full[i] + 0.4 * bypass[i]).ravel()
        rest = {c.name: rng.integers(0, 1000, position.size) for c in names if c.name not in columns}
        write_table(run.measured(checkpoint, "test", book), names, columns | rest)


def _route(
    study: Study, signal: np.ndarray, skill: Mapping[str, float], rng: np.random.Generator
) -> tuple[list[tuple[str, int]], np.ndarray, np.ndarray, dict[str, dict[str, float]]]:
    """Arms, scores and calls of shape [arms, books, blocks, scored], and the learned routers' thresholds."""
    arms, scores, calls = [], [], []
    thresholds: dict[str, dict[str, float]] = {}
    for name in study.routers.names:
        for seed in study.routers.seeds if name in (*LEARNED_ROUTERS, "random") else (0,):
            score = _score(study, name, signal, skill.get(name, 0.3), rng).astype(np.float32)
            share = study.calls / study.blocks.scored
            tau = float(np.quantile(score, 1 - share)) + (0.01 if name in LEARNED_ROUTERS else 0.0)
            if name in LEARNED_ROUTERS:
                thresholds.setdefault(name, {})[str(seed)] = tau
            arms.append((name, seed))
            scores.append(score)
            calls.append(quota(score, np.float64(tau), study.calls))
    return arms, np.stack(scores), np.stack(calls), thresholds


def _score(study: Study, name: str, signal: np.ndarray, skill: float, rng: np.random.Generator) -> np.ndarray:
    scored = signal.shape[-1]
    if name in LEARNED_ROUTERS:
        return 0.15 * (skill * signal + (1 - skill) * rng.normal(size=signal.shape))
    if name == "random":
        return rng.random(signal.shape)
    if name == "every-fifth":
        return np.broadcast_to(np.arange(scored) % 5 == 0, signal.shape).astype(float)
    return np.broadcast_to(rng.random(scored), signal.shape).copy()
