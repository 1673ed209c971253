"""Stronger learners on a router's own inputs: what the one recipe of section 4 might have missed.

Inputs, supervision (the signed utility at scored positions of the fit books), held-out books, seeds,
threshold and quota are the router's. What differs is the learner:

    trees      gradient-boosted trees; squared error, their number chosen by held-out Huber loss
    wide       the recipe with 512 hidden units
    ridge      linear; squared error, its penalty chosen by held-out Huber loss
    recurrent  the recipe with a GRU over the block's prefix between hidden layer and output

`wide` and `recurrent` train their map of the state; `trees` and `ridge` cannot, and read the state through
the map that the network router of the same name and seed learned (`state_map_of`). J32 and C_RP3 so have the
same input dimension under every learner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lastcall.analyses.gains import gains_of, planned_of_learned
from lastcall.analyses.recurrent import fit_recurrent, read_inputs
from lastcall.analyses.regressors import REGRESSORS
from lastcall.routing.dataset import Dataset
from lastcall.routing.fitting import fit_router, held_out, load_router, projection
from lastcall.routing.quota import deadline_calls, threshold
from lastcall.routing.routers import INPUTS, Router
from lastcall.study import Routers, Study

Kind = Literal["trees", "wide", "ridge", "recurrent"]
KINDS: tuple[Kind, ...] = ("trees", "wide", "ridge", "recurrent")
WIDE = 512
"""Hidden units of `wide`."""


@final
@dataclass(frozen=True, eq=False)
class Learner:
    """One fitted learner."""

    kind: Kind
    name: str
    """Router whose inputs it reads."""
    seed: int
    held_out_loss: tuple[float, ...]
    """Huber loss on the held-out books, nats: after each epoch or tree, or at each penalty."""
    kept: int
    """Which of these was kept, from 1."""
    predict: Callable[[Dataset], Tensor]

    def score(self, data: Dataset) -> Float[Tensor, "blocks n"]:
        """Predicted utility at every scored position of `data`, nats, float32."""
        return self.predict(data)


def fit_learner(
    kind: Kind, name: str, seed: int, fit: Dataset, recipe: Routers, state_map: Tensor | None = None
) -> Learner:
    """Fit `kind` on the inputs of router `name`; the same arguments give the same bytes on one machine.

    `state_map` [d, rank] is given where trees or ridge read the state, and only there: else ValueError.
    Raises BookError where no book would be held out, NonFiniteError where a fit diverges or an input is not
    finite.
    """
    expected = _map_shape(kind, name, fit)
    found = None if state_map is None else tuple(state_map.shape)
    if found != expected:
        raise ValueError(f"{kind} of {name} needs a state map of shape {expected}, not {found}")
    if kind == "wide":
        router, curve = fit_router(name, seed, fit, recipe.model_copy(update={"hidden": WIDE}))
        return Learner(kind, name, seed, tuple(curve["held_out_loss"]), curve["epoch"], router.score)
    if kind == "recurrent":
        model, losses = fit_recurrent(name, seed, fit, recipe)
        return Learner(kind, name, seed, tuple(losses), 1 + losses.index(min(losses)), model.score)
    return _fit_fixed(kind, name, seed, fit, recipe, state_map)


def needs_map(kind: Kind, name: str) -> bool:
    """Whether `fit_learner` must be given a state map."""
    return kind in REGRESSORS and INPUTS[name].state > 0


def state_map_of(folder: Path, name: str, seed: int, hidden: int) -> Tensor:
    """The map of the state, [d, rank], that the network router in `folder` learned.

    Raises OutputError where its file is missing or of another shape, ValueError where it reads no state.
    """
    learned = load_router(folder, name, seed, hidden).state_map
    if learned is None:
        raise ValueError(f"router {name} has no map of the state")
    return learned.detach()


def _map_shape(kind: Kind, name: str, fit: Dataset) -> tuple[int, int] | None:
    inputs = INPUTS[name]
    return (fit.states[inputs.source].shape[-1], inputs.state) if needs_map(kind, name) else None


def _fit_fixed(
    kind: Kind, name: str, seed: int, fit: Dataset, recipe: Routers, state_map: Tensor | None
) -> Learner:
    """Trees or ridge on fixed columns."""
    reader = _reader(name, fit, recipe, state_map)
    x = _columns(reader, fit)
    held = held_out(fit.books, recipe.holdout_every).repeat_interleave(fit.utility.shape[1]).numpy()
    y = fit.utility.double().flatten().numpy()
    fitted = REGRESSORS[kind](x, y, held, delta=recipe.huber_delta, seed=seed)

    def predict(data: Dataset) -> Tensor:
        predicted = fitted.predict(_columns(reader, data))
        return torch.from_numpy(predicted).float().reshape(data.utility.shape)

    return Learner(kind, name, seed, fitted.held_out_loss, fitted.kept, predict)


@torch.no_grad()
def _reader(name: str, fit: Dataset, recipe: Routers, state_map: Tensor | None) -> Router:
    """A router that only reads its inputs: scaled by the fit split, with the given map."""
    inputs = INPUTS[name]
    d = fit.states[inputs.source].shape[-1]
    reader = Router(inputs, d, hidden=1)
    reader.scaling.projection.copy_(projection(d, inputs.fixed, recipe.projection_seed))
    reader.scaling.learn(reader.raw(fit), fit.states[inputs.source] if inputs.state else None)
    if reader.state_map is not None and state_map is not None:
        reader.state_map.copy_(state_map)
    return reader


@torch.inference_mode()
def _columns(reader: Router, data: Dataset) -> Float[np.ndarray, "rows columns"]:
    """The inputs at every scored position, a block at a time; float32."""
    states = data.states[reader.inputs.source]
    blocks = [read_inputs(reader, r, s) for r, s in zip(reader.raw(data), states, strict=True)]
    return torch.cat(blocks).numpy()


def learner_gains(
    learners: Sequence[Learner], calibration: Dataset, test: Dataset, calls: int
) -> Float64[np.ndarray, "seeds books"]:
    """NLL(never) − NLL(learner) of each seed and test book; τ from calibration scores."""
    made = []
    for learner in learners:
        tau = threshold(learner.score(calibration).numpy(), calls, test.utility.shape[-1])
        made.append(deadline_calls(learner.score(test).numpy(), tau, calls))
    return gains_of(np.stack(made), test)


def fit_gains(
    kind: Kind,
    study: Study,
    folder: Path,
    fit: Dataset,
    calibration: Dataset,
    test: Dataset,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Float64[np.ndarray, "seeds books"]]:
    """Gains of `kind` on one checkpoint, by every router that a planned comparison names; `advance` a fit.

    `folder` holds the checkpoint's fitted routers, for their state maps.
    """
    recipe = study.routers
    compared = dict.fromkeys(name for over in planned_of_learned(study) for name in (over.a, over.b))

    def fitted(name: str, seed: int) -> Learner:
        learned = state_map_of(folder, name, seed, recipe.hidden) if needs_map(kind, name) else None
        learner = fit_learner(kind, name, seed, fit, recipe, learned)
        advance()
        return learner

    jobs = [(name, seed) for name in compared for seed in recipe.seeds]
    made = _side_by_side(fitted, jobs) if kind in ("wide", "recurrent") else [fitted(*job) for job in jobs]
    return {
        name: learner_gains([m for m in made if m.name == name], calibration, test, study.calls)
        for name in compared
    }


def _side_by_side(fitted: Callable[[str, int], Learner], jobs: Sequence[tuple[str, int]]) -> list[Learner]:
    """Fit `jobs` on as many threads as torch has, each on one: torch works outside the interpreter's lock,
    and no sum's order depends on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda job: fitted(*job), jobs))
    finally:
        torch.set_num_threads(threads)
