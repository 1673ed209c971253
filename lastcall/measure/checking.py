"""`lastcall check`: one checkpoint, every equivalence, on random tokens."""

from __future__ import annotations

import torch

from lastcall.errors import ModelError
from lastcall.measure.equivalence import Check, check_all
from lastcall.measure.loading import BYTES, load
from lastcall.progress import Reporter
from lastcall.study import Checkpoint

BLOCKS, TOKENS = 2, 513


def check_checkpoint(
    checkpoint: Checkpoint, seed: int, reporter: Reporter
) -> tuple[dict[str, str], list[Check]]:
    """The facts of `checkpoint` and its equivalence table, on BLOCKS blocks of TOKENS uniform tokens.

    A shorter context shortens the blocks. What the loaded model warns of is said to `reporter`. Raises
    ModelError where it cannot be loaded.
    """
    with reporter.task("Loading the model", 1) as advance:
        loaded = load(checkpoint, BYTES)
        advance()
    for warning in loaded.warnings:
        reporter.say(f"Warning: {warning}")
    site = loaded.site
    tokens = min(TOKENS, site.context)
    if tokens < 4:
        raise ModelError("the model's context is too short to check", got=f"{site.context} positions")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, site.head.vocabulary, (BLOCKS, tokens), generator=generator).to(site.device)
    with reporter.task("Checking", 1) as advance:
        checks = check_all(site, ids, checkpoint.dtype)
        advance()
    return loaded.facts, checks
