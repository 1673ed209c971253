"""Fit every router by the one recipe of section 4, cut its threshold on the calibration split, store both.

    fitted/<checkpoint>/<router>-<seed>.safetensors   network, scaling, projection
    fitted/<checkpoint>/by-position.safetensors       mean utility by scored position in the fit split
    fitted/<checkpoint>/thresholds.json               τ by router and seed
    fitted/<checkpoint>/training.json                 digests, files, held-out loss an epoch, epoch kept

Everything is float32 on the CPU: a router is small, and the same study gives the same bytes.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, final

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lastcall.errors import BookError, NonFiniteError, OutputError
from lastcall.records import RunFolder, atomic, read_json, write_json
from lastcall.routing.dataset import Dataset
from lastcall.routing.quota import threshold
from lastcall.routing.routers import INPUTS, Router
from lastcall.study import LEARNED_ROUTERS, Routers, Study

THRESHOLDS = "thresholds.json"
MADE = "lastcall_made"
"""Metadata of a router's file: JSON of the source digest it was fitted from and its training curve."""
TRAINING = "training.json"
PROFILE = "by-position.safetensors"


class Curve(TypedDict):
    """How one fit went."""

    held_out_loss: list[float]
    """Huber loss on the held-out books after each epoch, nats."""
    epoch: int
    """The epoch kept, from 1."""


@final
class _Fit:
    """The fit split as one router sees it, divided into training and held-out blocks."""

    def __init__(self, router: Router, data: Dataset, recipe: Routers) -> None:
        self.raw = router.raw(data)
        self.states = data.states[router.inputs.source]
        self.utility = data.utility
        held = held_out(data.books, recipe.holdout_every)
        self.train = torch.nonzero(~held).squeeze(1)
        self.held = torch.nonzero(held).squeeze(1)

    def loss(self, router: Router, blocks: Tensor, delta: float) -> Tensor:
        predicted = router(self.raw[blocks], self.states[blocks])
        return torch.nn.functional.huber_loss(predicted, self.utility[blocks], delta=delta)


def held_out(books: tuple[str, ...], every: int) -> Tensor:
    """Mask over blocks: those of every `every`-th book, in the order given (id order). Raises BookError where
    no book would be held out."""
    order = list(dict.fromkeys(books))
    held = set(order[every - 1 :: every])
    if not held:
        raise BookError(
            "too few fit books to hold one out",
            got=str(len(order)),
            todo=f"give at least {every}, or lower routers.holdout_every",
        )
    return torch.tensor([book in held for book in books])


