"""The page: self-contained, complete, escaped, the same bytes each time."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from lastcall.errors import OutputError
from lastcall.report.page import render_page, write_page
from lastcall.report.wording import check_schema

from .fixture import FIXED, LEARNED, judged

GOLDEN = Path(__file__).parent / "golden" / "page.txt"
HOSTILE = '<script>alert("1")</script>&<b>$x_1$'


class _Text(HTMLParser):
    """What a reader reads: text by block, and figures by title and description, never their drawing."""

    BLOCKS = frozenset(("title", "h1", "h2", "h3", "p", "li", "tr", "dt", "dd", "figcaption", "desc"))

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        if tag in self.BLOCKS:
            self.lines.append("")
        elif tag in ("td", "th"):
            self.lines[-1] += " | "

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        while self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        drawing = "svg" in self.open and not {"title", "desc"} & set(self.open)
        if not drawing and "style" not in self.open:
            self.lines[-1] += data


def text_of(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    lines = (" ".join(line.split()).removeprefix("| ") for line in parser.lines)
    return "\n".join(line for line in lines if line) + "\n"


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(judged())


def test_page_reads_as_the_golden_file(page: str) -> None:
    if os.environ.get("LASTCALL_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(text_of(page), encoding="utf-8")
    assert text_of(page) == GOLDEN.read_text(encoding="utf-8"), "LASTCALL_UPDATE_GOLDEN=1 rewrites it"


def test_page_asks_the_network_for_nothing(page: str) -> None:
    assert "http:" not in page
    assert "https:" not in page
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)\b|@import|\bsrc=", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert "default-src 'none'" in page


def test_every_verdict_router_and_reservation_appears(page: str) -> None:
    shown, given = text_of(page), judged()
    for family in given["families"]:
        assert family["name"] in shown or family["planned"]
        assert {c["verdict"] for c in family["comparisons"]} <= set(re.findall("|".join(VERDICTS), shown))
    for name in (*LEARNED, *FIXED, "never", "always", "knowable", "oracle"):
        assert f"\n{name} " in shown
    lock = given["lock"]
    for sentence in (
        given["claim"],
        *given["setup"]["warnings"],
        *lock["warnings"],
        *lock["verified"],
        *lock["unverified"],
        *given["left_out"],
        lock["amendments"][0]["reason"],
        "Secondary, outside the planned family",
        "not a matched budget",
        "not used",
    ):
        assert sentence in shown


VERDICTS = ("no gain of practical size", "undecided", "gain", "loss")


def test_light_dark_print_and_narrow_are_styled(page: str) -> None:
    assert "(prefers-color-scheme: dark)" in page
    assert "@media print" in page
    assert "@media (max-width: 40rem)" in page
    assert 'content="light dark"' in page
    variables = set(re.findall(r"var\((--\w+)", page))
    assert variables <= set(re.findall(r"(--\w+):", page))


def test_names_are_escaped_everywhere() -> None:
    hostile: Any = judged()
    for key in ("study", "question", "claim", "software"):
        hostile[key] = HOSTILE
    hostile["left_out"] = hostile["setup"]["warnings"] = [HOSTILE]
    hostile["provenance"][0]["facts"] = {HOSTILE: HOSTILE}
    checkpoint = hostile["checkpoints"][0]
    checkpoint["name"] = hostile["families"][1]["name"] = HOSTILE
    checkpoint["routers"][3]["name"] = HOSTILE
    checkpoint["calibration"] = {HOSTILE: checkpoint["calibration"]["J32"]}
    for comparison in hostile["families"][0]["comparisons"]:
        comparison["checkpoint"] = comparison["a"] = HOSTILE
    page = render_page(hostile)
    assert "<script" not in page
    assert "&<b>" not in page
    assert page.count("&lt;script&gt;") > 20


def test_bytes_are_the_same_in_another_process_without_torch(page: str) -> None:
    code = (
        "import sys, hashlib; from report.fixture import judged; from lastcall.report import page;"
        "print(hashlib.sha256(page.render_page(judged()).encode()).hexdigest(), 'torch' in sys.modules)"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": paths}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [hashlib.sha256(page.encode()).hexdigest(), "False"]


def test_a_readers_own_matplotlib_settings_neither_leak_in_nor_change(page: str) -> None:
    with matplotlib.rc_context({"font.size": 31, "axes.grid": False}):
        before = dict(matplotlib.rcParams)
        assert render_page(judged()) == page
        assert dict(matplotlib.rcParams) == before


def test_a_bare_judged_still_makes_a_page() -> None:
    bare: Any = judged()
    bare.update(families=[], claim="", left_out=[], provenance=[])
    bare["lock"] = {**bare["lock"], "amendments": [], "warnings": [], "verified": [], "test_measurements": []}
    bare["setup"]["warnings"] = []
    for checkpoint in bare["checkpoints"]:
        checkpoint["calibration"] = checkpoint["local_recovery"] = {}
        for router in checkpoint["routers"]:
            router.update(oracle_share=None, knowable_share=None, unforced=None)
            router["gain"] = {"estimate": 0.0, "low": 0.0, "high": 0.0}
    shown = text_of(render_page(bare))
    assert "planned no comparison" in shown
    assert "Local recovery is not given" in shown
    for absent in ("amended", "Warnings", "may and may not", "Secondary"):
        assert absent not in shown


@pytest.mark.parametrize("schema", [0, 2])
def test_another_schema_is_refused_in_one_line(schema: int, tmp_path: Path) -> None:
    found: Any = {**judged(), "schema": schema}
    with pytest.raises(OutputError, match=r"another schema: got version .*draws version 1") as caught:
        write_page(found, tmp_path / "report.html")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_write_page_leaves_one_file(tmp_path: Path, page: str) -> None:
    write_page(judged(), tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_text(encoding="utf-8") == page
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["report.html"]


def test_what_is_no_object_at_all_is_another_schema() -> None:
    with pytest.raises(OutputError, match="another schema: got version None"):
        check_schema([])
