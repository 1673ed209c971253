"""Three actions under a cost budget: the rule against exact fractions, its guarantee, price and oracle."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastcall.analyses.actions import (
    BYPASS,
    FULL,
    LOCAL,
    ActionData,
    budgeted_actions,
    choose,
    costs,
    frozen_price,
    local_cost,
    oracle_actions,
    prices,
    third_action,
    with_local,
)
from lastcall.errors import NonFiniteError, OutputError, StudyError
from lastcall.records import RunFolder
from lastcall.routing import dataset
from lastcall.routing.fitting import fit_all, fit_router, load_router
from lastcall.routing.quota import deadline_calls, threshold
from lastcall.stats.bootstrap import Draws, draw_clusters, partition
from lastcall.study import Study
from tests.measured import write_split
from tests.reference import stats as reference
from tests.routing.made import made
from tests.synthetic import make_study

EIGHTHS = st.integers(-24, 24).map(lambda i: i / 8)
"""Scores whose arithmetic is exact, many of which tie."""
ANY = st.one_of(EIGHTHS, st.floats(-1e100, 1e100))
COSTS = st.one_of(st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 2**32).map(lambda i: i * 2.0**-32))


@st.composite
def blocks(draw: st.DrawFn, scores: st.SearchStrategy[float] = EIGHTHS, most: int = 40) -> tuple[Any, ...]:
    """Scores of full and local, and a number of calls."""
    n = draw(st.integers(1, most))
    full, local = (draw(st.lists(scores, min_size=n, max_size=n)) for _ in range(2))
    return full, local, draw(st.integers(1, n))


def literal(
    full: Sequence[float], local: Sequence[float], price: float, calls: int, cost: float
) -> list[int]:
    """The rule, a position at a time, in exact fractions."""
    left, taken = Fraction(calls), []
    for i, scores in enumerate(zip(full, local, strict=True)):
        offers = [(Fraction(0), Fraction(0), BYPASS)]
        for score, own, action in zip(
            scores[::-1], (Fraction(cost), Fraction(1)), (LOCAL, FULL), strict=True
        ):
            if own <= left:
                offers.append((Fraction(score) - Fraction(price) * own, own, action))
        best = max(offers, key=lambda offer: (offer[0], -offer[2]))
        if left >= len(full) - i:
            best = (Fraction(0), Fraction(1), FULL)
        left -= best[1]
        taken.append(best[2])
    return taken


def spent(taken: Sequence[int], cost: float) -> Fraction:
    return sum(
        ({BYPASS: Fraction(0), LOCAL: Fraction(cost), FULL: Fraction(1)}[a] for a in taken), Fraction(0)
    )


@given(blocks(), st.integers(0, 24).map(lambda i: i / 8), COSTS)
def test_the_rule_is_the_literal_one(case: tuple[Any, ...], price: float, cost: float) -> None:
    full, local, calls = case
    (found,) = budgeted_actions(np.array([full]), np.array([local]), price, calls, cost)
    assert found.tolist() == literal(full, local, price, calls, cost)


@given(blocks(ANY), st.one_of(st.just(0.0), st.floats(0, 1e100)), COSTS)
def test_less_than_one_call_is_left_whatever_the_scores(
    case: tuple[Any, ...], price: float, cost: float
) -> None:
    full, local, calls = case
    (taken,) = budgeted_actions(np.array([full]), np.array([local]), price, calls, cost)
    assert calls - 1 < spent(taken.tolist(), cost) <= calls


@given(blocks(ANY), COSTS)
def test_where_full_calls_alone_are_worth_it_the_budget_is_spent_exactly(
    case: tuple[Any, ...], cost: float
) -> None:
    """And the rule is the deadline quota's, at τ = λ."""
    full, _, calls = case
    scores, never = np.array([full]), np.full((1, len(full)), -1.0)
    for price in (0.0, 0.5):
        found = budgeted_actions(scores, never, price, calls, cost)
        expected = deadline_calls(scores - price, 0.0, calls)
        assert found.tolist() == np.where(expected, FULL, BYPASS).tolist()


@given(blocks(ANY), blocks(ANY), st.integers(0, 40), COSTS)
def test_what_comes_later_changes_nothing(
    case: tuple[Any, ...], other: tuple[Any, ...], at: int, cost: float
) -> None:
    n = min(len(case[0]), len(other[0]))
    at, calls = min(at, n), min(case[2], n)
    full, local = (np.array([scores[:n]]) for scores in case[:2])
    moved = [
        np.concatenate([own[:, :at], np.array([of[at:n]])], axis=1)
        for own, of in zip((full, local), other, strict=False)
    ]
    first, second = (budgeted_actions(*scores, 0.5, calls, cost) for scores in ((full, local), moved))
    assert first[:, :at].tolist() == second[:, :at].tolist()


