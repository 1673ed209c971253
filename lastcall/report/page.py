"""The page: one self-contained HTML file that asks the network for nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from lastcall import records
from lastcall.report import beside, figures, secondary, secondary_figures, wording
from lastcall.results import CheckpointResult, Judged
from lastcall.secondary import Answers


class _Figure(TypedDict):
    svg: Markup
    caption: str


def write_page(judged: Judged, path: Path, answers: Answers | None = None) -> None:
    """Write the report of `judged` to `path`, as one atomic step, with the secondary `answers` where given.

    Raises OutputError where either is of an unknown schema version or the disk refuses.
    """
    records.write_text(path, render_page(judged, answers))


def render_page(judged: Judged, answers: Answers | None = None) -> str:
    """The report as HTML: the same bytes for the same `judged` and `answers`."""
    wording.check_schema(judged)
    threshold = judged["setup"]["practical_threshold"]
    return _template().render(
        judged=judged,
        setup=judged["setup"],
        lock=judged["lock"],
        answer=wording.answer(judged),
        level=wording.percent(1 - judged["setup"]["alpha"], 0),
        planned=[f for f in judged["families"] if f["planned"]],
        secondary=[f for f in judged["families"] if not f["planned"]],
        published=judged.get("published"),
        published_groups=beside.groups(judged),
        published_differences=beside.differences(judged),
        forests={f["name"]: Markup(figures.forest(f, threshold)) for f in judged["families"]},
        figures={c["name"]: _figures(c) for c in judged["checkpoints"]},
        answers=answers,
        **({} if answers is None else _secondary(judged, answers)),
    )


def _secondary(judged: Judged, answers: Answers) -> dict[str, Any]:
    """What secondary.html needs beside `answers`."""
    topics = secondary.topics(answers)
    threshold = answers["practical_threshold"]
    forests = [Markup(figures.forest(f, threshold)) for f in answers.get("learners", [])]
    drawn = secondary_figures.figures_of(answers, judged["setup"])
    return {
        "answers_level": wording.percent(1 - answers["alpha"], 0),
        "topics": topics,
        "learner_forests": forests,
        "secondary_figures": {
            section: [_Figure(svg=Markup(one.svg), caption=one.caption) for one in found]
            for section, found in drawn.items()
        },
    }


def _figures(checkpoint: CheckpointResult) -> list[_Figure]:
    """A checkpoint's figures with their captions."""
    drawn = (
        (
            figures.utility_histogram(checkpoint),
            "How much a call is worth: the utility of each scored test position. "
            "A call helps right of zero and harms left of it.",
        ),
        (
            figures.utility_by_position(checkpoint),
            "Mean utility along the block, with plain intervals. Dashed: the mean over all positions.",
        ),
        (
            figures.router_gains(checkpoint),
            "What each policy gains over never calling, with plain intervals. Circles are learned, squares "
            "are not, the diamond calls everywhere; the vertical lines are ceilings, not routers.",
        ),
        (
            figures.calibration(checkpoint),
            "Predicted against realised utility in tenths of the positions by prediction, seeds pooled. On "
            "the dashed line a prediction holds; the farther apart the points, the more the router can tell.",
        ),
    )
    return [{"svg": Markup(svg), "caption": caption} for svg, caption in drawn]


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("lastcall.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "by_checkpoint": wording.by_checkpoint,
        "bracket": wording.bracket,
        "number": wording.number,
        "p_value": wording.p_value,
        "percent": wording.percent,
        "percent_bracket": wording.percent_bracket,
        "plain": wording.plain,
        "plural": wording.plural,
        "signed": wording.signed,
    }
    environment.globals |= {"calls": wording.calls, "looks": wording.LOOKS, "title": wording.title}
    return environment.get_template("page.html")
