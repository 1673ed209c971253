"""States -> token losses, uncertainty and KL, over tiles of rows × vocabulary.

Estimands, for each row (one next-token prediction), in nats, float32:

    loss         log Σ exp(l) − l[target]          of every branch
    entropy      of the bypass distribution
    top_logprob  its largest log-probability; margin: to its second largest
    kl           KL(full ‖ bypass) = Σ p1 (l1 − l0) − lse1 + lse0

Only one tile of logits a branch exists at a time; sums are carried across tiles, in float64, relative to a
running maximum (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867). One float32 sum over the
vocabulary, as in torch's cross entropy, was off by up to 1.6e-5 nats on SmolLM2-135M from the same logits
summed in float64. The literal twin is in tests/reference/measure.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lastcall.measure.anatomy import Head

Rows = Float[Tensor, " rows"]

_TILES = {"cpu": (512, 4096), "cuda": (4096, 16384)}
"""Rows and vocabulary entries of a tile by device type: the CPU's stays in cache."""


FUSED_ENTRIES = 1 << 28
"""Logits a branch that exist at a time in the fused pass: 512 MiB in 16 bits."""


@final
@dataclass(frozen=True)
class Scores:
    """Per-prediction figures, each [rows], float32, nats."""

    loss_full: Rows
    loss_bypass: Rows
    loss_local: dict[int, Rows]
    entropy: Rows
    top_logprob: Rows
    margin: Rows
    kl: Rows


@final
class _Running:
    """Carried sums of one branch over the vocabulary, relative to the running maximum; float64."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.maximum = torch.full(targets.shape, -torch.inf, device=targets.device, dtype=torch.float64)
        self.target = torch.zeros_like(self.maximum)
        self.total = torch.zeros_like(self.maximum)
        self.moment = torch.zeros_like(self.maximum)

    def add(self, logits: Tensor, first: int, weights: Tensor | None = None) -> None:
        """Take in the tile [rows, …] that begins at vocabulary entry `first`; `weights` enter the moment."""
        maximum = torch.maximum(self.maximum, logits.amax(1))
        decay = torch.exp(self.maximum - maximum)
        mass = torch.exp(logits - maximum[:, None].float())
        self.total = self.total * decay + mass.sum(1)
        if weights is not None:
            self.moment = self.moment * decay + torch.linalg.vecdot(mass, weights)
        self.maximum = maximum
        local = self.targets - first
        inside = (local >= 0) & (local < logits.shape[1])
        picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        self.target = torch.where(inside, picked, self.target)

    @property
    def lse(self) -> Tensor:
        return self.maximum + self.total.log()

    @property
    def loss(self) -> Tensor:
        return self.lse - self.target

    @property
    def mean(self) -> Tensor:
        """The branch's expectation of the weights."""
        return self.moment / self.total


def score(
    head: Head,
    full: Float[Tensor, "rows d"],
    bypass: Float[Tensor, "rows d"],
    local: dict[int, Float[Tensor, "rows d"]],
    targets: Int[Tensor, " rows"],
) -> Scores:
    """Losses of every branch, uncertainty of the bypass, and KL(full ‖ bypass), for each row."""
    pass_, rows = _score_rows, _TILES[full.device.type][0]
    if is_fused(full.device):
        pass_, rows = _score_rows_fused, max(1, FUSED_ENTRIES // head.vocabulary)
    parts = [
        pass_(head, full[at], bypass[at], {w: s[at] for w, s in local.items()}, targets[at])
        for at in (slice(i, i + rows) for i in range(0, len(targets), rows))
    ]
    return Scores(
        loss_local={w: torch.cat([p.loss_local[w] for p in parts]) for w in local},
        **{
            name: torch.cat([getattr(p, name) for p in parts])
            for name in ("loss_full", "loss_bypass", "entropy", "top_logprob", "margin", "kl")
        },
    )


def _score_rows(
    head: Head, full: Tensor, bypass: Tensor, local: dict[int, Tensor], targets: Tensor
) -> Scores:
    on, off = _Running(targets), _Running(targets)
    near = {w: _Running(targets) for w in local}
    top = torch.full((len(targets), 2), -torch.inf, device=targets.device)  # float32: picked, never summed
    _, width = _TILES[full.device.type]
    for first in range(0, head.vocabulary, width):
        last = min(first + width, head.vocabulary)
        base = head.logits(bypass, first, last).float()
        off.add(base, first, weights=base)
        top = torch.cat([top, base.topk(min(2, last - first), dim=1).values], 1).topk(2, dim=1).values
        logits = head.logits(full, first, last).float()
        on.add(logits, first, weights=logits - base)
        for w, state in local.items():
            near[w].add(head.logits(state, first, last).float(), first)
    return Scores(
        loss_full=on.loss.float(),
        loss_bypass=off.loss.float(),
        loss_local={w: running.loss.float() for w, running in near.items()},
        entropy=(off.lse - off.mean).float(),
        top_logprob=(top[:, 0] - off.lse).float(),
        margin=top[:, 0] - top[:, 1],
        kl=(on.mean - on.lse + off.lse).clamp_min(0).float(),
    )


def is_fused(device: torch.device) -> bool:
    """Whether the scoring pass is the Triton kernel's: on a CUDA device, where Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


def _score_rows_fused(
    head: Head, full: Tensor, bypass: Tensor, local: dict[int, Tensor], targets: Tensor
) -> Scores:
    from lastcall.measure import fused

    whole = (0, head.vocabulary)
    figures = fused.pair(head.logits(full, *whole), head.logits(bypass, *whole), targets)
    near = {w: fused.losses(head.logits(state, *whole), targets) for w, state in local.items()}
    loss_full, loss_bypass, kl, entropy, top_logprob, margin = figures.unbind(1)
    return Scores(loss_full, loss_bypass, near, entropy, top_logprob, margin, kl)
