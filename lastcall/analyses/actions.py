"""Routing between three actions, bypass, local-w and full, under one cost budget (section 8).

A full call costs 1 and a local one the share of its keys that it reads, in the mean over scored positions
(`local_cost`). Keys are all that is counted: query and output projections are the same in both, so that where
these weigh, a local call saves less than that (`lastcall.measure.savings` counts them). A block may spend k,
the calls of the quota, in cost.

Each position has two predicted utilities from the same router inputs: of the full call, ℓ0 − ℓ1, by the
fitted router, and of the local one, ℓ0 − ℓw, by a second fit of the same recipe. The rule is causal: the
action with the largest score − λ · cost is taken (bypass: 0; of equal ones the cheaper), among those that the
cost left pays for. λ ≥ 0 is the least price at which, without any limit, the mean cost on the calibration
split is within the budget; it is frozen. The deadline: where the cost left is at least the positions left,
the call is full.

Guarantee, for any scores: k − 1 < cost ≤ k in every block, so that less than one full call is left unspent.
Proof. No action dearer than the cost left is taken, and a due call is paid for, since then cost left ≥
positions left ≥ 1: so cost ≤ k. With b left over r positions: where b < r, the step leaves b' ≤ b < r' + 1;
where b ≥ r, both fall by 1. So b − r < 1 throughout, for it begins at k − n ≤ 0, and the end, r = 0, has
b < 1. Nothing is rounded: a local call's cost is a whole number of 2⁻³².

The same router between two actions is the deadline quota (section 5), which spends k exactly: the comparison
favours it by less than one call a block. A choice at one position changes no other (section 2), so every loss
is exact. Secondary, whole-cluster intervals, outside every family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int8

from lastcall.analyses.gains import gains_of
from lastcall.errors import NonFiniteError, StudyError
from lastcall.records import RunFolder, local_loss
from lastcall.results import Interval
from lastcall.routing.dataset import Dataset
from lastcall.routing.fitting import fit_router, load_router
from lastcall.routing.quota import deadline_calls, threshold
from lastcall.routing.routers import Router
from lastcall.secondary import ThirdActionResult, ThirdActionRouter
from lastcall.stats.bootstrap import Draws, mean_intervals
from lastcall.stats.loading import read_losses
from lastcall.study import Part, Study

BYPASS, LOCAL, FULL = 0, 1, 2
ROUTERS = ("J32", "S32", "B")
"""Those asked about, where a study fits them."""
_GRAIN = 2.0**-32
"""Of costs: sums of up to 2²⁰ of them are exact in float64."""

Actions = Int8[np.ndarray, "blocks n"]
Utilities = Float[np.ndarray, "blocks n"]
"""Of full or of local calls, predicted or true, nats."""


@final
@dataclass(frozen=True, eq=False)
class ActionData:
    """One split of one checkpoint: what routers see, and both utilities."""

    data: Dataset
    local: Float64[np.ndarray, "blocks n"]
    """ℓ0 − ℓw, nats."""
    loss_bypass: Float64[np.ndarray, "blocks n"]
    """ℓ0, nats."""


def with_local(
    study: Study, run: RunFolder, checkpoint: str, part: Part, books: Sequence[str], data: Dataset
) -> ActionData:
    """`data`, the dataset of `part`, with the local utilities of the same `books` in the same order.

    Raises OutputError or NonFiniteError, naming the file, where a record is not as it should be.
    """
    losses = read_losses(study, run, checkpoint, books, part)
    shape = tuple(data.utility.shape)
    bypass = losses["loss_bypass"].reshape(shape)
    return ActionData(data, bypass - losses[local_loss(_window(study))].reshape(shape), bypass)


def local_cost(horizon: int, context: int, window: int) -> float:
    """Mean over scored t of min(t + 1, window) / (t + 1): keys that a local call reads of a full one's."""
    keys = np.arange(context, horizon) + 1
    return float(np.round((np.minimum(keys, window) / keys).mean() / _GRAIN) * _GRAIN)


def costs(actions: Int8[np.ndarray, "*any"], local: float) -> Float64[np.ndarray, "*any"]:
    """Cost of each action; `local` is a local call's."""
    of_action: Float64[np.ndarray, "*any"] = np.array([0.0, local, 1.0])[actions]
    return of_action


