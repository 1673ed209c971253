"""Many workers: two real ones on Ray, one of them killed; shards side by side; always the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import lastcall
from lastcall import pipeline
from lastcall.errors import InputError, ModelError, NonFiniteError, OutputError, StudyError
from lastcall.holding import Shard
from lastcall.progress import Reporter, Silent
from lastcall.workspace import Workspace
from tests.little import write_books, write_study

MODELS = {"llama": "llama", "qwen": "qwen3_5"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study and its run by one process, in `run`."""
    root = tmp_path_factory.mktemp("alone")
    write_books(root / "books", 20)
    counts = {"fit": 8, "calibration": 4, "test": 8}
    lastcall.run(write_study(root, MODELS, books={"counts": counts}), root / "run")
    return root


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    """Ray is started by the first test that needs it and stopped after the last."""
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def same_bytes(run: Path, alone: Path, *, ledger: bool = True) -> int:
    """Files of `run`, all as in `alone`; holding files aside, and the ledger where its order may differ."""
    apart = set() if ledger else {"lock.jsonl"}
    files = {
        p.relative_to(run)
        for p in run.rglob("*")
        if p.is_file() and not p.name.startswith(".") and p.name not in apart
    }
    for file in files:
        assert (run / file).read_bytes() == (alone / "run" / file).read_bytes(), file
    return len(files)


def workers() -> list[psutil.Process]:
    """The worker processes of Ray that measure for this one, by what Ray calls them."""
    return [
        p
        for p in psutil.process_iter(["cmdline"])
        if p.info["cmdline"] and p.info["cmdline"][0].startswith("ray::Worker")
    ]


def test_two_workers_of_which_one_is_killed_give_the_same_bytes(alone: Path, tmp_path: Path) -> None:
    """SIGKILL while it measures: it is replaced, said so, and every record is as one process makes it."""
    said: list[str] = []

    class Listening(Reporter):
        say = staticmethod(said.append)  # type: ignore[assignment]
        task = Silent().task  # type: ignore[assignment]

    killed = threading.Event()

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not killed.is_set():
            if list((tmp_path / "run").glob("measured/*/*/*.parquet")) and (found := workers()):
                os.kill(found[0].pid, signal.SIGKILL)
                killed.set()
            time.sleep(0.005)

    thread = threading.Thread(target=kill_one)
    thread.start()
    lastcall.run(alone / "study.toml", tmp_path / "run", Listening(), workers=2)
    thread.join()
    assert killed.is_set()
    assert any("died and was replaced" in line for line in said), said
    assert same_bytes(tmp_path / "run", alone) > 100


def test_what_a_worker_refuses_is_raised_here_by_name(alone: Path, tmp_path: Path) -> None:
    import numpy as np
    import safetensors.numpy

    study = write_study(tmp_path, {"llama": "llama"})
    weights = tmp_path / "llama" / "model.safetensors"
    tensors = safetensors.numpy.load_file(weights)
    tensors["model.norm.weight"][:] = np.nan
    safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"loss_full is not finite in book \d+, block 0, position 0"):
        lastcall.run(study, tmp_path / "run", workers=2)


def test_a_batch_that_kills_every_worker_stops_the_run(tmp_path: Path) -> None:
    """By the fourth time: a batch is not repeated for ever."""
    import ray.cloudpickle

    from lastcall.errors import WorkerError
    from lastcall.measure import cluster

    ws = Workspace.create(write_study(tmp_path, {"llama": "llama"}), tmp_path / "run")
    ws.hire(1)
    crew = ws.crew
    assert isinstance(crew, cluster.OnRay)
    crew._start(ws.study.checkpoints[0])
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.raises(WorkerError, match=r"a worker died 4 times.*run again with fewer workers"):
        crew._get(crew._workers[0].environment.remote(_Deadly()))


class _Deadly:
    """Kills whoever looks at it."""

    @property
    def device(self) -> str:
        os._exit(1)


