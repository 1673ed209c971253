"""Secondary questions along the stages: asked in the study file, answered from records, resumable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import lastcall
from lastcall import analysing, pipeline
from lastcall.errors import LockError, OutputError
from lastcall.lock import read
from lastcall.workspace import Workspace
from tests.little import write_books, write_study

ASKED: dict[str, Any] = {
    "horizon": 80,
    "quotas": [0.1, 0.2, 1.0],
    "controllers": ["token-bucket", "online-quantile", "integral"],
    "learners": ["ridge"],
    "independence": True,
    "third_action": 3,
    "ceilings": True,
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("answered")
    write_books(root / "books", 14)
    (root / "books" / "14.txt").write_text("Short enough for the core blocks alone. " * 3)
    books = {"counts": {"fit": 6, "calibration": 3, "test": 5}, "too_short": "leave out"}
    lastcall.run(write_study(root, {"llama": "llama"}, books=books, analyses=ASKED), root / "run")
    return root


@pytest.fixture
def copy(answered: Path, tmp_path: Path) -> Path:
    root = tmp_path / "copy"
    shutil.copytree(answered, root)
    study = root / "run" / "study.toml"
    study.write_text(study.read_text().replace(str(answered), str(root)))
    return root


def answers(root: Path) -> Any:
    return json.loads((root / "run" / "analyses.json").read_text())


def test_every_section_asked_is_answered_and_none_is_among_the_planned(answered: Path) -> None:
    found, judged = answers(answered), json.loads((answered / "run" / "judged.json").read_text())
    assert set(analysing._ANSWERS) <= set(found)
    assert found["lock"] == judged["lock"]["hash"]
    assert [f["name"] for f in judged["families"] if f["planned"]] == ["planned"]
    assert [(f["name"], f["planned"]) for f in found["learners"]] == [("learner: ridge", False)]
    assert "Secondary analyses" in (answered / "run" / "report.html").read_text()


def test_the_longer_blocks_are_routed_by_the_frozen_thresholds(answered: Path) -> None:
    """Forced and unforced figures from the files alone, by hand."""
    run, found = answered / "run", answers(answered)["horizon"][0]
    books = sorted((run / "measured" / "llama" / "horizon").glob("*.parquet"))
    assert found["books"] == len(books)
    tau = json.loads((run / "fitted" / "llama" / "thresholds.json").read_text())["J32"]
    forced, free, active = [], [], []
    for path in books:
        rows = pq.read_table(path).to_pandas().query("scored")
        assert len(rows) == found["scored"] == 75
        full, bypass = rows.loss_full.to_numpy(float), rows.loss_bypass.to_numpy(float)
        routed = pq.read_table(
            run / "routed" / "llama" / "horizon" / path.name, partitioning=None
        ).to_pandas()
        for seed, own in routed[routed.router == "J32"].groupby("seed"):
            call, above = own.call.to_numpy(), own.score.to_numpy(float) > tau[str(seed)]
            assert call.sum() == found["calls"] == 15
            forced.append(np.where(call, full, bypass).mean())
            free.append(np.where(above, full, bypass).mean())
            active.append(above.mean())
    j32 = next(r for r in found["routers"] if r["name"] == "J32")
    assert j32["forced"]["estimate"] == pytest.approx(np.mean(forced), abs=1e-9)
    assert j32["unforced"]["estimate"] == pytest.approx(np.mean(free), abs=1e-9)
    assert j32["activation"]["estimate"] == pytest.approx(np.mean(active), abs=1e-9)
    drift = np.average(
        [b["utility"]["estimate"] for b in j32["drift"]],
        weights=[b["last"] - b["first"] + 1 for b in j32["drift"]],
    )
    assert drift == pytest.approx(np.mean(active), abs=1e-9)


def test_the_overlap_with_the_core_blocks_is_counted(answered: Path) -> None:
    run, found = answered / "run", answers(answered)["horizon"][0]
    shared = total = 0
    for path in (run / "measured" / "llama" / "horizon").glob("*.parquet"):
        long, core = (
            {(s + p) for s, p, scored in zip(t["start"], t["position"], t["scored"], strict=True) if scored}
            for t in (
                pq.read_table(f).to_pydict() for f in (path, run / "measured" / "llama" / "test" / path.name)
            )
        )
        shared, total = shared + len(long & core), total + len(long)
    assert found["overlap"] == pytest.approx(shared / total)


def test_the_quota_curve_at_the_budget_is_the_judged_gain(answered: Path) -> None:
    found, judged = answers(answered), json.loads((answered / "run" / "judged.json").read_text())
    at = found["curves"]["llama"]["calls"].index(judged["setup"]["calls"])
    gains = {r["name"]: r["gain"]["estimate"] for r in judged["checkpoints"][0]["routers"]}
    for name in ("B", "J32", "C_RP3", "random", "by-position"):
        point = found["curves"]["llama"]["routers"][name][at]
        assert point["gain"]["estimate"] == pytest.approx(gains[name], abs=1e-9)
    assert found["ceilings"]["llama"]["knowable"]["realised"]["estimate"] == pytest.approx(
        gains["knowable"], abs=1e-9
    )


def test_answers_are_not_made_twice_and_a_lost_section_alone_is_made_again(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (copy / "run" / "analyses.json").read_bytes()
    pipeline.analyse(Workspace.open(copy / "run"))
    assert (copy / "run" / "analyses.json").read_bytes() == before
    cut = json.loads(before)
    del cut["controllers"]
    (copy / "run" / "analyses.json").write_text(json.dumps(cut))
    made: list[str] = []
    for section, answer in dict(analysing._ANSWERS).items():
        monkeypatch.setitem(
            analysing._ANSWERS, section, lambda ws, m, s=section, a=answer: (made.append(s), a(ws, m))[1]
        )
    pipeline.analyse(Workspace.open(copy / "run"))
    assert made == ["controllers"]
    assert answers(copy) == json.loads(before)


def test_answers_of_other_records_are_not_drawn(copy: Path) -> None:
    path = copy / "run" / "analyses.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "records": "other"}))
    pipeline.report(Workspace.open(copy / "run"))
    assert "Secondary analyses" not in (copy / "run" / "report.html").read_text()


def test_the_longer_blocks_are_refused_without_a_lock_and_hashed_under_it(answered: Path, copy: Path) -> None:
    files = read(answered / "run" / "lock.jsonl").test_files(answers(answered)["lock"])
    longer = [f for f in files if "/horizon/" in f]
    assert len(longer) == 3 * answers(answered)["horizon"][0]["books"]
    changed = copy / "run" / next(f for f in longer if f.startswith("routed/"))
    changed.write_bytes(changed.read_bytes() + b"x")
    with pytest.raises(
        LockError, match="test records changed after they were measured: got routed/llama/horizon"
    ):
        pipeline.judge(Workspace.open(copy / "run"))


def test_power_is_told_before_the_lock(copy: Path) -> None:
    rows = pipeline.power(Workspace.open(copy / "run"))
    assert [(r["a"], r["b"]) for r in rows] == [("T", "B"), ("J32", "S32"), ("J32", "C_RP3")]
    assert all(r["detectable_best"]["estimate"] < r["detectable_worst"]["estimate"] for r in rows)
    (copy / "run" / "fitted" / "llama" / "training.json").unlink()
    with pytest.raises(OutputError, match="the routers of llama are not fitted; run `lastcall fit` first"):
        pipeline.power(Workspace.open(copy / "run"))


def test_a_study_that_asks_nothing_answers_nothing(finished: Path) -> None:
    assert pipeline.analyse(Workspace.open(finished / "run")) is None
    assert not (finished / "run" / "analyses.json").exists()


@pytest.mark.parametrize("operation", ["ffn", "block", "heads:0,2", "window:3+2"])
def test_a_study_of_another_operation_runs_like_the_first(
    tmp_path: Path, operation: str, finished: Path
) -> None:
    """The same features, routers, quota, lock and verdicts; another utility."""
    run = tmp_path / "run"
    judged = lastcall.run(write_study(tmp_path, {"llama": "llama"}, operation=operation), run)
    assert judged["checkpoints"][0]["routers"][2]["calls_min"] == 7
    first = json.loads((finished / "run" / "judged.json").read_text())
    full = [j["checkpoints"][0]["nll_full"]["estimate"] for j in (judged, first)]
    bypass = [j["checkpoints"][0]["nll_bypass"]["estimate"] for j in (judged, first)]
    assert full[0] == pytest.approx(full[1], abs=1e-12)
    assert abs(bypass[0] - bypass[1]) > 1e-4


def test_a_published_figure_at_the_longer_horizon_stands_beside_ours(copy: Path) -> None:
    study = copy / "run" / "study.toml"
    figure = '[[published.figures]]\ncheckpoint = "llama"\nwhat = "unforced_activation:J32@80"\nvalue = 0.5\n'
    study.write_text(study.read_text() + f'\n[published]\nsource = "s"\n{figure}')
    pipeline.lock(Workspace.open(copy / "run"), "the published figures were forgotten")
    pipeline.measure(Workspace.open(copy / "run"), ["test"])
    row = pipeline.judge(Workspace.open(copy / "run"))["published"]["figures"][0]
    pipeline.analyse(Workspace.open(copy / "run"))
    j32 = next(r for r in answers(copy)["horizon"][0]["routers"] if r["name"] == "J32")
    assert (row["ours"], row["ours_low"]) == (j32["activation"]["estimate"], j32["activation"]["low"])
    assert row["difference"] == pytest.approx(row["ours"] - 0.5)


def test_another_operation_makes_every_record_stale(tmp_path: Path) -> None:
    """Before the lock a study may change; what was measured of another operation is measured again."""
    study, run = write_study(tmp_path, {"llama": "llama"}), tmp_path / "run"
    pipeline.measure(Workspace.create(study, run), ["fit"])
    before = {p: p.read_bytes() for p in run.glob("measured/llama/fit/*.parquet")}
    write_study(tmp_path, {"llama": "llama"}, operation="ffn")
    pipeline.measure(Workspace.create(study, run), ["fit"])
    assert all(path.read_bytes() != found for path, found in before.items())


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ("fitted/llama/J32-0.safetensors", "fitted file fitted/llama/J32-0.safetensors was"),
        (
            "measured/llama/calibration/{calibration}.safetensors",
            "fit and calibration records of llama are not",
        ),
        ("measured/llama/fit/{fit}.parquet", "fit and calibration records of llama are not"),
        ("routed/llama/horizon/{long}.parquet", "test records changed after they were measured"),
    ],
)
def test_nothing_is_answered_from_what_was_changed(copy: Path, spoilt: str, message: str) -> None:
    run = copy / "run"
    (run / "analyses.json").unlink()
    own = {
        split: next(run.glob(f"measured/llama/{split}/*.parquet")).stem for split in ("fit", "calibration")
    }
    long = next(run.glob("measured/llama/horizon/*.parquet")).stem
    path = run / spoilt.format(**own, long=long)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(LockError, match=message):
        pipeline.analyse(Workspace.open(run))


def test_a_lost_longer_block_is_measured_again_not_left_out(copy: Path) -> None:
    run = copy / "run"
    before = answers(copy)
    lost = next(run.glob("measured/llama/horizon/*.parquet"))
    lost.unlink()
    (run / "analyses.json").unlink()
    pipeline.judge(Workspace.open(run))  # no planned verdict waits for it
    with pytest.raises(
        LockError, match="the longer blocks are not all measured; run `lastcall measure` first"
    ):
        pipeline.analyse(Workspace.open(run))
    pipeline.measure(Workspace.open(run), ["test"])
    pipeline.analyse(Workspace.open(run))
    assert answers(copy)["horizon"] == before["horizon"]


def test_torn_answers_are_made_again(copy: Path) -> None:
    before = answers(copy)
    for torn in ("{", "[]"):
        (copy / "run" / "analyses.json").write_text(torn)
        pipeline.analyse(Workspace.open(copy / "run"))
        assert answers(copy) == before


def test_a_horizon_no_book_can_give_is_refused_before_any_model_runs(tmp_path: Path) -> None:
    from lastcall.errors import BookError

    study = write_study(tmp_path, {"llama": "llama"}, analyses={"horizon": 5000})
    with pytest.raises(
        BookError, match=r"no book long enough for its blocks is in split test|fewer than two"
    ):
        lastcall.run(study, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.parquet"))


def test_records_of_other_kernels_are_not_mixed(tmp_path: Path) -> None:
    """What a model was, beyond device and versions, is recorded; another is refused beside its records."""
    study, run = write_study(tmp_path, {"llama": "llama"}), tmp_path / "run"
    pipeline.measure(Workspace.create(study, run), ["fit"])
    facts = run / "measured" / "llama" / "facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "kernels": "others"}))
    with pytest.raises(
        OutputError, match="some records of llama were measured with another kernels: got others"
    ):
        pipeline.measure(Workspace.open(run), ["calibration"])
