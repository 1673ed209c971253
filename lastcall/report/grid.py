"""A table in words, made once and shown twice: whole on the page, in 80 columns in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, final

from rich.table import Table
from rich.text import Text

from lastcall.report.tables import as_is, framed
from lastcall.report.wording import bracket, number, percent, percent_bracket, signed
from lastcall.results import Interval

Kind = Literal["router", "reference", "ceiling"]
_STYLES: dict[Kind, str] = {"router": "", "reference": "dim", "ceiling": "dim italic"}


@final
@dataclass(frozen=True)
class Cell:
    """What stands in one place; the interval is empty where there is none."""

    text: str
    interval: str = ""


NONE = Cell("–")
"""Where nothing can stand."""


@final
@dataclass(frozen=True)
class Column:
    """A column and how it is headed."""

    heading: str
    short: str = ""
    """Its heading in the terminal, lines included; empty where it is the same."""
    words: bool = False
    """Words may wrap; figures never do."""
    brief: bool = False
    """The terminal leaves its intervals out."""
    span: str = ""
    """What stands over it and its equally spanned neighbours on the page."""


@final
@dataclass(frozen=True)
class Row:
    """One row; a ceiling is no router."""

    cells: tuple[Cell, ...]
    kind: Kind = "router"


@final
@dataclass(frozen=True)
class Group:
    """The rows of one checkpoint, and what must be said of them; no name where the rows name it."""

    name: str
    rows: tuple[Row, ...]
    note: str = ""


@final
@dataclass(frozen=True)
class Grid:
    """Columns over the rows of every checkpoint; each row has a cell a column."""

    title: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]

    @property
    def spans(self) -> list[tuple[str, int]]:
        """What stands over the columns, and over how many; empty where nothing does."""
        found = [(span, len(list(columns))) for span, columns in groupby(c.span for c in self.columns)]
        return found if any(span for span, _ in found) else []


def row(*cells: Cell | str, kind: Kind = "router") -> Row:
    """A row; what is only text is a cell without an interval."""
    return Row(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in cells), kind)


def loss(interval: Interval) -> Cell:
    """An NLL, nats a token."""
    return Cell(number(interval["estimate"]), bracket(interval["low"], interval["high"], 4))


def gain(interval: Interval) -> Cell:
    """A difference of losses, nats a token, with its sign."""
    return Cell(signed(interval["estimate"]), bracket(interval["low"], interval["high"]))


def ratio(interval: Interval) -> Cell:
    """A ratio that is no share of anything."""
    return Cell(number(interval["estimate"], 3), bracket(interval["low"], interval["high"], 3))


def share(interval: Interval | None) -> Cell:
    """A share in per cent; a dash where there is none."""
    if interval is None:
        return NONE
    return Cell(percent(interval["estimate"]), percent_bracket(interval["low"], interval["high"]))


def magnitude(value: float) -> str:
    """A count at three significant digits with its power of a thousand: 12.6 M."""
    for power, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * power:
            scaled = value / power
            return f"{number(scaled, 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0)} {letter}"
    return number(value, 0)


def terminal_tables(grid: Grid) -> list[Table]:
    """One table a group, labelled secondary; its note stands under it."""
    return [_terminal(grid, group) for group in grid.groups]


def _terminal(grid: Grid, group: Group) -> Table:
    table = framed(": ".join(filter(None, (f"{grid.title} (secondary)", group.name))))
    table.caption = Text(group.note) if group.note else None
    table.caption_justify = "left"
    for column in grid.columns:
        justify: Literal["left", "right"] = "left" if column.words else "right"
        heading = Text(column.short or column.heading)
        table.add_column(heading, justify=justify, no_wrap=not column.words, overflow="fold")
    for one in group.rows:
        table.add_row(*_cells(grid.columns, one.cells), style=_STYLES[one.kind])
    return table


def _cells(columns: Sequence[Column], cells: Sequence[Cell]) -> list[Text]:
    return [
        as_is(cell.text if column.brief or not cell.interval else f"{cell.text}\n{cell.interval}")
        for column, cell in zip(columns, cells, strict=True)
    ]
