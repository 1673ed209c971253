"""The one place that patches a module. Every patch is undone in `finally`, in reverse order.

A patch replaces a module's `forward` on the instance; the class, the weights and the hooks stay as they are.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from lastcall.errors import ModelError
from lastcall.measure.anatomy import Site
from lastcall.operation import Operation


@contextlib.contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` with `forward` in place of its own, until the block ends, however it ends."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextlib.contextmanager
def attention_skipped(site: Site) -> Iterator[None]:
    """The final block's attention contributes exactly zero and none of it is computed (section 2).

    Whatever follows it in the block (a sandwich norm, the residual addition) runs as the checkpoint runs it.
    """

    def zero(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return hidden_states.new_zeros(()).expand_as(hidden_states), None

    with replaced(site.attention, zero):
        yield


@contextlib.contextmanager
def removed(site: Site, operation: Operation) -> Iterator[None]:
    """The final block without `operation`, one of its modules or heads: it contributes exactly zero.

    Attention and FFN are not computed. Heads are left out of what the output projection reads: their own
    scores are still computed, so a loss is measured here and not a speed. Raises ModelError for a head that
    is not there.
    """
    if operation.kind == "attention":
        with attention_skipped(site):
            yield
    elif operation.kind == "ffn":
        with replaced(site.ffn, lambda hidden, *_, **__: hidden.new_zeros(()).expand_as(hidden)):
            yield
    elif operation.kind == "heads":
        require(site, operation)
        project = site.projection.forward

        def without(read: torch.Tensor) -> torch.Tensor:
            heads = read.reshape(*read.shape[:-1], site.heads, -1)
            gone = torch.tensor(operation.heads, device=read.device)
            projected: torch.Tensor = project(heads.index_fill(-2, gone, 0).flatten(-2))
            return projected

        with replaced(site.projection, without):
            yield
    else:
        raise ValueError(f"{operation.kind} is not a module of the block")


def require(site: Site, operation: Operation) -> None:
    """ModelError where the final attention has not the heads that `operation` names."""
    if operation.heads and operation.heads[-1] >= site.heads:
        raise ModelError(
            f"the final attention has no head {operation.heads[-1]}",
            got=f"heads 0 to {site.heads - 1}",
            todo="mend the study's `operation`",
        )


@final
@dataclass(frozen=True)
class BlockCall:
    """What the trunk handed to the final block."""

    hidden: torch.Tensor
    """h, [blocks, positions, d], the incoming residual state."""
    arguments: dict[str, Any]
    """Its other arguments, by name."""


@final
class _Reached(BaseException):
    """The trunk has reached the final block; no error, and nothing else may catch it."""


def run_trunk(site: Site, tokens: torch.Tensor) -> BlockCall:
    """Run everything before the final block on token ids [blocks, positions], and nothing from there on."""
    names = inspect.signature(site.block.forward)
    reached: list[BlockCall] = []

    def stop(*given: Any, **named: Any) -> None:
        bound = names.bind(*given, **named).arguments
        extra = bound.pop("kwargs", {})
        reached.append(BlockCall(bound.pop("hidden_states"), {**bound, **extra}))
        raise _Reached

    with replaced(site.block, stop), contextlib.suppress(_Reached):
        site.trunk(input_ids=tokens, use_cache=False)
    return reached[0]