def test_long_blocks_are_their_own_and_a_rest_is_spent_locally() -> None:
    rng = np.random.default_rng(0)
    cost = local_cost(512, 17, 32)
    full, local = rng.normal(size=(2, 6, 495))
    whole = budgeted_actions(full, local, 0.3, 99, cost)
    for i in range(6):
        alone = budgeted_actions(full[i : i + 1], local[i : i + 1], 0.3, 99, cost)
        assert whole[i].tolist() == alone[0].tolist()
        assert 98 < spent(whole[i].tolist(), cost) <= 99
    assert {BYPASS, LOCAL, FULL} == set(whole.ravel().tolist())
    greedy = budgeted_actions(np.full((1, 9), 2.0), np.full((1, 9), 1.9), 1.0, 2, 0.3)
    assert greedy.tolist() == [[LOCAL] * 6 + [BYPASS] * 3]  # 0.2 left pays for nothing


@pytest.mark.parametrize("calls", [0, 4])
def test_calls_that_no_block_can_have_are_refused(calls: int) -> None:
    with pytest.raises(ValueError, match=f"calls must be 1 to 3, got {calls}"):
        budgeted_actions(np.zeros((1, 3)), np.zeros((1, 3)), 0.0, calls, 0.5)


def test_of_equal_actions_the_cheaper_is_taken() -> None:
    full, local = np.array([1.0, 1.5, 0.5]), np.array([0.5, 1.0, 0.2])
    assert choose(full, local, 1.0, 0.5).tolist() == [BYPASS, LOCAL, BYPASS]


def test_local_cost_by_hand() -> None:
    """t = 1 … 4 and a window of 3: keys 2, 3, 3, 3 of 2, 3, 4, 5."""
    assert local_cost(5, 1, 3) == pytest.approx((1 + 1 + 3 / 4 + 3 / 5) / 4, abs=2**-32)
    assert (local_cost(512, 17, 32) * 2**32).is_integer()
    assert local_cost(512, 17, 32) == pytest.approx(
        fmean(min(t + 1, 32) / (t + 1) for t in range(17, 512)), abs=2**-32
    )
    assert local_cost(40, 5, 40) == 1.0


def unlimited(full: Any, local: Any, price: float, cost: float) -> Fraction:
    return spent(choose(np.array(full), np.array(local), price, cost).tolist(), cost)


@given(blocks(ANY), COSTS)
def test_the_price_is_the_least_that_is_within_the_budget(case: tuple[Any, ...], cost: float) -> None:
    full, local, calls = case
    price, below = (float(p[0]) for p in prices(np.array([full]), np.array([local]), float(calls), cost))
    assert unlimited(full, local, price, cost) <= calls
    if price == 0:
        assert below == 0
    else:
        assert below == np.nextafter(price, 0)
        assert unlimited(full, local, below, cost) > calls


def test_the_frozen_price_is_pooled_over_blocks() -> None:
    rng = np.random.default_rng(1)
    full, local = rng.normal(size=(2, 6, 50))
    price = frozen_price(full, local, 10, 0.25)
    mean = costs(choose(full, local, price, 0.25), 0.25).mean()
    assert 0.2 - 1 / 300 < mean <= 0.2
    shuffled = rng.permutation(300)
    mixed = (of.ravel()[shuffled].reshape(6, 50) for of in (full, local))
    assert frozen_price(*mixed, 10, 0.25) == price
    assert frozen_price(full - 9, local - 9, 10, 0.25) == 0


@given(blocks(most=6), COSTS)
def test_the_oracle_is_within_a_call_of_the_best_of_all_choices(case: tuple[Any, ...], cost: float) -> None:
    full, local, calls = case
    (taken,) = oracle_actions(np.array([full]), np.array([local]), calls, cost)
    assert spent(taken.tolist(), cost) <= calls
    worth = [(Fraction(0), Fraction(b), Fraction(a)) for a, b in zip(full, local, strict=True)]

    def gain(actions: Sequence[int]) -> Fraction:
        return sum((of[a] for of, a in zip(worth, actions, strict=True)), Fraction(0))

    every = itertools.product((BYPASS, LOCAL, FULL), repeat=len(full))
    best = max(gain(actions) for actions in every if spent(actions, cost) <= calls)
    price = float(prices(np.array([full]), np.array([local]), float(calls), cost)[0][0])
    left = calls - spent(taken.tolist(), cost)
    assert gain(taken.tolist()) <= best
    assert float(best - gain(taken.tolist())) <= price * float(left) + 1e-9
    if price > 0:
        assert left < 1


