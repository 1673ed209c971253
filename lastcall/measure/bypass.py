"""The one place that patches a module. Every patch is undone in `finally`, in reverse order.

A patch replaces a module's `forward` on the instance; the class, the weights and the hooks stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from lastcall.measure.anatomy import Site


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


@final
@dataclass
class BlockCall:
    """What the trunk handed to the final block: its residual input and its other arguments."""

    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """h, [blocks, positions, d], the incoming residual state."""
    arguments: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def final_block_deferred(site: Site) -> Iterator[BlockCall]:
    """The final block passes its input through; what it was called with is in the yielded BlockCall."""
    call = BlockCall()

    def keep(hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        call.hidden, call.arguments = hidden_states, arguments
        return hidden_states

    with replaced(site.block, keep):
        yield call
