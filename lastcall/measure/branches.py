"""Shared trunk, then the final block's branches: full, bypass, local-w (section 2).

The trunk runs once. Each branch is the checkpoint's own final block, run on the same h as it is, without the
optional operation, or with its attention masked to w positions, and then the checkpoint's own final norm.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lastcall.measure.anatomy import Site
from lastcall.measure.bypass import BlockCall, removed, run_trunk
from lastcall.operation import ATTENTION, Operation

State = Float[Tensor, "blocks positions d"]


@final
class Branches:
    """The branches of the final block over one batch of token ids.

    `incoming` is h; `full()`, `bypass()` and `local(w)` are final-norm outputs (what the head reads). All
    are [blocks, positions, d] in the model's own type.
    """

    def __init__(self, site: Site, tokens: Int[Tensor, "blocks positions"]) -> None:
        self._site = site
        self._call: BlockCall = run_trunk(site, tokens)

    @property
    def incoming(self) -> State:
        return self._call.hidden

    def full(self) -> State:
        """The block as the checkpoint runs it."""
        return self._normed(self._call.arguments.get("attention_mask"))

    def bypass(self, operation: Operation = ATTENTION) -> State:
        """The block without `operation`, everything else as the checkpoint runs it."""
        if operation.kind == "block":
            state: Tensor = self._site.norm(self._call.hidden)
            return state
        if operation.kind == "window":
            return self.local(operation.window, operation.sinks)
        with removed(self._site, operation):
            return self.full()

    def local(self, window: int, sinks: int = 0) -> State:
        """The block attending to the `window` most recent positions, the current one included, and to the
        first `sinks`."""
        return self._normed(self._banded(window, sinks))

    def _normed(self, mask: Tensor | None) -> State:
        output = self._site.block(self._call.hidden, **{**self._call.arguments, "attention_mask": mask})
        state: Tensor = self._site.norm(output[0] if isinstance(output, tuple) else output)
        return state

    def _banded(self, window: int, sinks: int) -> Tensor:
        """The block's own mask, narrowed to a band; boolean (True attends) or additive, as it came."""
        hidden = self._call.hidden
        mask: Tensor | None = self._call.arguments.get("attention_mask")
        at = torch.arange(hidden.shape[1], device=hidden.device)
        back = at[:, None] - at[None, :]
        near = (back < window) | (at < sinks)[None, :]
        band = ((back >= 0) & near)[None, None]
        if mask is None:
            return band
        if mask.dtype == torch.bool:
            return band & mask
        return torch.where(band, mask, torch.finfo(mask.dtype).min)
