"""Who may work in a run folder: one process alone, or the shards of one split side by side."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar, final

from lastcall.errors import OutputError, StudyError

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Shard:
    """The `number`th of `count` shares of the batches, from 1: a task of a job array."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`3/8`; StudyError where it reads otherwise."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise StudyError('a shard reads "i/n", from 1/n to n/n', got=f'"{text}"', todo="such as 3/8")
        return cls(int(match[1]), int(match[2]))

    def of(self, batches: Sequence[T]) -> list[T]:
        """Every `count`th of all batches of a split: who is done already changes nothing."""
        return list(batches[self.number - 1 :: self.count])


@contextlib.contextmanager
def holding(root: Path, shard: Shard | None) -> Iterator[None]:
    """Hold the run folder alone, or together with the other shards; OutputError where that cannot be."""
    with contextlib.ExitStack() as held:
        if shard is not None:
            name = f".held-{shard.number}-of-{shard.count}"
            held.enter_context(_locked(root / name, fcntl.LOCK_EX))
        held.enter_context(_locked(root / ".held", fcntl.LOCK_EX if shard is None else fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def turn(root: Path) -> Iterator[None]:
    """Wait for one's turn to write what every shard writes: the ledger, the facts."""
    with _opened(root / ".turn") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with _opened(path) as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another lastcall is at work in {path.parent}"
            raise OutputError(what, todo="wait for it, or choose another --out") from None
        yield


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w")
    except OSError as error:
        what = f"cannot write in {path.parent}"
        raise OutputError(what, got=error.strerror or str(error), todo="choose another --out") from None
