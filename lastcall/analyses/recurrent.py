"""A router with memory: the recipe of section 4 with a GRU over the block's prefix."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lastcall.errors import NonFiniteError
from lastcall.routing.dataset import Dataset
from lastcall.routing.fitting import held_out, projection
from lastcall.routing.routers import INPUTS, Inputs, Router
from lastcall.study import Routers

_DRAWING = threading.Lock()
"""Held while the global generator is saved, used and put back."""


def read_inputs(
    router: Router, raw: Float[Tensor, "*any width"], states: Float[Tensor, "*any d"]
) -> Float[Tensor, "*any size"]:
    """What the hidden layer of `router` reads: scaled scalars and fixed projections, the mapped state."""
    parts = [(raw - router.scaling.mean) / router.scaling.deviation]
    if router.state_map is not None:
        parts.append((states.float() / router.scaling.rms) @ router.state_map)
    return torch.cat(parts, dim=-1)


@final
class Recurrent(nn.Module):
    """out(hidden(t) + GRU(hidden(0), …, hidden(t))): it scores from the prefix alone.

    Memory starts empty at the first scored position of a block.
    """

    def __init__(self, inputs: Inputs, d: int, hidden: int) -> None:
        super().__init__()
        self.router = Router(inputs, d, hidden)
        with _DRAWING, torch.random.fork_rng(devices=[]):  # a GRU draws its start from the global generator
            self.gru = nn.GRU(hidden, hidden, batch_first=True)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw the start: the router's, then the GRU's weights, uniform within hidden^−1/2."""
        self.router.initialise(generator)
        bound = self.gru.hidden_size**-0.5
        for weights in self.gru.parameters():
            weights.uniform_(-bound, bound, generator=generator)

    def forward(
        self, raw: Float[Tensor, "blocks n width"], states: Float[Tensor, "blocks n d"]
    ) -> Float[Tensor, "blocks n"]:
        """Predicted utility from unscaled scalars and states of whole blocks."""
        hidden = nn.functional.gelu(self.router.hidden(read_inputs(self.router, raw, states)))
        predicted: Tensor = self.router.out(hidden + self.gru(hidden)[0])
        return predicted.squeeze(-1)

    @torch.inference_mode()
    def score(self, data: Dataset) -> Float[Tensor, "blocks n"]:
        """Predicted utility at every scored position of `data`, a block at a time."""
        blocks = zip(self.router.raw(data), data.states[self.router.inputs.source], strict=True)
        return torch.cat([self(raw[None], states[None]) for raw, states in blocks])


def fit_recurrent(name: str, seed: int, fit: Dataset, recipe: Routers) -> tuple[Recurrent, list[float]]:
    """The recipe of section 4 on whole blocks: loss, optimiser, epochs, batches and choice are the router's.

    Also the held-out Huber loss after each epoch, nats; the first of the least is the epoch kept.
    """
    inputs = INPUTS[name]
    d = fit.states[inputs.source].shape[-1]
    model = Recurrent(inputs, d, recipe.hidden)
    model.router.scaling.projection.copy_(projection(d, inputs.fixed, recipe.projection_seed))
    model.initialise(torch.Generator().manual_seed(2 * seed))
    raw, states = model.router.raw(fit), fit.states[inputs.source]
    model.router.scaling.learn(raw, states if inputs.state else None)
    held = held_out(fit.books, recipe.holdout_every)
    order = torch.Generator().manual_seed(2 * seed + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )

    def loss(blocks: Tensor) -> Tensor:
        predicted = model(raw[blocks], states[blocks])
        return nn.functional.huber_loss(predicted, fit.utility[blocks], delta=recipe.huber_delta)

    losses: list[float] = []
    best: dict[str, Tensor] = {}
    for _ in range(recipe.epochs):
        train = torch.nonzero(~held).squeeze(1)
        _epoch(train[torch.randperm(len(train), generator=order)], loss, optimizer, recipe.batch_blocks)
        losses.append(_mean_loss(torch.nonzero(held).squeeze(1), loss, recipe.batch_blocks))
        if losses[-1] < min(losses[:-1], default=math.inf):
            best = copy.deepcopy(model.state_dict())
    if not all(map(math.isfinite, losses)):
        raise NonFiniteError(
            f"recurrent {name} at seed {seed} diverges", got=str(losses), todo="lower routers.learning_rate"
        )
    model.load_state_dict(best)
    return model, losses


def _epoch(
    shuffled: Tensor, loss: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, batch: int
) -> None:
    for blocks in torch.split(shuffled, batch):
        optimizer.zero_grad()
        loss(blocks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _mean_loss(held: Tensor, loss: Callable[[Tensor], Tensor], batch: int) -> float:
    return sum(float(loss(blocks)) * len(blocks) for blocks in torch.split(held, batch)) / len(held)
