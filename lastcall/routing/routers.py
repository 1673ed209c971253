"""Routers: what each one sees (section 4), and the one network they all are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lastcall.routing.dataset import Dataset
from lastcall.routing.features import DISPLACEMENT, INCOMING, POSITION, TRAJECTORY, UNCERTAINTY


@final
@dataclass(frozen=True)
class Inputs:
    """What one router sees."""

    scalars: tuple[str, ...]
    state: int = 0
    """Rank of the learned map of the state."""
    fixed: int = 0
    """Rank of the seeded Gaussian projection of the state, never trained."""
    source: str = "bypass"
    """State that map and projection read: `bypass` or `incoming`."""

    @property
    def size(self) -> int:
        """Input dimension of the network."""
        return len(self.scalars) + self.state + self.fixed


_BASE = (*UNCERTAINTY, *DISPLACEMENT, *POSITION)
_INCOMING = (*(INCOMING + name for name in DISPLACEMENT), *POSITION)
_INCOMING_TRAJECTORY = tuple(INCOMING + name for name in TRAJECTORY)

INPUTS = {
    "B": Inputs(_BASE),
    "T": Inputs((*_BASE, *TRAJECTORY)),
    "S32": Inputs(_BASE, state=32),
    "S35": Inputs(_BASE, state=35),
    "J32": Inputs((*_BASE, *TRAJECTORY), state=32),
    "C_RP3": Inputs(_BASE, state=32, fixed=3),
    "I_B": Inputs(_INCOMING, source="incoming"),
    "I_S35": Inputs(_INCOMING, state=35, source="incoming"),
    "I_J32": Inputs((*_INCOMING, *_INCOMING_TRAJECTORY), state=32, source="incoming"),
}
"""The learned routers of section 4."""


@final
class Scaling(nn.Module):
    """Standardisation from the fit split: scalars and fixed projections to mean 0 and deviation 1, states
    divided by their root mean square. Buffers only; nothing here is trained."""

    mean: Tensor
    deviation: Tensor
    rms: Tensor
    projection: Tensor

    def __init__(self, inputs: Inputs, d: int) -> None:
        super().__init__()
        width = len(inputs.scalars) + inputs.fixed
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))
        self.register_buffer("rms", torch.ones(()))
        self.register_buffer("projection", torch.zeros(d, inputs.fixed))

    def learn(self, raw: Float[Tensor, "*any width"], states: Float[Tensor, "blocks n d"] | None) -> None:
        """Take the constants from the scored fit positions; a feature that never varies is left unscaled."""
        flat = raw.flatten(0, -2).double()
        self.mean.copy_(flat.mean(0))
        deviation = flat.std(0, correction=0)
        self.deviation.copy_(torch.where(deviation > 0, deviation, 1.0))
        if states is not None:
            squares = torch.stack([block.double().square().mean() for block in states])
            self.rms.copy_(squares.mean().sqrt())


@final
class Router(nn.Module):
    """input → one hidden layer (GELU) → a predicted utility, nats."""

    def __init__(self, inputs: Inputs, d: int, hidden: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.scaling = Scaling(inputs, d)
        self.state_map = nn.Parameter(torch.zeros(d, inputs.state)) if inputs.state else None
        layer: Any = skip_init  # else a layer draws its start from the global generator
        self.hidden = layer(nn.Linear, inputs.size, hidden)
        self.out = layer(nn.Linear, hidden, 1)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw the start: the map normal with deviation d^−1/2, the layers uniform within fan-in^−1/2."""
        for layer in (self.hidden, self.out):
            bound = 1 / math.sqrt(layer.in_features)
            layer.weight.uniform_(-bound, bound, generator=generator)
            layer.bias.uniform_(-bound, bound, generator=generator)
        if self.state_map is not None:
            self.state_map.normal_(0, len(self.state_map) ** -0.5, generator=generator)

    def raw(self, data: Dataset) -> Float[Tensor, "blocks n width"]:
        """Unscaled scalars and fixed projections of `data`."""
        columns = torch.stack([data.scalars[name] for name in self.inputs.scalars], dim=-1)
        if not self.inputs.fixed:
            return columns
        states = data.states[self.inputs.source]
        fixed = torch.stack([block.float() @ self.scaling.projection for block in states])
        return torch.cat([columns, fixed], dim=-1)

    def forward(
        self, raw: Float[Tensor, "*any width"], states: Float[Tensor, "*any d"]
    ) -> Float[Tensor, "*any"]:
        """Predicted utility from unscaled scalars and states."""
        parts = [(raw - self.scaling.mean) / self.scaling.deviation]
        if self.state_map is not None:
            parts.append((states.float() / self.scaling.rms) @ self.state_map)
        hidden = nn.functional.gelu(self.hidden(torch.cat(parts, dim=-1)))
        predicted: Tensor = self.out(hidden)
        return predicted.squeeze(-1)

    @torch.inference_mode()
    def score(self, data: Dataset) -> Float[Tensor, "blocks n"]:
        """Predicted utility at every scored position of `data`, a block at a time."""
        raw, states = self.raw(data), data.states[self.inputs.source]
        return torch.stack([self(r, s) for r, s in zip(raw, states, strict=True)])
