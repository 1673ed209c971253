"""A run killed by SIGKILL at random moments and resumed gives the same bytes: shown on the demonstration.

    python benchmarks/kills.py [--kills N] [--study STUDY]

One run is left alone. Another is killed N times, each at a moment drawn anew, and begun again by the same
command; where it is done before, a further one is begun. Each must end with the judged.json, lock.jsonl and
report.html of the first, byte for byte. Prints a line a kill, writes benchmarks/results/kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAME = ("judged.json", "lock.jsonl", "report.html")
SECONDS = (0.0, 40.0)
"""Least and most time that a run is left, once it holds its folder, before it is killed: to read the books
and load the model takes a dozen of them on 2 cores, a batch four."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--kills", type=int, default=25)
    options.add_argument("--study", default="demo")
    options.add_argument("--seed", type=int, default=217)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        start(given.study, whole).wait()
        kills, runs = killed(given.study, Path(scratch), given.kills, random.Random(given.seed))
        same = [all((r / f).read_bytes() == (whole / f).read_bytes() for f in SAME) for r in runs]
    found = {
        "study": given.study,
        "seed": given.seed,
        "kills": kills,
        "finished runs": len(runs),
        "identical": same,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {n: version(n) for n in ("lastcall", "torch", "transformers", "pyarrow")},
    }
    (ROOT / "benchmarks" / "results" / "kills.json").write_text(json.dumps(found, indent=1) + "\n")
    stages = ", ".join(f"{n} while {s}" for s, n in Counter(k["left"] for k in kills).items())
    print(f"{len(kills)} kills ({stages}); {len(runs)} runs finished, identical: {all(same)}")
    sys.exit(0 if all(same) else 1)


def start(study: str, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "lastcall", "run", study, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def killed(study: str, scratch: Path, kills: int, rng: random.Random) -> tuple[list[Any], list[Path]]:
    """Kill runs until `kills` are made, then let the last one finish; the kills and the finished runs."""
    made: list[Any] = []
    runs = [scratch / "killed-1"]
    while len(made) < kills:
        process, seconds = start(study, runs[-1]), rng.uniform(*SECONDS)
        wait_for_work(process, runs[-1])
        try:
            process.wait(seconds)
            if process.returncode != 0:
                sys.exit(f"a resumed run failed with exit {process.returncode}")
            runs.append(scratch / f"killed-{len(runs) + 1}")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            made.append({"after": round(seconds, 2), "left": left(runs[-1])})
            print(f"kill {len(made)} after {seconds:.1f} s, {made[-1]['left']}", flush=True)
            time.sleep(0.1)
    if start(study, runs[-1]).wait() != 0:
        sys.exit("the last run failed")
    return made, runs


def wait_for_work(process: subprocess.Popen[bytes], run: Path) -> None:
    """Return once `process` holds the run folder, or has ended."""
    began = time.time()
    while process.poll() is None:
        if (run / ".held").exists() and (run / ".held").stat().st_mtime >= began:
            return
        time.sleep(0.02)


def left(run: Path) -> str:
    """What the run was at when it was killed, by what it left behind."""
    if (run / "judged.json").exists():
        return "judging or reporting"
    if (run / "lock.jsonl").exists():
        return "measuring the test split"
    if list(run.glob("fitted/*/*")):
        return "fitting"
    return "measuring" if list(run.glob("measured/*/*/*")) else "starting"


if __name__ == "__main__":
    main()
