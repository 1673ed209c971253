"""One recipe (section 4) against training by hand; what is held out, kept, drawn and stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lastcall.errors import BookError, NonFiniteError, OutputError
from lastcall.records import RunFolder
from lastcall.routing.dataset import Dataset
from lastcall.routing.fitting import (
    fit_all,
    fit_router,
    held_out,
    is_fitted,
    load_router,
    load_tensors,
    position_profile,
    projection,
    router_file,
)
from lastcall.routing.routers import INPUTS, Router
from lastcall.study import Routers, Study
from tests.disk import fill
from tests.reference import routing as reference
from tests.routing.made import made
from tests.synthetic import make_study

QUICK = {"hidden": 8, "epochs": 2, "learning_rate": 0.01}


def recipe(**values: Any) -> Routers:
    return Routers(**{**QUICK, **values})


def fitted_tensors(router: Router) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in router.state_dict().items()}


def test_every_sixth_book_in_order_is_held_out() -> None:
    books = tuple(f"b{i:02d}" for i in range(14) for _ in range(2))
    assert held_out(books, 6).tolist() == [book in ("b05", "b11") for book in books]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_too_few_books_to_hold_one_out_are_refused(count: int) -> None:
    with pytest.raises(BookError, match=f"too few fit books to hold one out: got {count}; give at least 6"):
        held_out(tuple(f"b{i}" for i in range(count)), 6)


@pytest.mark.parametrize("name", ["T", "C_RP3", "I_J32"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_fit_is_the_fit_by_hand(name: str, decay: float) -> None:
    """Every constant of the recipe is away from its default."""
    chosen = recipe(weight_decay=decay, epochs=3, batch_blocks=5, holdout_every=4, huber_delta=0.05, hidden=6)
    data = made(11, strength=0.1)
    router, curve = fit_router(name, 3, data, chosen)
    losses, weights = by_hand(name, 3, data, chosen, fitted_tensors(router))
    assert curve["held_out_loss"] == pytest.approx(losses, rel=1e-3)
    assert curve["epoch"] == 1 + int(np.argmin(losses))
    for tensor, expected in weights[int(np.argmin(losses))].items():
        np.testing.assert_allclose(fitted_tensors(router)[tensor], expected, rtol=1e-2, atol=1e-3)


def by_hand(
    name: str, seed: int, data: Dataset, chosen: Routers, scaling: dict[str, np.ndarray]
) -> tuple[list[float], list[dict[str, np.ndarray]]]:
    """Held-out loss and weights after every epoch; the start and the order are those that the seed draws."""
    inputs = INPUTS[name]
    d = data.states["bypass"].shape[-1]
    start = Router(inputs, d, chosen.hidden)
    start.initialise(torch.Generator().manual_seed(2 * seed))
    network = reference.Network({n: p.detach().numpy() for n, p in start.named_parameters()})
    order = torch.Generator().manual_seed(2 * seed + 1)
    states = data.states[inputs.source].double().numpy()
    raw = np.stack([data.scalars[n].double().numpy() for n in reference.SEES[name]], -1)
    raw = np.concatenate([raw, states @ scaling["scaling.projection"]], -1)
    scaled = (raw - scaling["scaling.mean"]) / scaling["scaling.deviation"]
    states, utility = states / scaling["scaling.rms"], data.utility.double().numpy()
    held = [i for i in range(24) if i // 2 % 4 == 3]
    train = [i for i in range(24) if i not in held]
    losses, weights = [], []

    def flat(array: np.ndarray, blocks: list[int]) -> np.ndarray:
        return array[blocks].reshape(len(blocks) * 8, -1)

    for _ in range(chosen.epochs):
        shuffled = [train[i] for i in torch.randperm(len(train), generator=order).tolist()]
        for first in range(0, len(shuffled), chosen.batch_blocks):
            b = shuffled[first : first + chosen.batch_blocks]
            slopes = network.gradients(
                flat(scaled, b), flat(states, b), flat(utility, b)[:, 0], chosen.huber_delta
            )
            network.step(slopes, chosen.learning_rate, chosen.weight_decay)
        predicted = network.forward(flat(scaled, held), flat(states, held))[2]
        losses.append(reference.huber(predicted, flat(utility, held)[:, 0], chosen.huber_delta))
        weights.append({n: w.copy() for n, w in network.w.items()})
    return losses, weights


def test_the_kept_epoch_has_the_least_held_out_loss() -> None:
    """Small, noisy and long enough to overfit, so that the best epoch is not the last."""
    data, chosen = made(12, strength=0.05), recipe(learning_rate=0.05, epochs=8)
    router, curve = fit_router("S32", 0, data, chosen)
    losses = curve["held_out_loss"]
    assert len(losses) == 8
    assert curve["epoch"] == 1 + losses.index(min(losses)) < 8
    held = held_out(data.books, 6)
    predicted, utility = router.score(data)[held].flatten(), data.utility[held].flatten()
    assert reference.huber(predicted.tolist(), utility.tolist(), 1.0) == pytest.approx(min(losses), rel=1e-5)
    assert min(losses) < losses[-1]


def test_of_epochs_that_tie_the_first_is_kept() -> None:
    """At a rate too small to move a weight all epochs tie."""
    still = recipe(learning_rate=1e-30, weight_decay=0.0, epochs=3)
    _, curve = fit_router("B", 0, made(13), still)
    assert len(set(curve["held_out_loss"])) == 1
    assert curve["epoch"] == 1


def test_the_start_and_the_order_depend_on_the_seed_alone() -> None:
    data = made(14)
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  (the global generator is what must not matter)
    state = torch.get_rng_state()
    first, _ = fit_router("C_RP3", 1, data, recipe())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    again, _ = fit_router("C_RP3", 1, data, recipe())
    other, _ = fit_router("C_RP3", 2, data, recipe())
    for name, tensor in fitted_tensors(first).items():
        np.testing.assert_array_equal(fitted_tensors(again)[name], tensor)
        same = np.array_equal(fitted_tensors(other)[name], tensor)
        assert same == name.startswith("scaling."), name


def test_the_fixed_projection_is_one_draw_for_every_seed_and_is_never_trained() -> None:
    data = made(15, d=40)
    for seed in (0, 1, 2):
        router, _ = fit_router("C_RP3", seed, data, recipe())
        assert torch.equal(router.scaling.projection, projection(40, 3, 217))
    other, _ = fit_router("C_RP3", 0, data, recipe(projection_seed=218))
    assert not torch.equal(other.scaling.projection, projection(40, 3, 217))
    assert float(projection(2000, 3, 217).std()) == pytest.approx(2000**-0.5, rel=0.03)
    assert projection(5, 0, 217).shape == (5, 0)


@pytest.mark.parametrize(
    ("told_by", "learns", "does_not"),
    [("margin", "B", "I_B"), ("bypass", "S32", "B"), ("incoming", "I_S35", "S32"), ("curvature", "T", "S32")],
)
def test_a_planted_signal_is_learned_by_who_can_see_it(told_by: str, learns: str, does_not: str) -> None:
    fit, fresh = (made(seed, books=40, n=24, strength=0.2, told_by=told_by) for seed in (20, 21))
    chosen = recipe(hidden=32, epochs=6)
    assert correlation(learns, fit, fresh, chosen) > 0.75
    assert abs(correlation(does_not, fit, fresh, chosen)) < 0.2


@pytest.mark.parametrize("name", ["B", "J32", "C_RP3"])
def test_noise_is_not_beaten_by_much(name: str) -> None:
    fit, fresh = (made(seed, books=40, n=24) for seed in (22, 23))
    assert abs(correlation(name, fit, fresh, recipe())) < 0.1


def correlation(name: str, fit: Dataset, fresh: Dataset, chosen: Routers) -> float:
    router, _ = fit_router(name, 0, fit, chosen)
    return float(np.corrcoef(router.score(fresh).flatten(), fresh.utility.flatten())[0, 1])


def test_a_fit_that_diverges_is_refused_by_name() -> None:
    with pytest.raises(NonFiniteError, match=r"router T at seed 2 diverges.*lower routers"):
        fit_router("T", 2, made(16), recipe(learning_rate=1e30))


NAMES = ("B", "C_RP3", "random", "by-position")


@pytest.fixture(scope="module")
def study() -> Study:
    return make_study(
        test=["t"],
        blocks={"horizon": 12, "context": 4},
        routers={"names": NAMES, "seeds": [2, 0], **QUICK},
        inference={"planned": ["C_RP3 over B"]},
    )


def fit_into(folder: Path, study: Study, calibration: Dataset | None = None) -> RunFolder:
    run = RunFolder(folder)
    done: list[None] = []
    fit_all(
        run,
        study,
        "one",
        made(30, strength=0.2),
        calibration or made(31, books=3),
        "from",
        lambda: done.append(None),
    )
    assert len(done) == 4
    return run


@pytest.fixture(scope="module")
def run(study: Study, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Fitted once; a test that writes works on its own."""
    return fit_into(tmp_path_factory.mktemp("run"), study)


