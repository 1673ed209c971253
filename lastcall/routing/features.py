"""Features of section 3 that need only states and positions: displacement, trajectory, position.

At t they use nothing after t. Where t − 1, t − 2 or t − 3 does not exist, or a ratio is 0 / 0, the feature
is 0 (never among scored positions, or a state that did not move).
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

UNCERTAINTY = ("entropy", "top_logprob", "margin")
DISPLACEMENT = ("displacement",)
TRAJECTORY = ("extrapolation_error", "curvature", "error_change")
POSITION = ("log_position", "relative_position")
INCOMING = "incoming_"
"""Prefix of displacement and trajectory taken from the raw h."""


@final
class _Steps:
    """Differences of successive states, float32."""

    def __init__(self, states: Tensor) -> None:
        s = states.float()
        self.norm = s[..., :-1, :].norm(dim=-1)
        self.step = s[..., 1:, :] - s[..., :-1, :]
        self.length = self.step.norm(dim=-1)


def trajectory(states: Float[Tensor, "*blocks positions d"]) -> dict[str, Float[Tensor, "*blocks positions"]]:
    """Displacement, extrapolation error, curvature and error change of `states` (section 3), float32."""
    at = _Steps(states)
    bend = at.step[..., 1:, :] - at.step[..., :-1, :]
    error = _ratio(bend.norm(dim=-1), at.norm[..., 1:])
    dot = (at.step[..., 1:, :] * at.step[..., :-1, :]).sum(-1)
    lengths = at.length[..., 1:] * at.length[..., :-1]
    curvature = torch.where(lengths > 0, 1 - _ratio(dot, lengths), 0.0)
    found = {
        "displacement": _shifted(_ratio(at.length, at.norm), 1),
        "extrapolation_error": _shifted(error, 2),
        "curvature": _shifted(curvature, 2),
        "error_change": _shifted(error[..., 1:] - error[..., :-1], 3),
    }
    return {name: values[..., : states.shape[-2]] for name, values in found.items()}


def position(t: Float[Tensor, "*any"], horizon: int) -> dict[str, Float[Tensor, "*any"]]:
    """log(1 + t) and t / horizon."""
    return {"log_position": torch.log1p(t), "relative_position": t / horizon}


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def _shifted(values: Tensor, missing: int) -> Tensor:
    """`values` with `missing` leading zeros: the positions that lack a predecessor."""
    return torch.nn.functional.pad(values, (missing, 0))
