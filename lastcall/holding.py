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
    """Hold the run folder alone, or together with the other shards of as many; OutputError where that cannot
    be."""
    with contextlib.ExitStack() as held:
        if shard is None:
            held.enter_context(_locked(root / ".held", fcntl.LOCK_EX))
        else:
            held.enter_context(_locked(root / f".held-{shard.number}-of-{shard.count}", fcntl.LOCK_EX))
            held.enter_context(_locked(root / ".held", fcntl.LOCK_SH))
            _require_agreed(root, shard)
        yield


def _require_agreed(root: Path, shard: Shard) -> None:
    """OutputError where a shard of another count holds the folder: their batches would overlap."""
    for path in root.glob(".held-*-of-*"):
        if not path.name.endswith(f"-of-{shard.count}"):
            with _locked(path, fcntl.LOCK_EX):
                pass


@contextlib.contextmanager
def turn(root: Path) -> Iterator[None]:
    """Wait for one's turn to write what every shard writes: the ledger, the facts."""
    with _opened(root / ".turn") as file:
        _flock(file, fcntl.LOCK_EX, root)
        yield


@contextlib.contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with _opened(path) as file:
        try:
            _flock(file, kind | fcntl.LOCK_NB, path.parent)
        except BlockingIOError:
            what = f"another lastcall is at work in {path.parent}"
            raise OutputError(what, todo="wait for it, or choose another --out") from None
        yield


def _flock(file: TextIO, kind: int, root: Path) -> None:
    """BlockingIOError where another holds it; OutputError where the file system cannot lock at all."""
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        raise
    except OSError as error:
        todo = "put the run folder on a file system that can lock files"
        raise OutputError(f"cannot lock files in {root}", got=error.strerror, todo=todo) from None


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w")
    except OSError as error:
        what = f"cannot write in {path.parent}"
        raise OutputError(what, got=error.strerror or str(error), todo="choose another --out") from None