def contents(run: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.fitted("one").iterdir())}


def test_a_fit_gives_the_same_bytes_again(study: Study, run: RunFolder, tmp_path: Path) -> None:
    torch.manual_seed(99)
    again = contents(fit_into(tmp_path, study))
    assert again == contents(run)
    learned = {f"{name}-{seed}.safetensors" for name in ("B", "C_RP3") for seed in (0, 2)}
    assert set(again) == learned | {"by-position.safetensors", "thresholds.json", "training.json"}


def test_a_threshold_is_the_quantile_of_the_calibration_scores(study: Study, run: RunFolder) -> None:
    thresholds = json.loads((run.fitted("one") / "thresholds.json").read_text())
    assert {name: list(seeds) for name, seeds in thresholds.items()} == {"B": ["2", "0"], "C_RP3": ["2", "0"]}
    data = made(31, books=3)
    for name in ("B", "C_RP3"):
        for seed in (2, 0):
            weights = {
                n: t.numpy() for n, t in load_tensors(router_file(run.fitted("one"), name, seed)).items()
            }
            scores = [
                reference.predicted_utility(
                    weights,
                    [float(data.scalars[n][block, i]) for n in reference.SEES[name]],
                    data.states["bypass"][block, i].tolist(),
                )
                for block in range(6)
                for i in range(8)
            ]
            expected = reference.threshold(scores, study.calls, 8)
            assert thresholds[name][str(seed)] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_calibration_moves_thresholds_and_nothing_else(study: Study, run: RunFolder, tmp_path: Path) -> None:
    before, after = contents(run), contents(fit_into(tmp_path, study, made(32, books=3)))
    assert {name for name in before if before[name] != after[name]} == {"thresholds.json"}


