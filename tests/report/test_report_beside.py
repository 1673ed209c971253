"""Published figures beside ours: every row, every difference, nothing where there is no published study."""

from __future__ import annotations

from typing import Any

import pytest

from lastcall.report import beside
from lastcall.report.page import render_page
from lastcall.report.tables import published_tables

from .fixture import judged, judged_beside
from .test_report_page import HOSTILE, text_of
from .test_report_tables import shown


def rows() -> dict[str, beside.Row]:
    return {row.name: row for _, group in beside.groups(judged_beside()) for row in group}


def test_figures_are_grouped_by_checkpoint_in_order() -> None:
    found = [(name, len(group)) for name, group in beside.groups(judged_beside())]
    assert found == [("all checkpoints", 3), ("alder-3b-base", 5), ("birch-4b-base", 4)]


def row(*cells: str) -> beside.Row:
    return beside.Row(*cells)


ROWS = [
    row("planned comparisons", "6", "", "6", "", "0", "same", ""),
    row("of these, judged a gain", "0", "", "1", "", "+1", "not the same", ""),
    row("largest simultaneous upper bound", "< 0.005", "", "0.00672", "", "–", "not kept", ""),
    row(
        "NLL gain of full over bypass",
        "0.0381",
        "",
        "0.03800",
        "[0.03600, 0.04020]",
        "−0.00010",
        "inside",
        "",
    ),
    row(
        "positions of positive utility",
        "48.04%",
        "",
        "49.12%",
        "[48.52%, 49.78%]",
        "+1.08 pp",
        "outside",
        "",
    ),
    row("local 32 recovers", "54.8%", "", "55.00%", "[52.00%, 58.30%]", "+0.20 pp", "inside", ""),
    row(
        "Δ(C_RP3 over J32)",
        "+0.00356",
        "[0.00320, 0.00392]",
        "+0.00360",
        "[0.00230, 0.00503]",
        "+0.00004",
        "inside",
        "",
    ),
    row(
        "I_S35 speed ratio, horizon 4,096",
        "1.043",
        "[0.939, 1.147]",
        "not measured here",
        "",
        "–",
        "–",
        "the horizon here is 512",
    ),
]


@pytest.mark.parametrize("expected", ROWS, ids=[r.name for r in ROWS])
def test_a_row_in_words(expected: beside.Row) -> None:
    assert rows()[expected.name] == expected


def test_a_small_negative_published_figure_is_written_out() -> None:
    assert rows()["Δ(J32 over S32)"].published == "−0.00004"


def test_a_kept_bound_is_said_to_be() -> None:
    given = judged_beside()
    given["published"]["figures"][2]["agrees"] = True
    assert beside.groups(given)[0][1][2].agreement == "kept"


def test_the_page_shows_every_figure_and_every_difference() -> None:
    given = judged_beside()
    text = text_of(render_page(given))
    section = text[text.index("Beside the published figures") : text.index("NLL, full")]
    for found in rows().values():
        assert found.name in section
        assert found.published in section
        assert (found.why or found.ours_interval or found.ours) in section
    for sentence in (*given["published"]["unmeasured"], *given["published"]["differences"]):
        assert sentence in section
    assert section.splitlines()[-2:] == [beside.OUR_READING, "alder-3b-base"]


def test_a_study_without_one_shows_none_of_it() -> None:
    assert beside.groups(judged()) == beside.differences(judged()) == published_tables(judged()) == []
    assert "published figures" not in render_page(judged())


@pytest.mark.parametrize("width", [80, 100])
def test_the_terminal_keeps_every_column(width: int) -> None:
    tables = published_tables(judged_beside())
    assert len(tables) == 3
    text = "\n".join(line for table in tables for line in shown(table, width))
    for found in rows().values():
        for part in (found.published, found.published_interval, found.ours, found.ours_interval):
            assert part in text
        assert found.name.split()[0] in text
    assert text.count("not measured here") == 3


def test_its_names_and_sentences_are_escaped() -> None:
    hostile: Any = judged_beside()
    before = render_page(hostile).count("&lt;script&gt;")
    hostile["published"].update(source=HOSTILE, unmeasured=[HOSTILE], differences=[HOSTILE])
    hostile["published"]["figures"][3].update(checkpoint=HOSTILE, unmeasured=HOSTILE)
    page = render_page(hostile)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == before + 5
