"""A whole judgement against literal loops over the rows of the files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from lastcall.records import RunFolder, read_json
from lastcall.stats import judging
from lastcall.stats.judging import Judgement, judge
from lastcall.stats.summaries import EDGES
from lastcall.study import Study
from tests.reference import stats as reference
from tests.synthetic import make_run, make_study

PAIRS = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "w"), ("f", "v")]
BOOKS = [book for book, _ in PAIRS]
DRAWS, ALPHA = 200, 0.1


def small_study(**sections: object) -> Study:
    return make_study(
        test=BOOKS,
        checkpoints=("one", "two"),
        blocks={"horizon": 44, "context": 4},
        routers={"names": ["B", "J32", "random", "every-fifth"], "seeds": [0, 1]},
        inference={
            "draws": DRAWS,
            "alpha": ALPHA,
            "planned": ["J32 over B"],
            "secondary": {"chance": ["B over random", "J32 over every-fifth"]},
        },
        **sections,
    )


@pytest.fixture(scope="module")
def study() -> Study:
    return small_study()


@pytest.fixture(scope="module")
def run(study: Study, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("run")
    return make_run(
        folder, study, np.random.default_rng(4), books=BOOKS, skill={"J32": 0.8, "B": 0.2}, mean_utility=0.3
    )


@pytest.fixture(scope="module")
def judged(study: Study, run: RunFolder) -> Judgement:
    return judge(study, run, PAIRS)


@pytest.fixture(scope="module")
def draws() -> list[list[str]]:
    return reference.drawn_books(dict(PAIRS), DRAWS, np.random.default_rng(217))


def literal_losses(run: RunFolder, checkpoint: str, calls: int) -> dict[str, list[dict[str, float]]]:
    """By policy and seed: each book's loss, with the operation run where the files say so."""
    losses: dict[str, list[dict[str, float]]] = {}
    for book in BOOKS:
        measured = reference.rows(run.measured(checkpoint, "test", book))
        called: dict[tuple[str, int], set[tuple[int, int]]] = {
            ("never", 0): set(),
            ("always", 0): {(row["block"], row["position"]) for row in measured},
            ("oracle", 0): reference.best_calls(
                measured, lambda row: row["loss_bypass"] - row["loss_full"], calls
            ),
            ("knowable", 0): reference.best_calls(measured, lambda row: row["kl"], calls),
        }
        for row in reference.rows(run.routed(checkpoint, book)):
            here = called.setdefault((row["router"], row["seed"]), set())
            here |= {(row["block"], row["position"])} if row["call"] else set()
        for (name, seed), positions in called.items():
            seeds = losses.setdefault(name, [])
            seeds += [{}] * (seed + 1 - len(seeds))
            seeds[seed] = {**seeds[seed], book: reference.book_loss(measured, positions)}
    return losses


