"""Progress: a bar on a terminal, lines elsewhere, nothing for library callers."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lastcall import progress
from lastcall.progress import OnConsole, Silent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time is `clock[0]`."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80, force_terminal=terminal), file


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Silent()
    reporter.say("hello")
    with reporter.task("Measuring", 2) as advance:
        advance()
    assert capsys.readouterr() == ("", "")


def test_lines_come_now_and_then_with_the_time_left(clock: list[float]) -> None:
    on, file = console()
    with OnConsole(on).task("Measuring", 40) as advance:
        for _ in range(40):
            clock[0] += 3
            advance()
    assert file.getvalue().splitlines() == [
        "Measuring: 0/40, begun",
        *(f"Measuring: {i}/40, about {3 * (40 - i)} s left" for i in range(4, 40, 4)),
        "Measuring: 40/40, done in 120 s",
    ]


def test_a_quick_task_says_only_that_it_began_and_ended(clock: list[float]) -> None:
    on, file = console()
    with OnConsole(on).task("Fitting", 3) as advance:
        for _ in range(3):
            advance()
    assert file.getvalue().splitlines() == ["Fitting: 0/3, begun", "Fitting: 3/3, done in 0 s"]


@pytest.mark.parametrize("text", ["a [fit] b", "[/x]", "/some/run[red]/x", "long " * 50])
def test_text_is_printed_as_it_is(text: str) -> None:
    on, file = console()
    reporter = OnConsole(on)
    reporter.say(text)
    with reporter.task(text, 1):
        pass
    assert file.getvalue() == f"{text}\n{text}: 0/1, begun\n"


def test_a_terminal_has_a_bar() -> None:
    on, file = console(terminal=True)
    with OnConsole(on).task("Measuring [fit]", 2) as advance:
        advance()
        advance()
    assert "Measuring [fit]" in file.getvalue()
    assert "2/2" in file.getvalue()
    assert "left" in file.getvalue()
