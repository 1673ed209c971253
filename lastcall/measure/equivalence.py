"""Patched = stock, cached = whole, and the bypassed attention does not run: the gate before everything.

Beside it `check_all` looks, by running the model, for defects that are reported of models and their kernels.

Section 2: the full branch must equal the stock model's own loss (float32: max |Δ| ≤ 1e-5 nats; 16 bits:
mean |Δ| ≤ 1e-3). The stock loss is computed from the stock model's logits, summed in float64.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lastcall.errors import EquivalenceError, ModelError
from lastcall.measure.anatomy import Site
from lastcall.measure.branches import Branches
from lastcall.measure.bypass import attention_skipped, run_trunk
from lastcall.measure.scoring import score

TOLERANCE = {"float32": ("max", 1e-5), "bfloat16": ("mean", 1e-3), "float16": ("mean", 1e-3)}
"""Largest |Δ| in nats between full branch and stock loss, by dtype, and how it is summed up."""
CACHED_TOLERANCE = {"float32": ("max", 1e-4), "bfloat16": ("mean", 5e-2), "float16": ("mean", 5e-3)}
"""The same for a cached continuation against the whole sequence at once (our choice; not in the protocol). In
bfloat16 it is as wide as between two attention backends: 0.025 and 0.029 were measured on random models that
pass in float32, where a dropped state is seen."""
BATCH_TOLERANCE = {"float32": ("max", 1e-4), "bfloat16": ("mean", 2e-2), "float16": ("mean", 2e-2)}
"""The same for a block alone against the same block in a batch (our choice: a study fixes its batches, so
that no comparison rests on it)."""
BACKEND_TOLERANCE = {"float32": ("max", 1e-4), "bfloat16": ("mean", 5e-2), "float16": ("mean", 2e-2)}
"""The same between two attention backends (our choice: every branch of a study runs with the same one). In
bfloat16 it was set after measuring 0.003 to 0.034 on random models that pass in float32, so it sees gross
disagreement only."""


@final
@dataclass(frozen=True)
class Check:
    """One row of the equivalence table."""

    name: str
    found: float
    allowed: float
    unit: str

    @property
    def passed(self) -> bool:
        return self.found <= self.allowed


@torch.inference_mode()
def full_is_stock(site: Site, tokens: Int[Tensor, "blocks tokens"], dtype: str) -> Check:
    """The full branch's loss against the stock model's, a block at a time."""
    gap = torch.cat([(_full_loss(site, row) - stock_loss(site, row)).abs() for row in tokens[:, None]])
    how, allowed = TOLERANCE[dtype]
    return Check(f"full branch = stock loss ({how} |Δ|)", _summed(gap, how), allowed, "nats")


def gate(site: Site, tokens: Int[Tensor, "blocks tokens"], dtype: str, name: str) -> Check:
    """`full_is_stock`, raising EquivalenceError where it fails: nothing is measured then.

    Where a loss is NaN or infinite it passes: measuring refuses that, and names book and position.
    """
    check = full_is_stock(site, tokens, dtype)
    if not check.passed and math.isfinite(check.found):
        raise EquivalenceError(
            f"{name}: the full branch does not equal the stock model's loss",
            got=f"|Δ| = {check.found:.3g} nats where {check.allowed:g} is allowed",
            todo="nothing was measured; run `lastcall check` on this checkpoint",
        )
    return check


@torch.inference_mode()
def check_all(site: Site, tokens: Int[Tensor, "blocks tokens"], dtype: str) -> list[Check]:
    """Every row of `lastcall check`."""
    before = _logits(site, tokens[:1, :-1])
    rows = [
        full_is_stock(site, tokens, dtype),
        _bypass_runs_nothing(site, tokens),
        _bypass_is_zeroed(site, tokens),
    ]
    after = _logits(site, tokens[:1, :-1])
    rows.append(
        Check(
            "logits unchanged after the patches (max |Δ|)", float((after - before).abs().max()), 0.0, "logits"
        )
    )
    rows += [_cached_is_whole(site, tokens, dtype), _alone_is_in_a_batch(site, tokens, dtype)]
    return rows + [
        row for row in (_backends_agree(site, tokens, dtype), _rotary_as_said(site, tokens)) if row
    ]


def stock_loss(site: Site, tokens: Int[Tensor, "blocks tokens"]) -> Float[Tensor, " predictions"]:
    """The stock model's next-token losses, nats, from its own logits summed in float64."""
    logits = _logits(site, tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits.double(), tokens[:, 1:].flatten(), reduction="none")


def _logits(site: Site, tokens: Tensor) -> Tensor:
    logits: Tensor = site.model(input_ids=tokens, use_cache=False).logits
    return logits.float()


def _full_loss(site: Site, tokens: Tensor) -> Tensor:
    state = Branches(site, tokens[:, :-1]).full().flatten(0, 1)
    return score(site.head, state, state, {}, tokens[:, 1:].flatten()).loss_full


def _summed(gap: Tensor, how: str) -> float:
    return float(gap.max() if how == "max" else gap.mean())


