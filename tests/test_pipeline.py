"""The stages together: end to end, resumed, locked, amended, judged elsewhere."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

import lastcall
from lastcall import pipeline
from lastcall.errors import BookError, LockError, NonFiniteError, OutputError
from lastcall.workspace import Workspace
from tests.little import flip, write_books, write_study

TWO = {"llama": "llama", "smollm3": "smollm3"}


def judge(root: Path) -> Any:
    return pipeline.judge(Workspace.open(root / "run"))


def test_a_study_of_two_checkpoints_gives_one_family_of_six(finished: Path) -> None:
    judged = json.loads((finished / "run" / "judged.json").read_text())
    planned = judged["families"][0]
    assert planned["planned"]
    assert [(c["checkpoint"], c["a"], c["b"]) for c in planned["comparisons"]] == [
        (name, a, b) for name in TWO for a, b in (("T", "B"), ("J32", "S32"), ("J32", "C_RP3"))
    ]
    assert judged["setup"]["calls"] == 7
    assert {(r["calls_min"], r["calls_max"]) for c in judged["checkpoints"] for r in c["routers"][2:]} == {
        (7, 7)
    }
    assert "4 test clusters" in judged["setup"]["warnings"][0]
    assert "no gain" in (finished / "run" / "report.html").read_text()


def test_the_replayed_loss_is_the_sum_over_the_branches(finished: Path) -> None:
    """Section 2: ℓ1 where called, ℓ0 elsewhere, from the files alone."""
    run = finished / "run"
    judged = json.loads((run / "judged.json").read_text())
    found = {r["name"]: r["nll"]["estimate"] for r in judged["checkpoints"][0]["routers"]}
    losses: dict[str, list[float]] = {"J32": [], "random": [], "always": []}
    for path in sorted((run / "measured" / "llama" / "test").glob("*.parquet")):
        rows = pq.read_table(path).to_pandas().query("scored").set_index(["block", "position"])
        rows = rows.astype({"loss_full": float, "loss_bypass": float})
        routed = pq.read_table(run / "routed" / "llama" / path.name).to_pandas()
        losses["always"].append(rows.loss_full.mean())
        for name in ("J32", "random"):
            for _, own in routed[routed.router == name].groupby("seed"):
                called = own.set_index(["block", "position"]).call.reindex(rows.index)
                losses[name].append(np.where(called, rows.loss_full, rows.loss_bypass).mean())
    for name, values in losses.items():
        assert found[name] == pytest.approx(np.mean(values), abs=1e-7)


def test_a_finished_run_does_nothing_again(done: Path) -> None:
    run = done / "run"
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    bytes_before = (run / "judged.json").read_bytes()
    lastcall.run(done / "study.toml", run)
    written = {p.name for p, at in before.items() if p.stat().st_mtime_ns != at}
    assert written <= {"judged.json", "report.html", ".held", ".turn", "study.toml"}
    assert (run / "judged.json").read_bytes() == bytes_before


def test_the_same_study_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    lastcall.run(finished / "study.toml", tmp_path / "again")
    files = [p.relative_to(finished / "run") for p in (finished / "run").rglob("*") if p.is_file()]
    assert len(files) > 60
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (finished / "run" / file).read_bytes(), file


@pytest.mark.parametrize("seconds", [0.8, 1.6, 2.4, 3.2])
def test_a_killed_run_resumes_to_the_same_bytes(finished: Path, tmp_path: Path, seconds: float) -> None:
    """SIGKILL at a moment of the run, then the same command."""
    code = "import sys, lastcall; lastcall.run(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", code, str(finished / "study.toml"), str(tmp_path / "run")]
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "measured").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    lastcall.run(finished / "study.toml", tmp_path / "run")
    for file in ("judged.json", "lock.jsonl", "report.html"):
        assert (tmp_path / "run" / file).read_bytes() == (finished / "run" / file).read_bytes()
    assert not list((tmp_path / "run").rglob("*.part"))


def test_the_test_split_is_refused_without_a_lock(tmp_path: Path) -> None:
    ws = Workspace.create(write_study(tmp_path, {"llama": "llama"}), tmp_path / "run")
    with pytest.raises(LockError, match="there is no lock; run `lastcall lock` before the test split"):
        pipeline.measure(ws, ["test"])
    pipeline.measure(ws, ["fit", "calibration"])
    pipeline.fit(ws)
    with pytest.raises(LockError, match="there is no lock"):
        pipeline.measure(ws, ["fit", "test"])
    assert not (tmp_path / "run" / "measured" / "llama" / "test").exists()
    with pytest.raises(LockError, match="there is no lock"):
        pipeline.judge(ws)


def test_stages_out_of_order_say_which_comes_first(tmp_path: Path) -> None:
    ws = Workspace.create(write_study(tmp_path, {"llama": "llama"}), tmp_path / "run")
    with pytest.raises(OutputError, match="the fit split of llama is not measured: got 3 batches to do"):
        pipeline.fit(ws)
    pipeline.measure(ws, ["fit", "calibration"])
    with pytest.raises(OutputError, match="the routers of llama are not fitted; run `lastcall fit` first"):
        pipeline.lock(ws)
    pipeline.fit(ws)
    pipeline.lock(ws)
    with pytest.raises(LockError, match="not measured under the current lock: got 8 of 8 files missing"):
        pipeline.judge(ws)


def test_a_run_folder_is_judged_where_books_weights_and_states_are_not(done: Path) -> None:
    same = judge(done)
    shutil.rmtree(done / "books")
    shutil.rmtree(done / "llama")
    for states in (done / "run" / "measured").rglob("test/*.safetensors"):
        states.unlink()
    judged = judge(done)
    assert judged["families"] == same["families"]
    unverified = " | ".join(judged["lock"]["unverified"])
    assert "books: their folder is not here" in unverified
    assert "weights and tokenizer of llama" in unverified
    assert "8 states files: not here" in unverified
    assert "weights and tokenizer of smollm3" in judged["lock"]["verified"]


def test_judging_and_reporting_import_no_torch(done: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lastcall import pipeline;"
        "from lastcall.workspace import Workspace; ws = Workspace.open(Path(sys.argv[1]));"
        "pipeline.judge(ws); pipeline.report(ws);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(done / "run")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"


def test_a_book_too_short_for_one_checkpoint_is_left_out_for_all_and_listed(tmp_path: Path) -> None:
    study = write_study(tmp_path, TWO, books={"too_short": "leave out"})
    (tmp_path / "books" / "5.txt").write_text("Too short to cut.")
    judged = lastcall.run(study, tmp_path / "run")
    assert judged["left_out"] == ["5: too short: 17 tokens, its blocks need 123"]
    assert sum(judged["setup"]["books"].values()) == 11


def test_too_few_books_are_refused_before_any_model_runs(tmp_path: Path) -> None:
    counts = {"fit": 5, "calibration": 2, "test": 4}
    ws = Workspace.create(
        write_study(tmp_path, {"llama": "llama"}, books={"counts": counts}), tmp_path / "run"
    )
    with pytest.raises(
        BookError, match="too few fit books to hold one out: got 5 where every 6th is held out"
    ):
        pipeline.run(ws)
    assert not (tmp_path / "run" / "measured").exists()


def test_one_test_cluster_is_refused_before_any_model_runs(tmp_path: Path) -> None:
    counts = {"fit": 6, "calibration": 2, "test": 1}
    ws = Workspace.create(
        write_study(tmp_path, {"llama": "llama"}, books={"counts": counts}), tmp_path / "run"
    )
    with pytest.raises(BookError, match="the test split has fewer than two clusters"):
        pipeline.run(ws)


def test_a_changed_book_or_setting_before_the_lock_is_measured_again(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    ws = Workspace.create(study, tmp_path / "run")
    pipeline.measure(ws, ["fit", "calibration"])
    fit_book = ws.used.split("fit")[0].id
    record = ws.run.measured("llama", "fit", fit_book)
    tokens = pq.read_table(record).column("token").to_pylist()
    flip(tmp_path / "books" / f"{fit_book}.txt", 60)
    again = Workspace.open(tmp_path / "run")
    with pytest.raises(OutputError, match="the fit split of llama is not measured: got 1 batches to do"):
        pipeline.fit(again)
    pipeline.measure(again, ["fit"])
    assert pq.read_table(record).column("token").to_pylist() != tokens


def test_a_study_may_change_until_it_is_locked(tmp_path: Path) -> None:
    counts = {"fit": 6, "calibration": 2, "test": 9}
    with pytest.raises(BookError, match="too few books"):
        lastcall.run(write_study(tmp_path, {"llama": "llama"}, books={"counts": counts}), tmp_path / "run")
    lastcall.run(write_study(tmp_path, {"llama": "llama"}), tmp_path / "run")


def test_another_process_in_the_folder_is_refused(done: Path) -> None:
    ws = Workspace.open(done / "run")
    code = (
        "import sys; from pathlib import Path; from lastcall import pipeline;"
        "from lastcall.workspace import Workspace; pipeline.report(Workspace.open(Path(sys.argv[1])))"
    )
    with ws.alone():
        command = [sys.executable, "-c", code, str(done / "run")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another lastcall is at work in" in result.stderr


def test_a_fit_that_was_stopped_keeps_the_routers_it_made(
    done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lastcall.routing import fitting

    folder = done / "run" / "fitted" / "llama"
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / "training.json").unlink()
    (folder / "J32-1.safetensors").unlink()
    made: list[tuple[str, int]] = []
    fit_router = fitting.fit_router
    monkeypatch.setattr(
        fitting,
        "fit_router",
        lambda name, seed, *rest: (made.append((name, seed)), fit_router(name, seed, *rest))[1],
    )
    pipeline.fit(Workspace.open(done / "run"))
    assert made == [("J32", 1)]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole


def test_another_study_in_the_folder_is_refused(finished: Path, tmp_path: Path) -> None:
    other = write_study(tmp_path, TWO, quota={"budget": 0.4})
    with pytest.raises(
        OutputError, match=r"belongs to another study: got plan quota budget was 0\.2, is 0\.4"
    ):
        Workspace.create(other, finished / "run")
    (tmp_path / "full").mkdir()
    write_books(tmp_path / "full", 1)
    with pytest.raises(OutputError, match="is not empty and is no run folder; choose another --out"):
        Workspace.create(other, tmp_path / "full")


def test_a_model_that_is_not_its_stock_self_stops_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lastcall.errors import EquivalenceError
    from lastcall.measure.branches import Branches

    full = Branches.full
    monkeypatch.setattr(Branches, "full", lambda self: full(self) * 1.001)
    with pytest.raises(
        EquivalenceError, match="llama: the full branch does not equal the stock model's loss"
    ):
        lastcall.run(write_study(tmp_path, {"llama": "llama"}), tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.parquet"))


def test_nan_weights_are_refused_by_book_and_position_and_write_nothing(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    weights = tmp_path / "llama" / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors["model.norm.weight"][:] = np.nan
    safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(
        NonFiniteError, match=r"loss_full is not finite in book \d+, block 0, position 0: got nan"
    ):
        lastcall.run(study, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.parquet"))
