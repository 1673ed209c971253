"""Learners against literal twins; planted signals; what each may see; how its comparisons are judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from lastcall.analyses.gains import planned_of_learned
from lastcall.analyses.learners import (
    KINDS,
    Kind,
    fit_gains,
    fit_learner,
    learner_gains,
    needs_map,
    state_map_of,
)
from lastcall.analyses.recurrent import Recurrent, fit_recurrent
from lastcall.analyses.regressors import (
    PATIENCE,
    PENALTIES,
    fit_ridge,
    fit_trees,
    huber,
)
from lastcall.errors import BookError, NonFiniteError, OutputError, StudyError
from lastcall.records import RunFolder
from lastcall.routing.dataset import Dataset
from lastcall.routing.fitting import fit_all, fit_router, held_out, projection
from lastcall.routing.routers import INPUTS
from lastcall.stats.bootstrap import draw_clusters, partition
from lastcall.stats.judging import family
from lastcall.study import Routers
from tests.reference import analyses as reference
from tests.reference import routing
from tests.routing.made import made
from tests.synthetic import make_study

QUICK = {"hidden": 8, "epochs": 2, "learning_rate": 0.01}


def recipe(**values: Any) -> Routers:
    return Routers(**{**QUICK, **values})


def map_for(kind: Kind, name: str, d: int = 5) -> torch.Tensor | None:
    """Some map of the right shape where one is needed."""
    rank = INPUTS[name].state
    return torch.eye(d, rank) if needs_map(kind, name) else None


def correlation(kind: Kind, name: str, fit: Dataset, fresh: Dataset, chosen: Routers) -> float:
    learner = fit_learner(kind, name, 0, fit, chosen, map_for(kind, name))
    return float(np.corrcoef(learner.score(fresh).flatten(), fresh.utility.flatten())[0, 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("told_by", "learns", "does_not"),
    [("margin", "B", "I_B"), ("bypass", "S32", "B"), ("curvature", "T", "B")],
)
def test_a_planted_signal_is_learned_by_who_can_see_it(
    kind: Kind, told_by: str, learns: str, does_not: str
) -> None:
    """The same signals that the 64-unit network must learn, at its own bar."""
    fit, fresh = (made(seed, books=40, n=24, strength=0.2, told_by=told_by) for seed in (20, 21))
    chosen = recipe(hidden=32, epochs=6)
    assert correlation(kind, learns, fit, fresh, chosen) > 0.75
    assert abs(correlation(kind, does_not, fit, fresh, chosen)) < 0.2


def interacting(seed: int) -> Dataset:
    """Utility is the product of two scalars, each of which alone tells nothing."""
    data = made(seed, books=40, n=24)
    margin, entropy = (data.scalars[name] for name in ("margin", "entropy"))
    product = ((margin - margin.mean()) / margin.std()) * ((entropy - entropy.mean()) / entropy.std())
    return Dataset(data.books, data.scalars, data.states, 0.2 * product + data.utility)


@pytest.mark.parametrize("kind", ["trees", "wide", "recurrent"])
def test_a_planted_interaction_is_learned(kind: Kind) -> None:
    chosen = recipe(hidden=32, epochs=12)
    assert correlation(kind, "B", interacting(50), interacting(51), chosen) > 0.6


def test_ridge_cannot_learn_an_interaction() -> None:
    assert abs(correlation("ridge", "B", interacting(50), interacting(51), recipe())) < 0.15


def test_memory_is_used_by_the_recurrent_learner_alone() -> None:
    """Utility is told by the margin two positions ago."""

    def delayed(seed: int) -> Dataset:
        data = made(seed, books=40, n=24)
        margin = data.scalars["margin"]
        margin = (margin - margin.mean()) / margin.std()
        before = torch.nn.functional.pad(margin[:, :-2], (2, 0))
        return Dataset(data.books, data.scalars, data.states, 0.2 * before + data.utility)

    chosen = recipe(hidden=32, epochs=12)
    fit, fresh = delayed(52), delayed(53)
    assert correlation("recurrent", "B", fit, fresh, chosen) > 0.7
    assert abs(correlation("wide", "B", fit, fresh, chosen)) < 0.2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["J32", "C_RP3"])
def test_later_inputs_never_change_an_earlier_score(kind: Kind, name: str) -> None:
    data = made(54)
    learner = fit_learner(kind, name, 1, made(55, strength=0.1), recipe(), map_for(kind, name))
    before = learner.score(data)
    for cut in (1, 4, 7):
        for values in (*data.scalars.values(), *data.states.values()):
            values[:, cut:] += 100.0
        after = learner.score(data)
        assert torch.equal(after[:, :cut], before[:, :cut])
        assert not torch.equal(after[:, cut:], before[:, cut:])
        data = made(54)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_twice_whatever_the_global_generators(kind: Kind) -> None:
    fit, fresh = made(56, strength=0.1), made(57)
    scores = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002  (the global generator is what must not matter)
        states = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # noqa: NPY002
        learner = fit_learner(kind, "C_RP3", 5, fit, recipe(), map_for(kind, "C_RP3"))
        scores.append(learner.score(fresh).numpy().tobytes())
        assert torch.equal(torch.get_rng_state(), states[0])
        assert np.random.get_state()[1].tobytes() == states[1]  # noqa: NPY002
    assert scores[0] == scores[1]


@pytest.mark.parametrize("kind", ["trees", "wide", "recurrent"])
def test_another_seed_is_another_fit(kind: Kind) -> None:
    fit, fresh = made(56, strength=0.1), made(57)
    first, other = (fit_learner(kind, "B", seed, fit, recipe()).score(fresh) for seed in (1, 2))
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_has_the_least_held_out_loss(kind: Kind) -> None:
    """Small, noisy and long enough to overfit; the loss is the study's, and so are the held-out books."""
    data, chosen = made(12, strength=0.05), recipe(learning_rate=0.05, epochs=8, huber_delta=0.05)
    learner = fit_learner(kind, "S32", 0, data, chosen, map_for(kind, "S32"))
    least = min(learner.held_out_loss)
    assert learner.kept == 1 + learner.held_out_loss.index(least)
    held = held_out(data.books, 6)
    predicted, utility = learner.score(data)[held].flatten(), data.utility[held].flatten()
    assert routing.huber(predicted.tolist(), utility.tolist(), 0.05) == pytest.approx(least, rel=1e-4)
    assert least < learner.held_out_loss[-1]


