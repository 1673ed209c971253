"""Reading a run's test records: what is read, and every way in which a file is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lastcall.errors import NonFiniteError, OutputError
from lastcall.records import RunFolder, read_json, write_json
from lastcall.stats.loading import read_checkpoint
from lastcall.study import Study
from tests.reference import stats as reference
from tests.synthetic import make_run, make_study, quota

BOOKS = ["one", "two", "three"]


@pytest.fixture
def study() -> Study:
    return make_study(
        test=BOOKS,
        blocks={"horizon": 24, "context": 4},
        routers={"names": ["B", "J32", "random", "every-fifth", "by-position"], "seeds": [3, 1]},
        inference={"planned": ["J32 over B"]},
    )


@pytest.fixture
def run(study: Study, tmp_path: Path) -> RunFolder:
    return make_run(tmp_path, study, np.random.default_rng(0), books=BOOKS)


def test_arrays_hold_the_rows_of_the_files(study: Study, run: RunFolder) -> None:
    records = read_checkpoint(study, run, "one", BOOKS)
    assert [p.name for p in records.routers] == list(study.routers.names)
    assert [p.seeds for p in records.routers] == [(3, 1), (3, 1), (3, 1), (0,), (0,)]
    assert [p.kind for p in records.routers] == ["learned"] * 2 + ["fixed"] * 3
    tau = read_json(run.fitted("one") / "thresholds.json")
    assert records.routers[1].thresholds == (tau["J32"]["3"], tau["J32"]["1"])
    for i, book in enumerate(BOOKS):
        for row in reference.rows(run.measured("one", "test", book)):
            if row["scored"]:
                at = i, row["block"], row["position"] - 4
                assert records.loss_full[at] == row["loss_full"]
                assert records.loss_bypass[at] == row["loss_bypass"]
                assert records.kl[at] == row["kl"]
                assert records.loss_local[32][at] == row["loss_local32"]
        for row in reference.rows(run.routed("one", book)):
            policy = next(p for p in records.routers if p.name == row["router"])
            at = policy.seeds.index(row["seed"]), i, row["block"], row["position"] - 4
            assert policy.calls[at] == row["call"]
            assert policy.scores is None or policy.scores[at] == row["score"]


def test_synthetic_calls_obey_the_literal_quota() -> None:
    scores = np.random.default_rng(1).normal(size=(6, 30))
    for threshold in (-3.0, 0.5, 3.0):
        for row, called in zip(scores, quota(scores, np.float64(threshold), 7), strict=True):
            assert called.tolist() == reference.quota(row.tolist(), threshold, 7)


def routed(change: Callable[[pa.Table], pa.Table], run: RunFolder) -> Path:
    return rewritten(run.routed("one", "two"), change)


def measured(change: Callable[[pa.Table], pa.Table], run: RunFolder) -> Path:
    return rewritten(run.measured("one", "test", "two"), change)


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    pq.write_table(change(pq.read_table(path, partitioning=None)), path)
    return path


def swapped(table: pa.Table) -> pa.Table:
    order = np.arange(table.num_rows)
    order[[7, 30]] = order[[30, 7]]
    return table.take(order)


def with_column(name: str, row: int, value: object) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        values[row] = value
        field = table.schema.field(name)
        return table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))

    return change


def retyped(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        cast = table.column(name).cast(kind)
        return table.set_column(table.schema.get_field_index(name), name, cast)

    return change


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        (routed, lambda t: t.slice(1), OutputError, "should have 320 rows: got 319"),
        (routed, lambda t: t.drop_columns(["call"]), OutputError, r"No match .*\(call\)"),
        (routed, swapped, OutputError, "row 7 should have block 0: got 1"),
        (routed, with_column("router", 5, "T"), OutputError, "row 5 should have router B: got T"),
        (routed, with_column("seed", 41, 3), OutputError, "row 41 should have seed 1: got 3"),
        (routed, with_column("position", 0, 3), OutputError, "row 0 should have position 4: got 3"),
        (routed, with_column("book", 0, "one"), OutputError, "should be of book two: got one, two"),
        (routed, with_column("score", 79, float("nan")), NonFiniteError, "column score is not finite"),
        (routed, retyped("router", pa.string()), OutputError, "column router is no dictionary"),
        (measured, lambda t: t.slice(0, 47), OutputError, "should have 48 rows: got 47"),
        (measured, swapped, OutputError, "row 7 should have block 0: got 1"),
        (measured, with_column("scored", 3, True), OutputError, "row 3 should have scored False: got True"),
        (measured, with_column("book", 9, "one"), OutputError, "should be of book two: got two, one"),
        (measured, with_column("kl", 9, float("inf")), NonFiniteError, "column kl is not finite"),
        (
            measured,
            retyped("loss_full", pa.float64()),
            OutputError,
            "column loss_full is no float: got double",
        ),
        (measured, lambda t: t.replace_schema_metadata({}), OutputError, "another schema"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_refused_by_name(
    study: Study,
    run: RunFolder,
    kind: Callable[[Callable[[pa.Table], pa.Table], RunFolder], Path],
    change: Callable[[pa.Table], pa.Table],
    error: type[Exception],
    message: str,
) -> None:
    path = kind(change, run)
    with pytest.raises(error, match=f"{re.escape(str(path))}.*{message}"):
        read_checkpoint(study, run, "one", BOOKS)


def test_scores_of_policies_that_learn_nothing_may_be_anything(study: Study, run: RunFolder) -> None:
    routed(with_column("score", 300, float("nan")), run)
    read_checkpoint(study, run, "one", BOOKS)


def test_calls_that_miss_the_budget_are_refused(study: Study, run: RunFolder) -> None:
    calls = pq.read_table(run.routed("one", "two")).column("call").to_pylist()
    path = routed(with_column("call", calls.index(True), False), run)
    with pytest.raises(OutputError, match=f"{re.escape(str(path))}: a block should have 4 calls: got 3 to 4"):
        read_checkpoint(study, run, "one", BOOKS)


def test_a_missing_file_is_named(study: Study, run: RunFolder) -> None:
    run.routed("one", "three").unlink()
    with pytest.raises(OutputError, match=r"routed/one/three.parquet is missing"):
        read_checkpoint(study, run, "one", BOOKS)


@pytest.mark.parametrize(
    ("thresholds", "error", "message"),
    [
        ({"B": {"3": 0.1, "1": 0.1}}, OutputError, "a number for J32"),
        ({"B": {"3": 0.1}, "J32": {"3": 0.1, "1": 0.1}}, OutputError, "a number for B"),
        ({"B": {"3": 0.1, "1": None}, "J32": {"3": 0.1, "1": 0.1}}, OutputError, "a number for B"),
        ({"B": {"3": 0.1, "1": "nan"}, "J32": {"3": 0.1, "1": 0.1}}, NonFiniteError, "threshold of B"),
        ([], OutputError, "a number for B"),
    ],
)
def test_thresholds_that_are_not_there_are_refused(
    study: Study, run: RunFolder, thresholds: object, error: type[Exception], message: str
) -> None:
    write_json(run.fitted("one") / "thresholds.json", thresholds)
    with pytest.raises(error, match=message):
        read_checkpoint(study, run, "one", BOOKS)