def near(value: object) -> object:
    return pytest.approx(value, rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("number", [0, 1])
def test_every_policy_is_worth_what_its_rows_say(
    study: Study, run: RunFolder, judged: Judgement, draws: list[list[str]], number: int
) -> None:
    losses = literal_losses(run, study.checkpoints[number].name, study.calls)
    mean = {n: {b: fmean(s[b] for s in seeds) for b in BOOKS} for n, seeds in losses.items()}
    gain = {n: {b: mean["never"][b] - of[b] for b in BOOKS} for n, of in mean.items()}
    overall = {n: fmean(of.values()) for n, of in gain.items()}
    found = judged.checkpoints[number]
    order = ["never", "always", *study.routers.names, "knowable", "oracle"]
    assert [r["name"] for r in found["routers"]] == order
    for router in found["routers"]:
        of, worth = mean[router["name"]], gain[router["name"]]
        interval = reference.interval(lambda d, of=of: fmean(of[b] for b in d), BOOKS, draws, ALPHA)
        assert router["nll"] == near(interval)
        interval = reference.interval(lambda d, of=worth: fmean(of[b] for b in d), BOOKS, draws, ALPHA)
        assert router["gain"] == near(interval)
        assert router["oracle_share"] == near(overall[router["name"]] / overall["oracle"])
        assert router["knowable_share"] == near(overall[router["name"]] / overall["knowable"])
        spent = {"never": 0, "always": study.blocks.scored}.get(router["name"], study.calls)
        assert (router["calls_min"], router["calls_max"]) == (spent, spent)


def test_comparisons_are_the_differences_of_the_losses_on_shared_draws(
    study: Study, run: RunFolder, judged: Judgement, draws: list[list[str]]
) -> None:
    losses = {c.name: literal_losses(run, c.name, study.calls) for c in study.checkpoints}
    assert [(f["name"], f["planned"]) for f in judged.families] == [("planned", True), ("chance", False)]
    for family in judged.families:
        asked = [(c.name, o.a, o.b) for c in study.checkpoints for o in study.families[family["name"]]]
        assert [(c["checkpoint"], c["a"], c["b"]) for c in family["comparisons"]] == asked
        deltas, drawn = [], []
        for found, (checkpoint, a, b) in zip(family["comparisons"], asked, strict=True):
            of_a, of_b = losses[checkpoint][a], losses[checkpoint][b]
            seeds = [
                {k: of_b[s % len(of_b)][k] - of_a[s % len(of_a)][k] for k in BOOKS}
                for s in range(max(len(of_a), len(of_b)))
            ]
            assert found["per_seed"] == near([fmean(seed.values()) for seed in seeds])
            mean = {book: fmean(seed[book] for seed in seeds) for book in BOOKS}
            deltas.append(fmean(mean.values()))
            drawn.append(reference.means(mean, draws))
            low, high = (reference.percentile(drawn[-1], share) for share in (ALPHA / 2, 1 - ALPHA / 2))
            assert found["delta"] == near({"estimate": deltas[-1], "low": low, "high": high})
        p = [reference.one_sided(delta, stars) for delta, stars in zip(deltas, drawn, strict=True)]
        bounds = reference.simultaneous(deltas, drawn, ALPHA)
        for found, *expected in zip(family["comparisons"], p, reference.holm(p), bounds, strict=True):
            assert [found["p"], found["p_holm"]] == near(expected[:2])
            assert (found["simultaneous_low"], found["simultaneous_high"]) == near(expected[2])
            assert found["verdict"] == reference.verdict(expected[1], expected[2][1], ALPHA, 0.005)


def test_the_branches_and_local_recovery(run: RunFolder, judged: Judgement, draws: list[list[str]]) -> None:
    scored = {
        book: [row for row in reference.rows(run.measured("one", "test", book)) if row["scored"]]
        for book in BOOKS
    }

    def mean(column: str, books: list[str]) -> float:
        return fmean(fmean(row[column] for row in scored[book]) for book in books)

    def recovery(books: list[str]) -> float:
        bypass = mean("loss_bypass", books)
        return (bypass - mean("loss_local32", books)) / (bypass - mean("loss_full", books))

    def positive(books: list[str]) -> float:
        return fmean(fmean(row["loss_bypass"] > row["loss_full"] for row in scored[book]) for book in books)

    found = judged.checkpoints[0]
    expected = {
        "nll_full": lambda books: mean("loss_full", books),
        "nll_bypass": lambda books: mean("loss_bypass", books),
        "gain_full": lambda books: mean("loss_bypass", books) - mean("loss_full", books),
        "share_positive": positive,
    }
    for key, statistic in expected.items():
        assert found[key] == near(reference.interval(statistic, BOOKS, draws, ALPHA))
    local = reference.interval(lambda books: mean("loss_local32", books), BOOKS, draws, ALPHA)
    assert found["nll_local"] == {"32": near(local)}
    assert found["local_recovery"] == {"32": near(reference.interval(recovery, BOOKS, draws, ALPHA))}


def test_forced_calls_and_the_unforced_rule(study: Study, run: RunFolder, judged: Judgement) -> None:
    thresholds = read_json(run.fitted("one") / "thresholds.json")
    for router in judged.checkpoints[0]["routers"]:
        if router["name"] not in thresholds:
            assert router["unforced"] is None
            assert router["forced_share"] is None
            continue
        forced = calls = above = total = 0
        loss, quarters = 0.0, [[], [], [], []]
        for book in BOOKS:
            at = {
                (row["block"], row["position"]): row
                for row in reference.rows(run.measured("one", "test", book))
            }
            for row in reference.rows(run.routed("one", book)):
                if row["router"] != router["name"]:
                    continue
                over = row["score"] > thresholds[router["name"]][str(row["seed"])]
                total, above, calls = total + 1, above + over, calls + row["call"]
                forced += row["call"] and not over
                loss += at[row["block"], row["position"]]["loss_full" if over else "loss_bypass"]
                quarters[(row["position"] - 4) // 10].append(over)
        assert router["forced_share"] == near(forced / calls)
        assert router["unforced"] == {
            "nll": near(loss / total),
            "activation": near(above / total),
            "activation_by_quarter": near([fmean(quarter) for quarter in quarters]),
        }


def test_the_histogram_and_the_means_by_position(
    run: RunFolder, judged: Judgement, draws: list[list[str]]
) -> None:
    rows = {book: reference.rows(run.measured("one", "test", book)) for book in BOOKS}
    utility = [
        float(r["loss_bypass"]) - float(r["loss_full"]) for of in rows.values() for r in of if r["scored"]
    ]
    histogram = judged.checkpoints[0]["histogram"]
    assert histogram["edges"] == list(EDGES)
    assert sum(histogram["shares"]) + histogram["below"] + histogram["above"] == pytest.approx(1)
    assert histogram["below"] == near(fmean(u < -1.5 for u in utility))
    assert histogram["shares"][30] == near(fmean(0 <= u < 0.05 for u in utility))
    bins = judged.checkpoints[0]["by_position"]
    assert [(b["first"], b["last"]) for b in bins] == [(4, 17), (18, 30), (31, 43)]
    for one in bins:
        of = {
            book: fmean(
                r["loss_bypass"] - r["loss_full"]
                for r in rows[book]
                if one["first"] <= r["position"] <= one["last"]
            )
            for book in BOOKS
        }
        expected = reference.interval(lambda d, of=of: fmean(of[b] for b in d), BOOKS, draws, ALPHA)
        assert one["utility"] == near(expected)


def test_calibration_pools_the_seeds(run: RunFolder, judged: Judgement, draws: list[list[str]]) -> None:
    pairs = []
    for book in BOOKS:
        at = {(r["block"], r["position"]): r for r in reference.rows(run.measured("one", "test", book))}
        for row in reference.rows(run.routed("one", book)):
            if row["router"] == "J32":
                here = at[row["block"], row["position"]]
                pairs.append((row["score"], here["loss_bypass"] - here["loss_full"], book))
    pairs.sort()
    bins = judged.checkpoints[0]["calibration"]["J32"]
    assert set(judged.checkpoints[0]["calibration"]) == {"B", "J32"}
    assert len(bins) == 10
    each = len(pairs) // 10
    for i, found in enumerate(bins):
        tenth = pairs[i * each : (i + 1) * each]

        def realised(books: list[str], tenth: list[tuple[float, float, str]] = tenth) -> float:
            return fmean(u for book in books for _, u, of in tenth if of == book)

        assert found["predicted"] == near(fmean(score for score, _, _ in tenth))
        assert found["realised"] == near(reference.interval(realised, BOOKS, draws, ALPHA))


def test_the_same_records_judge_to_the_same_bytes(study: Study, run: RunFolder, judged: Judgement) -> None:
    again = judge(study, run, PAIRS)
    texts = [json.dumps(asdict(j), allow_nan=False, sort_keys=True) for j in (judged, again)]
    assert texts[0] == texts[1]


def test_the_order_of_books_is_that_of_the_argument(study: Study, run: RunFolder, judged: Judgement) -> None:
    turned = judge(study, run, PAIRS[::-1])
    for here, there in zip(judged.checkpoints, turned.checkpoints, strict=True):
        assert here["gain_full"]["estimate"] == near(there["gain_full"]["estimate"])


def test_few_clusters_are_warned_of(
    study: Study, run: RunFolder, judged: Judgement, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged.clusters == 5
    assert judged.warnings[0].startswith("5 test clusters, fewer than 20")
    monkeypatch.setattr(judging, "FEW_CLUSTERS", 5)
    assert not any("clusters" in warning for warning in judge(study, run, PAIRS).warnings)


def test_where_full_is_no_gain_there_are_no_ratios_to_it(tmp_path: Path) -> None:
    study = small_study()
    run = make_run(tmp_path, study, np.random.default_rng(0), books=BOOKS, mean_utility=-5.0)
    found = judge(study, run, PAIRS)
    assert found.checkpoints[0]["local_recovery"] == {}
    assert all(
        r["oracle_share"] is None and r["knowable_share"] is None for r in found.checkpoints[0]["routers"]
    )
    assert "one: local recovery is not given" in found.warnings[1]
    json.dumps(asdict(found), allow_nan=False)


def test_without_local_windows_nothing_is_said_of_them(tmp_path: Path) -> None:
    study = small_study(measure={"local_windows": []})
    run = make_run(tmp_path, study, np.random.default_rng(0), books=BOOKS)
    found = judge(study, run, PAIRS)
    assert found.checkpoints[0]["nll_local"] == found.checkpoints[0]["local_recovery"] == {}
    assert len(found.warnings) == 1


def test_the_global_generator_is_left_alone(study: Study, run: RunFolder) -> None:
    before = np.random.get_state()  # noqa: NPY002
    judge(study, run, PAIRS)
    after = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_judging_reaches_no_torch() -> None:
    code = (
        "import sys, lastcall.stats.judging, lastcall.stats.error_rates; "
        "heavy = {'torch', 'transformers', 'pandas', 'scipy.stats', 'statsmodels'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