def test_a_worker_of_another_version_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from lastcall.measure.crew import Job, Worker

    study = write_study(tmp_path, {"llama": "llama"})
    ws = Workspace.create(study, tmp_path / "run")
    checkpoint = ws.study.checkpoints[0]
    books = tuple(ws.blocked["llama"].books)
    job = Job(ws.run.root, ws.study, checkpoint, "fit", books, ws.sources(checkpoint), {}, 40, 1, "0.0.1")
    with pytest.raises(InputError, match=r"a worker has another lastcall: got version .*, not 0\.0\.1"):
        Worker().prepare(job)
    unseen = replace(job, software=lastcall.__version__, root=tmp_path / "elsewhere")
    with pytest.raises(OutputError, match=r"a worker does not see the run folder .*elsewhere"):
        Worker().prepare(unseen)
    other = replace(job, software=lastcall.__version__, root=ws.run.root)
    with pytest.raises(ModelError, match="a worker's files of llama are not those of the run folder"):
        Worker().prepare(other)
    same = replace(other, hashes=ws.hashes["llama"])
    facts = Worker().prepare(same).facts
    with pytest.raises(InputError, match="the worker in another's place differs in device: got cpu, not gpu"):
        Worker().prepare(replace(same, facts={**facts, "device": "gpu"}))
    with pytest.raises(ModelError, match="its context is shorter than a block: got 128 positions where 4096"):
        Worker().prepare(replace(same, positions=4096))


def test_a_device_by_number_and_too_many_workers_are_refused(alone: Path, tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    text = study.read_text()
    study.write_text(text.replace('device = "cpu"', 'device = "cuda:1"'))
    ws = Workspace.create(study, tmp_path / "run")
    ws.hire(2)
    with pytest.raises(StudyError, match=r'device = "cuda:1" is one device; with several workers'):
        ws.crew._start(ws.study.checkpoints[0])  # type: ignore[attr-defined]
    study.write_text(text)
    ws = Workspace.create(study, tmp_path / "run")
    ws.hire(1000)
    with pytest.raises(InputError, match="1000 workers need 1000 CPUs: got"):
        ws.crew._start(ws.study.checkpoints[0])  # type: ignore[attr-defined]


def test_no_cluster_at_an_address_is_one_line(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    command = [sys.executable, "-m", "lastcall", "run", str(study), "--out", str(tmp_path / "run")]
    found = subprocess.run(
        [*command, "--workers", "2", "--cluster", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert found.returncode == 2
    assert 'lastcall: no Ray cluster could be joined at "127.0.0.1:1"' in found.stderr
    assert "Traceback" not in found.stderr


def test_shards_side_by_side_give_the_same_bytes(alone: Path, tmp_path: Path) -> None:
    """Three processes at once begin the folder, measure a third each before the lock and after it."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "lastcall", "measure"]
    for _ in range(2):
        shards = [
            subprocess.Popen(
                [*command, str(alone / "study.toml"), "--out", str(run), "--shard", f"{i}/3"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in (1, 2, 3)
        ]
        for shard in shards:
            out, err = shard.communicate(timeout=300)
            assert shard.returncode == 0, out + err
        ws = Workspace.open(run)
        pipeline.fit(ws)
        pipeline.lock(ws)
    books = [p.stem for p in run.glob("measured/llama/test/*.parquet")]
    assert len(books) == 8
    before = (run / "lock.jsonl").read_bytes()
    lastcall.run(alone / "study.toml", run)
    assert (run / "lock.jsonl").read_bytes() == before  # nothing was left to measure
    assert same_bytes(run, alone, ledger=False) > 100
    lines = lambda path: sorted(line.split('"previous"')[0] for line in path.read_text().splitlines())  # noqa: E731
    assert lines(run / "lock.jsonl") == lines(alone / "run" / "lock.jsonl")


def test_a_shard_excludes_every_other_stage_and_itself(alone: Path) -> None:
    one, other, same = (Workspace.open(alone / "run") for _ in range(3))
    with one.alone(Shard(1, 2)):
        with pytest.raises(OutputError, match="another lastcall is at work in"), same.alone(Shard(1, 2)):
            pass
        with pytest.raises(OutputError, match="another lastcall is at work in"), other.alone():
            pass
        with other.alone(Shard(2, 2)):
            pass
        with pytest.raises(OutputError), other.alone(Shard(3, 3)):
            pass
    with other.alone(), pytest.raises(OutputError), one.alone(Shard(1, 2)):
        pass


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_the_shards_of_n_are_every_batch_once(count: int) -> None:
    batches = list(range(11))
    shards = [Shard.parse(f"{i}/{count}").of(batches) for i in range(1, count + 1)]
    assert sorted(batch for shard in shards for batch in shard) == batches


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(StudyError, match=f'reads "i/n", from 1/n to n/n: got "{text}"; such as 3/8'):
        Shard.parse(text)
