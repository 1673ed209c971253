"""The scoring pass on a GPU: one Triton kernel reads both branches' logits once and writes every figure.

A program takes one row (one prediction) and walks the vocabulary, carrying the sums relative to a running
maximum as `scoring` does; that module's tiles are the slow twin. Logits are computed whole for a few rows
at a time, in the model's own type, as the stock model computes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 4096
"""Vocabulary entries a step of a program."""
FIGURES = 6
"""Columns of the output: loss_full, loss_bypass, kl, entropy, top_logprob, margin."""


@triton.jit  # type: ignore[untyped-decorator]
def _pair_kernel(full, base, targets, out, vocabulary, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every figure of one row from its logits under both branches."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, width)
    low = -float("inf")
    m0 = low
    m1 = low
    s0 = 0.0
    s1 = 0.0
    e0 = 0.0
    x1 = 0.0
    first = low
    second = low
    for start in range(0, vocabulary, width):
        inside = start + lanes < vocabulary
        l0 = tl.load(base + row * stride + start + lanes, mask=inside, other=low).to(tl.float32)
        l1 = tl.load(full + row * stride + start + lanes, mask=inside, other=low).to(tl.float32)
        top, at = tl.max(l0, axis=0, return_indices=True)
        next_ = tl.max(tl.where(lanes == at, low, l0), axis=0)
        second = tl.maximum(tl.minimum(first, top), tl.maximum(second, next_))
        first = tl.maximum(first, top)
        n0 = tl.maximum(m0, top)
        n1 = tl.maximum(m1, tl.max(l1, axis=0))
        p0 = tl.exp(l0 - n0)
        p1 = tl.exp(l1 - n1)
        d0 = tl.exp(m0 - n0)
        d1 = tl.exp(m1 - n1)
        s0 = s0 * d0 + tl.sum(p0, axis=0)
        s1 = s1 * d1 + tl.sum(p1, axis=0)
        e0 = e0 * d0 + tl.sum(tl.where(inside, p0 * l0, 0.0), axis=0)
        x1 = x1 * d1 + tl.sum(tl.where(inside, p1 * (l1 - l0), 0.0), axis=0)
        m0 = n0
        m1 = n1
    target = tl.load(targets + row)
    lse0 = m0 + tl.log(s0)
    lse1 = m1 + tl.log(s1)
    at0 = tl.load(base + row * stride + target).to(tl.float32)
    at1 = tl.load(full + row * stride + target).to(tl.float32)
    into = out + row * 6
    tl.store(into, lse1 - at1)
    tl.store(into + 1, lse0 - at0)
    tl.store(into + 2, tl.maximum(x1 / s1 - lse1 + lse0, 0.0))
    tl.store(into + 3, lse0 - e0 / s0)
    tl.store(into + 4, first - lse0)
    tl.store(into + 5, first - second)


@triton.jit  # type: ignore[untyped-decorator]
def _loss_kernel(logits, targets, out, vocabulary, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The loss of one row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, width)
    m = -float("inf")
    s = 0.0
    for start in range(0, vocabulary, width):
        inside = start + lanes < vocabulary
        x = tl.load(logits + row * stride + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        n = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - n) + tl.sum(tl.exp(x - n), axis=0)
        m = n
    at = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32)
    tl.store(out + row, m + tl.log(s) - at)


def pair(full: Tensor, bypass: Tensor, targets: Tensor) -> Tensor:
    """Figures [rows, FIGURES], float32, from logits [rows, vocabulary] of both branches."""
    out = torch.empty(len(targets), FIGURES, device=full.device)
    grid, vocabulary = (len(targets),), full.shape[1]
    _pair_kernel[grid](full, bypass, targets, out, vocabulary, full.stride(0), width=WIDTH, num_warps=8)
    return out


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses [rows], float32, from logits [rows, vocabulary]."""
    out = torch.empty(len(targets), device=logits.device)
    grid, vocabulary = (len(targets),), logits.shape[1]
    _loss_kernel[grid](logits, targets, out, vocabulary, logits.stride(0), width=WIDTH, num_warps=8)
    return out
