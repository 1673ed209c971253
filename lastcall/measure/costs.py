"""What measuring a checkpoint costs, from its shapes: operations, memory, and the rate of a device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, final

import torch
from torch import nn

from lastcall.measure.anatomy import TABLE, Site
from lastcall.measure.loading import environment
from lastcall.measure.scoring import FUSED_ENTRIES
from lastcall.study import Checkpoint

SHARE = {"cuda": 0.59, "cpu": 0.55}
"""Share of a matrix product's rate that the paired measure reaches, by device type. cuda: SmolLM3-3B, bf16,
full and bypass, in benchmarks/results/measure_gpu.json. cpu: SmolLM2-135M, float32, with local-32, product
and measure in turn on one core of an AMD EPYC, in CPU time (0.51 to 0.63 over five rounds)."""
RECURRENT = 0.73
"""And so much of that share where blocks have linear attention: Qwen3.5-4B in the same file, with
flash-linear-attention; torch's fallback is slower."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k")
_SIDE = {"cuda": 8192, "cpu": 1024}
"""Side of the square matrices whose product gives a device's rate."""


@final
@dataclass(frozen=True)
class Machine:
    """What measures: a device here, or one that is only told of."""

    name: str
    kind: Literal["cpu", "cuda"]
    rate: float
    """Operations a second of a matrix product in the type that the checkpoint computes in."""
    memory: int | None
    """Bytes of a GPU's memory, where it is here."""


def parameters(site: Site) -> int:
    """Parameters of the whole model; a head tied to the embedding counts once."""
    return sum(p.numel() for p in site.model.parameters())


def width(site: Site) -> int:
    """d, the width of a state."""
    return int(site.head.weight.shape[1])


def operations(site: Site, blocks: int, positions: int, windows: int) -> int:
    """Operations, two a multiply-add, of the paired measure of `blocks` blocks of `positions` inputs each.

    The trunk and the full branch once; for the bypass the final block without its attention, and the head;
    for each of `windows` local branches the final block and the head. Of experts only those that a token
    uses. Attention is causal: t + 1 keys for the query at t, sliding window or not, since a masked product
    computes them. Left out, being small: elementwise work, norms, short convolutions, and the recurrence of
    linear attention and of state spaces.
    """
    config: Any = site.model.config
    row = TABLE[config.model_type]
    layers = list(site.model.get_submodule(row.blocks).children())
    head, final_block = site.head.weight.numel(), matrices(site.block, config)
    bypass = final_block - matrices(site.attention, config) + head
    linear = sum(matrices(layer, config) for layer in layers) + head + bypass + windows * (final_block + head)
    attentions = sum(hasattr(layer, row.attention) for layer in layers) + windows
    pairs = positions * (positions + 1) // 2
    return 2 * blocks * (positions * linear + attentions * 2 * _attention_width(config) * pairs)


def matrices(module: nn.Module, config: Any) -> int:
    """Weights of a module that one token is multiplied by; experts are stacked [experts, …, …]."""
    experts, used = _first(config, _EXPERTS), _first(config, _USED)
    total = 0
    for weight in module.parameters():
        stacked = experts is not None and used is not None and weight.dim() == 3 and len(weight) == experts
        total += weight.numel() * used // experts if stacked else weight.numel() * (weight.dim() > 1)
    return total


def _attention_width(config: Any) -> int:
    """Heads × width of a head."""
    heads = int(config.num_attention_heads)
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    """The value of the first of these keys that a configuration has, or None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def weight_bytes(site: Site) -> int:
    """Bytes of the parameters in the type they compute in."""
    return parameters(site) * site.head.weight.element_size()


def working_bytes(site: Site, blocks: int, positions: int, windows: int, kind: str, eager: bool) -> int:
    """About how many bytes a batch of `blocks` blocks takes beside the weights on a device of this kind: the
    states, and the larger of a block's activations and the logits that exist at a time.

    The peaks in benchmarks/results/measure_gpu.json are within 1% of it.
    """
    size, d = site.head.weight.element_size(), width(site)
    rows = blocks * positions
    widest = max(max(weight.shape[-2:]) for weight in site.block.parameters() if weight.dim() > 1)
    activations = rows * (10 * d + 3 * widest) * size
    if eager:  # the scores of every pair, in the model's type and in float32
        config: Any = site.model.config
        activations += blocks * int(config.num_attention_heads) * positions**2 * (size + 4)
    logits = 2 * min(rows * site.head.vocabulary, FUSED_ENTRIES) * size if kind == "cuda" else 0
    return max(activations, logits) + (3 + windows) * rows * d * size


def seconds(site: Site, machine: Machine, blocks: int, positions: int, windows: int) -> float:
    """About how long measuring takes on one machine, without loading and checks."""
    recurrent = "linear_attention" in (getattr(site.model.config, "layer_types", None) or ())
    share = SHARE[machine.kind] * (RECURRENT if recurrent else 1.0)
    return operations(site, blocks, positions, windows) / (machine.rate * share)


def elsewhere(tflops: float) -> Machine:
    """A GPU that is not here, by the rate of its matrix product in TFLOP/s."""
    return Machine(f"a GPU of {tflops:g} TFLOP/s", "cuda", tflops * 1e12, None)


def here(checkpoint: Checkpoint) -> Machine:
    """The device that `checkpoint` will be measured on; ModelError where there is none such."""
    name = environment(checkpoint)["device"]  # refuses a device that cannot be used
    available = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(available if checkpoint.device == "auto" else checkpoint.device)
    rate = product_rate(device, getattr(torch, checkpoint.dtype))
    if device.type == "cpu":
        return Machine(f"{torch.get_num_threads()}-core CPU", "cpu", rate, None)
    return Machine(name, "cuda", rate, torch.cuda.get_device_properties(device).total_memory)


@cache
def product_rate(device: torch.device, dtype: torch.dtype, at_least: float = 1.0) -> float:
    """Operations a second of a square matrix product on `device`, timed for `at_least` seconds, warmed up."""
    side = _SIDE[device.type]
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    _products(a, b)
    done, begun = 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < at_least:
        done += _products(a, b)
    return 2 * side**3 * done / taken


def _products(a: torch.Tensor, b: torch.Tensor, count: int = 5) -> int:
    """Multiply `count` times, wait for the device, and give the count back."""
    for _ in range(count):
        a @ b
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return count
