"""What a paired measure costs on a GPU, at full size with random weights, beside the same work by others.

    python benchmarks/measure_gpu.py OUT.json

For each of MODELS, in bfloat16: every row of the equivalence table; the Triton pass against its slow twin;
and at each of SHAPES (blocks × horizon) every arm, interleaved in rotated order, warmed first, timed with
device events: stock (one forward with per-token loss), paired (losses of both branches, KL, uncertainty,
states, scalar features), and the losses alone by other means (peers.py). An arm's ratio is its time over
stock's of the same round, median over ROUNDS; its memory is the most allocated, less what was before.

For the first model also: the paired measure's rate as a share of an 8,192³ bf16 product's in the same run;
a collection of BOOKS books of two blocks, measured batch by batch; and apart from it loading and writing.
Last, the product in each type on a small model: its losses must be float32 in all, and in float32 every
arm's must agree (in 16 bits they differ by rounding: a bridge's attention is another kernel).

A part that raises becomes {"error": reason} and the rest goes on; an arm that cannot run is a line with the
reason. Prints a table last and writes JSON, renewed after every part.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
import transformers

from lastcall.measure import engine, scoring
from lastcall.measure.anatomy import Site
from lastcall.measure.branches import Branches
from lastcall.measure.corpus import BookBlocks
from lastcall.measure.equivalence import check_all, stock_loss
from lastcall.measure.loading import Loaded, load
from lastcall.records import RunFolder
from lastcall.study import Blocks, Checkpoint, Measure, Study

MODELS = {"smollm3-3b": 1.107, "qwen3.5-4b": 1.168}
"""Full-size architecture to the floor by parameters: two heads and two last FFNs over one."""
DEVICE = "cuda"
SMALL = "smollm2-135m"
"""Architecture for the three types."""
SHAPES = ((8, 512), (1, 4096))
ROUNDS = 12
BOOKS, BATCH_BOOKS, HORIZON = 500, 4, 512
WRITTEN = 25
"""Batches that are written, to time it."""
Row = dict[str, Any]


def main() -> None:
    begun, target = time.perf_counter(), Path(sys.argv[-1])
    out: Row = {"machine": machine(), "models": {name: {"floor": floor} for name, floor in MODELS.items()}}
    print(out["machine"], flush=True)

    def part(row: Row, name: str, run: Callable[[], Any]) -> None:
        attempt(row, name, run)
        out["seconds"] = time.perf_counter() - begun
        target.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")

    part(out, "rate_8192_cubed", lambda: product_rate(torch.device(DEVICE)))
    for name, row in out["models"].items():
        one_model(name, row, part, out["rate_8192_cubed"], collected=name == next(iter(MODELS)))
        release()
    for dtype in ("float32", "float16", "bfloat16"):
        part(out.setdefault("types", {}), dtype, lambda dtype=dtype: one_type(dtype))
    summary(out)


def attempt(row: Row, name: str, run: Callable[[], Any]) -> None:
    """Put what `run` gives into `row`, or its error."""
    start = time.perf_counter()
    try:
        row[name] = run()
    except Exception as error:
        row[name] = {"error": peers.short(error)}
    failed = f": {row[name]['error']}" if is_error(row[name]) else ""
    print(f"  [{time.perf_counter() - start:.1f} s] {name}{failed}", flush=True)


def is_error(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


def release() -> None:
    """Give back what the last model held; a wrapped model is a cycle."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def machine() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    names = ("torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d")
    return {"gpu": gpu, "python": sys.version.split()[0], **peers.versions(*names)}


