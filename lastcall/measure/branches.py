"""Shared trunk, then the final block's branches: full, bypass, local-w (section 2).

The trunk runs once. Each branch is the checkpoint's own final block, run on the same h with the attention
as it is, contributing zero, or masked to w positions, and then the checkpoint's own final norm.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lastcall.measure.anatomy import Site
from lastcall.measure.bypass import BlockCall, attention_skipped, run_trunk

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

    def bypass(self) -> State:
        """The block with its attention contributing exactly zero; its FFN kept."""
        with attention_skipped(self._site):
            return self.full()

    def local(self, window: int) -> State:
        """The block attending to the `window` most recent positions, the current one included."""
        return self._normed(self._banded(window))

    def _normed(self, mask: Tensor | None) -> State:
        output = self._site.block(self._call.hidden, **{**self._call.arguments, "attention_mask": mask})
        state: Tensor = self._site.norm(output[0] if isinstance(output, tuple) else output)
        return state

    def _banded(self, window: int) -> Tensor:
        """The block's own mask, narrowed to a band; boolean (True attends) or additive, as it came."""
        hidden = self._call.hidden
        mask: Tensor | None = self._call.arguments.get("attention_mask")
        at = torch.arange(hidden.shape[1], device=hidden.device)
        back = at[:, None] - at[None, :]
        band = ((back >= 0) & (back < window))[None, None]
        if mask is None:
            return band
        if mask.dtype == torch.bool:
            return band & mask
        return torch.where(band, mask, torch.finfo(mask.dtype).min)
