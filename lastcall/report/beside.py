"""Published figures beside ours, in words: the same in the terminal and on the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lastcall.published import Kind, parse
from lastcall.report.wording import bracket, number, percent, percent_bracket, signed
from lastcall.results import Judged, PublishedFigure

OUR_READING = (
    "The features' formulas, what the incoming routers see, the head and the constants of the fit, which "
    "comparisons are the planned ones, where in a book its blocks lie, the sizes of the fit and calibration "
    "splits, the form of the p-value and the simultaneous bounds are our reading of the published study."
)
"""What no figure can show to differ; always the last of the differences."""
NOT_MEASURED = "not measured here"

_NAMES: dict[Kind, str] = {
    "gain_full": "NLL gain of full over bypass",
    "share_positive": "positions of positive utility",
    "local_recovery": "local {window} recovers",
    "unforced_activation": "{a} calls, unforced",
    "delta": "Δ({a} over {b})",
    "planned_comparisons": "planned comparisons",
    "planned_gains": "of these, judged a gain",
    "planned_upper_bound": "largest simultaneous upper bound",
    "speed_ratio": "{a} speed ratio",
    "executed_nll_change": "{a} executed NLL change",
}
_SHARES: tuple[Kind, ...] = ("share_positive", "local_recovery", "unforced_activation")
_COUNTS: tuple[Kind, ...] = ("planned_comparisons", "planned_gains")
_SIGNED: tuple[Kind, ...] = ("delta", "executed_nll_change")


@final
@dataclass(frozen=True)
class Row:
    """One figure, as it is written; an interval is empty where there is none."""

    name: str
    published: str
    published_interval: str
    ours: str
    ours_interval: str
    difference: str
    agreement: str
    """inside or outside our interval; a count is the same or not, a bound kept or not."""
    why: str
    """Why it is not measured here."""


def groups(judged: Judged) -> list[tuple[str, list[Row]]]:
    """The rows by checkpoint, in the study file's order; those of all checkpoints are a group too."""
    found: dict[str, list[Row]] = {}
    for figure in judged["published"]["figures"] if "published" in judged else []:
        found.setdefault(figure["checkpoint"] or "all checkpoints", []).append(_row(figure))
    return list(found.items())


def unmeasured(judged: Judged) -> list[str]:
    """What else the published study reports, a sentence each."""
    return judged["published"]["unmeasured"] if "published" in judged else []


def differences(judged: Judged) -> list[str]:
    """What differs from the published study, a sentence each; none where there is no such study."""
    return [*judged["published"]["differences"], OUR_READING] if "published" in judged else []


def _row(figure: PublishedFigure) -> Row:
    quantity, ours, change = parse(figure["what"]), figure["ours"], figure["difference"]
    kind = quantity.kind
    a, b = (*quantity.routers, "", "")[:2]
    name = _NAMES[kind].format(a=a, b=b, window=quantity.window)
    return Row(
        name=name if quantity.horizon is None else f"{name}, horizon {quantity.horizon:,}",
        published=_published(kind, figure["value"]),
        published_interval=_between(kind, figure["low"], figure["high"]),
        ours=NOT_MEASURED if ours is None else _ours(kind, ours),
        ours_interval=_between(kind, figure["ours_low"], figure["ours_high"]),
        difference="–" if change is None else _difference(kind, change),
        agreement=_agreement(kind, figure["agrees"]),
        why=figure["unmeasured"] or "",
    )


def _published(kind: Kind, value: float) -> str:
    """As it was published: no more digits than were given."""
    digits = f"{100 * value if kind in _SHARES else value:.9f}".rstrip("0").rstrip(".").replace("-", "−")
    if kind in _SHARES:
        return f"{digits}%"
    text = f"+{digits}" if kind in _SIGNED and value > 0 else digits
    return f"< {text}" if kind == "planned_upper_bound" else text


def _ours(kind: Kind, value: float) -> str:
    if kind in _SHARES:
        return percent(value, 2)
    if kind in _COUNTS:
        return number(value, 0)
    return signed(value) if kind in _SIGNED else number(value, 5)


def _between(kind: Kind, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    if kind in _SHARES:
        return percent_bracket(low, high, 2)
    return bracket(low, high, 3 if kind == "speed_ratio" else 5)


def _difference(kind: Kind, change: float) -> str:
    """Ours less the published one; of shares in percentage points."""
    if kind in _SHARES:
        return f"{signed(100 * change, 2)} pp"
    return signed(change, 0 if kind in _COUNTS else 5)


def _agreement(kind: Kind, agrees: bool | None) -> str:
    if agrees is None:
        return "–"
    if kind in _COUNTS:
        return "same" if agrees else "not the same"
    if kind == "planned_upper_bound":
        return "kept" if agrees else "not kept"
    return "inside" if agrees else "outside"
