"""The secondary analyses in words and tables, for the page and the terminal; figures are drawn apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

from rich.table import Table

from lastcall.errors import OutputError
from lastcall.report import secondary_grids as grids
from lastcall.report.grid import Grid, terminal_tables
from lastcall.report.tables import comparisons_tables
from lastcall.results import Family
from lastcall.secondary import SCHEMA, Answers, Section


@final
@dataclass(frozen=True)
class Topic:
    """One section of the answers that is there, as the page shows it."""

    section: Section
    title: str
    prose: str
    grids: list[Grid]
    families: list[Family]
    """Judged anew; of the learners alone."""
    left_out: list[str]
    """Test books too short for the longer blocks."""


_TITLES: dict[Section, str] = {
    "costs": "What a bypassed call would save",
    "curves": "Gain at other budgets",
    "ceilings": "How far the ceilings can be trusted",
    "controllers": "Controllers that know no horizon",
    "horizon": "A longer horizon",
    "third_action": "A third action: the local call",
    "independence": "Is the trajectory independent of the utility, given the rest?",
    "learners": "Stronger learners on the same inputs",
}
"""Every section, in the order shown."""

_PROSE: dict[Section, str] = {
    "costs": "By count: nothing here is timed, and a count is not a speed. Operations are multiply-adds "
    "times two; bytes are the weights and the cached keys and values that a decode step would not read. Both "
    "are means over the positions of a block; shares are of the whole forward.",
    "curves": "Gain over never when more or fewer calls are allowed. Only the study’s own budget was locked, "
    "so other budgets are exploratory. At each budget a router’s threshold is cut anew from its calibration "
    "scores, and the deadline rule makes exactly that many calls in every block.",
    "ceilings": "The knowable ceiling takes the positions of largest KL between the full branch and the "
    "bypass: the utility that the full branch itself expects. It is the most a prefix can tell only if the "
    "full branch is calibrated. Agreement of mean utility with mean KL is needed for that and does not prove "
    "it. A correction by a positive scale changes no order, so what is realised stays the same. Ranking "
    "takes a block’s best scores, which needs the whole block; sign calls wherever a gain is predicted, "
    "without a budget. Fixed positions are the same in every block: the best of the fit split or, as a "
    "ceiling, of the test books themselves. No choice of positions gains more than the sign in hindsight.",
    "controllers": "The deadline rule knows where a block ends; these rules see the prefix alone. For every "
    "t, and whatever the scores, the calls up to t lie within the bounds shown, t counted in scored "
    "positions and rate being the budget’s share. They need not spend the budget exactly, so beside each "
    "gain stand the deadline rule’s and the oracle’s at the share that was really called.",
    "horizon": "Longer blocks of the test books, with the same routers and the same frozen thresholds. "
    "Forced is the rule with quota and deadline. Unforced is the rule score > threshold alone: it spends "
    "what it spends, so its loss is not at a matched budget and cannot be compared with a forced one, nor "
    "with that of another unforced router. What it tells is the share called, beside the share that the same "
    "rule calls in the core blocks of the same books.",
    "third_action": "A router may bypass, call locally or call in full, under one budget of cost. The last "
    "column is its gain over the same router that chooses between bypass and full alone at the same cost. "
    "Cost counts the keys a call reads, in the mean over the block; the projections, which both calls need, "
    "are not in it, so that in operations a local call saves much less than its cost here says.",
    "independence": "A test without any router: of what is left of the utility and of each trajectory "
    "feature once state, uncertainty, displacement and position are given, does one go with the other? Whole "
    "clusters are treated as independent, positions within them are not. z is positive where both go "
    "together; each p is two-sided and of one feature by itself.",
    "learners": "The planned comparisons judged anew, the network replaced by another learner of the same "
    "inputs, books, budget and deadline. Each learner is a family of its own, corrected by itself.",
}


def check_answers(answers: Any) -> None:
    """Raise OutputError where `answers` is not of the schema version this lastcall draws."""
    found = answers.get("schema") if isinstance(answers, dict) else None
    if found != SCHEMA:
        raise OutputError(
            "analyses.json has another schema",
            got=f"version {found}",
            todo=f"this lastcall draws version {SCHEMA}; answer again with it",
        )


def topics(answers: Answers) -> list[Topic]:
    """What is answered, in the order shown; a section without an entry is left out.

    Raises OutputError where `answers` is of an unknown schema version.
    """
    check_answers(answers)
    left_out = [book for of in answers.get("horizon", []) for book in of["left_out"]]
    return [
        Topic(
            section,
            title,
            _PROSE[section],
            _GRIDS[section](answers) if section in _GRIDS else [],
            answers.get("learners", []) if section == "learners" else [],
            list(dict.fromkeys(left_out)) if section == "horizon" else [],
        )
        for section, title in _TITLES.items()
        if cast(dict[str, Any], answers).get(section)
    ]


def secondary_tables(answers: Answers) -> list[Table]:
    """The secondary analyses in 80 columns, a table a checkpoint and question, each labelled secondary.

    Raises OutputError where `answers` is of an unknown schema version.
    """
    found = []
    for topic in topics(answers):
        found += [table for grid in topic.grids for table in terminal_tables(grid)]
        found += [table for family in topic.families for table in comparisons_tables(family)]
    return found


_GRIDS: dict[Section, Callable[[Answers], list[Grid]]] = {
    "costs": lambda a: [grids.costs(a["costs"])],
    "curves": lambda a: grids.curves(a["curves"]),
    "ceilings": lambda a: grids.ceilings(a["ceilings"]),
    "controllers": lambda a: [grids.controllers(a["controllers"])],
    "horizon": lambda a: [grids.horizon(a["horizon"])],
    "third_action": lambda a: [grids.third_action(a["third_action"])],
    "independence": lambda a: [grids.independence(a["independence"], a["alpha"])],
}
