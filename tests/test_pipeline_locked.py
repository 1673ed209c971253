"""What the lock guards, along the stages: what changed is refused and named, amended, or measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lastcall
from lastcall import judging, pipeline, sealing
from lastcall.errors import LockError, OutputError, StudyError
from lastcall.lock import read
from lastcall.workspace import Workspace
from tests.little import flip, write_study


def judge(root: Path) -> Any:
    return pipeline.judge(Workspace.open(root / "run"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def _threshold(root: Path) -> None:
    path = root / "run" / "fitted" / "llama" / "thresholds.json"
    thresholds = json.loads(path.read_text())
    thresholds["J32"]["1"] += 1e-9
    path.write_text(json.dumps(thresholds))


def _first_test_book(root: Path) -> str:
    return min(p.stem for p in (root / "run" / "routed" / "llama").iterdir())


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a book": (lambda root: flip(root / "books" / "3.txt", 20), "book 3 sha256 was .*, is "),
    "a weight": (
        lambda root: flip(root / "smollm3" / "model.safetensors"),
        "checkpoint smollm3 weights model.safetensors was .*, is ",
    ),
    "a config": (
        lambda root: edit(root / "llama" / "config.json", "1e-06", "2e-06"),
        "checkpoint llama weights config.json was ",
    ),
    "a threshold": (_threshold, "threshold llama J32 1 was "),
    "a fitted file": (
        lambda root: flip(root / "run" / "fitted" / "llama" / "S32-0.safetensors"),
        "fitted file fitted/llama/S32-0.safetensors was ",
    ),
    "the plan": (
        lambda root: edit(root / "run" / "study.toml", "draws = 200", "draws = 300"),
        "plan inference draws was 200, is 300",
    ),
    "a record": (
        lambda root: flip(
            root / "run" / "measured" / "llama" / "test" / f"{_first_test_book(root)}.parquet", 9
        ),
        r"test records changed after they were measured: got measured/llama/test/\d+.parquet",
    ),
    "a state": (
        lambda root: flip(
            root / "run" / "measured" / "llama" / "test" / f"{_first_test_book(root)}.safetensors"
        ),
        r"test records changed after they were measured: got measured/llama/test/\d+.safetensors",
    ),
    "a call": (
        lambda root: flip(root / "run" / "routed" / "llama" / f"{_first_test_book(root)}.parquet", 9),
        r"test records changed after they were measured: got routed/llama/\d+.parquet",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_judging_after_a_locked_thing_changed_is_refused_and_named(done: Path, what: str) -> None:
    change, message = CHANGES[what]
    change(done)
    before = (done / "run" / "judged.json").read_bytes()
    with pytest.raises(LockError, match=message):
        judge(done)
    assert (done / "run" / "judged.json").read_bytes() == before


@pytest.mark.parametrize("what", ["a book", "a weight", "a threshold", "a fitted file", "the plan"])
def test_measuring_the_test_split_after_a_locked_thing_changed_is_refused(done: Path, what: str) -> None:
    change, message = CHANGES[what]
    change(done)
    with pytest.raises(LockError, match=message):
        pipeline.measure(Workspace.open(done / "run"), ["test"])


def test_another_software_version_may_judge_with_a_warning_but_not_measure(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "__version__", "9.9.9")
    monkeypatch.setattr(sealing, "__version__", "9.9.9")
    judged = judge(done)
    assert judged["lock"]["warnings"] == [f"software version was {lastcall.__version__}, is 9.9.9"]
    with pytest.raises(LockError, match=r"software version was .*, is 9\.9\.9"):
        pipeline.measure(Workspace.open(done / "run"), ["test"])


def test_an_amendment_is_new_beside_the_old_and_shows_for_ever(done: Path) -> None:
    edit(done / "run" / "study.toml", "epochs = 2", "epochs = 3")
    ws = Workspace.open(done / "run")
    fitted = {p: p.read_bytes() for p in ws.run.fitted_files("llama")}
    for stage in (pipeline.fit, pipeline.lock, lambda ws: pipeline.measure(ws, ["fit"])):
        with pytest.raises(LockError, match="plan routers epochs was 2, is 3"):
            stage(ws)
    assert {p: p.read_bytes() for p in ws.run.fitted_files("llama")} == fitted
    pipeline.lock(ws, "three epochs after all")
    with pytest.raises(LockError, match="an amendment is open"):
        pipeline.measure(ws, ["test"])
    pipeline.fit(ws)
    pipeline.lock(ws)
    with pytest.raises(LockError, match="not measured under the current lock"):
        pipeline.judge(ws)
    with pytest.raises(LockError, match="judged under another lock"):
        pipeline.report(ws)
    pipeline.measure(ws, ["test"])
    judged = pipeline.judge(ws)
    pipeline.report(ws)
    first, second = read(ws.run.lock).locks
    assert "plan routers epochs was 2, is 3" in judged["lock"]["amendments"][0]["changed"]
    assert judged["lock"]["amendments"][0]["reason"] == "three epochs after all"
    assert [(m["lock"], m["files"], m["used"]) for m in judged["lock"]["test_measurements"]] == [
        (first["hash"], 24, False),
        (second["hash"], 24, True),
    ]
    assert "three epochs after all" in ws.run.report.read_text()


def test_an_amendment_needs_a_reason_and_a_lock(done: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="the reason to amend is empty"):
        pipeline.lock(Workspace.open(done / "run"), "  ")
    ws = Workspace.create(write_study(tmp_path / "new", {"llama": "llama"}), tmp_path / "run")
    pipeline.measure(ws, ["fit", "calibration"])
    pipeline.fit(ws)
    with pytest.raises(LockError, match="there is nothing to amend: no lock yet"):
        pipeline.lock(ws, "why not")


def test_moving_locked_test_books_to_fit_measures_nothing(done: Path) -> None:
    """Under a lock, no stage may write what the lock covers once the plan has changed."""
    edit(done / "run" / "study.toml", "fit = 6", "fit = 7")
    edit(done / "run" / "study.toml", "test = 4", "test = 3")
    before = sorted((done / "run" / "measured").rglob("*"))
    with pytest.raises(LockError, match="plan books counts fit was 6, is 7"):
        pipeline.measure(Workspace.open(done / "run"), ["fit"])
    assert sorted((done / "run" / "measured").rglob("*")) == before


def test_a_lost_ledger_is_not_made_anew(done: Path) -> None:
    (done / "run" / "lock.jsonl").unlink()
    with pytest.raises(LockError, match=r"the test split was measured here, but there is no lock\.jsonl"):
        pipeline.lock(Workspace.open(done / "run"))


def test_an_altered_ledger_is_refused(done: Path) -> None:
    path = done / "run" / "lock.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:1], *lines[2:]]))
    with pytest.raises(LockError, match="was altered at or before line 2"):
        judge(done)


def test_deleted_test_files_are_measured_again_and_counted(done: Path) -> None:
    same = (done / "run" / "judged.json").read_bytes()
    book = _first_test_book(done)
    (done / "run" / "routed" / "llama" / f"{book}.parquet").unlink()
    with pytest.raises(OutputError, match="is missing; run `lastcall measure` again"):
        judge(done)
    pipeline.measure(Workspace.open(done / "run"), ["test"])
    (row,) = judge(done)["lock"]["test_measurements"]
    assert (row["files"], row["repeated"]) == (24, 6)
    assert (done / "run" / "judged.json").read_bytes() != same


def test_a_renamed_checkpoint_is_a_broken_lock(done: Path) -> None:
    edit(done / "run" / "study.toml", 'name = "llama"', 'name = "lama"')
    with pytest.raises(LockError, match="plan checkpoints 1 name was llama, is lama"):
        judge(done)
