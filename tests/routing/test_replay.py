"""Routed files against the literal twins, for every router and seed; whatever the batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from lastcall.errors import OutputError
from lastcall.records import RunFolder
from lastcall.routing import dataset
from lastcall.routing.fitting import fit_all, load_tensors, router_file
from lastcall.routing.replay import Policies, random_scores, route
from lastcall.routing.routers import INPUTS
from lastcall.study import LEARNED_ROUTERS, ROUTERS, Study
from tests.measured import write_split
from tests.reference import routing as reference
from tests.synthetic import make_study

FIT = [f"fit{i}" for i in range(6)]
CALIBRATION = ["calibration"]
TEST = ["m", "k", "z"]
SEEDS = (4, 1)
SCORED, CALLS = 20, 4


@pytest.fixture(scope="module")
def study() -> Study:
    return make_study(
        test=TEST,
        blocks={"horizon": 24, "context": 4},
        routers={"seeds": SEEDS, "epochs": 1, "hidden": 6, "names": ["by-position", *ROUTERS[:-1]]},
    )


@pytest.fixture(scope="module")
def run(study: Study, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """All splits measured, every router fitted, the test books routed in one go."""
    run, rng = RunFolder(tmp_path_factory.mktemp("run")), np.random.default_rng(0)
    write_split(run, study, "one", "fit", FIT, rng, strength=0.1, dtype=torch.bfloat16)
    write_split(run, study, "one", "calibration", CALIBRATION, rng, strength=0.1, dtype=torch.bfloat16)
    write_split(run, study, "one", "test", TEST, rng, strength=0.1, dtype=torch.bfloat16)
    fit, calibration = (
        dataset.read(run, study, "one", s, b) for s, b in (("fit", FIT), ("calibration", CALIBRATION))
    )
    fit_all(run, study, "one", fit, calibration, "", lambda: None)
    routed(run, study, [TEST])
    return run


def routed(run: RunFolder, study: Study, batches: Sequence[Sequence[str]]) -> None:
    policies = Policies(run, study, "one")
    for books in batches:
        route(run, study, policies, dataset.read(run, study, "one", "test", books))


def arms(study: Study) -> list[tuple[str, int]]:
    seeded = (*LEARNED_ROUTERS, "random")
    return [(name, seed) for name in study.routers.names for seed in (SEEDS if name in seeded else (0,))]


def scores_and_calls(
    run: RunFolder, study: Study, book: str
) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    """[block, scored] of every arm, whose rows must lie as the schema says."""
    table = pq.read_table(run.routed("one", book), partitioning=None)
    shape = (len(arms(study)), 2, SCORED)
    rows = table.to_pydict()
    assert rows["book"] == [book] * (len(arms(study)) * 2 * SCORED)
    expected = [(n, s, b, t) for n, s in arms(study) for b in range(2) for t in range(4, 24)]
    assert list(zip(rows["router"], rows["seed"], rows["block"], rows["position"], strict=True)) == expected
    scores, calls = (table.column(n).to_numpy().reshape(shape) for n in ("score", "call"))
    return dict(zip(arms(study), zip(scores, calls, strict=True), strict=True))


def test_every_block_makes_exactly_its_calls(study: Study, run: RunFolder) -> None:
    assert study.calls == CALLS
    for book in TEST:
        for arm, (_, calls) in scores_and_calls(run, study, book).items():
            assert calls.sum(axis=1).tolist() == [CALLS, CALLS], arm


@pytest.mark.parametrize("name", LEARNED_ROUTERS)
def test_learned_scores_and_calls_are_the_twins(study: Study, run: RunFolder, name: str) -> None:
    thresholds = json.loads((run.fitted("one") / "thresholds.json").read_text())
    for seed in SEEDS:
        weights = {n: t.numpy() for n, t in load_tensors(router_file(run.fitted("one"), name, seed)).items()}
        for book in TEST:
            scores, calls = scores_and_calls(run, study, book)[name, seed]
            expected = twin_scores(run, study, name, book, weights)
            np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
            for block in range(2):
                tau = thresholds[name][str(seed)]
                assert calls[block].tolist() == reference.quota(scores[block].tolist(), tau, CALLS)


def twin_scores(
    run: RunFolder, study: Study, name: str, book: str, weights: dict[str, np.ndarray]
) -> list[list[float]]:
    rows = pq.read_table(run.measured("one", "test", book), partitioning=None).to_pylist()
    states = load_tensors(run.states("one", "test", book))[INPUTS[name].source].float()
    scores: list[list[float]] = [[], []]
    for row in rows:
        if row["scored"]:
            seen = row | reference.position(row["position"], 24)
            scalars = [seen[n] for n in reference.SEES[name]]
            state = states[row["block"], row["position"]].tolist()
            scores[row["block"]].append(reference.predicted_utility(weights, scalars, state))
    return scores


def test_every_fifth_is_literal(study: Study, run: RunFolder) -> None:
    for book in TEST:
        scores, calls = scores_and_calls(run, study, book)["every-fifth", 0]
        assert calls.tolist() == [reference.every_fifth(SCORED)] * 2
        assert scores.tolist() == calls.astype(float).tolist()


def test_by_position_calls_where_the_fit_split_gains_most(study: Study, run: RunFolder) -> None:
    utilities: dict[int, list[float]] = {}
    for book in FIT:
        for row in pq.read_table(run.measured("one", "fit", book), partitioning=None).to_pylist():
            if row["scored"]:
                utilities.setdefault(row["position"], []).append(row["loss_bypass"] - row["loss_full"])
    profile = [sum(utilities[t]) / len(utilities[t]) for t in range(4, 24)]
    for book in TEST:
        scores, calls = scores_and_calls(run, study, book)["by-position", 0]
        assert scores[0].tolist() == scores[1].tolist() == pytest.approx(profile, abs=1e-6)
        assert calls.tolist() == [reference.largest(profile, CALLS)] * 2


def test_random_calls_are_the_largest_of_uniform_draws(study: Study, run: RunFolder) -> None:
    drawn = []
    for book in TEST:
        for seed in SEEDS:
            scores, calls = scores_and_calls(run, study, book)["random", seed]
            assert calls.tolist() == [reference.largest(block.tolist(), CALLS) for block in scores]
            assert (scores >= 0).all()
            assert (scores < 1).all()
            drawn += [tuple(block) for block in scores.tolist()]
    assert len(set(drawn)) == len(drawn)


def test_random_scores_do_not_depend_on_what_is_routed_beside() -> None:
    alone = random_scores(["k", "k"], 3, 50)
    beside = random_scores(["a", "a", "k", "k", "z", "z"], 3, 50)
    np.testing.assert_array_equal(beside[2:4], alone)
    assert len({tuple(row) for row in beside.tolist()}) == 6
    assert (random_scores(["k", "k"], 4, 50) != alone).mean() > 0.9


def test_random_calls_are_spread_over_positions() -> None:
    scores = random_scores([f"b{i}" for i in range(400)], 0, 20)
    calls = np.array([reference.largest(row, 4) for row in scores.tolist()])
    assert calls.mean(axis=0) == pytest.approx(0.2, abs=0.09)


@pytest.mark.parametrize("batches", [[["m"], ["k"], ["z"]], [["z"], ["m", "k"]]])
def test_batches_change_no_byte(
    study: Study, run: RunFolder, batches: list[list[str]], tmp_path: Path
) -> None:
    other = RunFolder(tmp_path)
    for folder in ("measured", "fitted"):
        (tmp_path / folder).symlink_to(run.root / folder)
    routed(other, study, batches)
    for book in TEST:
        assert other.routed("one", book).read_bytes() == run.routed("one", book).read_bytes()


def test_a_missing_router_is_named_before_anything_is_routed(
    study: Study, run: RunFolder, tmp_path: Path
) -> None:
    other = RunFolder(tmp_path)
    other.fitted("one").mkdir(parents=True)
    for path in run.fitted("one").iterdir():
        if path.name != "J32-1.safetensors":
            (other.fitted("one") / path.name).write_bytes(path.read_bytes())
    with pytest.raises(OutputError, match=r"cannot read .*J32-1\.safetensors.*run `lastcall fit` again"):
        Policies(other, study, "one")
