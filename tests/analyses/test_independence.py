"""The measure against its literal twin; level and power where the truth is known; what it never looks at."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from lastcall.analyses import independence as module
from lastcall.analyses.independence import Independence, Regression, independence, of_dataset
from lastcall.analyses.independence_rates import World, rejection_rate, simulate
from lastcall.errors import BookError, NonFiniteError
from lastcall.routing.features import TRAJECTORY
from lastcall.routing.fitting import projection
from tests.reference import analyses as reference
from tests.routing.made import made

LINEAR = World(clusters=30, linear=True)
SMALL = World(clusters=24, positions=40)


def found(world: World, seed: int = 0, learner: Regression = "ridge", folds: int = 3) -> Independence:
    rng = np.random.default_rng(seed)
    return independence(*simulate(world, rng=rng), folds, learner, rng, draws=999)


def rate(world: World, learner: Regression = "ridge", repetitions: int = 200, folds: int = 3) -> float:
    rng = np.random.default_rng(1)
    return rejection_rate(world, learner, rng, repetitions=repetitions, folds=folds, draws=399)


@pytest.mark.parametrize("world", [LINEAR, dataclasses.replace(LINEAR, clusters=20, autoregression=0.9)])
def test_the_level_is_kept_with_serial_dependence_and_book_levels(world: World) -> None:
    assert 0.02 <= rate(world) <= 0.09


def test_the_level_is_not_kept_where_positions_count_as_independent() -> None:
    """What the cluster sums are for: with a variance over positions the same residuals reject too often."""
    rejected, rng = 0, np.random.default_rng(2)
    world = dataclasses.replace(LINEAR, autoregression=0.9)
    for _ in range(60):
        utility, trajectory, given, clusters = simulate(world, rng=rng)
        targets = np.concatenate([utility[..., None], trajectory], axis=-1)
        left = module._residuals(targets, given, clusters, clusters % 5, "ridge", 0)
        products = (left[..., :1] * left[..., 1:]).reshape(-1, 3)
        z = products.mean(0) / (products.std(0) / len(products) ** 0.5)
        rejected += bool((2 * stats.norm.sf(abs(z)) <= 0.05 / 3).any())
    assert rejected > 12


def test_power_grows_with_the_effect() -> None:
    powers = [
        rate(dataclasses.replace(LINEAR, effect=effect), repetitions=60) for effect in (0.03, 0.06, 0.12)
    ]
    assert powers == sorted(powers)
    assert powers[0] < 0.5
    assert powers[-1] > 0.9


def test_the_feature_with_the_effect_is_named() -> None:
    judged = found(dataclasses.replace(LINEAR, effect=-0.3))
    assert judged.z[0] < -4
    assert judged.p[0] < 0.001 < min(judged.p[1:])
    assert judged.p_largest < 0.01
    assert judged.correlation[0] == pytest.approx(-0.28, abs=0.05)
    assert abs(judged.correlation[1:]).max() < 0.1
    assert judged.largest == pytest.approx(abs(judged.z).max())


def test_a_level_that_books_share_unseen_is_no_evidence() -> None:
    assert rate(dataclasses.replace(LINEAR, shared_level=1.0)) <= 0.09


def test_trees_learn_a_bent_confounder_that_ridge_takes_for_dependence() -> None:
    assert rate(SMALL, "ridge", repetitions=10) == 1.0
    judged = [found(SMALL, seed, "trees", folds=2) for seed in range(5)]
    assert sum(j.p_largest <= 0.05 for j in judged) <= 2
    assert abs(np.mean([j.z for j in judged])) < 1.5
    strong = [found(dataclasses.replace(SMALL, effect=0.4), seed, "trees", folds=2) for seed in range(2)]
    assert all(j.p_largest <= 0.05 and j.z[0] > 3 for j in strong)


def test_the_measure_is_the_measure_by_hand() -> None:
    """From residuals on: cluster by cluster, product by product, and over every way to sign nine clusters."""
    rng = np.random.default_rng(3)
    world = World(clusters=9, positions=20, effect=0.2, linear=True)
    utility, trajectory, given, clusters = simulate(world, rng=rng)
    judged = independence(utility, trajectory, given, clusters, 3, "ridge", np.random.default_rng(4))
    again = np.random.default_rng(4)
    fold_of = (again.permutation(9) % 3)[clusters]
    targets = np.concatenate([utility[..., None], trajectory], axis=-1)
    left = module._residuals(targets, given, clusters, fold_of, "ridge", int(again.integers(2**31)))
    np.testing.assert_allclose(left.mean(axis=1), 0, atol=1e-12)
    z = [reference.covariance_z(left[..., 0], left[..., 1 + j], clusters.tolist()) for j in range(3)]
    np.testing.assert_allclose(judged.z, z, rtol=1e-9)
    np.testing.assert_allclose(judged.p, [2 * stats.t.sf(abs(value), 8) for value in z], rtol=1e-9)
    pairs = [np.corrcoef(left[..., 0].ravel(), left[..., 1 + j].ravel())[0, 1] for j in range(3)]
    np.testing.assert_allclose(judged.correlation, pairs, rtol=1e-9)
    sums = np.array([(left[clusters == c, :, :1] * left[clusters == c, :, 1:]).sum((0, 1)) for c in range(9)])
    assert judged.p_largest == pytest.approx(reference.sign_p(sums), abs=0.02)


def test_residuals_come_from_models_that_never_saw_the_cluster() -> None:
    """A cluster's own values move no expectation of its own, but those of other folds."""
    rng = np.random.default_rng(5)
    utility, trajectory, given, clusters = simulate(World(clusters=8, positions=15), rng=rng)
    targets = np.concatenate([utility[..., None], trajectory], axis=-1)
    fold_of = clusters % 4
    moved = targets.copy()
    moved[clusters == 3] += given[clusters == 3][..., :1] * 5

    def expected(of: np.ndarray) -> np.ndarray:
        left = module._residuals(of, given, clusters, fold_of, "ridge", 0)
        return of - of.mean(axis=1, keepdims=True) - left

    change = abs(expected(moved) - expected(targets)).max(axis=(1, 2))
    assert (change[fold_of == 3] < 1e-9).all()
    assert (change[fold_of != 3] > 1e-3).all()


