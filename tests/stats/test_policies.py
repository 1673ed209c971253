"""Ceilings, ties and the unforced rule."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lastcall.stats.loading import CheckpointRecords, Policy
from lastcall.stats.policies import exceeds, forced_share, largest, unforced
from lastcall.stats.summaries import tenths


@given(arrays(np.float64, (2, 1, 9), elements=st.sampled_from([-1.0, 0.0, 0.5, 2.0])), st.integers(1, 9))
def test_the_largest_are_chosen_and_ties_go_to_the_earlier(values: np.ndarray, calls: int) -> None:
    for block, mask in zip(values[:, 0], largest(values, calls)[:, 0], strict=True):
        best = sorted(range(9), key=lambda i: (-block[i], i))[:calls]
        assert np.flatnonzero(mask).tolist() == sorted(best)


def policy(scores: list[float], calls: list[bool], tau: float) -> Policy:
    shape = (1, 1, 1, len(scores))
    return Policy(
        "B", "learned", (0,), np.array(calls).reshape(shape), np.float32(scores).reshape(shape), (tau,)
    )


def test_a_score_at_the_threshold_is_not_above_it_and_its_call_was_forced() -> None:
    b = policy([0.5, 0.25, 0.75, 0.25], [False, False, True, True], 0.25)
    above = exceeds(b)
    assert above is not None
    assert above.ravel().tolist() == [True, False, True, False]
    assert forced_share(b, above) == 0.5


def test_scores_and_thresholds_are_compared_in_float64() -> None:
    score = np.float32(0.1)
    tau = float(score) - 1e-12
    assert np.float32(tau) == score
    above = exceeds(policy([score], [True], tau))
    assert above is not None
    assert above.all()


def test_the_unforced_rule_and_its_drift() -> None:
    b = policy([1, 1, 0, 1, 0, 0, 0, 0], [True] * 8, 0.5)
    full, bypass = np.zeros((1, 1, 8)), np.arange(8.0).reshape(1, 1, 8)
    records = CheckpointRecords(full, bypass, bypass, {}, (b,))
    above = exceeds(b)
    assert above is not None
    assert unforced(above, records) == {
        "nll": (2 + 4 + 5 + 6 + 7) / 8,
        "activation": 3 / 8,
        "activation_by_quarter": [1.0, 0.5, 0.0, 0.0],
    }


def test_tenths_are_tenths_and_ties_share_one() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 7, 10)).astype(np.float32)
    bins = tenths(scores)
    assert np.bincount(bins.ravel()).tolist() == [21] * 10
    assert (np.diff(bins.ravel()[np.argsort(scores.ravel())]) >= 0).all()
    assert tenths(np.float32([1, 1, 1, 1])).tolist() == [0, 0, 0, 0]