def test_ties_at_the_price_are_filled_up() -> None:
    taken = oracle_actions(np.full((2, 9), 1.0), np.full((2, 9), -1.0), 4, 0.5)
    assert taken.tolist() == [[FULL] * 4 + [BYPASS] * 5] * 2


SIZES = {"blocks": {"horizon": 12, "context": 4}, "quota": {"budget": 0.25}}
RECIPE = {"names": ["B", "S32", "random"], "seeds": [0, 2], "hidden": 8, "epochs": 6, "learning_rate": 0.02}
TEST = [f"book{i:03d}" for i in range(12)]


def study_of(**values: Any) -> Study:
    """8 scored positions, 2 calls, a window of 3."""
    sections: dict[str, Any] = {
        "test": TEST,
        "measure": {"local_windows": [3]},
        "routers": RECIPE,
        "inference": {"planned": ["S32 over B"], "alpha": 0.1},
        "analyses": {"third_action": 3},
        **SIZES,
    }
    return make_study(**{**sections, **values})


def side(seed: int, worth: float, lost: float = 0.0) -> ActionData:
    """Utility is told by the margin; a local call gains `worth` of it, less what is `lost` everywhere."""
    data = made(seed, strength=0.3)
    rng = np.random.default_rng(seed)
    local = worth * data.utility.double().numpy() - lost + 0.01 * rng.normal(size=tuple(data.utility.shape))
    return ActionData(data, local, rng.gamma(2.0, 1.5, local.shape))


def fitted(study: Study, root: Path, fit: ActionData, calibration: ActionData) -> Path:
    run = RunFolder(root)
    fit_all(run, study, "one", fit.data, calibration.data, "source", lambda: None)
    return run.fitted("one")


def drawn(draws: int = 200) -> Draws:
    return draw_clusters(partition([(b, b) for b in TEST]), draws, rng=np.random.default_rng(5))


