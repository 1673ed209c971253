"""Figures: inline, accessible, coloured by the page, small."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from lastcall.report import figures
from lastcall.report.canvas import PALETTE

from .fixture import judged


def every_figure(given: Any) -> dict[str, str]:
    checkpoint = given["checkpoints"][0]
    draw = (figures.utility_histogram, figures.utility_by_position, figures.calibration, figures.router_gains)
    drawn = {f.__name__: f(checkpoint) for f in draw}
    return drawn | {f["name"]: figures.forest(f, 0.005) for f in given["families"]}


DRAWN = every_figure(judged())


@pytest.mark.parametrize("svg", DRAWN.values(), ids=DRAWN)
def test_figures_are_inline_and_follow_the_page(svg: str) -> None:
    root = ET.fromstring(svg)
    assert root.tag == "svg"
    assert root.get("role") == "img"
    assert root.findtext("title")
    assert root.findtext("desc")
    assert root.findall(".//text"), "text stays text"
    assert not [colour for colour in PALETTE.values() if colour in svg]
    outside = re.sub(r"var\([^()]*\)", "", svg)
    assert not re.findall(r"(?:fill|stroke): ?#(?!000000)\w+", outside)
    assert "DejaVu" not in svg
    assert not re.search(r"\d\.\d{3,}[^<]*\"", "".join(re.findall(r'd="[^"]*"', svg)))


def test_no_identifier_is_shared_between_figures() -> None:
    seen: set[str] = set()
    for svg in DRAWN.values():
        own = set(re.findall(r'id="([^"]*)"', svg))
        assert set(re.findall(r'(?:href="|url\()#(\w+)', svg)) == own
        assert not own & seen
        seen |= own


def test_forest_says_every_comparison_and_marks_the_practical_size() -> None:
    family = judged()["families"][0]
    description = ET.fromstring(figures.forest(family, 0.005)).findtext("desc") or ""
    for comparison in family["comparisons"]:
        assert f"{comparison['a']} over {comparison['b']} on {comparison['checkpoint']}" in description
    assert "practical size is 0.005" in description
    assert "var(--band" in figures.forest(family, 0.005)


def test_calibration_prefers_j32_and_its_control_else_the_first_two() -> None:
    checkpoint: Any = judged()["checkpoints"][0]
    labels = [e.text for e in ET.fromstring(figures.calibration(checkpoint)).iter("text")]
    assert labels[-2:] == ["J32", "C_RP3"]
    del checkpoint["calibration"]["C_RP3"]
    labels = [e.text for e in ET.fromstring(figures.calibration(checkpoint)).iter("text")]
    assert labels[-2:] == ["B", "T"]
