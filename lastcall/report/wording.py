"""How figures and verdicts are put into words, the same in the terminal, in figures and on the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from lastcall.errors import OutputError
from lastcall.results import SCHEMA, ComparisonResult, Family, Judged, RouterResult, Verdict


@final
@dataclass(frozen=True)
class Look:
    """How a verdict is shown: never by colour alone."""

    symbol: str
    colour: str
    """Key of `canvas.PALETTE`, and class on the page."""
    terminal: str
    """Style of rich."""
    marker: str
    """Marker of matplotlib."""
    filled: bool


LOOKS: dict[Verdict, Look] = {
    "gain": Look("▲", "green", "green", "^", True),
    "loss": Look("▼", "red", "red", "v", True),
    "no gain of practical size": Look("■", "blue", "blue", "s", True),
    "undecided": Look("○", "muted", "dim", "o", False),
}


_WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def check_schema(judged: Any) -> None:
    """Raise OutputError where `judged` is not of the schema version this lastcall draws."""
    found = judged.get("schema") if isinstance(judged, dict) else None
    if found != SCHEMA:
        raise OutputError(
            "judged.json has another schema",
            got=f"version {found}",
            todo=f"this lastcall draws version {SCHEMA}; judge again with it",
        )


def number(value: float, digits: int = 4) -> str:
    """`value` at `digits` decimals with a true minus sign, and none before a zero."""
    text = f"{value:.{digits}f}"
    negative = text.startswith("-") and float(text) != 0
    return f"−{text[1:]}" if negative else text.removeprefix("-")


def signed(value: float, digits: int = 5) -> str:
    """`value` with its sign; a zero has none."""
    text = number(value, digits)
    return f"+{text}" if float(text.replace("−", "-")) > 0 else text


def bracket(low: float, high: float, digits: int = 5) -> str:
    """An interval."""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def percent(value: float | None, digits: int = 1) -> str:
    """A share, a dash where there is none; without decimals from 1,000% on."""
    if value is None:
        return "–"
    return f"{number(100 * value, digits if abs(value) < 10 else 0)}%"


def percent_bracket(low: float, high: float, digits: int = 1) -> str:
    """An interval of a share."""
    return f"[{percent(low, digits)}, {percent(high, digits)}]"


def p_value(p: float) -> str:
    """A p-value at four decimals; below them, that it is."""
    return "<0.0001" if p < 0.00005 else f"{p:.4f}"


def plain(value: float) -> str:
    """A setting as people write it: 0.005, not 0.005000."""
    return f"{value:g}".replace("-", "−")


def calls(router: RouterResult) -> str:
    """Calls a block: one figure where every block and seed has the same."""
    low, high = router["calls_min"], router["calls_max"]
    return str(low) if low == high else f"{low}–{high}"


def title(comparison: ComparisonResult) -> str:
    """`A over B`."""
    return f"{comparison['a']} over {comparison['b']}"


def by_checkpoint(family: Family) -> list[tuple[str, list[ComparisonResult]]]:
    """A family's comparisons grouped by checkpoint, both in the order given."""
    groups: dict[str, list[ComparisonResult]] = {}
    for comparison in family["comparisons"]:
        groups.setdefault(comparison["checkpoint"], []).append(comparison)
    return list(groups.items())


def plural(count: int, one: str, many: str | None = None) -> str:
    """`3 books`, `1 book`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def answer(judged: Judged) -> list[str]:
    """The verdicts of the planned comparisons in plain sentences: counts only."""
    planned = [c for f in judged["families"] if f["planned"] for c in f["comparisons"]]
    setup = judged["setup"]
    scope = (
        f"Judged on {plural(setup['clusters'], 'test ' + setup['cluster'])} and "
        f"{plural(len(judged['checkpoints']), 'checkpoint')}, with exactly {plural(setup['calls'], 'call')} "
        f"in the {setup['scored']:,} scored positions of a block."
    )
    if not planned:
        return ["This study planned no comparison, so there is no verdict.", scope]
    return [_gains(planned), *_excluded(planned, setup["practical_threshold"]), scope]


def _gains(planned: list[ComparisonResult]) -> str:
    n, gains = len(planned), _count(planned, "gain")
    if n == 1:
        return f"The one planned comparison shows {'a gain' if gains else 'no gain'}."
    if gains == n:
        return f"{'Both' if n == 2 else 'All ' + _word(n)} planned comparisons show a gain."
    who = _word(gains).capitalize() if gains else "None"
    return f"{who} of the {_word(n)} planned comparisons {'show' if gains > 1 else 'shows'} a gain."


def _excluded(planned: list[ComparisonResult], threshold: float) -> list[str]:
    """For how many a gain of practical size is excluded, how many are losses, how many stay undecided."""
    small = [c for c in planned if c["simultaneous_high"] < threshold]
    size = f"a gain of {plain(threshold)} nats a token or more"
    if len(planned) == 1:
        sentences = [f"For it {size} is {'excluded' if small else 'not excluded'}."]
    elif small:
        which = "all" if len(small) == len(planned) else _word(len(small))
        sentences = [f"For {which} of them {size} is excluded."]
    else:
        sentences = [f"For none of them is {size} excluded."]
    if trifles := _count(small, "gain"):
        which = "The gain shown" if _count(planned, "gain") == 1 else f"Of the gains shown, {_word(trifles)}"
        sentences.append(f"{which} {_are(trifles)} among these, hence below practical size.")
    if losses := _count(planned, "loss"):
        what = "is a loss" if losses == 1 else "are losses"
        sentences.append(f"{_word(losses).capitalize()} {what}: the first router does worse than the second.")
    if undecided := _count(planned, "undecided"):
        who = f"{_word(undecided).capitalize()} {_are(undecided)} undecided"
        sentences.append(f"{who}: no gain is shown, nor one of that size excluded.")
    return sentences


def _count(comparisons: list[ComparisonResult], verdict: Verdict) -> int:
    return sum(c["verdict"] == verdict for c in comparisons)


def _word(count: int) -> str:
    """A count in words up to twelve."""
    return _WORDS[count] if count < len(_WORDS) else f"{count:,}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
