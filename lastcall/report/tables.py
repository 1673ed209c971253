"""Tables for the terminal: every column fits 80 columns, and only words wrap, never figures."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastcall.report.beside import Row, differences, groups, unmeasured
from lastcall.report.wording import (
    LOOKS,
    bracket,
    by_checkpoint,
    calls,
    check_schema,
    number,
    p_value,
    percent,
    signed,
    title,
)
from lastcall.results import CheckpointResult, ComparisonResult, Family, Interval, Judged, RouterResult

_STYLES = {"learned": "", "fixed": "", "reference": "dim", "ceiling": "dim italic"}


def routers_table(judged: Judged) -> list[Table]:
    """One table a checkpoint: each policy's loss, its gain over never, and that gain's share of the ceilings.

    Ceilings are set in italics: they are not routers. `unforced` is the share called by the rule without
    budget or deadline, which is not a matched budget.
    """
    check_schema(judged)
    return [_routers(checkpoint) for checkpoint in judged["checkpoints"]]


def comparisons_tables(family: Family) -> list[Table]:
    """A family's comparisons, one table a checkpoint: Δ with simultaneous interval, Holm's p, the verdict."""
    label = "planned" if family["planned"] else f"{family['name']} (secondary, outside the planned family)"
    return [_comparisons(f"{label}: {name}", comparisons) for name, comparisons in by_checkpoint(family)]


def published_tables(judged: Judged) -> list[Table]:
    """Published figures beside ours, one table a checkpoint; none where there is no such study."""
    return [_beside(name, rows) for name, rows in groups(judged)]


def print_published(console: Console, judged: Judged) -> None:
    """Print the published figures beside ours, what else is published, what differs; or nothing."""
    for table in published_tables(judged):
        console.print(table)
    lists = {
        "What else is published, not measured here:": unmeasured(judged),
        "What differs from the published study:": differences(judged),
    }
    for heading, sentences in lists.items():
        if sentences:
            console.print(heading, style="bold")
        for sentence in sentences:
            console.print(f"- {sentence}", highlight=False, markup=False)


def _beside(name: str, rows: list[Row]) -> Table:
    table = framed(f"beside the published figures: {name}")
    table.add_column("figure", overflow="fold")
    _figures(table, "published", "ours", "difference")
    table.add_column("published\nis")
    for row in rows:
        published = f"{row.published}\n{row.published_interval}".rstrip()
        ours = f"{row.ours}\n{row.ours_interval}".rstrip()
        table.add_row(*map(as_is, (row.name, published, ours, row.difference, row.agreement)))
    return table


def _comparisons(heading: str, comparisons: list[ComparisonResult]) -> Table:
    table = framed(heading)
    table.add_column("A over B", overflow="fold")
    _figures(table, "Δ, nats a token", "simultaneous", "Holm p")
    table.add_column("verdict", min_width=14)
    for c in comparisons:
        look = LOOKS[c["verdict"]]
        table.add_row(
            Text(title(c)),
            signed(c["delta"]["estimate"]),
            as_is(bracket(c["simultaneous_low"], c["simultaneous_high"])),
            p_value(c["p_holm"]),
            Text(f"{look.symbol} {c['verdict']}", style=look.terminal),
        )
    return table


def _routers(checkpoint: CheckpointResult) -> Table:
    table = framed(checkpoint["name"])
    table.add_column("router", overflow="fold")
    _figures(table, "NLL", "gain over never", "oracle\nshare", "know-\nable", "calls", "unforced\ncalls")
    for router in checkpoint["routers"]:
        table.add_row(*_row(router), style=_STYLES[router["kind"]])
    return table


def _row(router: RouterResult) -> list[Text]:
    unforced = router["unforced"]
    cells = (
        number(router["nll"]["estimate"], 4 if router["nll"]["estimate"] < 10 else 3),
        _interval(router["gain"]),
        percent(router["oracle_share"]),
        percent(router["knowable_share"]),
        calls(router),
        "–" if unforced is None else percent(unforced["activation"]),
    )
    return [as_is(router["name"]), *map(as_is, cells)]


def _interval(interval: Interval) -> str:
    return f"{number(interval['estimate'])} {bracket(interval['low'], interval['high'], 4)}"


def as_is(text: str) -> Text:
    """Text as it is: rich reads no markup in it."""
    return Text(text)


def framed(heading: str) -> Table:
    """An empty table under its heading."""
    options: dict[str, Any] = {"show_edge": False, "pad_edge": False, "collapse_padding": True}
    return Table(title=Text(heading), title_justify="left", box=SIMPLE_HEAD, title_style="bold", **options)


def _figures(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