def timed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of `run`, by the device's own events where it is a GPU."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def product_rate(device: torch.device, side: int = 8192) -> float:
    """Operations a second of a side³ bf16 product on random data, median of 20 after 3."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * side**3 / (statistics.median(timed(lambda: a @ b, device) for _ in range(20)) / 1e3)


def one_model(name: str, row: Row, part: Callable[..., None], rate: Any, collected: bool) -> None:
    """Every part of one full-size model, into `row`."""
    print(name, flush=True)
    start = time.perf_counter()
    try:
        loaded = load(Checkpoint(name="m", model=f"random:{name}", dtype="bfloat16", device=DEVICE))
    except Exception as error:
        row["error"] = peers.short(error)
        return
    row["load_s"] = time.perf_counter() - start
    row["load_note"] = "weights drawn on the device and hashed on the CPU, not read from files"
    row["facts"] = loaded.facts
    ids = random_tokens(loaded.site, 2, HORIZON)
    part(row, "checks", lambda: checks(loaded.site, ids, "bfloat16"))
    part(row, "fused", lambda: fused_against_tiles(loaded, ids))
    row["shapes"] = {}
    for blocks, horizon in SHAPES:
        part(row["shapes"], f"{blocks}x{horizon}", lambda b=blocks, h=horizon: shape(loaded, b, h, rate))
        release()
    if collected:
        part(row, "collection", lambda: collection(loaded, (), BOOKS))
        part(row, "collection_with_local32", lambda: collection(loaded, (32,), BOOKS))
        part(row, "writing", lambda: writing(loaded, BOOKS))


def random_tokens(site: Site, blocks: int, horizon: int, seed: int = 0) -> torch.Tensor:
    """Token ids [blocks, horizon + 1]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, site.head.vocabulary, (blocks, horizon + 1), generator=generator)
    return ids.to(site.device)


def checks(site: Site, ids: torch.Tensor, dtype: str) -> list[Row]:
    """Every row of the equivalence table."""
    return [{**asdict(check), "passed": check.passed} for check in check_all(site, ids, dtype)]


@torch.inference_mode()
def fused_against_tiles(loaded: Loaded, ids: torch.Tensor) -> dict[str, float]:
    """Largest difference between the Triton pass and its slow twin, by figure."""
    branches = Branches(loaded.site, ids[:, :-1])
    full, bypass = branches.full().flatten(0, 1), branches.bypass().flatten(0, 1)
    local, targets = branches.local(32).flatten(0, 1), ids[:, 1:].flatten()
    head = loaded.site.head
    fast = scoring._score_rows_fused(head, full, bypass, {32: local}, targets)
    slow = scoring._score_rows(head, full, bypass, {32: local}, targets)
    names = ("loss_full", "loss_bypass", "entropy", "top_logprob", "margin", "kl")
    gaps = {n: float((getattr(fast, n) - getattr(slow, n)).abs().max()) for n in names}
    return {**gaps, "loss_local32": float((fast.loss_local[32] - slow.loss_local[32]).abs().max())}


def a_study(windows: tuple[int, ...] = (), horizon: int = HORIZON) -> Study:
    books = {"source": "folder", "path": ".", "counts": {"fit": 6, "calibration": 1, "test": 2}}
    checkpoints = [{"name": "m", "model": "random:m"}]
    study = Study.model_validate({"name": "bench", "books": books, "checkpoints": checkpoints})
    changes = {"measure": Measure(local_windows=windows), "blocks": Blocks(horizon=horizon)}
    return study.model_copy(update=changes)


def arms(loaded: Loaded, tokens: torch.Tensor) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Every arm that runs here, and of the others the reason; `paired` begins with the losses."""
    study = a_study()

    @torch.inference_mode()
    def paired() -> Any:
        scores, states = engine._run(loaded, study, tokens)
        return scores.loss_full, scores.loss_bypass, scores, engine._state_columns(states)

    theirs, reasons = peers.ready(loaded.site, tokens)
    return {"stock": lambda: (peers.stock(loaded.site, tokens),), "paired": paired, **theirs}, reasons


def agreement(runs: dict[str, Callable[[], Any]]) -> Row:
    """|Δ| of each arm's losses to the paired arm's, nats, largest and mean; and the mean |utility|."""
    want = [loss.clone() for loss in runs["paired"]()[:2]]
    found: Row = {"paired": {"mean_abs_utility": float((want[1] - want[0]).abs().mean())}}
    for name, run in runs.items():
        if name == "paired":
            continue
        found[name] = {}
        for what, got, ours in zip(("full", "bypass"), run()[:2], want, strict=False):  # stock has one
            gap = (got - ours).abs()
            found[name] |= {f"max_{what}": float(gap.max()), f"mean_{what}": float(gap.mean())}
    return found


def peak_gib(run: Callable[[], Any], device: torch.device) -> float | None:
    """Most device memory allocated during `run`, less what was before; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - base) / 2**30