def _bypass_runs_nothing(site: Site, tokens: Tensor) -> Check:
    """Modules of the attention that ran while it was bypassed, counted."""
    ran: list[str] = []
    hooks = [
        module.register_forward_hook(lambda m, *_: ran.append(type(m).__name__))
        for module in site.attention.modules()
        if module is not site.attention
    ]
    try:
        Branches(site, tokens[:1, :-1]).bypass()
        bypassed = len(ran)
        ran.clear()
        with attention_skipped(site):
            _logits(site, tokens[:1, :-1])
        bypassed += len(ran)
        ran.clear()
        _logits(site, tokens[:1, :-1])
    finally:
        for hook in hooks:
            hook.remove()
    if not ran:
        raise ModelError(
            "the final attention runs no modules that could be counted", got=type(site.attention).__name__
        )
    # The first pass ran the trunk only: its final block, attention included, was deferred.
    return Check("modules of the bypassed attention that ran", float(bypassed), 0.0, "calls")


def _bypass_is_zeroed(site: Site, tokens: Tensor) -> Check:
    """The bypass branch against the stock model run whole, its final attention computed, then multiplied by
    zero: what others do and call skipping. The losses must be those."""

    def zeroed(_: nn.Module, __: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:])

    ids = tokens[:1]
    hook = site.attention.register_forward_hook(zeroed)
    try:
        slow = stock_loss(site, ids)
    finally:
        hook.remove()
    state = Branches(site, ids[:, :-1]).bypass().flatten(0, 1)
    fast = score(site.head, state, state, {}, ids[:, 1:].flatten()).loss_bypass
    return Check("bypass = attention times zero (max |Δ|)", float((fast - slow).abs().max()), 1e-5, "nats")


def _cached_is_whole(site: Site, tokens: Tensor, dtype: str) -> Check:
    """A prefill, a continuation of several tokens and one of a single token against the whole sequence."""
    ids = tokens[:1, :-1]
    whole = _logits(site, ids).log_softmax(-1)
    length = ids.shape[1]
    cuts = [0, length // 2, length - 1, length]
    cache: Any = None
    gaps: list[Tensor] = []
    for first, last in pairwise(cuts):
        output = site.model(input_ids=ids[:, first:last], use_cache=True, **_cache_argument(site, cache))
        cache = output.cache if hasattr(output, "cache") else output.past_key_values
        step = output.logits.float().log_softmax(-1)
        target = tokens[:1, first + 1 : last + 1, None]
        gaps.append((step.gather(2, target) - whole[:, first:last].gather(2, target)).abs().flatten())
    how, allowed = CACHED_TOLERANCE[dtype]
    return Check(
        f"cached continuation = whole ({how} |Δ| of loss)", _summed(torch.cat(gaps), how), allowed, "nats"
    )


def _alone_is_in_a_batch(site: Site, tokens: Tensor, dtype: str) -> Check:
    """Each block's full-branch losses alone and among twice as many: a kernel may go by the batch's shape."""
    together = _full_loss(site, torch.cat([tokens, tokens.flip(0)]))[: tokens[:, 1:].numel()]
    alone = torch.cat([_full_loss(site, row) for row in tokens[:, None]])
    gap = (together - alone).abs()
    how, allowed = BATCH_TOLERANCE[dtype]
    return Check(f"alone = in a batch ({how} |Δ| of loss)", _summed(gap, how), allowed, "nats")


def _backends_agree(site: Site, tokens: Tensor, dtype: str) -> Check | None:
    """The stock loss with the attention backend torch chooses and with its plain one, of matrix products;
    None where the model does not call torch's attention."""
    ids = tokens[:1]
    with _Calls(nn.functional.scaled_dot_product_attention) as calls:
        chosen = stock_loss(site, ids)
    if calls.count == 0:
        return None
    with sdpa_kernel(SDPBackend.MATH):
        plain = stock_loss(site, ids)
    how, allowed = BACKEND_TOLERANCE[dtype]
    gap = _summed((chosen - plain).abs(), how)
    return Check(f"torch's choice of attention = its plain one ({how} |Δ| of loss)", gap, allowed, "nats")


@final
class _Calls(TorchFunctionMode):
    """Counts calls of one torch function while it is active."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self.count = function, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is self._function
        return func(*args, **(kwargs or {}))


def _rotary_as_said(site: Site, tokens: Tensor) -> Check | None:
    """Whether SmolLM3's final block turns queries and keys by their positions, told by doubling these,
    against its configuration: block i does not where (i + 1) % no_rope_layer_interval = 0."""
    config: Any = site.model.config
    if config.model_type != "smollm3":
        return None
    call, trunk = run_trunk(site, tokens[:1, :-1]), cast("Any", site.trunk)
    positions = torch.arange(call.hidden.shape[1], device=site.device)[None]
    doubled = trunk.rotary_emb(call.hidden, 2 * positions)
    own, other = (
        site.block(call.hidden, **{**call.arguments, "position_embeddings": turned})
        for turned in (call.arguments["position_embeddings"], doubled)
    )
    turns = not torch.equal(own, other)
    said = config.num_hidden_layers % config.no_rope_layer_interval != 0
    return Check(
        "final block's rotary positions not as its interval says", float(turns != said), 0.0, "blocks"
    )


def _cache_argument(site: Site, cache: Any) -> dict[str, Any]:
    """The cache under the name this version of transformers gives it."""
    forward: Callable[..., Any] = inspect.unwrap(type(site.model).forward)
    return {"cache" if "cache" in inspect.signature(forward).parameters else "past_key_values": cache}
