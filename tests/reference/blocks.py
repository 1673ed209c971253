"""Block cutting, literally as section 1 says it: exact fractions, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def block_starts(n_tokens: int, horizon: int, fractions: Sequence[float]) -> list[int]:
    """floor(f · (n − (horizon + 1))) for each f, where f is the decimal that was written."""
    starts = []
    for fraction in fractions:
        exact = Fraction(str(fraction)) * (n_tokens - (horizon + 1))
        starts.append(exact.numerator // exact.denominator)
    return starts


def cut(ids: Sequence[int], horizon: int, fractions: Sequence[float]) -> list[list[int]]:
    """The token ids of each block."""
    blocks = []
    for start in block_starts(len(ids), horizon, fractions):
        block = []
        for t in range(horizon + 1):
            block.append(ids[start + t])
        blocks.append(block)
    return blocks


def overlap(starts: Sequence[int], horizon: int) -> bool:
    """Whether any token is in two blocks."""
    covered: set[int] = set()
    for start in starts:
        block = set(range(start, start + horizon + 1))
        if covered & block:
            return True
        covered |= block
    return False
