"""Features of section 3 against their literal twins, and their causality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastcall.routing.features import POSITION, TRAJECTORY, position, trajectory
from tests.reference import routing as reference


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 5))
def test_trajectory_is_the_twin(seed: int, positions: int, d: int) -> None:
    states = drawn(seed, 2, positions, d)
    found = trajectory(states)
    assert set(found) == {"displacement", *TRAJECTORY}
    for block in range(2):
        for name, expected in reference.trajectory(states[block].tolist()).items():
            np.testing.assert_allclose(found[name][block].numpy(), expected, rtol=2e-4, atol=2e-5)


@given(st.integers(0, 2**32), st.integers(0, 7))
def test_nothing_after_t_is_used(seed: int, t: int) -> None:
    states, changed = drawn(seed, 8, 3), drawn(seed, 8, 3)
    changed[t + 1 :] = drawn(seed + 1, 7 - t, 3)
    before, after = trajectory(states), trajectory(changed)
    for name in before:
        assert torch.equal(before[name][: t + 1], after[name][: t + 1])


def test_positions_without_predecessors_are_zero_and_the_rest_are_not() -> None:
    found = trajectory(drawn(0, 6, 4))
    lacking = {"displacement": 1, "extrapolation_error": 2, "curvature": 2, "error_change": 3}
    for name, missing in lacking.items():
        assert (found[name] != 0).tolist() == [False] * missing + [True] * (6 - missing)


def test_a_state_that_does_not_move_gives_zeros_and_a_straight_line_no_bend() -> None:
    still = trajectory(torch.zeros(5, 3))
    assert all((values == 0).all() for values in still.values())
    straight = trajectory(torch.arange(1.0, 6.0)[:, None] * torch.tensor([3.0, 4.0]))
    assert straight["extrapolation_error"].tolist() == pytest.approx([0] * 5, abs=1e-6)
    assert straight["curvature"].tolist() == pytest.approx([0] * 5, abs=1e-6)
    assert straight["displacement"].tolist() == pytest.approx([0, 1, 1 / 2, 1 / 3, 1 / 4])


def test_half_precision_states_are_computed_on_in_single() -> None:
    states = drawn(0, 9, 4).to(torch.bfloat16)
    for name, values in trajectory(states).items():
        assert values.dtype == torch.float32
        assert torch.equal(values, trajectory(states.float())[name])


def test_position_is_the_twin() -> None:
    found = position(torch.arange(17.0, 512.0), 512)
    assert tuple(found) == POSITION
    for t in (17, 100, 511):
        for name, expected in reference.position(t, 512).items():
            assert float(found[name][t - 17]) == pytest.approx(expected, rel=1e-6)
