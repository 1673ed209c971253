"""How long quota curves take, and how many decisions a second the controllers make.

    python benchmarks/allocation.py [--rounds N] [--out FILE]

Quota curves: 12 routers x 3 seeds x 40 quotas x 100 books of 2 blocks x 495 positions, 10,000 draws, with
both ceilings and every interval. Controllers, rate 99 / 495: many blocks at once (200 x 495 ranks) and one
stream, a step at a time; the deadline rule and its form without a loop beside them. Every arm is warmed
before any is timed; a round times each once, in random order. Prints a table, writes
benchmarks/results/allocation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lastcall.analyses.curves import QUOTAS, Scored, deadline_mask, quota_curves
from lastcall.routing.controllers import (
    CalibrationRanks,
    Controller,
    IntegralControl,
    OnlineQuantile,
    Stream,
    TokenBucket,
    controlled_calls,
)
from lastcall.routing.quota import deadline_calls
from lastcall.stats.bootstrap import draw_clusters, partition

ROOT = Path(__file__).resolve().parents[1]
ROUTERS, SEEDS, BOOKS, BLOCKS, SCORED = 12, 3, 100, 2, 495
CALIBRATION = 40 * SCORED
RATE = Fraction(99, 495)
CONTROLLERS: dict[str, Controller] = {
    "token bucket": TokenBucket(RATE, 16),
    "online quantile": OnlineQuantile(RATE, 0.05),
    "integral control": IntegralControl(RATE, 8, 0.2),
}

Arm = tuple[Callable[[], Any], int, str]
"""What is timed, how many decisions it makes, and the unit it is told in."""


def curves(rng: np.random.Generator) -> Callable[[], Any]:
    """Every router's curve, from scores, utility and KL that are drawn once."""
    shape = (BOOKS, BLOCKS, SCORED)
    kl = rng.exponential(0.1, shape)
    utility = 0.5 * kl + 0.2 * rng.standard_t(4, shape)
    routers = [
        Scored(
            f"router {i}",
            tuple(range(SEEDS)),
            (kl + rng.normal(0, 0.1, (SEEDS, *shape))).astype(np.float32),
            rng.normal(0.1, 0.15, (SEEDS, CALIBRATION)).astype(np.float32),
        )
        for i in range(ROUTERS)
    ]
    draws = draw_clusters(partition([(str(i), str(i)) for i in range(BOOKS)]), 10_000, rng=rng)
    return lambda: quota_curves(routers, utility, kl, draws, 0.05)


def stream(controller: Controller, ranks: list[float]) -> None:
    """One sequence, a step at a time."""
    step = Stream(controller).step
    for rank in ranks:
        step(rank)


def arms(rng: np.random.Generator) -> dict[str, Arm]:
    """Everything that is timed."""
    scores = rng.normal(size=(BOOKS * BLOCKS, SCORED)).astype(np.float32)
    ranks = CalibrationRanks(rng.normal(size=CALIBRATION))(scores)
    single = ranks.ravel()[:20_000].tolist()
    found: dict[str, Arm] = {
        "quota curves": (curves(rng), ROUTERS * SEEDS * len(QUOTAS) * scores.size, "seconds"),
        "deadline rule, many": (lambda: deadline_calls(scores, 0.84, 99), scores.size, "million a second"),
        "without a loop, many": (
            lambda: deadline_mask(scores.astype(np.float64) > 0.84, 99),
            scores.size,
            "million a second",
        ),
    }
    for name, controller in CONTROLLERS.items():
        found[f"{name}, many"] = (
            lambda c=controller: controlled_calls(c, ranks),
            scores.size,
            "million a second",
        )
        found[f"{name}, one"] = (lambda c=controller: stream(c, single), len(single), "µs a step")
    return found


def told(seconds: float, decisions: int, unit: str) -> float:
    """`seconds` for `decisions`, in `unit`."""
    if unit == "seconds":
        return seconds
    return decisions / seconds / 1e6 if unit == "million a second" else seconds / decisions * 1e6


def measure(timed: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by arm; each arm is run once before any is timed."""
    for run, _, _ in timed.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(timed), len(timed)):
            start = time.perf_counter()
            timed[name][0]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("lastcall", "numpy")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "allocation.json")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        sys.exit(f"--rounds must be at least 1, got {arguments.rounds}")
    result: dict[str, Any] = {"machine": machine()}
    timed = arms(np.random.default_rng(0))
    result["arms"] = {
        name: {"decisions": timed[name][1], "seconds": of}
        for name, of in measure(timed, arguments.rounds).items()
    }
    print(f"{arguments.rounds} rounds: median, least, most")
    for name, arm in result["arms"].items():
        unit = timed[name][2]
        each = [told(s, arm["decisions"], unit) for s in arm["seconds"]]
        print(f"{name:24}{statistics.median(each):10.3f}{min(each):10.3f}{max(each):10.3f}  {unit}")
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