def test_the_whole_against_loops(tmp_path: Path) -> None:
    study = study_of()
    fit, calibration, test = (side(seed, 0.5) for seed in (1, 2, 3))
    folder = fitted(study, tmp_path, fit, calibration)
    fits: list[None] = []
    found = third_action(
        study, "one", folder, fit, calibration, test, drawn(), advance=lambda: fits.append(None)
    )
    cost = local_cost(12, 4, 3)
    assert (found["checkpoint"], found["window"], found["local_cost"], found["budget"]) == (
        "one",
        3,
        cost,
        0.25,
    )
    assert [r["name"] for r in found["routers"]] == ["S32", "B"]
    assert len(fits) == 4
    books = reference.drawn_books({b: b for b in TEST}, 200, np.random.default_rng(5))
    for router in found["routers"]:
        expected = by_loops(study, folder, router["name"], fit, calibration, test, cost)
        for key in ("nll", "gain", "over_two"):
            values = expected[key]
            interval = reference.interval(lambda of, v=values: fmean(v[b] for b in of), TEST, books, 0.1)
            assert router[key] == pytest.approx(interval, rel=1e-6, abs=1e-9)
        for key in ("full", "local", "cost"):
            assert router[key] == pytest.approx(fmean(expected[key]))
    best = dict.fromkeys(TEST, 0.0)
    for i, block in enumerate(oracle_actions(test.data.utility.double().numpy(), test.local, 2, cost)):
        best[TEST[i // 2]] += gain_of(test, i, block.tolist()) / 2
    interval = reference.interval(lambda of: fmean(best[b] for b in of), TEST, books, 0.1)
    assert found["oracle"] == pytest.approx(interval, rel=1e-9)


def gain_of(test: ActionData, block: int, actions: Sequence[int]) -> float:
    offers = {BYPASS: np.zeros(8), LOCAL: test.local[block], FULL: test.data.utility[block].double().numpy()}
    return fmean(float(offers[action][i]) for i, action in enumerate(actions))


def by_loops(
    study: Study,
    folder: Path,
    name: str,
    fit: ActionData,
    calibration: ActionData,
    test: ActionData,
    cost: float,
) -> dict[str, Any]:
    """Figures by test book, and shares by seed."""
    out: dict[str, Any] = {"nll": {}, "gain": {}, "over_two": {}, "full": [], "local": [], "cost": []}
    gains: dict[str, list[float]] = {b: [] for b in TEST}
    twos: dict[str, list[float]] = {b: [] for b in TEST}
    target = replace(fit.data, utility=torch.from_numpy(fit.local).float())
    for seed in study.routers.seeds:
        routers = (load_router(folder, name, seed, 8), fit_router(name, seed, target, study.routers)[0])
        cut, cut_local = (r.score(calibration.data).double().numpy() for r in routers)
        full, local = (r.score(test.data).double().numpy() for r in routers)
        price, tau = frozen_price(cut, cut_local, 2, cost), threshold(cut, 2, 8)
        made = [literal(a, b, price, 2, cost) for a, b in zip(full.tolist(), local.tolist(), strict=True)]
        for i, actions in enumerate(made):
            two = np.where(deadline_calls(full[i], tau, 2), FULL, BYPASS).tolist()
            gains[TEST[i // 2]].append(gain_of(test, i, actions))
            twos[TEST[i // 2]].append(gain_of(test, i, two))
        flat = [action for actions in made for action in actions]
        out["full"].append(flat.count(FULL) / len(flat))
        out["local"].append(flat.count(LOCAL) / len(flat))
        out["cost"].append(float(spent(flat, cost)) / len(flat))
    for i, book in enumerate(TEST):
        out["gain"][book] = fmean(gains[book])
        out["nll"][book] = float(test.loss_bypass[2 * i : 2 * i + 2].mean()) - fmean(gains[book])
        out["over_two"][book] = fmean(gains[book]) - fmean(twos[book])
    return out


def test_a_local_call_that_is_worth_its_price_is_made_and_one_that_is_not_is_not(tmp_path: Path) -> None:
    """Where it recovers everything at a third of the cost, and where it only loses."""
    study = study_of(
        blocks={"horizon": 28, "context": 20},
        quota={"budget": 0.125},
        measure={"local_windows": [8]},
        analyses={"third_action": 8},
    )
    shares, gains = {}, {}
    for worth, lost in ((1.0, 0.0), (0.0, 0.2)):
        fit, calibration, test = (side(seed, worth, lost) for seed in (1, 2, 3))
        folder = fitted(study, tmp_path / str(worth), fit, calibration)
        found = third_action(study, "one", folder, fit, calibration, test, drawn(), routers=["B"])
        (router,) = found["routers"]
        assert 0 < router["cost"] <= 1 / 8
        shares[worth], gains[worth] = router["local"], router["over_two"]
        assert found["oracle"]["estimate"] >= router["gain"]["estimate"]
    assert shares[1.0] > 0.25
    assert gains[1.0]["low"] > 0
    assert shares[0.0] < 0.01


def test_local_utilities_are_read_beside_the_dataset(tmp_path: Path) -> None:
    study, run = study_of(), RunFolder(tmp_path)
    write_split(run, study, "one", "test", TEST, np.random.default_rng(0))
    data = dataset.read(run, study, "one", "test", TEST)
    found = with_local(study, run, "one", "test", TEST, data)
    np.testing.assert_allclose(found.local, 0.6 * data.utility.numpy(), atol=1e-5)
    rows = [r for b in TEST for r in reference.rows(run.measured("one", "test", b)) if r["scored"]]
    assert found.loss_bypass.ravel().tolist() == [r["loss_bypass"] for r in rows]
    assert found.local.ravel().tolist() == [r["loss_bypass"] - r["loss_local3"] for r in rows]
    run.measured("one", "test", TEST[0]).unlink()
    with pytest.raises(OutputError, match="is missing; run `lastcall measure` again"):
        with_local(study, run, "one", "test", TEST, data)


def test_refusals(tmp_path: Path) -> None:
    fit, calibration, test = (side(seed, 0.5) for seed in (1, 2, 3))
    study = study_of()

    def answer(study: Study, **values: Any) -> Any:
        return third_action(study, "one", tmp_path, fit, calibration, test, drawn(), **values)

    with pytest.raises(ValueError, match="asks for no third action"):
        answer(study_of(analyses={}))
    with pytest.raises(StudyError, match='only where the operation is the attention: got operation = "ffn"'):
        answer(study.model_copy(update={"operation": "ffn"}))
    with pytest.raises(
        StudyError, match="a third action needs a fitted router: got B, S32, random; add one of"
    ):
        answer(study, routers=["J32"])
    with pytest.raises(OutputError, match=r"B-0\.safetensors.*run `lastcall fit` again"):
        answer(study, routers=["B"])
    other = draw_clusters(partition([(b, b) for b in TEST[::-1]]), 9, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="of other books than the test split, or in another order"):
        third_action(study, "one", tmp_path, fit, calibration, test, other)


def test_a_score_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    study = study_of()
    fit, calibration, test = (side(seed, 0.5) for seed in (1, 2, 3))
    folder = fitted(study, tmp_path, fit, calibration)
    test.data.scalars["margin"][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="a score of router S32 is not finite"):
        third_action(study, "one", folder, fit, calibration, test, drawn())