def shape(loaded: Loaded, blocks: int, horizon: int, rate: Any, rounds: int = ROUNDS) -> Row:
    """Every arm at one shape: times, ratios, memory, agreement, and the rate."""
    device = loaded.site.device
    runs, reasons = arms(loaded, random_tokens(loaded.site, blocks, horizon, seed=1))
    gaps = agreement(runs)
    peak = {name: peak_gib(run, device) for name, run in runs.items()}
    rows = []
    for i in range(rounds):
        order = list(runs)[i % len(runs) :] + list(runs)[: i % len(runs)]
        taken = {name: timed(runs[name], device) for name in order}
        rows.append({name: taken[name] for name in runs})
    median = {n: statistics.median(r[n] for r in rows) for n in runs}
    found: Row = {
        "ms": median,
        "ratio": {n: statistics.median(r[n] / r["stock"] for r in rows) for n in runs},
        "peak_gib": peak,
        "difference_to_paired": gaps,
        "not_timed": reasons,
        "operations": operations(loaded.site, blocks, horizon),
        "rounds": rows,
    }
    if isinstance(rate, float):
        found["rate_share"] = rate_share(found["operations"], median, rate)
    return found


def operations(site: Site, blocks: int, horizon: int) -> dict[str, float]:
    """Operations of the stock forward and of the paired measure, a multiplication and an addition each one.

    2 × parameters in products × tokens, the head included, the embedding's lookup not; and causal attention
    as half of its square (2 · horizon · heads · head size a token and layer). Norms, softmax, the scoring
    pass and a delta net's recurrence are not counted. Paired does one more last FFN and one more head.
    """
    model, config = site.model, site.model.config
    tokens = blocks * horizon
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    if model.get_input_embeddings().weight is not site.head.weight:
        weights -= model.get_input_embeddings().weight.numel()
    layers = sum(isinstance(module, type(site.attention)) for module in model.modules())
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * tokens * horizon * layers * config.num_attention_heads * size
    again = sum(p.numel() for p in site.block.mlp.parameters() if p.dim() > 1) + site.head.weight.numel()
    stock = 2 * weights * tokens + attention
    return {"stock": float(stock), "paired": float(stock + 2 * again * tokens)}


def rate_share(counted: dict[str, float], ms: dict[str, float], rate: float) -> dict[str, float]:
    """Shares of the product's rate."""
    return {
        "stock operations / stock time": counted["stock"] / (ms["stock"] / 1e3) / rate,
        "stock operations / paired time": counted["stock"] / (ms["paired"] / 1e3) / rate,
        "operations really done / paired time": counted["paired"] / (ms["paired"] / 1e3) / rate,
    }


def synthetic_books(site: Site, count: int, horizon: int = HORIZON) -> list[BookBlocks]:
    """Books of two blocks of random token ids."""
    tokens = random_tokens(site, 2 * count, horizon).cpu().numpy().astype(np.int32).reshape(count, 2, -1)
    starts = (horizon, 3 * horizon)
    return [BookBlocks(f"book{i}", "fit", 6 * horizon, starts, own) for i, own in enumerate(tokens)]


def collection(loaded: Loaded, windows: tuple[int, ...], books: int, horizon: int = HORIZON) -> Row:
    """Seconds to measure `books` books, batch by batch, figures and states copied to the host each time."""
    study = a_study(windows, horizon)
    batches = engine.batches(synthetic_books(loaded.site, books, horizon), BATCH_BOOKS)
    engine.measure_batch(loaded, study, batches[0])
    start = time.perf_counter()
    for batch in batches:
        engine.measure_batch(loaded, study, batch)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "books": books,
        "blocks": 2 * books,
        "horizon": horizon,
        "batches": len(batches),
        "local_windows": list(windows),
        "predictions_a_second": 2 * books * horizon / seconds,
        "aside": "loading and writing",
    }


