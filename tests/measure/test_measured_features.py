"""Features of section 3: literal, causal, zero where a predecessor is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastcall.measure.engine import measure_batch
from lastcall.measure.loading import Loaded
from lastcall.routing.features import trajectory
from tests.reference import measure as twin
from tests.tiny import HORIZON, TINY, book, study, token_blocks

Tiny = Callable[..., Loaded]
FEATURES = ("entropy", "top_logprob", "margin")
TRAJECTORY = ("displacement", "extrapolation_error", "curvature", "error_change")
MISSING = dict(zip(TRAJECTORY, (1, 2, 2, 3), strict=True))


def states(seed: int, positions: int, d: int = 8, blocks: int = 1) -> torch.Tensor:
    return torch.randn(blocks, positions, d, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 1000), positions=st.integers(3, 20), d=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_the_trajectory_is_the_literal_one(seed: int, positions: int, d: int) -> None:
    s = states(seed, positions, d, blocks=2)
    found = trajectory(s)
    assert tuple(found) == TRAJECTORY
    for i in range(2):
        for name, want in twin.trajectory(s[i]).items():
            torch.testing.assert_close(found[name][i].double(), want, atol=2e-5, rtol=2e-5, msg=name)


def test_a_known_path() -> None:
    path = torch.tensor([[3.0, 4.0], [3.0, 0.0], [6.0, 0.0], [9.0, 0.0]])
    found = {name: value.tolist() for name, value in trajectory(path).items()}
    assert found["displacement"] == pytest.approx([0, 4 / 5, 1, 1 / 2])
    assert found["extrapolation_error"] == pytest.approx([0, 0, 5 / 3, 0])  # |(6,0) − (3,−4)| / 3
    assert found["curvature"] == pytest.approx([0, 0, 1, 0])
    assert found["error_change"] == pytest.approx([0, 0, 0, -5 / 3])


def test_where_a_predecessor_is_missing_the_feature_is_zero_and_only_there() -> None:
    for name, value in trajectory(states(0, 12, blocks=3)).items():
        assert (value[:, : MISSING[name]] == 0).all()
        assert (value[:, MISSING[name] :] != 0).all()


def test_states_that_do_not_move_or_are_zero_give_zeros_not_nan() -> None:
    still = torch.ones(1, 6, 4)
    for value in (*trajectory(still).values(), *trajectory(torch.zeros(1, 6, 4)).values()):
        assert (value == 0).all()


def test_sixteen_bit_states_are_computed_in_float32() -> None:
    s = states(0, 12).bfloat16()
    for name, value in trajectory(s).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, trajectory(s.float())[name])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY)
def test_features_at_t_use_nothing_after_t_nor_the_target(name: str, backend: str, tiny: Tiny) -> None:
    loaded, plan = tiny(name, backend), study()
    tokens = token_blocks()
    for t in (0, 3, HORIZON // 2, HORIZON - 1):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 101) % 256
        here, there = (measure_batch(loaded, plan, (book("a", x),))[0] for x in (tokens, changed))
        for column in (*FEATURES, *TRAJECTORY, *(f"incoming_{f}" for f in TRAJECTORY)):
            a, b = (torch.as_tensor(m.columns[column]).view(2, HORIZON) for m in (here, there))
            assert torch.equal(a[:, : t + 1], b[:, : t + 1]), column
            assert t > HORIZON - 5 or not torch.equal(a[:, t + 1 :], b[:, t + 1 :]), column
        for kind in ("bypass", "incoming"):
            assert torch.equal(here.states[kind][:, : t + 1], there.states[kind][:, : t + 1])


def test_the_losses_before_t_do_not_see_what_comes_after_their_target(tiny: Tiny) -> None:
    loaded, plan, tokens, t = tiny("gemma3-sliding"), study(), token_blocks(), 11
    changed = tokens.clone()
    changed[:, t + 1 :] = (changed[:, t + 1 :] + 101) % 256
    here, there = (measure_batch(loaded, plan, (book("a", x),))[0].columns for x in (tokens, changed))
    for column in ("loss_full", "loss_bypass", "loss_local3", "kl"):
        a, b = (torch.as_tensor(c[column]).view(2, HORIZON) for c in (here, there))
        assert torch.equal(a[:, :t], b[:, :t])
        assert (a[:, t + 1 :] != b[:, t + 1 :]).any()
