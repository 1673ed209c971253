"""The same two losses of every token by other means, over a model that is already loaded.

Every arm gives (loss_full, loss_bypass): nats, float32, [blocks · horizon], the second with the final
attention's output made zero. All take the loss from whole logits by the same cross entropy.

    naive             transformers alone: two passes, the second with a forward hook
    transformer_lens  TransformerLens' bridge: a pass, and one under `run_with_hooks`. Its `start_at_layer`
                      runs the blocks below all the same (on input it then discards), so the trunk is not
                      shared. Its attention is eager by design (scores and patterns must be visible).
    nnsight           two traces, the second with an intervention
    nnsight shared    one trace, the rest of the final block written out by hand inside it: the trunk is
                      shared. Only for blocks of the plain pre-norm kind.

A bridge replaces modules in place and a trace wraps them, so each works on a copy of the modules that shares
the parameters of the original. `ready` gives the arms that ran here, and of the others the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lastcall.measure.anatomy import Site

Losses = tuple[Tensor, Tensor]
Arm = Callable[[], Losses]

PRE_NORM = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "smollm3")
"""Model types whose block is h + attention(norm(h)), then + FFN(norm(·)), nothing else."""
PACKAGES = ("transformer-lens", "nnsight")


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Losses [blocks · horizon] of logits [blocks, horizon, vocabulary] of tokens [blocks, horizon + 1]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")


@torch.inference_mode()
def stock(site: Site, tokens: Tensor) -> Tensor:
    """The stock model's losses: one forward pass."""
    return token_losses(site.model(input_ids=tokens[:, :-1], use_cache=False).logits, tokens)


def naive(site: Site, tokens: Tensor) -> Arm:
    def run() -> Losses:
        full = stock(site, tokens)
        hook = site.attention.register_forward_hook(lambda _, __, out: (torch.zeros_like(out[0]), *out[1:]))
        try:
            return full, stock(site, tokens)
        finally:
            hook.remove()

    return run


def transformer_lens(site: Site, tokens: Tensor) -> Arm:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model: Any = twin(site.model)
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    point = f"blocks.{len(bridge.blocks) - 1}.attn.hook_out"
    zeroed = [(point, lambda value, hook: torch.zeros_like(value))]

    @torch.inference_mode()
    def run() -> Losses:
        full = token_losses(bridge(tokens[:, :-1], return_type="logits"), tokens)
        logits = bridge.run_with_hooks(tokens[:, :-1], return_type="logits", fwd_hooks=zeroed)
        return full, token_losses(logits, tokens)

    return run


def nnsight(site: Site, tokens: Tensor) -> Arm:
    wrapped, block = traced(site)

    @torch.inference_mode()
    def run() -> Losses:
        with wrapped.trace(input_ids=tokens[:, :-1], use_cache=False):
            logits = wrapped.output.logits.save()
        full = token_losses(logits, tokens)
        with wrapped.trace(input_ids=tokens[:, :-1], use_cache=False):
            out = block.self_attn.output
            block.self_attn.output = (torch.zeros_like(out[0]), *out[1:])
            logits = wrapped.output.logits.save()
        return full, token_losses(logits, tokens)

    return run


def nnsight_shared(site: Site, tokens: Tensor) -> Arm:
    if site.model.config.model_type not in PRE_NORM:
        raise ValueError(f"the block of a {site.model.config.model_type} is not of the plain pre-norm kind")
    wrapped, block = traced(site)
    norm, head = wrapped.model.norm, wrapped.lm_head

    @torch.inference_mode()
    def run() -> Losses:
        with wrapped.trace(input_ids=tokens[:, :-1], use_cache=False):
            hidden = block.input
            on = head.output.save()
            off = head(norm(hidden + block.mlp(block.post_attention_layernorm(hidden)))).save()
        return token_losses(on, tokens), token_losses(off, tokens)

    return run


def traced(site: Site) -> tuple[Any, Any]:
    """nnsight's envoys of a copy of the model and of its final block.

    Raises ValueError where they do not lie where they lie in a Llama.
    """
    from nnsight import NNsight

    model: Any = twin(site.model)
    if not hasattr(getattr(model, "model", None), "layers") or not hasattr(
        model.model.layers[-1], "self_attn"
    ):
        raise ValueError(f"no arm was written for a {type(model).__name__}")
    wrapped: Any = NNsight(model)
    return wrapped, wrapped.model.layers[-1]


def twin(model: nn.Module) -> nn.Module:
    """A copy of `model` whose modules are its own and whose parameters are the original's."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


MAKERS: dict[str, Callable[[Site, Tensor], Arm]] = {
    "naive": naive,
    "transformer_lens": transformer_lens,
    "nnsight": nnsight,
    "nnsight shared": nnsight_shared,
}


def ready(site: Site, tokens: Tensor) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms that ran once on tokens [blocks, horizon + 1], and of the others why they did not."""
    arms: dict[str, Arm] = {}
    reasons: dict[str, str] = {}
    for name, make in MAKERS.items():
        try:
            arm = make(site, tokens)
            arm()
            arms[name] = arm
        except ModuleNotFoundError as error:
            reasons[name] = f"not timed: {error.name} is not installed"
        except Exception as error:
            reasons[name] = f"not timed: {short(error)}"
    return arms, reasons


def short(error: BaseException) -> str:
    """An error in one line."""
    said = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {said}"[:300]


def versions(*others: str) -> dict[str, str]:
    """Versions here of the packages `others` and of the peers'."""
    found = {}
    for name in (*others, *PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found
