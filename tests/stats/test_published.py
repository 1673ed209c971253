"""Published figures beside ours: recomputed from the rows of the files, and what differs."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from lastcall.records import RunFolder, read_json
from lastcall.results import Provenance, PublishedFigure, Setup
from lastcall.stats.judging import Judgement, judge
from lastcall.stats.published import published_result
from lastcall.study import Study
from tests.reference import stats as reference
from tests.synthetic import make_run, make_study

PAIRS = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "w"), ("f", "v")]
BOOKS = [book for book, _ in PAIRS]
DRAWS, ALPHA = 200, 0.1
FIGURES: list[dict[str, Any]] = [
    {"what": "planned_comparisons", "value": 6},
    {"what": "planned_gains", "value": 2},
    {"what": "planned_upper_bound", "value": 0.005},
    *(
        {"checkpoint": "one", "what": what, "value": value}
        for what, value in (
            ("unforced_activation:J32@4096", 0.8),
            ("speed_ratio:J32@40", 1.04),
            ("executed_nll_change:J32", 0.009),
            ("gain_full", 0.1),
            ("share_positive", 0.5),
            ("local_recovery:32", 0.6),
            ("unforced_activation:J32", 0.2),
            ("delta:J32 over B", 0.1),
        )
    ),
    {"checkpoint": "two", "what": "unforced_activation:J32@44", "value": 0.2},
    {"checkpoint": "two", "what": "delta:B over J32", "value": 9, "low": 8, "high": 10},
]


def small_study(**sections: Any) -> Study:
    return make_study(
        test=BOOKS,
        checkpoints=("one", "two"),
        **{
            "blocks": {"horizon": 44, "context": 4},
            "routers": {"names": ["B", "J32", "random"], "seeds": [0, 1]},
            "inference": {"draws": DRAWS, "alpha": ALPHA, "planned": ["J32 over B"], "secondary": {}},
            "published": {"source": "A study.", "figures": FIGURES},
            **sections,
        },
    )


@pytest.fixture(scope="module")
def study() -> Study:
    return small_study()


@pytest.fixture(scope="module")
def run(study: Study, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("run")
    skill = {"J32": 0.8, "B": 0.2}
    return make_run(folder, study, np.random.default_rng(4), books=BOOKS, skill=skill, mean_utility=0.3)


@pytest.fixture(scope="module")
def judged(study: Study, run: RunFolder) -> Judgement:
    return judge(study, run, PAIRS)


def found(judged: Judgement, checkpoint: str | None, what: str) -> PublishedFigure:
    (row,) = [r for r in judged.published if (r["checkpoint"], r["what"]) == (checkpoint, what)]
    return row


def literal(of_book: dict[str, float]) -> Any:
    draws = reference.drawn_books(dict(PAIRS), DRAWS, np.random.default_rng(217))
    interval = reference.interval(lambda drawn: fmean(of_book[b] for b in drawn), BOOKS, draws, ALPHA)
    return pytest.approx(tuple(interval.values()), rel=1e-7, abs=1e-10)


def ours(row: PublishedFigure) -> tuple[float | None, ...]:
    return row["ours"], row["ours_low"], row["ours_high"]


def scored_rows(run: RunFolder, checkpoint: str, book: str) -> list[Any]:
    return [r for r in reference.rows(run.measured(checkpoint, "test", book)) if r["scored"]]


def test_measured_figures_are_those_of_the_rows(run: RunFolder, judged: Judgement) -> None:
    utility = {b: [r["loss_bypass"] - r["loss_full"] for r in scored_rows(run, "one", b)] for b in BOOKS}
    assert ours(found(judged, "one", "gain_full")) == literal({b: fmean(u) for b, u in utility.items()})
    positive = {b: fmean(v > 0 for v in u) for b, u in utility.items()}
    assert ours(found(judged, "one", "share_positive")) == literal(positive)
    assert found(judged, "one", "local_recovery:32")["ours"] == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize(
    ("checkpoint", "what"), [("one", "unforced_activation:J32"), ("two", "unforced_activation:J32@44")]
)
def test_unforced_activation_is_the_share_above_each_seeds_threshold(
    run: RunFolder, judged: Judgement, checkpoint: str, what: str
) -> None:
    taus = read_json(run.fitted(checkpoint) / "thresholds.json")["J32"]
    shares = {
        book: fmean(
            r["score"] > taus[str(r["seed"])]
            for r in reference.rows(run.routed(checkpoint, book))
            if r["router"] == "J32"
        )
        for book in BOOKS
    }
    assert ours(found(judged, checkpoint, what)) == literal(shares)


def test_a_planned_delta_is_the_familys_and_the_reverse_its_mirror(judged: Judgement) -> None:
    one, two = (c["delta"] for c in judged.families[0]["comparisons"])
    assert ours(found(judged, "one", "delta:J32 over B")) == pytest.approx(tuple(one.values()))
    mirrored = -two["estimate"], -two["high"], -two["low"]
    row = found(judged, "two", "delta:B over J32")
    assert ours(row) == pytest.approx(mirrored)
    assert row["difference"] == pytest.approx(mirrored[0] - 9)
    assert row["agrees"] is False
    assert (row["value"], row["low"], row["high"]) == (9, 8, 10)


def test_agreement_is_the_published_value_inside_our_interval(study: Study, run: RunFolder) -> None:
    _, low, high = ours(found(judge(study, run, PAIRS), "one", "gain_full"))
    assert low is not None
    assert high is not None
    for value, agrees in ((low, True), (high, True), (low - 1e-9, False), (high + 1e-9, False)):
        figures = [{"checkpoint": "one", "what": "gain_full", "value": value}]
        again = judge(small_study(published={"source": "s", "figures": figures}), run, PAIRS)
        assert found(again, "one", "gain_full")["agrees"] is agrees


def test_counts_and_bounds_are_of_the_planned_family_alone(judged: Judgement) -> None:
    planned = judged.families[0]["comparisons"]
    count, gains, bound = judged.published[-3:]
    assert (count["ours"], count["agrees"], count["difference"]) == (2, False, -4)
    assert gains["ours"] == sum(c["verdict"] == "gain" for c in planned)
    assert gains["agrees"] is (gains["ours"] == 2)
    assert bound["ours"] == max(c["simultaneous_high"] for c in planned)
    assert (bound["agrees"], bound["difference"]) == (False, None)
    assert {row["ours_low"] for row in (count, gains, bound)} == {None}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("unforced_activation:J32@4096", "the horizon here is 44"),
        ("speed_ratio:J32@40", "judging executes no policy"),
        ("executed_nll_change:J32", "judging executes no policy"),
    ],
)
def test_what_is_not_measured_says_why(judged: Judgement, what: str, why: str) -> None:
    row = found(judged, "one", what)
    assert row["unmeasured"] == why
    assert {row["ours"], row["difference"], row["agrees"]} == {None}


def test_local_recovery_without_a_gain_is_not_given(tmp_path: Path) -> None:
    study = small_study(published={"source": "s", "figures": [FIGURES[8]]})
    worse = make_run(tmp_path, study, np.random.default_rng(4), books=BOOKS, mean_utility=-0.3)
    row = found(judge(study, worse, PAIRS), "one", "local_recovery:32")
    assert row["ours"] is None
    assert "not surely a gain" in (row["unmeasured"] or "")


def test_a_fixed_router_has_no_threshold(run: RunFolder) -> None:
    figure = {"checkpoint": "one", "what": "unforced_activation:random", "value": 0.2}
    judged = judge(small_study(published={"source": "s", "figures": [figure]}), run, PAIRS)
    assert judged.published[0]["unmeasured"] == "random has no threshold"


def test_a_study_without_one_has_none(run: RunFolder) -> None:
    study = small_study(published=None)
    judged = judge(study, run, PAIRS)
    assert judged.published == []
    assert published_result(study, [], SETUP, [], []) is None


SETUP: Setup = {
    "horizon": 44,
    "context": 4,
    "scored": 40,
    "calls": 8,
    "blocks_a_book": 2,
    "books": {"fit": 7, "calibration": 3, "test": 6},
    "cluster": "book",
    "clusters": 6,
    "draws": DRAWS,
    "seed": 217,
    "alpha": ALPHA,
    "practical_threshold": 0.005,
    "warnings": [],
}
SAME = {
    "operation": "attention",
    "fit_books": 7,
    "calibration_books": 3,
    "test_books": 6,
    "blocks_a_book": 2,
    "horizon": 44,
    "context": 4,
    "calls": 8,
    "fit_seeds": 2,
    "cluster": "book",
    "draws": DRAWS,
    "bootstrap_seed": 217,
    "alpha": ALPHA,
    "practical_threshold": 0.005,
    "dtype": "float32",
}
"""The design of this very study; its corpus has no name."""


def differences(design: dict[str, Any], left_out: list[str] | None = None, **sections: Any) -> list[str]:
    """What differs, and the sentence of each checkpoint."""
    study = small_study(
        published={"source": "s", "figures": FIGURES, "design": design, "differences": ["Own."]}, **sections
    )
    locked: list[Provenance] = [{"name": n, "facts": {"weights hash": f"{n}-hash"}} for n in ("one", "two")]
    result = published_result(study, [], SETUP, locked, left_out or [])
    assert result is not None
    assert result["differences"][-1] == "Own."
    return result["differences"][:-1]


def test_the_same_design_differs_only_in_what_is_not_known() -> None:
    said = differences(SAME)[0]
    assert said == "Not known of the published study: source of the books (a folder of texts here)."


@pytest.mark.parametrize(
    ("key", "theirs", "sentence"),
    [
        ("operation", "ffn", "Optional operation: attention here, ffn there."),
        ("corpus", "PG-19", "Source of the books: a folder of texts here, PG-19 there."),
        ("fit_books", 350, "Books of the fit split: 7 here, 350 there."),
        ("calibration_books", 50, "Books of the calibration split: 3 here, 50 there."),
        ("test_books", 1000, "Test books: 6 here, 1,000 there."),
        ("test_books", 100, "Blocks of the test split: 12 here, 200 there."),
        ("horizon", 512, "Predictions a block: 44 here, 512 there."),
        ("context", 17, "Context predictions a block: 4 here, 17 there."),
        ("calls", 99, "Calls a block: 8 here, 99 there."),
        ("fit_seeds", 3, "Fit seeds: 2 here, 3 there."),
        ("cluster", "author", "Unit of resampling: book here, author there."),
        ("draws", 10_000, "Bootstrap draws: 200 here, 10,000 there."),
        ("bootstrap_seed", 2024, "Bootstrap seed: 217 here, 2024 there."),
        ("alpha", 0.05, "Level of Holm's correction: 0.1 here, 0.05 there."),
        ("practical_threshold", 0.01, "Practical size in nats a token: 0.005 here, 0.01 there."),
        ("dtype", "bfloat16", "Type the models compute in: float32 here, bfloat16 there."),
    ],
)
def test_each_part_of_the_design_that_differs_is_named(key: str, theirs: Any, sentence: str) -> None:
    assert sentence in differences({**SAME, key: theirs})
    assert sentence not in differences(SAME)


def test_pg19_from_the_hub_is_pg19_and_books_left_out_are_counted() -> None:
    hub = {"source": "pg19-hub", "lists": {"fit": [], "calibration": [], "test": BOOKS}}
    said = differences({**SAME, "corpus": "PG-19"}, ["x: short"], books=hub)
    assert said[0] == "Books left out here: 1, listed under provenance."
    assert not any("source of the books" in s.lower() for s in said)


def test_nothing_said_of_the_design_is_all_unknown() -> None:
    (said,) = [s for s in differences({}) if s.startswith("Not known")]
    assert said.count(";") == len(
        SAME
    )  # the corpus beside these; blocks a book are said as blocks of the split


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("checkpoint", "sentence"),
    [
        ({"model": "hub/m"}, "one: the revision of hub/m was not pinned; weights hash one-hash."),
        (
            {"model": "hub/m", "revision": "main"},
            'one: the revision of hub/m was not pinned: "main" is not a commit; weights hash one-hash.',
        ),
        (
            {"model": "hub/m", "revision": COMMIT},
            f"one: hub/m at commit {COMMIT}; which commit the published study used is not known; "
            "weights hash one-hash.",
        ),
        (
            {"model": "/secret/m"},
            "one is read from files here, not from a pinned commit of the hub; weights hash one-hash.",
        ),
        ({"model": "random:m"}, "one has random weights; the published study's are trained."),
    ],
)
def test_whose_weights_they_are_is_said(checkpoint: dict[str, str], sentence: str) -> None:
    checkpoints = [{"name": "one", **checkpoint}, {"name": "two", "model": "hub/two"}]
    study = small_study(published={"source": "s", "figures": FIGURES}).model_dump()
    study["checkpoints"] = checkpoints
    locked: list[Provenance] = [{"name": n, "facts": {"weights hash": f"{n}-hash"}} for n in ("one", "two")]
    result = published_result(Study.model_validate(study), [], SETUP, locked, [])
    assert result is not None
    assert sentence in result["differences"]
    assert "secret" not in str(result)


def test_a_checkpoint_without_published_figures_is_said_to_have_none() -> None:
    of_one = published_of([f for f in FIGURES if f.get("checkpoint") != "two"])
    assert "two is not in the published study; weights hash two-hash." in of_one["differences"]


def published_of(figures: list[dict[str, Any]]) -> Any:
    locked: list[Provenance] = [{"name": n, "facts": {"weights hash": f"{n}-hash"}} for n in ("one", "two")]
    study = small_study(published={"source": "s", "figures": figures})
    return published_result(study, [], SETUP, locked, [])


def test_rows_come_in_the_study_files_order(study: Study, judged: Judgement) -> None:
    result = published_result(study, judged.published, SETUP, [], [])
    assert result is not None
    assert [row["what"] for row in result["figures"]] == [figure["what"] for figure in FIGURES]