def test_the_linear_part_is_the_within_estimator() -> None:
    """About block means by least squares, levels far larger than all else."""
    rng = np.random.default_rng(6)
    given = rng.normal(size=(40, 30, 2)) + 50 * rng.normal(size=(40, 1, 1))
    y = given @ [2.0, -1.0] + 100 * rng.normal(size=(40, 1)) + 0.1 * rng.normal(size=(40, 30))
    predict = module._fit_with_levels(y, given, np.arange(40) % 6 == 5, "ridge", 0)
    slopes = predict(np.eye(2)) - predict(np.zeros((2, 2)))
    np.testing.assert_allclose(slopes, [2, -1], atol=0.01)


def test_explained_shares_are_those_of_fresh_clusters() -> None:
    judged = found(dataclasses.replace(LINEAR, confounding=0.0, clusters=60))
    assert -0.02 < judged.explained_utility < 0.02
    assert judged.explained == pytest.approx(np.full(3, 0.5), abs=0.06)


def test_a_feature_that_never_varies_is_no_evidence() -> None:
    rng = np.random.default_rng(7)
    utility, trajectory, given, clusters = simulate(LINEAR, rng=rng)
    trajectory[..., 2] = 4.0
    judged = independence(utility, trajectory, given, clusters, 2, "ridge", rng, draws=200)
    assert (judged.z[2], judged.p[2], judged.correlation[2], judged.explained[2]) == (0, 1, 0, 1)
    assert np.isfinite([judged.largest, judged.p_largest, *judged.z]).all()


@pytest.mark.parametrize("learner", ["ridge", "trees"])
def test_the_same_rng_gives_the_same_figures_whatever_the_global_one(learner: Regression) -> None:
    world = World(clusters=6, positions=12)
    np.random.seed(1)  # noqa: NPY002  (the global generator is what must not matter)
    state = np.random.get_state()[1].tobytes()  # noqa: NPY002
    first = found(world, learner=learner)
    assert np.random.get_state()[1].tobytes() == state  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    again = found(world, learner=learner)
    for field in dataclasses.fields(first):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(again, field.name))


def test_the_coding_of_clusters_does_not_matter() -> None:
    rng = np.random.default_rng(8)
    utility, trajectory, given, clusters = simulate(World(clusters=8), rng=rng)
    one, other = (
        independence(utility, trajectory, given, of, 2, "ridge", np.random.default_rng(0), draws=99)
        for of in (clusters, 10 * clusters + 3)
    )
    np.testing.assert_array_equal(one.z, other.z)


@pytest.mark.parametrize(("clusters", "folds"), [(3, 2), (6, 7), (6, 1)])
def test_too_few_clusters_are_refused_in_a_line(clusters: int, folds: int) -> None:
    with pytest.raises(BookError, match=f"got {clusters} clusters and {folds} folds") as caught:
        found(World(clusters=clusters), folds=folds)
    assert "\n" not in str(caught.value)


def test_what_is_not_finite_is_refused() -> None:
    rng = np.random.default_rng(9)
    utility, trajectory, given, clusters = simulate(World(clusters=6), rng=rng)
    given[0, 0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="a utility or a feature is not finite"):
        independence(utility, trajectory, given, clusters, 2, "ridge", rng)


def test_z_of_measured_books() -> None:
    data = made(10, books=3)
    utility, trajectory, given = of_dataset(data, 4, 11)
    torch.testing.assert_close(torch.from_numpy(utility), data.utility.double())
    assert trajectory.shape == (6, 8, 3)
    np.testing.assert_array_equal(trajectory[..., 1], data.scalars[TRAJECTORY[1]].numpy())
    names = ["entropy", "top_logprob", "margin", "displacement", "log_position", "relative_position"]
    for j, name in enumerate(names):
        np.testing.assert_array_equal(given[..., j], data.scalars[name].numpy())
    states = data.states["bypass"].double().numpy()
    np.testing.assert_allclose(given[..., 6], np.linalg.norm(states, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(
        given[..., 7:], states @ projection(5, 4, 11).double().numpy(), rtol=1e-4, atol=1e-4
    )


def test_a_simulation_has_the_dependence_it_was_asked_for() -> None:
    rng = np.random.default_rng(12)
    world = World(clusters=300, positions=50, autoregression=0.6, level=0.5)
    given = simulate(world, rng=rng)[2]
    about = given - given.mean(axis=1, keepdims=True)
    assert np.corrcoef(given[:, 1:].ravel(), given[:, :-1].ravel())[0, 1] == pytest.approx(
        (0.6 + 0.25) / 1.25, abs=0.03
    )
    assert about.std() == pytest.approx(1, abs=0.06)
    first, second = given[::2].mean(axis=1).ravel(), given[1::2].mean(axis=1).ravel()
    assert np.cov(first, second)[0, 1] == pytest.approx(0.25, abs=0.05)