def choose(
    full: Float[np.ndarray, "*any"],
    local: Float[np.ndarray, "*any"],
    price: float | Float64[np.ndarray, "blocks 1"],
    local_cost: float,
    left: float | Float64[np.ndarray, " blocks"] = np.inf,
) -> Int8[np.ndarray, "*any"]:
    """The action of the largest score − price · cost among those that cost at most `left`; of equal ones the
    cheaper. `price` and `left` broadcast over the scores, which are in nats."""
    net_local = np.where(local_cost <= left, local - price * local_cost, -np.inf)
    net_full = np.where(left >= 1.0, full - price, -np.inf)
    chosen = np.where(net_local > 0, LOCAL, BYPASS)
    return np.where(net_full > np.maximum(net_local, 0), FULL, chosen).astype(np.int8)


def budgeted_actions(
    full: Utilities, local: Utilities, price: float, calls: int, local_cost: float
) -> Actions:
    """What the rule does in every block at once: each costs more than calls − 1 and at most `calls`.

    Raises ValueError where `calls` is not 1 to n.
    """
    n = full.shape[-1]
    if not 0 < calls <= n:
        raise ValueError(f"calls must be 1 to {n}, got {calls}")
    taken = np.empty(full.shape, dtype=np.int8)
    left = np.full(len(full), float(calls))
    for i in range(n):
        best = choose(full[:, i], local[:, i], price, local_cost, left)
        taken[:, i] = np.where(left >= n - i, FULL, best)
        left = left - costs(taken[:, i], local_cost)
    return taken


def prices(
    full: Utilities, local: Utilities, budget: float, local_cost: float
) -> tuple[Float64[np.ndarray, " blocks"], Float64[np.ndarray, " blocks"]]:
    """Of each row the least λ ≥ 0 at which the row's whole cost is within `budget`, and the next float below,
    at which it is not; both 0 where nothing need be given up. Bisection: cost falls as the price rises."""

    def within(price: Float64[np.ndarray, " blocks"]) -> Bool[np.ndarray, " blocks"]:
        spent = costs(choose(full, local, price[:, None], local_cost), local_cost).sum(-1)
        return np.asarray(spent <= budget)

    dearest = np.maximum(full.max(-1), local.max(-1) / local_cost).astype(np.float64)
    below = np.zeros(len(full))
    price = np.where(within(below), 0.0, 2 * np.maximum(dearest, 0))  # at twice the dearest nothing is called
    while True:
        middle = (below + price) / 2
        if ((middle <= below) | (middle >= price)).all():
            return price, below
        fits = within(middle)
        price, below = np.where(fits, middle, price), np.where(fits, below, middle)


def frozen_price(full: Utilities, local: Utilities, calls: int, local_cost: float) -> float:
    """λ from calibration scores [blocks, n]: the least at which their mean cost is within calls / n."""
    budget = calls * full.size / full.shape[-1]
    return float(prices(full.reshape(1, -1), local.reshape(1, -1), budget, local_cost)[0][0])


def oracle_actions(full: Utilities, local: Utilities, calls: int, local_cost: float) -> Actions:
    """Hindsight's choice at a cost of at most `calls` a block, from true utilities.

    The block's own λ, and of what ties there the earliest that still fit. Lagrangian duality: no choice
    within the budget gains more than λ · (cost left) above this one. Where λ is positive less than one full
    call is left, so that it is within λ, the worth of one call's cost, of the exact optimum; where λ is 0 it
    is the optimum.
    """
    price, below = prices(full, local, calls, local_cost)
    chosen = choose(full, local, price[:, None], local_cost)
    dearer = choose(full, local, below[:, None], local_cost)
    more = costs(dearer, local_cost) - costs(chosen, local_cost)
    left = calls - costs(chosen, local_cost).sum(-1, keepdims=True)
    taken: Actions = np.where(np.cumsum(more, axis=-1) <= left, dearer, chosen)
    return taken


@final
@dataclass(frozen=True, eq=False)
class _Routed:
    """One router on the test split: actions, and the same router's two-action calls."""

    three: Int8[np.ndarray, "seeds blocks n"]
    two: Bool[np.ndarray, "seeds blocks n"]