def test_held_out_books_choose_but_do_not_train() -> None:
    """Where the held-out rows change, every candidate stays what it was."""
    rng = np.random.default_rng(0)
    x, held = rng.normal(size=(400, 3)), np.arange(400) % 6 == 5
    y = x[:, 0] + 0.1 * rng.normal(size=400)
    for regress in (fit_trees, fit_ridge):
        plain = regress(x, y, held, delta=1.0, seed=0)
        other = regress(x, np.where(held, y + 1e-6, y), held, delta=1.0, seed=0)
        assert plain.kept == other.kept
        np.testing.assert_array_equal(plain.predict(x), other.predict(x))
        moved = regress(x, np.where(held, y, y + 1.0), held, delta=1.0, seed=0)
        assert abs(moved.predict(x) - plain.predict(x)).max() > 0.5


def test_trees_stop_once_more_of_them_do_not_help() -> None:
    rng = np.random.default_rng(1)
    x, held = rng.normal(size=(600, 2)), np.arange(600) % 6 == 5
    noise = fit_trees(x, rng.normal(size=600), held, delta=1.0, seed=0)
    assert len(noise.held_out_loss) <= 3 * PATIENCE
    step = fit_trees(x, np.sign(x[:, 0]) * np.sign(x[:, 1]), held, delta=1.0, seed=0)
    assert len(step.held_out_loss) > len(noise.held_out_loss)


def test_ridge_is_scikit_learns_on_standardised_columns() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(300, 4)) * [1, 10, 0.1, 0] + 5  # the last column never varies
    y, held = x @ [1.0, 0.1, 3.0, 0.0] + rng.normal(size=300), np.arange(300) % 5 == 0
    found = fit_ridge(x, y, held, delta=0.7, seed=0)
    mean, deviation = x[~held].mean(0), x[~held].std(0)
    z = (x - mean) / np.where(deviation > 0, deviation, 1)
    models = [Ridge(alpha=share * (~held).sum()).fit(z[~held], y[~held]) for share in PENALTIES]
    losses = [routing.huber(m.predict(z[held]).tolist(), y[held].tolist(), 0.7) for m in models]
    np.testing.assert_allclose(found.held_out_loss, losses, rtol=1e-8)
    np.testing.assert_allclose(found.predict(x), models[found.kept - 1].predict(z), rtol=1e-8)