def test_the_profile_is_the_mean_utility_by_position_of_the_fit_split(run: RunFolder) -> None:
    utility = made(30, strength=0.2).utility.double().numpy()
    expected = [sum(block[i] for block in utility) / 24 for i in range(8)]
    assert position_profile(run.fitted("one")).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_loaded_router_scores_as_the_fitted_one(study: Study, run: RunFolder) -> None:
    fresh = made(33)
    router, curve = fit_router("C_RP3", 2, made(30, strength=0.2), study.routers)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    loaded = load_router(run.fitted("one"), "C_RP3", 2, study.routers.hidden)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(loaded.score(fresh), router.score(fresh))
    training = json.loads((run.fitted("one") / "training.json").read_text())
    assert training["curves"]["C_RP3"]["2"] == curve
    assert training["source"] == "from"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("missing", "cannot read .*B-0.safetensors.*run `lastcall fit` again"),
        ("torn", "cannot read .*B-0.safetensors.*run `lastcall fit` again"),
        ("other", "router B seed 0 does not fit this study"),
        ("foreign", "router B seed 0 does not fit this study"),
    ],
)
def test_a_fitted_file_that_is_not_whole_is_one_line(
    study: Study, tmp_path: Path, run: RunFolder, harm: str, message: str
) -> None:
    whole = contents(run)
    harmed = {
        "torn": whole["B-0.safetensors"][:200],
        "other": whole["C_RP3-0.safetensors"],
        "foreign": whole["by-position.safetensors"],
    }
    if harm in harmed:
        router_file(tmp_path, "B", 0).write_bytes(harmed[harm])
    with pytest.raises(OutputError, match=message) as caught:
        load_router(tmp_path, "B", 0, study.routers.hidden)
    assert "\n" not in str(caught.value)


def test_a_router_of_another_width_does_not_fit(study: Study, run: RunFolder) -> None:
    with pytest.raises(OutputError, match="router B seed 0 does not fit this study"):
        load_router(run.fitted("one"), "B", 0, study.routers.hidden + 1)


def test_fitted_means_from_this_source_and_every_file_there(
    study: Study, run: RunFolder, tmp_path: Path
) -> None:
    assert is_fitted(run, "one", "from")
    assert not is_fitted(run, "one", "elsewhere")
    assert not is_fitted(run, "two", "from")
    for name in contents(run):
        copy = RunFolder(tmp_path / name)
        copy.fitted("one").mkdir(parents=True)
        for other, whole in contents(run).items():
            if other != name:
                (copy.fitted("one") / other).write_bytes(whole)
        assert not is_fitted(copy, "one", "from"), name


def test_a_full_disk_is_one_line(study: Study, tmp_path: Path) -> None:
    path = router_file(RunFolder(tmp_path).fitted("one"), "B", 2)
    fill(path)
    with pytest.raises(OutputError, match=f"cannot write {re.escape(str(path))}.*free some space"):
        fit_into(tmp_path, study)
    assert list(path.parent.iterdir()) == []
