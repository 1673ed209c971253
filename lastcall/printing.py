"""What the commands print: tables and sentences for people, then one JSON object as the last line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastcall.results import Judged
from lastcall.workspace import Workspace

if TYPE_CHECKING:
    from lastcall.analyses.power import PowerRow
    from lastcall.measure.describe import FolderSummary
    from lastcall.measure.equivalence import Check
    from lastcall.secondary import Answers


def last_line(command: str, out: Path | None, **facts: Any) -> None:
    """The one JSON object that ends stdout."""
    where = {} if out is None else {"out": str(out)}
    print(json.dumps({"command": command, **where, **facts}, ensure_ascii=False, allow_nan=False))


def print_judged(command: str, ws: Workspace, judged: Judged, answers: Answers | None = None) -> None:
    from lastcall.report.tables import comparisons_tables, print_published, routers_table
    from lastcall.report.wording import answer

    console = Console()
    for table in routers_table(judged):
        console.print(table)
    for family in judged["families"]:
        for table in comparisons_tables(family):
            console.print(table)
    print_published(console, judged)
    print_answers(answers)
    for sentence in answer(judged):
        console.print(sentence, highlight=False, markup=False)
    for warning in [*judged["setup"]["warnings"], *judged["lock"]["warnings"]]:
        console.print(f"Warning: {warning}", highlight=False, markup=False, style="yellow")
    verdicts = {
        f"{c['a']} over {c['b']} on {c['checkpoint']}": c["verdict"]
        for c in judged["families"][0]["comparisons"]
    }
    facts: dict[str, Any] = {"lock": judged["lock"]["hash"], "verdicts": verdicts}
    if command == "run":
        print(f"Report: {ws.run.report}")
        facts["report"] = str(ws.run.report)
    last_line(command, ws.run.root, judged=str(ws.run.judged), **facts)


def print_checks(model: str, facts: dict[str, str], checks: list[Check]) -> None:
    table = Table(title=Text(model))
    for heading in ("check", "found", "allowed", ""):
        table.add_column(heading)
    for c in checks:
        found, allowed = f"{c.found:.3g} {c.unit}", f"{c.allowed:g} {c.unit}"
        table.add_row(c.name, found, allowed, "[green]passed[/]" if c.passed else "[red]failed[/]")
    console = Console()
    for name, fact in facts.items():
        console.print(f"{name}: {fact}", highlight=False, markup=False)
    console.print(table)


def print_books(summary: FolderSummary) -> None:
    exact = "tokens" if summary.exact else "tokens (estimated; give --model to count)"
    table = Table(title=Text(f"{summary.path} ({summary.layout})"))
    for heading in ("split", "books", exact, "blocks"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for s in summary.splits:
        table.add_row(s.name, f"{s.books:,}", f"{s.tokens:,}", f"{s.blocks:,}")
    console = Console()
    console.print(table)
    for one in summary.refused:
        console.print(f"refused {one.id}: {one.reason}", highlight=False, markup=False)


def print_answers(answers: Answers | None) -> None:
    """The secondary questions' tables."""
    if answers is not None:
        from lastcall.report.secondary import secondary_tables

        for table in secondary_tables(answers):
            Console().print(table)


def print_power(rows: Sequence[PowerRow]) -> None:
    """What the planned comparisons can be expected to show."""
    table = Table(title=Text("What the planned comparisons can show, from fit and calibration books"))
    for heading in ("checkpoint", "A over B", "se", "seen with 80% power", "books for it", "books for none"):
        table.add_column(heading, justify="left" if heading in ("checkpoint", "A over B") else "right")
    for row in rows:
        best, worst = row["detectable_best"]["estimate"], row["detectable_worst"]["estimate"]
        books = [round(row[key]["estimate"] * row["books_a_cluster"]) for key in _NEEDED]  # type: ignore[literal-required]
        cells = (f"{row['se']['estimate']:.5f}", f"{best:.5f} to {worst:.5f}", f"{books[0]} to {books[1]}")
        table.add_row(row["checkpoint"], f"{row['a']} over {row['b']}", *cells, str(books[2]))
    console = Console()
    console.print(table)
    for warning in dict.fromkeys(row["warning"] for row in rows if row["warning"]):
        console.print(f"Warning: {warning}", highlight=False, markup=False, style="yellow")


_NEEDED = ("clusters_best", "clusters_worst", "clusters_no_gain")
