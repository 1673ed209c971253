"""A whole little study with a published one beside it: from the study file to the page and the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lastcall
from lastcall.errors import LockError
from lastcall.printing import print_judged
from lastcall.workspace import Workspace
from tests.little import write_study

PUBLISHED = {
    "source": "A little published study.",
    "design": {"test_books": 100, "calls": 7},
    "figures": [
        {"what": "planned_comparisons", "value": 6},
        {"checkpoint": "llama", "what": "gain_full", "value": 0.5},
        {"checkpoint": "llama", "what": "unforced_activation:J32", "value": 0.2},
        {"checkpoint": "llama", "what": "speed_ratio:J32@4096", "value": 1.04, "low": 1.0, "high": 1.1},
    ],
    "unmeasured": ["It was timed."],
    "differences": ["It was larger."],
}


def test_the_figures_stand_beside_ours_on_the_page_and_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path, {"llama": "llama"}, published=PUBLISHED)
    judged = lastcall.run(study, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "judged.json").read_text())["published"] == judged["published"]
    assert str(tmp_path) not in str(judged["published"])
    count, gain, unforced, speed = judged["published"]["figures"]
    assert (count["ours"], count["agrees"]) == (3, False)
    assert gain["ours"] == judged["checkpoints"][0]["gain_full"]["estimate"]
    (j32,) = (r for r in judged["checkpoints"][0]["routers"] if r["name"] == "J32")
    assert j32["unforced"] is not None
    assert unforced["ours"] == pytest.approx(j32["unforced"]["activation"])
    assert speed["unmeasured"] == "judging executes no policy"
    print_judged("judge", Workspace.open(tmp_path / "run"), judged)
    terminal = " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "run" / "report.html").read_text()
    weights = judged["provenance"][0]["facts"]["weights hash"]
    for text in (terminal, page):
        for said in ("It was timed.", "It was larger.", "Test books: 4 here, 100 there.", weights):
            assert said in text
        assert "Calls a block" not in text
        assert "not measured here" in text


def test_the_figures_are_locked(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"}, published=PUBLISHED)
    lastcall.run(study, tmp_path / "run")
    file = tmp_path / "run" / "study.toml"
    file.write_text(file.read_text().replace("value = 0.5", "value = 0.01"))
    with pytest.raises(LockError, match="the lock is broken: got plan published figures"):
        lastcall.run(file, tmp_path / "run")
