"""Power against its formulas by hand, against simulated studies judged for real, and from a run folder."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np
import pytest
import statsmodels.stats.multitest  # noqa: F401  (loaded before anything is frozen)
from scipy import stats

from lastcall.analyses.power import (
    PowerRow,
    calibration_gains,
    cluster_deviations,
    deviation_interval,
    leave_one_out_calls,
    power,
)
from lastcall.errors import BookError, OutputError
from lastcall.records import RunFolder
from lastcall.routing import dataset
from lastcall.routing.fitting import fit_all
from lastcall.routing.quota import deadline_calls, threshold
from lastcall.routing.replay import Policies
from lastcall.stats.bootstrap import Clusters, draw_clusters
from lastcall.stats.error_rates import Scenario, differences
from lastcall.stats.verdicts import infer
from lastcall.study import Study
from tests.measured import write_split
from tests.reference import analyses as reference
from tests.synthetic import make_study

STUDY = make_study(test=["t"], checkpoints=("one", "two"))
NAMES = ("B", "T", "S32", "J32", "C_RP3")


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """statsmodels collects garbage at every correction; what is already loaded need not be gone through."""
    gc.freeze()
    yield
    gc.unfreeze()


def gains(books: int, rng: np.random.Generator, deviation: float = 0.02) -> dict[str, dict[str, np.ndarray]]:
    """Of two checkpoints, three seeds a router."""
    return {c: {name: deviation * rng.normal(size=(3, books)) for name in NAMES} for c in ("one", "two")}


def rows_for(
    deviation: float, calibration: int = 400, test: int = 100, study: Study = STUDY
) -> list[PowerRow]:
    """Rows whose every comparison has exactly this deviation."""
    values = np.tile([1.0, -1.0], calibration // 2)
    values *= deviation / np.std(values, ddof=1)
    of = {"B": 0 * values, "T": values, "S32": 0 * values, "J32": values, "C_RP3": 0 * values}
    seeds = {name: value[None] for name, value in of.items()}
    checkpoints = {c.name: seeds for c in study.checkpoints}
    return power(study, checkpoints, [f"c{i}" for i in range(calibration)], test)


def test_a_row_is_the_formulas_by_hand() -> None:
    rng = np.random.default_rng(0)
    found, clusters = gains(12, rng), ["a", "a", "a", "b", "c", "c", "d", "e", "f", "g", "g", "h"]
    rows = power(STUDY, found, clusters, 50)
    assert [(r["checkpoint"], r["a"], r["b"]) for r in rows] == [
        (c, a, b) for c in ("one", "two") for a, b in (("T", "B"), ("J32", "S32"), ("J32", "C_RP3"))
    ]
    normal = NormalDist()
    for row in rows:
        of = found[row["checkpoint"]]
        values = of[row["a"]].mean(axis=0) - of[row["b"]].mean(axis=0)
        sigma = reference.cluster_deviation(values.tolist(), clusters)
        assert row["delta"] == pytest.approx(values.mean())
        assert row["deviation"]["estimate"] == pytest.approx(sigma)
        assert (row["calibration_clusters"], row["test_clusters"], row["books_a_cluster"]) == (8, 50, 1.5)
        for end in ("estimate", "low", "high"):
            s = row["deviation"][end]
            se = s / math.sqrt(50)
            assert row["se"][end] == pytest.approx(se)
            for key, a in (("best", 0.05), ("worst", 0.05 / 6)):
                z = normal.inv_cdf(1 - a) + normal.inv_cdf(0.8)
                assert row[f"detectable_{key}"][end] == pytest.approx(z * se)
                fewest = row[f"clusters_{key}"][end]
                assert z * s / math.sqrt(fewest) <= 0.005 < z * s / math.sqrt(fewest - 1)
            q = normal.inv_cdf((1 + 0.95 ** (1 / 6)) / 2)
            fewest, z = row["clusters_no_gain"][end], q + normal.inv_cdf(0.8)
            assert z * s / math.sqrt(fewest) <= 0.005 < z * s / math.sqrt(fewest - 1)
            assert row["power_no_gain"][end] == pytest.approx(1 - normal.cdf(q - 0.005 / se))
            a = normal.inv_cdf(1 - 0.05 / 6)
            assert row["power_threshold"][end] == pytest.approx(1 - normal.cdf(a - 0.005 / se))


@pytest.mark.parametrize("sizes", [[1] * 30, [1, 5] * 15, [1] * 15 + [8] * 15])
def test_the_deviation_is_the_bootstraps(sizes: list[int]) -> None:
    """se² = σ² / C is the variance of Δ*, but for (C − 1) / C and the sizes that a draw happens to take."""
    rng = np.random.default_rng(1)
    of_book = np.repeat(np.arange(30), sizes)
    clusters = Clusters(tuple(map(str, range(len(of_book)))), of_book)
    values = rng.normal(size=(len(of_book), 1)) + rng.normal(size=30)[of_book][:, None]
    drawn = draw_clusters(clusters, 20_000, rng=rng).means(values)
    sigma = cluster_deviations(values, clusters)[0]
    assert sigma / math.sqrt(30) == pytest.approx(drawn.std() * math.sqrt(30 / 29), rel=0.06)


def test_the_chi_square_interval_covers() -> None:
    rng = np.random.default_rng(2)
    samples = rng.normal(size=(4000, 8)).std(axis=1, ddof=1)
    ends = [deviation_interval(float(s), 8, 0.1) for s in samples]
    assert np.mean([e["low"] <= 1 <= e["high"] for e in ends]) == pytest.approx(0.9, abs=0.02)


def judged(effects: Sequence[float], clusters: int, simulations: int, seed: int) -> list[tuple[str, ...]]:
    """Verdicts of simulated studies, Gaussian books of deviation 0.02, by the real bootstrap."""
    rng = np.random.default_rng(seed)
    scenario = Scenario(tuple(effects), clusters, correlation=0.3)
    numbers = Clusters(tuple(map(str, range(clusters))), np.arange(clusters))
    return [
        infer(
            draw_clusters(numbers, 400, rng=rng),
            differences(scenario, rng=rng),
            alpha=0.05,
            practical_threshold=0.005,
        ).verdicts
        for _ in range(simulations)
    ]


def share(verdicts: list[tuple[str, ...]], word: str) -> float:
    return float(np.mean([of[0] == word for of in verdicts]))


def test_the_smallest_effect_is_found_as_often_as_promised_first_of_six() -> None:
    effect = rows_for(0.02)[0]["detectable_worst"]["estimate"]
    assert share(judged([effect, *[0.0] * 5], 100, 400, 3), "gain") == pytest.approx(0.8, abs=0.07)


def test_the_smallest_effect_is_found_as_often_as_promised_alone() -> None:
    study = make_study(test=["t"], inference={"planned": ["T over B"]})
    row = rows_for(0.02, study=study)[0]
    assert row["detectable_best"] == pytest.approx(row["detectable_worst"])
    verdicts = judged([row["detectable_best"]["estimate"]], 100, 400, 4)
    assert share(verdicts, "gain") == pytest.approx(0.8, abs=0.07)


def test_holms_last_step_is_the_best_case() -> None:
    """Five effects so large that they are surely found: the sixth is judged at alpha."""
    effect = rows_for(0.02)[0]["detectable_best"]["estimate"]
    found = share(judged([effect, *[0.05] * 5], 100, 400, 5), "gain")
    assert found == pytest.approx(0.8, abs=0.07)


def test_no_gain_is_said_as_often_as_promised() -> None:
    clusters = int(rows_for(0.02)[0]["clusters_no_gain"]["estimate"])
    found = share(judged([0.0] * 6, clusters, 300, 6), "no gain of practical size")
    assert 0.75 <= found <= 0.9
    fewer = share(judged([0.0] * 6, clusters // 2, 300, 6), "no gain of practical size")
    row = rows_for(0.02, test=clusters // 2)[0]
    assert fewer == pytest.approx(row["power_no_gain"]["estimate"], abs=0.1)
    assert fewer < 0.6


def test_routers_that_never_differ_need_the_fewest_clusters() -> None:
    row = rows_for(0.0)[0]
    assert row["se"] == {"estimate": 0, "low": 0, "high": 0}
    assert row["clusters_no_gain"]["high"] == row["clusters_worst"]["high"] == 2
    assert row["power_no_gain"]["low"] == row["power_threshold"]["low"] == 1


def test_few_clusters_widen_the_interval_and_warn() -> None:
    few, many = rows_for(0.02, calibration=8)[0], rows_for(0.02, calibration=40)[0]
    assert few["deviation"]["high"] / few["deviation"]["low"] > 3
    assert many["deviation"]["high"] / many["deviation"]["low"] < 1.7
    assert few["warning"].startswith("8 calibration clusters, fewer than 20")
    assert many["warning"] == ""
    both = rows_for(0.02, calibration=8, test=10)[0]["warning"]
    assert both.startswith("8 calibration clusters and 10 test clusters, fewer than 20")


@pytest.mark.parametrize(("clusters", "test"), [(["a"] * 4, 50), (["a", "b", "c", "d"], 1)])
def test_nothing_to_vary_is_refused_in_a_line(clusters: list[str], test: int) -> None:
    with pytest.raises(BookError, match="power needs at least 2 calibration clusters") as caught:
        power(STUDY, gains(4, np.random.default_rng(0)), clusters, test)
    assert "\n" not in str(caught.value)


def test_thresholds_leave_the_book_out() -> None:
    rng = np.random.default_rng(7)
    books = [f"b{i // 2}" for i in range(10)]
    scores = rng.normal(size=(10, 20)) + np.repeat(np.arange(5), 2)[:, None]
    calls = leave_one_out_calls(scores, books, 4)
    thresholds = reference.left_out_thresholds(scores, books, 4)
    utility = rng.normal(size=(10, 20))
    expected = reference.book_gains(scores, thresholds, utility, books, 4)
    found = np.where(calls, utility, 0).mean(axis=1).reshape(5, 2).mean(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert (calls.sum(axis=1) == 4).all()
    pooled = deadline_calls(scores, threshold(scores, 4, 20), 4)
    assert (calls != pooled).any()
    moved = scores.copy()
    moved[:2] += 50  # a book's own scores do not move its own threshold
    assert (leave_one_out_calls(moved, books, 4)[:2].argmax(axis=1) == 0).all()


CALIBRATION = [f"c{i}" for i in range(5)]


@pytest.fixture(scope="module")
def study() -> Study:
    return make_study(
        test=["t"],
        blocks={"horizon": 24, "context": 4},
        routers={"names": ["B", "T", "random", "every-fifth"], "seeds": [2, 0], "epochs": 2, "hidden": 6},
        inference={"planned": ["T over B", "T over random", "B over every-fifth"], "secondary": {}},
    )


@pytest.fixture(scope="module")
def run(study: Study, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Fit and calibration measured and fitted; no test record exists."""
    run, rng = RunFolder(tmp_path_factory.mktemp("run")), np.random.default_rng(8)
    fit = [f"f{i}" for i in range(6)]
    write_split(run, study, "one", "fit", fit, rng, strength=0.2, told_by="curvature")
    write_split(run, study, "one", "calibration", CALIBRATION, rng, strength=0.2, told_by="curvature")
    data = [
        dataset.read(run, study, "one", split, books)
        for split, books in (("fit", fit), ("calibration", CALIBRATION))
    ]
    fit_all(run, study, "one", *data, "from", lambda: None)
    return run


