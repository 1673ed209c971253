"""How long judging takes: 100 books x 2 checkpoints x 12 routers x 3 seeds, 10,000 draws.

    python benchmarks/judge.py [--repeats N]

Writes a synthetic run to a temporary folder, then times, each in a fresh process: importing, hashing every
record (sha256), reading the records, and judging them. Prints a table, writes benchmarks/results/judge.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
BOOKS = [f"book{i:03d}" for i in range(100)]
CHECKPOINTS = ("first", "second")
STEPS = ("process", "imports", "hashing", "judging", "of which reading")


def build(folder: Path) -> int:
    """Write the run; the number of its routed rows."""
    import numpy as np
    import pyarrow.parquet as pq

    from tests.synthetic import make_run, make_study

    study = make_study(test=BOOKS, checkpoints=CHECKPOINTS)
    run = make_run(folder, study, np.random.default_rng(0), books=BOOKS)
    return sum(pq.read_metadata(run.routed(c, b)).num_rows for c in CHECKPOINTS for b in BOOKS)


def timed(folder: Path) -> None:
    """One measurement, for a fresh process: seconds by step, as JSON on stdout."""
    seconds, start = {}, time.perf_counter()

    def lap(step: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[step], start = now - start, now

    import lastcall.stats.judging as judging
    from lastcall.records import RunFolder
    from tests.synthetic import make_study

    study = make_study(test=BOOKS, checkpoints=CHECKPOINTS)
    lap("imports")
    for path in sorted(folder.rglob("*.*")):
        with path.open("rb") as handle:
            hashlib.file_digest(handle, "sha256")
    lap("hashing")
    judging.read_checkpoint = clocked(judging.read_checkpoint, seconds)
    judging.judge(study, RunFolder(folder), [(book, book) for book in BOOKS])
    lap("judging")
    print(json.dumps(seconds))


def clocked(function: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    """`function`, its time added to the reading's."""

    def inner(*args: Any) -> Any:
        start = time.perf_counter()
        value = function(*args)
        step = "of which reading"
        seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start
        return value

    return inner


def fresh(folder: Path) -> dict[str, float]:
    """Seconds by step in a fresh process, and of the process as a whole."""
    start = time.perf_counter()
    command = [sys.executable, __file__, "--timed", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return {"process": time.perf_counter() - start, **json.loads(done.stdout)}


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    packages = ("numpy", "scipy", "statsmodels", "pyarrow", "pydantic")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timed", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.timed:
        timed(arguments.timed)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = build(Path(folder))
        runs = [fresh(Path(folder)) for _ in range(arguments.repeats)]
    print(f"{rows:,} routed rows, {arguments.repeats} fresh processes; seconds")
    print(f"{'':18}{'median':>8}{'least':>8}{'most':>8}")
    for step in STEPS:
        each = [run[step] for run in runs]
        print(f"{step:18}{statistics.median(each):8.2f}{min(each):8.2f}{max(each):8.2f}")
    result = {"routed_rows": rows, "machine": machine(), "seconds": runs}
    target = ROOT / "benchmarks" / "results" / "judge.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