def writing(loaded: Loaded, books: int, horizon: int = HORIZON) -> Row:
    """Seconds to write WRITTEN measured batches, synchronised to disk, and so for `books` books."""
    study = a_study((), horizon)
    batches = engine.batches(synthetic_books(loaded.site, WRITTEN * BATCH_BOOKS, horizon), BATCH_BOOKS)
    seconds, size = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        for batch in batches:
            measured = engine.measure_batch(loaded, study, batch)
            start = time.perf_counter()
            for one in measured:
                engine.write(run, study, "m", "fit", one, "")
            seconds += time.perf_counter() - start
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    scale = books / (WRITTEN * BATCH_BOOKS)
    return {"seconds": seconds, "batches": WRITTEN, "bytes": size, "seconds_for_all": seconds * scale}


def one_type(dtype: str) -> Row:
    """The product's own path in `dtype` on a small model: losses in float32, equal to the stock model's."""
    loaded = load(Checkpoint(name="m", model=f"random:{SMALL}", dtype=dtype, device=DEVICE))
    (batch,) = engine.batches(synthetic_books(loaded.site, 2), 2)
    measured = engine.measure_batch(loaded, a_study((32,)), batch)
    tokens = torch.from_numpy(np.concatenate([book.tokens for book in batch])).to(loaded.site.device).long()
    with torch.inference_mode():
        want = stock_loss(loaded.site, tokens).cpu().numpy()
    columns = {
        n: np.concatenate([m.columns[n] for m in measured]) for n in measured[0].columns if "loss" in n
    }
    gap = np.abs(columns["loss_full"] - want)
    return {
        "facts": loaded.facts,
        "losses": {name: str(values.dtype) for name, values in columns.items()},
        "all_float32": all(values.dtype == np.float32 for values in columns.values()),
        "all_finite": all(bool(np.isfinite(values).all()) for values in columns.values()),
        "states": {name: str(state.dtype) for name, state in measured[0].states.items()},
        "full_to_stock": {"max": float(gap.max()), "mean": float(gap.mean())},
        "checks": checks(loaded.site, tokens, dtype),
        "difference_to_paired": agreement(arms(loaded, tokens)[0]),
    }


def summary(out: Row) -> None:
    """The short table."""
    rate = out["rate_8192_cubed"]
    said = f"{rate / 1e12:.0f} TFLOP/s" if isinstance(rate, float) else rate
    print(f"\n{out['machine']}\n8,192^3 bf16 product: {said}")
    for name, row in out["models"].items():
        print(
            f"\n{name}: kernels {row.get('facts', {}).get('kernels')}, floor {row['floor']}",
            row.get("error", ""),
        )
        for check in row.get("checks", ()) if not is_error(row.get("checks")) else ():
            said = "ok" if check["passed"] else "FAILED"
            print(f"  {said:6} {check['name']}: {check['found']:.3g} of {check['allowed']:g} {check['unit']}")
        for where, found in row.get("shapes", {}).items():
            shape_table(where, found)
        for what in ("checks", "fused", "collection", "collection_with_local32", "writing"):
            if what in row and (what != "checks" or is_error(row[what])):
                print(f"  {what}: {row[what]}")
        if "load_s" in row:
            print(f"  loading: {row['load_s']:.1f} s ({row['load_note']})")
    for dtype, row in out["types"].items():
        kept = ("error", "all_float32", "all_finite", "full_to_stock", "difference_to_paired")
        print(f"{SMALL} {dtype}:", {key: row[key] for key in kept if key in row})
    print(f"whole run: {out['seconds']:.0f} s", flush=True)


def shape_table(where: str, found: Row) -> None:
    if is_error(found):
        print(f"  {where}: {found['error']}")
        return
    print(f"  {where:18}{'ms':>9}{'ratio':>8}{'+GiB':>8}{'max |d| full':>14}{'bypass':>10}")
    for name, ms in found["ms"].items():
        gaps = found["difference_to_paired"][name]
        cells = [f"{gaps[key]:.2g}" if key in gaps else "" for key in ("max_full", "max_bypass")]
        peak = found["peak_gib"][name]
        more = f"{peak:8.2f}" if peak is not None else " " * 8
        print(f"  {name:18}{ms:9.1f}{found['ratio'][name]:8.3f}{more}{cells[0]:>14}{cells[1]:>10}")
    for name, why in found["not_timed"].items():
        print(f"  {name:18} {why}")
    for what, share in found.get("rate_share", {}).items():
        print(f"  {what}: {share:.3f} of the product's rate")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
