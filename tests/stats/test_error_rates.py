"""The procedure's error rates, simulated; and that the simulation would see a broken procedure."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator

import numpy as np
import pytest
import statsmodels.stats.multitest  # noqa: F401  (loaded before anything is frozen)

from lastcall.stats import verdicts
from lastcall.stats.error_rates import ErrorRates, Scenario, differences, error_rates

NULL = Scenario(effects=(0.0,) * 6, clusters=40, correlation=0.3)


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """statsmodels collects garbage at every correction; what is already loaded need not be gone through."""
    gc.freeze()
    yield
    gc.unfreeze()


def rates(scenario: Scenario, seed: int = 0, simulations: int = 600) -> ErrorRates:
    rng = np.random.default_rng(seed)
    return error_rates(
        scenario, simulations=simulations, draws=500, alpha=0.05, practical_threshold=0.005, rng=rng
    )


def test_the_family_wise_error_and_the_coverage_are_near_what_is_promised() -> None:
    found = rates(NULL)
    assert 0.025 <= found.false_gain <= 0.09
    assert 0.90 <= found.simultaneous_coverage <= 0.97
    assert all(0.90 <= share <= 0.97 for share in found.plain_coverage)


def test_without_holm_the_family_wise_error_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "holm", lambda p: p)
    assert rates(NULL).false_gain > 0.12


def test_books_of_one_cluster_count_as_one() -> None:
    tied = Scenario((0.0,), clusters=40, books_a_cluster=4, book_deviation=0.002, cluster_deviation=0.02)
    assert rates(tied).false_gain <= 0.09
    apart = rates(dataclasses.replace(tied, effects=(0.01,)))
    assert apart.gains[0] == pytest.approx(0.9, abs=0.08)


def test_power_grows_with_the_effect_and_losses_are_no_gains() -> None:
    found = rates(Scenario((0.02, 0.008, 0.0, -0.02), clusters=40), simulations=200)
    assert found.gains[0] > 0.95 > found.gains[1] > 0.3 > found.gains[2]
    assert found.gains[3] == 0
    assert found.false_dismissal < 0.05


def test_a_simulation_has_the_dependence_it_was_asked_for() -> None:
    scenario = Scenario(
        (1.0, 2.0), 4000, books_a_cluster=2, book_deviation=0.3, cluster_deviation=0.4, correlation=0.5
    )
    found = differences(scenario, rng=np.random.default_rng(0))
    np.testing.assert_allclose(found.mean(axis=0), [1, 2], atol=0.03)
    np.testing.assert_allclose(found.std(axis=0), 0.5, atol=0.02)
    assert np.corrcoef(found.T)[0, 1] == pytest.approx(0.5, abs=0.04)
    first, second = found[::2, 0], found[1::2, 0]
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(0.16 / 0.25, abs=0.04)


@pytest.mark.parametrize(
    "scenario", [Scenario((), 5), Scenario((0.0,), 1), Scenario((0.0,), 5, correlation=1.5)]
)
def test_an_impossible_scenario_is_refused(scenario: Scenario) -> None:
    with pytest.raises(ValueError, match=r"nothing to simulate|correlation"):
        rates(scenario)
