"""The README's examples, run as they stand on little books and a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lastcall.study_file import read_study
from tests.little import write_books
from tests.tiny import save

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def example(name: str) -> str:
    """The code block after the comment that names it."""
    found = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", README, flags=re.DOTALL)
    assert found, name
    return found[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, books and the README's study file, its sizes made little."""
    save("llama", tmp_path / "path" / "or" / "hub-id")
    write_books(tmp_path / "books")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_study_is_the_protocols(here: Path) -> None:
    (here / "mine.toml").write_text(example("study"))
    study = read_study("mine.toml")
    assert study.books.path == here / "books"
    assert study.checkpoints[0].model == str(here / "path" / "or" / "hub-id")
    assert (study.blocks.tokens, study.blocks.scored, study.calls) == (513, 495, 99)
    assert len(example("study").strip().splitlines()) == 3  # and the command: four lines


def test_the_api_runs_a_study(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = example("study").replace(
        "fit = 30, calibration = 10, test = 30", "fit = 6, calibration = 2, test = 4"
    )
    text = text.replace('hub-id" }', 'hub-id", tokenizer = "bytes" }')
    sizes = "blocks = { horizon = 40, context = 5 }\nrouters = { epochs = 1 }\ninference = { draws = 200 }\n"
    (here / "mine.toml").write_text(text + sizes)
    exec(example("api"), {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in printed] == [
        ["my-model", "T", "over", "B"],
        ["my-model", "J32", "over", "S32"],
        ["my-model", "J32", "over", "C_RP3"],
    ]
    assert (here / "runs" / "mine" / "report.html").is_file()


def test_the_paired_intervention_by_itself(here: Path) -> None:
    text = example("paired").replace('hub-id"', 'hub-id", tokenizer="bytes"')
    names: dict[str, object] = {}
    exec(text, names)
    assert names["utility"].shape == (len("When in the course of human events it becomes") - 1,)  # type: ignore[attr-defined]
    assert names["utility"].abs().max() > 1e-3  # type: ignore[attr-defined]


def test_the_further_questions_are_a_study_files(here: Path) -> None:
    (here / "mine.toml").write_text(example("study") + example("analyses"))
    asked = read_study("mine.toml").analyses
    assert all(getattr(asked, field) for field in type(asked).model_fields)
