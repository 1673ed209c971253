"""What each router sees, and the one network, against section 4 and its literal twin."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from lastcall.routing.dataset import Dataset
from lastcall.routing.fitting import projection
from lastcall.routing.routers import INPUTS, Router
from lastcall.study import LEARNED_ROUTERS
from tests.reference import routing as reference
from tests.routing.made import SCALARS, made

SIZES = {
    "B": (6, 0, 0),
    "T": (9, 0, 0),
    "S32": (6, 32, 0),
    "S35": (6, 35, 0),
    "J32": (9, 32, 0),
    "C_RP3": (6, 32, 3),
    "I_B": (3, 0, 0),
    "I_S35": (3, 35, 0),
    "I_J32": (6, 32, 0),
}
"""Scalars, rank of the learned map and rank of the fixed projection (section 4)."""


def started(name: str, data: Dataset, seed: int = 0, hidden: int = 7) -> Router:
    """A router at its start, scaled to `data`."""
    inputs = INPUTS[name]
    d = data.states[inputs.source].shape[-1]
    router = Router(inputs, d, hidden)
    router.scaling.projection.copy_(projection(d, inputs.fixed, 217))
    router.initialise(torch.Generator().manual_seed(seed))
    router.scaling.learn(router.raw(data), data.states[inputs.source] if inputs.state else None)
    return router


def tensors(router: Router) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in router.state_dict().items()}


def test_every_learned_router_has_its_row() -> None:
    assert tuple(INPUTS) == LEARNED_ROUTERS == tuple(SIZES)


@pytest.mark.parametrize("name", LEARNED_ROUTERS)
def test_inputs_are_those_of_section_4(name: str) -> None:
    inputs = INPUTS[name]
    assert (len(inputs.scalars), inputs.state, inputs.fixed) == SIZES[name]
    assert list(inputs.scalars) == reference.SEES[name]
    assert inputs.size == sum(SIZES[name]) == Router(inputs, 5, 64).hidden.in_features
    assert inputs.source == ("incoming" if name.startswith("I_") else "bypass")


def test_matched_routers_are_of_one_size() -> None:
    assert INPUTS["J32"].size == INPUTS["C_RP3"].size == INPUTS["S35"].size == 41
    assert INPUTS["I_J32"].size == INPUTS["I_S35"].size == 38


@pytest.mark.parametrize("name", LEARNED_ROUTERS)
def test_scores_are_the_twins(name: str) -> None:
    data = made(1)
    router = started(name, data)
    scores = router.score(data)
    weights = tensors(router)
    for block, i in [(0, 0), (3, 7), (23, 4)]:
        scalars = [float(data.scalars[n][block, i]) for n in reference.SEES[name]]
        state = data.states[INPUTS[name].source][block, i].tolist()
        expected = reference.predicted_utility(weights, scalars, state)
        assert float(scores[block, i]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", LEARNED_ROUTERS)
def test_a_router_reads_what_it_lists_and_nothing_else(name: str) -> None:
    data = made(2)
    router = started(name, data)
    scores = router.score(data)
    for scalar in SCALARS:
        changed = data.scalars | {scalar: data.scalars[scalar] + 1}
        same = torch.equal(router.score(dataclasses.replace(data, scalars=changed)), scores)
        assert same == (scalar not in reference.SEES[name]), scalar
    for source in ("bypass", "incoming"):
        states = data.states | {source: data.states[source] + 1}
        same = torch.equal(router.score(dataclasses.replace(data, states=states)), scores)
        assert same == (not INPUTS[name].state or source != INPUTS[name].source), source


def test_no_incoming_router_reads_uncertainty_or_the_bypass_state() -> None:
    for inputs in (INPUTS[name] for name in INPUTS if name.startswith("I_")):
        assert not {"entropy", "top_logprob", "margin"} & set(inputs.scalars)
        assert inputs.source == "incoming"


@pytest.mark.parametrize("name", ["J32", "C_RP3", "I_S35"])
def test_a_score_uses_its_own_position_alone(name: str) -> None:
    data, other = made(3), made(4)
    router = started(name, data)
    mixed = Dataset(
        data.books,
        {n: torch.cat([x[:, :5], other.scalars[n][:, 5:]], 1) for n, x in data.scalars.items()},
        {n: torch.cat([x[:, :5], other.states[n][:, 5:]], 1) for n, x in data.states.items()},
        other.utility,
    )
    torch.testing.assert_close(router.score(mixed)[:, :5], router.score(data)[:, :5], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["T", "C_RP3", "I_J32"])
def test_scaling_takes_the_moments_of_all_positions(name: str) -> None:
    data = made(5)
    weights = tensors(started(name, data))
    columns = [data.scalars[n].flatten().tolist() for n in reference.SEES[name]]
    states = data.states[INPUTS[name].source].flatten(0, 1).double().numpy()
    columns += [list(column) for column in (states @ weights["scaling.projection"].astype(float)).T]
    for i, column in enumerate(columns):
        mean, deviation = reference.moments(column)
        assert weights["scaling.mean"][i] == pytest.approx(mean, rel=1e-4, abs=1e-4)
        assert weights["scaling.deviation"][i] == pytest.approx(deviation, rel=1e-4)
    expected = reference.root_mean_square(states.ravel().tolist()) if INPUTS[name].state else 1.0
    assert weights["scaling.rms"] == pytest.approx(expected, rel=1e-5)


def test_a_feature_that_never_varies_is_left_unscaled() -> None:
    data = made(6)
    data.scalars["margin"].fill_(4.0)
    router = started("B", data)
    assert float(router.scaling.deviation[2]) == 1.0
    assert torch.isfinite(router.score(data)).all()


def test_scaling_is_never_trained() -> None:
    trained = {name for name, _ in Router(INPUTS["C_RP3"], 5, 7).named_parameters()}
    assert trained == {"state_map", "hidden.weight", "hidden.bias", "out.weight", "out.bias"}


def test_the_map_starts_normal_and_the_layers_uniform() -> None:
    router = Router(INPUTS["S35"], 900, 64)
    router.initialise(torch.Generator().manual_seed(0))
    assert router.state_map is not None
    start = router.state_map.detach()
    assert float(start.std()) == pytest.approx(900**-0.5, rel=0.02)
    assert float(start.abs().max()) > 3 * 900**-0.5
    for layer in (router.hidden, router.out):
        bound = layer.in_features**-0.5
        assert 0.9 * bound < float(layer.weight.detach().abs().max()) <= bound
        assert float(layer.bias.detach().abs().max()) <= bound


def test_the_start_depends_on_its_seed_alone() -> None:
    data = made(7)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tensors(started("C_RP3", data, seed=4))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = tensors(started("C_RP3", data, seed=4)), tensors(started("C_RP3", data, seed=5))
    for name, tensor in first.items():
        np.testing.assert_array_equal(again[name], tensor)
    assert all(
        (other[n] != first[n]).any() for n in ("state_map", "hidden.weight", "hidden.bias", "out.weight")
    )
