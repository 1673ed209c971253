"""Scores and calls of every router on measured books: what the quota would have done, position by position.

Choosing bypass at one position of the final block changes no other position (section 2), so the calls and
the two branch losses give the loss of any routing exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from lastcall.records import ROUTED, RunFolder, read_json, write_table
from lastcall.routing.dataset import Dataset
from lastcall.routing.fitting import THRESHOLDS, load_router, position_profile
from lastcall.routing.quota import deadline_calls, evenly, largest
from lastcall.study import LEARNED_ROUTERS, Part, Study

Decision = tuple[np.ndarray, np.ndarray]
"""Scores, float32, and calls, both [blocks, n]."""


@final
class Policies:
    """The fitted policies of one checkpoint, loaded once."""

    def __init__(self, run: RunFolder, study: Study, checkpoint: str) -> None:
        folder = run.fitted(checkpoint)
        self.checkpoint = checkpoint
        self._study = study
        self._thresholds = read_json(folder / THRESHOLDS)
        names, seeds = study.routers.names, study.routers.seeds
        self._routers = {
            (name, seed): load_router(folder, name, seed, study.routers.hidden)
            for name in names
            if name in LEARNED_ROUTERS
            for seed in seeds
        }
        self._profile = position_profile(folder) if "by-position" in names else np.empty(0)

    def decide(self, data: Dataset) -> dict[tuple[str, int], Decision]:
        """Scores and calls by router and seed, in the study's order."""
        return {
            (name, seed): self._decide(name, seed, data)
            for name in self._study.routers.names
            for seed in self._study.seeds_of(name)
        }

    def _decide(self, name: str, seed: int, data: Dataset) -> Decision:
        calls, shape = self._study.calls, data.utility.shape
        if name == "random":
            scores = random_scores(data.books, seed, shape[1])
            return scores, largest(scores, calls)
        if name == "every-fifth":
            made = np.broadcast_to(evenly(calls, shape[1]), shape)
            return made.astype(np.float32), made
        if name == "by-position":
            scores = np.broadcast_to(self._profile, shape)
            return scores, largest(scores, calls)
        scores = self._routers[name, seed].score(data).numpy()
        return scores, deadline_calls(scores, self._thresholds[name][str(seed)], calls)


def random_scores(books: Sequence[str], seed: int, positions: int) -> np.ndarray:
    """Uniform draws [blocks, n]: the same for a book and block whatever is routed beside it."""
    rows, block = [], 0
    for i, book in enumerate(books):
        block = block + 1 if i and books[i - 1] == book else 0
        digest = int.from_bytes(hashlib.sha256(book.encode()).digest()[:8], "big")
        rows.append(np.random.default_rng([seed, digest, block]).random(positions))
    return np.array(rows, dtype=np.float32)


def route(run: RunFolder, study: Study, policies: Policies, data: Dataset, part: Part = "test") -> None:
    """Decide and write the routed file of every book of `data` (records.ROUTED)."""
    decisions = policies.decide(data)
    order = np.array(data.books)
    for book in dict.fromkeys(data.books):
        own = np.flatnonzero(order == book)
        write_table(run.routed(policies.checkpoint, book, part), ROUTED, _rows(study, book, own, decisions))


def _rows(
    study: Study, book: str, own: np.ndarray, decisions: dict[tuple[str, int], Decision]
) -> dict[str, Any]:
    n, blocks, kinds = study.blocks.scored, len(own), len(decisions)
    each = blocks * n
    return {
        "book": [book] * (kinds * each),
        "block": np.tile(np.repeat(np.arange(blocks), n), kinds),
        "position": np.tile(np.arange(study.blocks.context, study.blocks.horizon), kinds * blocks),
        "router": [name for name, _ in decisions for _ in range(each)],
        "seed": np.repeat([seed for _, seed in decisions], each),
        "score": np.concatenate([scores[own].ravel() for scores, _ in decisions.values()]),
        "call": np.concatenate([calls[own].ravel() for _, calls in decisions.values()]),
    }