def fit_router(name: str, seed: int, data: Dataset, recipe: Routers) -> tuple[Router, Curve]:
    """One router at one seed: AdamW on Huber loss; the epoch with the least held-out loss is kept."""
    inputs = INPUTS[name]
    d = data.states[inputs.source].shape[-1]
    router = Router(inputs, d, recipe.hidden)
    router.scaling.projection.copy_(projection(d, inputs.fixed, recipe.projection_seed))
    router.initialise(torch.Generator().manual_seed(2 * seed))
    fit = _Fit(router, data, recipe)
    router.scaling.learn(fit.raw, fit.states if inputs.state else None)
    order = torch.Generator().manual_seed(2 * seed + 1)
    optimizer = torch.optim.AdamW(
        router.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    for _ in range(recipe.epochs):
        _epoch(router, fit, recipe, order, optimizer)
        loss = _held_out_loss(router, fit, recipe)
        if loss < min(losses, default=math.inf):
            best = copy.deepcopy(router.state_dict())
        losses.append(loss)
    if not all(map(math.isfinite, losses)):
        raise NonFiniteError(
            f"router {name} at seed {seed} diverges", got=str(losses), todo="lower routers.learning_rate"
        )
    router.load_state_dict(best)
    return router, Curve(held_out_loss=losses, epoch=1 + losses.index(min(losses)))


def _epoch(
    router: Router, fit: _Fit, recipe: Routers, order: torch.Generator, optimizer: torch.optim.Optimizer
) -> None:
    shuffled = fit.train[torch.randperm(len(fit.train), generator=order)]
    for blocks in torch.split(shuffled, recipe.batch_blocks):
        optimizer.zero_grad()
        fit.loss(router, blocks, recipe.huber_delta).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _held_out_loss(router: Router, fit: _Fit, recipe: Routers) -> float:
    parts = torch.split(fit.held, recipe.batch_blocks)
    losses = [float(fit.loss(router, b, recipe.huber_delta)) * len(b) for b in parts]
    return sum(losses) / len(fit.held)


def projection(d: int, rank: int, seed: int) -> Tensor:
    """The one recorded Gaussian draw of fixed projections, deviation d^−1/2."""
    drawn = torch.empty(d, rank)
    return drawn.normal_(0, d**-0.5, generator=torch.Generator().manual_seed(seed))


def fit_all(
    run: RunFolder,
    study: Study,
    checkpoint: str,
    fit: Dataset,
    calibration: Dataset,
    source: str,
    advance: Callable[[], None],
    records: str = "",
) -> None:
    """Fit every router of the study and write its artifacts, made from `source`; calls `advance` a fit.

    `records` is the digest of the files that `fit` and `calibration` were read from.
    """
    folder = run.fitted(checkpoint)
    files = [THRESHOLDS]
    thresholds: dict[str, dict[str, float]] = {}
    curves: dict[str, dict[str, Curve]] = {}
    for name in (n for n in study.routers.names if n in LEARNED_ROUTERS):
        thresholds[name], curves[name] = {}, {}
        for seed in study.routers.seeds:
            path = router_file(folder, name, seed)
            router, curves[name][str(seed)] = _made(path, name, seed, study.routers, source) or fit_router(
                name, seed, fit, study.routers
            )
            made = {"source": source, "curve": curves[name][str(seed)]}
            scores = router.score(calibration).numpy()
            thresholds[name][str(seed)] = threshold(scores, study.calls, study.blocks.scored)
            files.append(_save(path, router.state_dict(), made))
            advance()
    if "by-position" in study.routers.names:
        profile = fit.utility.double().mean(0).float()
        files.append(_save(folder / PROFILE, {"utility": profile}))
    write_json(folder / THRESHOLDS, thresholds)
    write_json(folder / TRAINING, {"source": source, "records": records, "files": files, "curves": curves})


def _made(path: Path, name: str, seed: int, recipe: Routers, source: str) -> tuple[Router, Curve] | None:
    """The router and its curve, where a run that was stopped had fitted them from `source`."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            made = json.loads((file.metadata() or {}).get(MADE, "{}"))
        if made.get("source") != source:
            return None
        return load_router(path.parent, name, seed, recipe.hidden), made["curve"]
    except (OSError, safetensors.SafetensorError, OutputError):  # missing or torn: fitted again
        return None


def is_fitted(run: RunFolder, checkpoint: str, source: str) -> bool:
    """Whether `checkpoint`'s routers are all there and were fitted from `source`; training.json is last."""
    folder = run.fitted(checkpoint)
    try:
        made = read_json(folder / TRAINING)
    except OutputError:  # missing or torn: fitted again
        return False
    return made["source"] == source and all((folder / file).is_file() for file in made["files"])


def router_file(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-{seed}.safetensors"


def load_router(folder: Path, name: str, seed: int, hidden: int) -> Router:
    """The fitted router; OutputError where its file is missing or of another shape."""
    tensors = load_tensors(router_file(folder, name, seed))
    try:
        router = Router(INPUTS[name], tensors["scaling.projection"].shape[0], hidden)
        router.load_state_dict(tensors)
    except (KeyError, RuntimeError) as error:
        raise OutputError(
            f"{folder}: router {name} seed {seed} does not fit this study", got=str(error)
        ) from None
    return router


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a fitted file; OutputError where it is missing or torn."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise OutputError(f"cannot read {path}", got=str(error), todo="run `lastcall fit` again") from None
    return tensors


def _save(path: Path, tensors: dict[str, Any], made: dict[str, Any] | None = None) -> str:
    """Write `tensors` and how they were `made`; the file's name. A full disk is then an OSError.

    One metadata key: safetensors writes several in no fixed order, and the bytes are locked.
    """
    metadata = None if made is None else {MADE: json.dumps(made)}
    data = safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}, metadata=metadata)
    with atomic(path) as temporary:
        temporary.write_bytes(data)
    return path.name


def position_profile(folder: Path) -> np.ndarray:
    """Mean utility by scored position in the fit split, [n]."""
    return load_tensors(folder / PROFILE)["utility"].numpy()