def third_action(
    study: Study,
    checkpoint: str,
    folder: Path,
    fit: ActionData,
    calibration: ActionData,
    test: ActionData,
    draws: Draws,
    *,
    routers: Sequence[str] = ROUTERS,
    advance: Callable[[], None] = lambda: None,
) -> ThirdActionResult:
    """Three actions on one checkpoint, by those of `routers` that the study fits; `advance` a fit.

    `folder` holds the checkpoint's fitted routers; the window is `analyses.third_action`; `draws` are of the
    clusters of the test books. StudyError where the operation is not the attention or no router is fitted,
    OutputError where a fitted file is missing, NonFiniteError where a fit diverges or a score is not finite;
    ValueError where the study asks for no third action or the draws are of other books.
    """
    window = _window(study)
    if tuple(dict.fromkeys(test.data.books)) != draws.clusters.books:
        raise ValueError("the draws are of other books than the test split, or in another order")
    cost = local_cost(study.blocks.horizon, study.blocks.context, window)
    routed = {
        name: _route(study, folder, name, fit, calibration, test, cost, advance)
        for name in _asked(study, routers)
    }
    full, local = test.data.utility.double().numpy(), test.local
    best = _gain(oracle_actions(full, local, study.calls, cost)[None], test)
    oracle = mean_intervals(draws, {"oracle": best}, study.inference.alpha)["oracle"]
    return {
        "checkpoint": checkpoint,
        "window": window,
        "local_cost": cost,
        "budget": study.calls / study.blocks.scored,
        "routers": [
            _summary(name, of, test, cost, draws, study.inference.alpha) for name, of in routed.items()
        ],
        "oracle": oracle,
    }


def _window(study: Study) -> int:
    """The third action's; ValueError where the study asks for none, StudyError where it cannot have one."""
    if study.analyses.third_action is None:
        raise ValueError("the study asks for no third action")
    if study.operation != "attention":
        raise StudyError(
            "a local call lies between bypass and full only where the operation is the attention",
            got=f'operation = "{study.operation}"',
            todo="leave out analyses.third_action",
        )
    return study.analyses.third_action


def _asked(study: Study, routers: Sequence[str]) -> list[str]:
    """Those of `routers` that the study fits."""
    fitted = [name for name in routers if name in study.routers.names]
    if not fitted:
        raise StudyError(
            "a third action needs a fitted router",
            got=", ".join(study.routers.names),
            todo=f"add one of {', '.join(routers)} to routers.names",
        )
    return fitted


def _route(
    study: Study,
    folder: Path,
    name: str,
    fit: ActionData,
    calibration: ActionData,
    test: ActionData,
    cost: float,
    advance: Callable[[], None],
) -> _Routed:
    """Router `name` at every seed, between three actions and between two."""
    target = replace(fit.data, utility=torch.from_numpy(fit.local).float())
    three, two = [], []
    for seed in study.routers.seeds:
        of_full = load_router(folder, name, seed, study.routers.hidden)
        of_local, _ = fit_router(name, seed, target, study.routers)
        advance()
        cut, cut_local = (_scores(router, calibration.data, name) for router in (of_full, of_local))
        full, local = (_scores(router, test.data, name) for router in (of_full, of_local))
        price = frozen_price(cut, cut_local, study.calls, cost)
        three.append(budgeted_actions(full, local, price, study.calls, cost))
        two.append(deadline_calls(full, threshold(cut, study.calls, study.blocks.scored), study.calls))
    return _Routed(np.stack(three), np.stack(two))


def _scores(router: Router, data: Dataset, name: str) -> Float64[np.ndarray, "blocks n"]:
    scores = router.score(data).double().numpy()
    if not np.isfinite(scores).all():
        raise NonFiniteError(f"a score of router {name} is not finite", todo="lower routers.learning_rate")
    return scores


def _gain(actions: Int8[np.ndarray, "seeds blocks n"], test: ActionData) -> Float64[np.ndarray, " books"]:
    """NLL(never) − NLL(actions) of each test book: the mean over its blocks and over seeds, nats a token."""
    full = test.data.utility.double().numpy()
    gained = np.where(actions == FULL, full, np.where(actions == LOCAL, test.local, 0.0))
    return _by_book(gained.mean(0), test.data)


def _by_book(values: Float64[np.ndarray, "blocks n"], data: Dataset) -> Float64[np.ndarray, " books"]:
    """Mean of `values` over the blocks of each book, which lie side by side."""
    means: Float64[np.ndarray, " books"] = values.reshape(len(set(data.books)), -1).mean(-1)
    return means


def _summary(
    name: str, routed: _Routed, test: ActionData, cost: float, draws: Draws, alpha: float
) -> ThirdActionRouter:
    gain, two = _gain(routed.three, test), gains_of(routed.two, test.data).mean(0)
    columns = {"nll": _by_book(test.loss_bypass, test.data) - gain, "gain": gain, "over_two": gain - two}
    found: dict[str, Interval] = mean_intervals(draws, columns, alpha)
    return {
        "name": name,
        "nll": found["nll"],
        "gain": found["gain"],
        "over_two": found["over_two"],
        "full": float((routed.three == FULL).mean()),
        "local": float((routed.three == LOCAL).mean()),
        "cost": float(costs(routed.three, cost).mean()),
    }
