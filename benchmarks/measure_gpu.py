"""What a paired measure costs on a GPU over the stock forward with per-token loss: full size, random weights.

Arms are interleaved in one run, each warmed first, timed with device events: stock, naive (two passes of
plain transformers, losses only), paired (losses of both branches, KL, uncertainty, states, scalar features).
Prints a table and writes JSON to the file named as the last argument.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from lastcall.measure import engine, scoring
from lastcall.measure.branches import Branches
from lastcall.measure.equivalence import check_all
from lastcall.measure.loading import Loaded, load
from lastcall.study import Checkpoint, Measure, Study

MODELS = {"smollm3-3b": 1.107, "qwen3.5-4b": 1.168}
"""Full-size architecture to the floor by operations: two heads and two last FFNs over one."""
SHAPES = ((8, 512), (1, 4096))
ROUNDS = 12


def main() -> None:
    out: dict[str, Any] = {"machine": machine(), "rate_8192_cubed": product_rate(), "models": {}}
    print(out["machine"], f"8192^3 bf16 product: {out['rate_8192_cubed'] / 1e12:.0f} TFLOP/s", flush=True)
    for name, floor in MODELS.items():
        loaded = load(Checkpoint(name="m", model=f"random:{name}", dtype="bfloat16", device="cuda"))
        out["models"][name] = one_model(loaded, floor, out["rate_8192_cubed"])
        del loaded
        torch.cuda.empty_cache()
    with open(sys.argv[-1], "w") as file:
        json.dump(out, file, indent=1)


def machine() -> dict[str, str]:
    names = ("torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return {"gpu": torch.cuda.get_device_name(), "python": sys.version.split()[0], **found}


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def product_rate() -> float:
    """Operations a second of an 8,192³ bf16 product on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    return 2 * 8192**3 / (statistics.median(timed(lambda: a @ b) for _ in range(20)) / 1e3)


@torch.inference_mode()
def one_model(loaded: Loaded, floor: float, rate: float) -> dict[str, Any]:
    site, row = loaded.site, {"facts": loaded.facts, "floor": floor, "shapes": {}}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, site.head.vocabulary, (2, 513), generator=generator).cuda()
    row["checks"] = {c.name: [c.found, c.allowed] for c in check_all(site, ids, "bfloat16")}
    row["fused"] = fused_against_tiles(loaded, ids)
    print(loaded.facts["architecture"], row["checks"], row["fused"], flush=True)
    for blocks, horizon in SHAPES:
        row["shapes"][f"{blocks}x{horizon}"] = shape(loaded, blocks, horizon, floor, rate)
    return row


def fused_against_tiles(loaded: Loaded, ids: torch.Tensor) -> dict[str, float]:
    """Largest and mean difference between the Triton pass and its slow twin, by figure."""
    branches = Branches(loaded.site, ids[:, :-1])
    full, bypass = branches.full().flatten(0, 1), branches.bypass().flatten(0, 1)
    local, targets = branches.local(32).flatten(0, 1), ids[:, 1:].flatten()
    head = loaded.site.head
    fast = scoring._score_rows_fused(head, full, bypass, {32: local}, targets)
    slow = scoring._score_rows(head, full, bypass, {32: local}, targets)
    names = ("loss_full", "loss_bypass", "entropy", "top_logprob", "margin", "kl")
    gaps = {n: float((getattr(fast, n) - getattr(slow, n)).abs().max()) for n in names}
    return {**gaps, "loss_local32": float((fast.loss_local[32] - slow.loss_local[32]).abs().max())}


def arms(loaded: Loaded, tokens: torch.Tensor) -> dict[str, Callable[[], Any]]:
    site = loaded.site
    study = a_study(tokens)

    def stock() -> torch.Tensor:
        logits = site.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")

    def naive() -> torch.Tensor:
        loss = stock()
        hook = site.attention.register_forward_hook(lambda _, __, output: (output[0] * 0, *output[1:]))
        try:
            return loss - stock()
        finally:
            hook.remove()

    def paired() -> Any:
        scores, states = engine._run(loaded, study, tokens)
        return scores, engine._state_columns(states)

    return {"stock": stock, "naive": naive, "paired": paired}


def a_study(tokens: torch.Tensor) -> Study:
    books = {"source": "folder", "path": ".", "counts": {"fit": 6, "calibration": 1, "test": 2}}
    checkpoints = [{"name": "m", "model": "random:m"}]
    study = Study.model_validate({"name": "bench", "books": books, "checkpoints": checkpoints})
    return study.model_copy(update={"measure": Measure(local_windows=())})


def shape(loaded: Loaded, blocks: int, horizon: int, floor: float, rate: float) -> dict[str, Any]:
    vocabulary = loaded.site.head.vocabulary
    tokens = torch.randint(0, vocabulary, (blocks, horizon + 1), device="cuda")
    runs = arms(loaded, tokens)
    peak, base = {}, torch.cuda.memory_allocated()
    for name, run in runs.items():
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        peak[name] = (torch.cuda.max_memory_allocated() - base) / 2**30
    rounds = [{name: timed(run) for name, run in runs.items()} for _ in range(ROUNDS)]
    ratio = {n: statistics.median(r[n] / r["stock"] for r in rounds) for n in runs}
    median = {n: statistics.median(r[n] for r in rounds) for n in runs}
    operations = 2 * blocks * horizon * sum(p.numel() for p in loaded.site.model.parameters())
    print(
        f"{blocks} x {horizon}: "
        + ", ".join(f"{n} {median[n]:.1f} ms ({ratio[n]:.3f} x, +{peak[n]:.2f} GiB)" for n in runs)
        + f"; floor {floor}, allowed {1.05 * floor:.3f}",
        flush=True,
    )
    stock_share = operations / (median["stock"] / 1e3) / rate
    return {"ms": median, "ratio": ratio, "peak_gib": peak, "rounds": rounds, "stock_rate_share": stock_share}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
