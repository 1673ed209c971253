"""Tables in the terminal: all columns at 80 and 100, figures never broken."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from lastcall.errors import OutputError
from lastcall.report.tables import comparisons_tables, routers_table

from .fixture import FIXED, LEARNED, judged


def shown(table: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= width for line in lines)
    assert not any("…" in line for line in lines)
    return lines


@pytest.mark.parametrize("width", [80, 100])
def test_routers_keep_one_line_each_with_every_column(width: int) -> None:
    given = judged()
    tables = routers_table(given)
    assert len(tables) == len(given["checkpoints"])
    for table, checkpoint in zip(tables, given["checkpoints"], strict=True):
        lines = shown(table, width)
        assert lines[0].strip() == checkpoint["name"]
        heading = " ".join(lines[1:3]).split()
        for word in ("router", "NLL", "gain", "oracle", "know-", "calls", "unforced"):
            assert word in heading
        assert [line.split()[0] for line in lines[4:]] == [r["name"] for r in checkpoint["routers"]]
        # a gain is three words: the estimate and its interval's two ends
        assert {len(line.split()) for line in lines[4:]} == {9}
    assert {"never", "always", *LEARNED, *FIXED, "knowable", "oracle"} <= {
        line.split()[0] for line in lines[4:]
    }


@pytest.mark.parametrize("width", [80, 100])
def test_awkward_figures_still_fit(width: int) -> None:
    given = judged()
    for router in given["checkpoints"][0]["routers"]:
        router["nll"]["estimate"] = 11.93125
        router["gain"] = {"estimate": -0.00011, "low": -0.00031, "high": -0.00009}
        router["oracle_share"], router["knowable_share"] = None, -31.4159
        router["calls_min"], router["calls_max"] = 97, 99
    lines = shown(routers_table(given)[0], width)
    assert len(lines[4:]) == len(given["checkpoints"][0]["routers"])
    assert "11.931  −0.0001 [−0.0003, −0.0001]       –  −3142%" in lines[6]


@pytest.mark.parametrize("width", [80, 100])
def test_comparisons_break_words_only(width: int) -> None:
    for family in judged()["families"]:
        tables = comparisons_tables(family)
        text = "\n".join(line for table in tables for line in shown(table, width))
        for name in {c["checkpoint"] for c in family["comparisons"]}:
            assert sum(f": {name}" in line for line in text.splitlines()) == 1
        for word in ("A over B", "Δ, nats a token", "simultaneous", "Holm p", "verdict"):
            assert word in text
        rows = [line for line in text.splitlines() if " over " in line and "[" in line]
        for row, comparison in zip(rows, family["comparisons"], strict=True):
            assert row.startswith(f"{comparison['a']} over {comparison['b']} ")
            assert row.count("[") == row.count("]") == 1
            assert comparison["verdict"].split()[0] in row
        assert ("outside the planned family" in text) is not family["planned"]


def test_markup_in_names_is_shown_not_read() -> None:
    given: Any = judged()
    given["checkpoints"][0]["name"] = "[red]x[/red]"
    given["families"][0]["comparisons"][0]["a"] = "[/]"
    assert "[red]x[/red]" in shown(routers_table(given)[0], 100)[0]
    assert any("[/] over B" in line for line in shown(comparisons_tables(given["families"][0])[0], 100))


def test_another_schema_is_refused() -> None:
    given: Any = {**judged(), "schema": 99}
    with pytest.raises(OutputError, match="got version 99"):
        routers_table(given)
