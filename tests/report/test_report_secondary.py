"""Secondary analyses: labelled, complete, escaped, on the page and in 80 columns; nothing without answers."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest

from lastcall.errors import OutputError
from lastcall.report import secondary_figures
from lastcall.report.canvas import PALETTE
from lastcall.report.grid import magnitude
from lastcall.report.page import render_page, write_page
from lastcall.report.secondary import secondary_tables, topics
from lastcall.report.secondary_grids import independence_said
from lastcall.secondary import Section

from .fixture import LEARNED, judged
from .fixture_secondary import FIRST, SECOND, UNFORCED, answers, oracle
from .test_report_page import HOSTILE, text_of
from .test_report_tables import shown

SECTIONS = get_args(Section)
UNMATCHED = "not a matched budget"


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(judged(), answers())


def of_section(page: str, section: Section) -> str:
    """The text of one section of the page."""
    start = page.index(f'id="secondary-{section.replace("_", "-")}"')
    return text_of("<section " + page[start : page.index("</section>", start)] + "</section>")


def terminal(given: Any, width: int = 80) -> str:
    return "\n".join(line for table in secondary_tables(given) for line in shown(table, width))


def test_every_section_is_shown_under_its_label(page: str) -> None:
    assert {topic.section for topic in topics(answers())} == set(SECTIONS)
    text = text_of(page)
    order = ("Planned comparisons", "Routers under the quota", "Secondary analyses", "Provenance")
    places = [text.index(f"\n{heading}\n") for heading in order]
    assert places == sorted(places)
    assert text.count("Secondary, outside the planned family.") == 2
    for topic in topics(answers()):
        assert f"{topic.title} secondary\n" in text
        assert topic.prose in text


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_that_is_not_answered_is_not_shown(section: Section) -> None:
    """Each by itself: what is there stands alone, what is not leaves nothing behind."""
    given: Any = answers()
    alone: Any = {key: value for key, value in given.items() if key == section or key not in SECTIONS}
    found = re.findall(r'id="secondary-([\w-]+)"', render_page(judged(), alone))
    assert found == ["analyses", section.replace("_", "-")]
    assert secondary_tables(alone)
    without: Any = {key: value for key, value in given.items() if key != section}
    assert f'id="secondary-{section.replace("_", "-")}"' not in render_page(judged(), without)
    assert len(secondary_tables(without)) == len(secondary_tables(given)) - len(secondary_tables(alone))


def test_without_answers_the_page_holds_none_of_it(tmp_path: Path, page: str) -> None:
    bare = render_page(judged())
    assert "Secondary analyses" not in bare
    assert ".topic" not in bare
    outside = re.sub(
        r'<section id="secondary-analyses">.*?(?=\n<section id="provenance">)', "", page, flags=re.S
    )
    styles = re.search(r"\.topic \{.*?(?=</style>)", outside, flags=re.S)
    assert styles is not None
    assert outside.replace(styles[0], "").split() == bare.split(), "the rest of the page is left as it was"
    write_page(judged(), tmp_path / "report.html", answers())
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page


def test_unforced_figures_stand_under_the_statement_that_no_budget_is_matched(page: str) -> None:
    text = of_section(page, "horizon")
    assert f"| unforced: {UNMATCHED}" in text
    for caption in [line for line in text.splitlines() if "share of positions that the unforced" in line]:
        assert "not at a matched budget" in caption
    given = answers()
    for h in given["horizon"]:
        activation = UNFORCED[h["checkpoint"]]
        assert f"| {100 * activation:.1f}% [" in text
        assert f"{h['calls']:,} calls" in text
        assert f"{100 * h['overlap']:.1f}% of the scored predictions" in text
        for left_out in h["left_out"]:
            assert left_out in text
    tables = [t for t in secondary_tables(given) if "longer horizon" in str(t.title)]
    headings = [str(c.header) for t in tables for c in t.columns if "unforced" in str(c.header)]
    assert len(headings) == 3 * len(given["horizon"])
    assert all("budget not\nmatched" in h or "core\nhorizon" in h for h in headings)


def test_costs_say_that_nothing_is_timed(page: str) -> None:
    text = of_section(page, "costs")
    assert "nothing here is timed" in text
    assert f"{FIRST} | attention | 18.9 M | 0.31% | 17.3 MB | 0.29%" in text
    assert "nothing here is timed" in terminal({**answers()})


def test_curves_are_tabled_at_a_few_budgets_and_drawn_at_all(page: str) -> None:
    text = of_section(page, "curves")
    assert (
        "router | 1.0%, 5 calls | 5.1%, 25 calls | 10.1%, 50 calls | 20.0%, 99 calls | 48.1%, 238 calls"
        in text
    )
    j32 = next(line for line in text.splitlines() if line.startswith("J32 | "))
    assert j32.split(" | ")[4].startswith("43.3% [")
    assert "exploratory" in text
    few: Any = answers()
    for curve in few["curves"].values():
        keep = [0, 19, -1]
        for key in ("calls", "chance", "knowable", "oracle"):
            curve[key] = [curve[key][i] for i in keep]
        curve["routers"] = {name: [of[i] for i in keep] for name, of in curve["routers"].items()}
    assert "router | 1.0%, 5 calls | 20.0%, 99 calls | 100.0%, 495 calls" in of_section(
        render_page(judged(), few), "curves"
    )


def test_a_share_of_no_ceiling_is_a_dash() -> None:
    given: Any = answers()
    given["curves"][FIRST]["routers"]["J32"][4]["oracle_share"] = None
    text = of_section(render_page(judged(), given), "curves")
    assert next(line for line in text.splitlines() if line.startswith("J32")).split(" | ")[2] == "–"


def test_ceilings_stand_claimed_corrected_realised_and_ranking_against_sign(page: str) -> None:
    text = of_section(page, "ceilings")
    for row in (
        "claimed | +0.06308 [",
        "corrected | +0.05639 [",
        "realised | +0.05654 [",
        "chance | 20.0% | +0.00760 [0.00684, 0.00844] | – | –",
        "sign, in hindsight ceiling | – | – | 48.0% | +0.11020 [",
        "knowable ceiling | 20.0% | +0.05654 [",
    ):
        assert f"\n{row}" in text
    given: Any = answers()
    for of in given["ceilings"].values():
        of["allocations"]["fixed_fit"] = None
    assert "\nfixed positions |" in text
    assert "\nfixed positions |" not in of_section(render_page(judged(), given), "ceilings")


def test_a_controllers_guarantee_is_in_calls_and_its_peers_at_its_own_share(page: str) -> None:
    text = of_section(page, "controllers")
    rows = [line for line in text.splitlines() if line.startswith("integral | J32")]
    assert len(rows) == 2
    assert rows[0].startswith("integral | J32 | rate·t ± 6.6 | 19.9% | +0.03788 [")
    assert "at the share really called" in text


def test_learners_are_families_of_their_own_with_verdicts(page: str) -> None:
    text = of_section(page, "learners")
    assert " learner: trees (secondary)\n" in text
    assert text.count("J32 over C_RP3 | ▼ loss") == 4
    assert "learner: ridge (secondary, outside the planned family): birch-4b-base" in terminal(answers())


def test_independence_says_what_it_does_and_does_not_show() -> None:
    calm, loud = answers()["independence"]
    said = independence_said(calm, 0.05)
    assert said.startswith("Together p = 0.8474: nothing is shown to be left")
    assert "no proof of independence" in said
    said = independence_said(loud, 0.05)
    assert said.startswith("Together p = 0.0001: something between utility and trajectory is left")
    assert "does not say how much there is to gain" in said
    at_alpha: Any = {**loud, "p_together": 0.05}
    assert "something" in independence_said(at_alpha, 0.05)
    assert independence_said({**at_alpha, "p_together": 1e-6}, 0.05).startswith("Together p <0.0001:")


def test_third_action_shows_what_is_spent_and_what_may_be(page: str) -> None:
    text = of_section(page, "third_action")
    assert "J32 | 12.1% | 39.2% | 0.1990 | 2.4666 [" in text
    assert "a local one of 32 positions 0.199 (keys read); 0.200 a position may be spent" in text
    assert "oracle ceiling | – | – | – | – | +0.10260" in text


@pytest.mark.parametrize("width", [80, 100])
def test_the_terminal_keeps_every_figure_in_its_columns(width: int) -> None:
    given = answers()
    text = terminal(given, width)
    for name in LEARNED:
        expected = 10 if name in ("J32", "S32", "B") else 8  # of these three also a third action
        assert len(re.findall(rf"^{name} (?!over)", text, flags=re.M)) == expected
    for table in secondary_tables(given):
        assert "secondary" in str(table.title)
    for found in (FIRST, SECOND):
        assert f"(secondary): {found}" in text.replace("\n", " ")


def test_awkward_figures_still_fit_80_columns() -> None:
    given: Any = answers()
    wide = {"estimate": -0.12345, "low": -0.23456, "high": -0.01234}
    for h in given["horizon"]:
        h["overlap"] = 1.0
        for r in h["routers"]:
            r["forced_gain"], r["forced"] = wide, {"estimate": 12.0, "low": 11.5, "high": 12.5}
            r["activation"] = r["activation_core"] = {"estimate": 1.0, "low": 1.0, "high": 1.0}
    for t in given["third_action"]:
        for r in t["routers"]:
            r.update(gain=wide, over_two=wide, full=1.0)
    for results in given["controllers"].values():
        for c in results:
            c.update(slack=16.333333, called=1.0, gain=wide, deadline_gain=wide, oracle_gain=wide)
    text = terminal(given)
    assert "rate·t ± 16.33" in text
    assert "[100.0%, 100.0%]" in text


def test_names_are_escaped_and_markup_is_not_read() -> None:
    given: Any = answers()
    for section in ("costs", "horizon", "independence", "third_action"):
        given[section][0]["checkpoint"] = HOSTILE
    for section in ("curves", "ceilings", "controllers"):
        given[section] = {HOSTILE: given[section][FIRST], **given[section]}
    given["horizon"][0]["left_out"] = [HOSTILE]
    given["learners"][0]["name"] = given["independence"][0]["features"][0]["name"] = HOSTILE
    page = render_page(judged(), given)
    assert "<script" not in page
    assert "&<b>" not in page
    given["horizon"][0]["checkpoint"] = given["horizon"][0]["routers"][0]["name"] = "[red]x[/red]"
    assert terminal(given).count("[red]x[/red]") >= 1


@pytest.mark.parametrize("schema", [0, 2, None])
def test_another_schema_is_refused_in_one_line(schema: int | None, tmp_path: Path) -> None:
    found: Any = {"schema": schema}
    for draw in (secondary_tables, lambda a: write_page(judged(), tmp_path / "report.html", a)):
        with pytest.raises(OutputError, match=r"analyses.json has another schema: got version") as caught:
            draw(found)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.00 k"),
        (1234, "1.23 k"),
        (12_600_000, "12.6 M"),
        (3.456e11, "346 G"),
    ],
)
def test_magnitudes_keep_three_digits(value: float, words: str) -> None:
    assert magnitude(value) == words


def test_the_invented_figures_agree_with_those_of_the_planned_page() -> None:
    """Else the page under test would contradict itself."""
    given = answers()
    for checkpoint in judged()["checkpoints"]:
        curve, full = given["curves"][checkpoint["name"]], checkpoint["gain_full"]["estimate"]
        at = curve["calls"].index(99)
        gains = {r["name"]: r["gain"]["estimate"] for r in checkpoint["routers"]}
        for name, points in curve["routers"].items():
            assert points[at]["gain"]["estimate"] == pytest.approx(gains[name], rel=1e-3)
            assert points[-1]["gain"]["estimate"] == pytest.approx(full)
        assert oracle(full, 0.2) == pytest.approx(gains["oracle"], rel=1e-3)


DRAWN = [
    (section, drawn)
    for section, found in secondary_figures.figures_of(answers(), judged()["setup"]).items()
    for drawn in found
]


@pytest.mark.parametrize(("section", "drawn"), DRAWN)
def test_figures_are_inline_and_follow_the_page(section: str, drawn: secondary_figures.Drawn) -> None:
    root = ET.fromstring(drawn.svg)
    assert root.findtext("title")
    assert root.findtext("desc")
    assert not [colour for colour in PALETTE.values() if colour in drawn.svg]
    assert not re.findall(r"(?:fill|stroke): ?#(?!000000)\w+", re.sub(r"var\([^()]*\)", "", drawn.svg))
    assert drawn.caption.startswith((FIRST, SECOND))


def test_there_is_a_figure_a_checkpoint_and_no_identifier_is_shared(page: str) -> None:
    assert [section for section, _ in DRAWN] == ["curves"] * 2 + ["ceilings"] * 2 + ["horizon"] * 2
    found = [set(re.findall(r'id="([^"]*)"', drawn.svg)) for _, drawn in DRAWN]
    assert sum(map(len, found)) == len(set().union(*found))
    assert len(re.findall(r' id="([^"]*)"', page)) == len(set(re.findall(r' id="([^"]*)"', page)))


def test_drift_draws_bands_of_the_leading_routers_and_says_every_routers_ends() -> None:
    of = answers()["horizon"][0]
    drawn = secondary_figures._drift(of, "95%")
    root = ET.fromstring(drawn.svg)
    words = [e.text for e in root.iter("text")]
    for name in ("J32", "C_RP3", "I_J32", "other routers"):
        assert name in words
    assert drawn.svg.count("fill-opacity: 0.18") == 3
    for name in LEARNED:
        assert f"{name}: " in (root.findtext("desc") or "")
    of["routers"] = [r for r in of["routers"] if r["name"] in ("B", "T")]
    few = secondary_figures._drift(of, "95%")
    assert "other routers" not in few.svg + few.caption
    assert few.svg.count("fill-opacity: 0.18") == 2


def test_curves_name_the_groups_and_both_ceilings() -> None:
    curve = answers()["curves"][FIRST]
    words = [e.text for e in ET.fromstring(secondary_figures._curves(FIRST, curve, 0.2).svg).iter("text")]
    for name in ("reads the bypass state", "reads the incoming state", "learns no weights", "chance"):
        assert words.count(name) == 1
    assert {"oracle", "knowable", "1%", "20%", "100%"} <= set(words)
    assert all(a < b for a, b in pairwise(curve["calls"]))
