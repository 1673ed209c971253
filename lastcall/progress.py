"""Progress with time left, for people, on stderr; silent for library callers.

On a terminal it is rich's bar. Elsewhere (a log, a job) it is a plain line now and then.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[], None]
"""Call once a unit of work done."""


class Reporter(ABC):
    """Where stages say what they are doing."""

    @abstractmethod
    def say(self, message: str) -> None:
        """One line."""

    @abstractmethod
    def task(self, description: str, total: int) -> contextlib.AbstractContextManager[Advance]:
        """A long stage of `total` units."""


@final
class Silent(Reporter):
    """Says nothing."""

    def say(self, message: str) -> None:
        pass

    @contextlib.contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        yield lambda: None


@final
class OnConsole(Reporter):
    """Bars on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def task(self, description: str, total: int) -> Iterator[Advance]:
        if not self._console.is_terminal:
            yield _Lines(self._console, description, total).advance
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(description, total=total)
            yield lambda: progress.advance(task)


@final
class _Lines:
    """A line at the start, then at most one every few seconds, with time left."""

    SECONDS = 10.0

    def __init__(self, console: Console, description: str, total: int) -> None:
        self._console, self._description, self._total, self._done = console, description, total, 0
        self._began = self._said = time.monotonic()
        self._say("begun")

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if self._done == self._total:
            self._say(f"done in {now - self._began:.0f} s")
        elif now - self._said >= self.SECONDS:
            self._said = now
            left = (now - self._began) / self._done * (self._total - self._done)
            self._say(f"about {left:.0f} s left")

    def _say(self, state: str) -> None:
        line = f"{self._description}: {self._done}/{self._total}, {state}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