def test_gains_of_a_run_folder_are_the_gains_by_hand(study: Study, run: RunFolder) -> None:
    found = calibration_gains(run, study, "one", CALIBRATION)
    assert list(found) == ["T", "B", "random", "every-fifth"]
    data = dataset.read(run, study, "one", "calibration", CALIBRATION)
    decided, utility = Policies(run, study, "one").decide(data), data.utility.double().numpy()
    for name in ("T", "B"):
        for row, seed in zip(found[name], (2, 0), strict=True):
            scores = decided[name, seed][0]
            thresholds = reference.left_out_thresholds(scores, data.books, study.calls)
            expected = reference.book_gains(scores, thresholds, utility, data.books, study.calls)
            np.testing.assert_allclose(row, expected, rtol=1e-6)
    for name, seeds in (("random", (2, 0)), ("every-fifth", (0,))):
        for row, seed in zip(found[name], seeds, strict=True):
            called = np.where(decided[name, seed][1], utility, 0).mean(axis=1)
            np.testing.assert_allclose(row, called.reshape(5, 2).mean(axis=1), rtol=1e-6)


def test_power_of_a_run_folder(study: Study, run: RunFolder) -> None:
    rows = power(study, {"one": calibration_gains(run, study, "one", CALIBRATION)}, CALIBRATION, 100)
    assert [(r["a"], r["b"]) for r in rows] == [("T", "B"), ("T", "random"), ("B", "every-fifth")]
    assert all(r["warning"] for r in rows)
    spread = stats.chi2.ppf([0.975, 0.025], 4)
    for row in rows:
        assert row["deviation"]["estimate"] > 0
        np.testing.assert_allclose(
            [row["se"]["low"], row["se"]["high"]], row["se"]["estimate"] * np.sqrt(4 / spread), rtol=1e-9
        )


def test_one_calibration_book_is_refused_and_so_is_a_missing_one(study: Study, run: RunFolder) -> None:
    with pytest.raises(BookError, match="leaves a book out needs another one: got 1 calibration book"):
        calibration_gains(run, study, "one", CALIBRATION[:1])
    with pytest.raises(OutputError, match=r"nowhere.*is missing"):
        calibration_gains(run, study, "one", ["nowhere", "c0"])