@pytest.mark.parametrize("delta", [0.3, 1.0])
def test_huber_is_torchs(delta: float) -> None:
    errors = np.random.default_rng(3).normal(size=50)
    expected = torch.nn.functional.huber_loss(torch.from_numpy(errors), torch.zeros(50).double(), delta=delta)
    assert huber(errors, delta) == pytest.approx(float(expected))
    assert huber(errors, float("inf")) == pytest.approx(float(np.mean(errors**2)) / 2)


@pytest.mark.parametrize("name", ["T", "C_RP3", "I_J32"])
def test_a_recurrent_score_is_the_score_by_hand(name: str) -> None:
    data = made(58, books=6)
    model, _ = fit_recurrent(name, 3, data, recipe(holdout_every=3))
    weights = {n: t.numpy() for n, t in model.state_dict().items()}
    raw, states = model.router.raw(data).numpy(), data.states[INPUTS[name].source].numpy()
    for block in (0, 11):
        expected = reference.recurrent_scores(weights, raw[block], states[block])
        np.testing.assert_allclose(model.score(data)[block].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_recurrent_fit_with_no_memory_is_the_router() -> None:
    """Out of the GRU comes 0 where its weights are 0: the rest is the router of the same seed, to the bit."""
    model = Recurrent(INPUTS["S32"], 5, 8)
    model.initialise(torch.Generator().manual_seed(4))
    with torch.no_grad():
        for weights in model.gru.parameters():
            weights.zero_()
    router, data = model.router, made(59)
    torch.testing.assert_close(model.score(data), router.score(data))


def test_wide_is_the_recipe_with_512_hidden_units() -> None:
    data, fresh = made(60, strength=0.1), made(61)
    learner = fit_learner("wide", "J32", 2, data, recipe())
    router, curve = fit_router("J32", 2, data, recipe(hidden=512))
    assert torch.equal(learner.score(fresh), router.score(fresh))
    assert list(learner.held_out_loss) == curve["held_out_loss"]


@pytest.mark.parametrize("kind", ["trees", "ridge"])
def test_the_state_is_read_through_the_given_map_alone(kind: Kind) -> None:
    """A map without the telling coordinate leaves nothing; the control's projection is the recorded draw."""
    fit, fresh = (made(seed, books=40, n=24, strength=0.2, told_by="bypass") for seed in (20, 21))
    blind = torch.eye(5, 32)
    blind[0] = 0
    learner = fit_learner(kind, "S32", 0, fit, recipe(), blind)
    assert abs(float(np.corrcoef(learner.score(fresh).flatten(), fresh.utility.flatten())[0, 1])) < 0.2
    control = fit_learner(kind, "C_RP3", 0, fit, recipe(), torch.zeros(5, 32))
    seen = float(np.corrcoef(control.score(fresh).flatten(), fresh.utility.flatten())[0, 1])
    share = projection(5, 3, 217)
    reach = torch.linalg.lstsq(share, torch.eye(5)[:, :1]).solution
    told = float((share @ reach)[0]) ** 0.5  # how far three directions reach the first coordinate
    assert seen == pytest.approx(told * 0.2 / (0.2**2 + 0.1**2) ** 0.5, abs=0.08)


@pytest.mark.parametrize(
    ("kind", "name", "given"),
    [
        ("trees", "S32", None),
        ("ridge", "J32", torch.zeros(5, 31)),
        ("trees", "B", torch.zeros(5, 32)),
        ("wide", "S32", torch.zeros(5, 32)),
        ("recurrent", "S32", torch.zeros(5, 32)),
    ],
)
def test_a_map_that_does_not_belong_is_refused(kind: Kind, name: str, given: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match=f"{kind} of {name} needs a state map of shape"):
        fit_learner(kind, name, 0, made(1), recipe(), given)


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_books_to_hold_one_out_are_refused(kind: Kind) -> None:
    with pytest.raises(BookError, match="too few fit books to hold one out"):
        fit_learner(kind, "B", 0, made(1, books=5), recipe())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_refused(kind: Kind) -> None:
    data = made(62)
    data.scalars["margin"][3, 3] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        fit_learner(kind, "B", 0, data, recipe())
    assert "\n" not in str(caught.value)


def test_a_recurrent_fit_that_diverges_is_refused_by_name() -> None:
    with pytest.raises(NonFiniteError, match=r"recurrent T at seed 2 diverges.*lower routers"):
        fit_learner("recurrent", "T", 2, made(16), recipe(learning_rate=1e30))


def test_gains_are_the_gains_by_hand() -> None:
    fit, calibration, test = made(63, strength=0.1), made(64, books=4), made(65, books=5)
    learners = [fit_learner("ridge", "B", seed, fit, recipe()) for seed in (0, 1)]
    learners.append(fit_learner("trees", "B", 7, fit, recipe()))
    found = learner_gains(learners, calibration, test, 3)
    for row, learner in zip(found, learners, strict=True):
        tau = routing.threshold(learner.score(calibration).flatten().tolist(), 3, 8)
        scores, utility = learner.score(test).numpy(), test.utility.numpy()
        taus = dict.fromkeys(test.books, tau)
        np.testing.assert_allclose(row, reference.book_gains(scores, taus, utility, test.books, 3), rtol=1e-6)


@pytest.mark.parametrize("kind", ["trees", "ridge"])
def test_a_learners_planned_comparisons_are_a_family_of_its_own(kind: Kind, tmp_path: Path) -> None:
    """From fitted maps to verdicts, where the trajectory tells the utility: T beats B, J32 both others."""
    study = make_study(
        test=["t"],
        blocks={"horizon": 28, "context": 4},
        routers={"names": ["B", "T", "S32", "J32", "C_RP3"], "seeds": [0, 1], **QUICK},
    )
    fit, calibration, test = (
        made(seed, books=20, n=24, strength=0.2, told_by="curvature") for seed in (66, 67, 68)
    )
    run, done = RunFolder(tmp_path), list[None]()
    fit_all(run, study, "one", fit, calibration, "from", lambda: None)
    gains = fit_gains(
        kind, study, run.fitted("one"), fit, calibration, test, advance=lambda: done.append(None)
    )
    assert len(done) == 10
    assert {name: of.shape for name, of in gains.items()} == dict.fromkeys(gains, (2, 20))
    clusters = partition([(f"b{i}", f"b{i}") for i in range(20)])
    draws = draw_clusters(clusters, 500, rng=np.random.default_rng(0))
    found = family(study, "learner: ridge", planned_of_learned(study), {"one": gains}, draws)["comparisons"]
    pairs = tuple((c["checkpoint"], c["a"], c["b"]) for c in found)
    assert pairs == (("one", "T", "B"), ("one", "J32", "S32"), ("one", "J32", "C_RP3"))
    assert [c["verdict"] for c in found] == ["gain", "gain", "gain"]
    np.testing.assert_allclose(found[0]["delta"]["estimate"], gains["T"].mean() - gains["B"].mean())


def test_the_map_is_the_fitted_routers(tmp_path: Path) -> None:
    study = make_study(
        test=["t"],
        blocks={"horizon": 12, "context": 4},
        routers={"names": ["B", "S32"], "seeds": [3], **QUICK},
        inference={"planned": ["S32 over B"]},
    )
    run = RunFolder(tmp_path)
    fit_all(run, study, "one", made(69), made(70, books=2), "from", lambda: None)
    router, _ = fit_router("S32", 3, made(69), study.routers)
    assert router.state_map is not None
    assert torch.equal(state_map_of(run.fitted("one"), "S32", 3, 8), router.state_map.detach())
    with pytest.raises(ValueError, match="router B has no map of the state"):
        state_map_of(run.fitted("one"), "B", 3, 8)
    with pytest.raises(OutputError, match=r"cannot read .*S32-4"):
        state_map_of(run.fitted("one"), "S32", 4, 8)


def test_a_plan_without_two_fitted_routers_is_refused() -> None:
    study = make_study(test=["t"], inference={"planned": ["J32 over random"]})
    with pytest.raises(StudyError, match="no planned comparison is between two fitted routers: got J32 over"):
        planned_of_learned(study)
