"""Measured records become the tensors that routers see."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from lastcall.errors import OutputError
from lastcall.records import SCALARS, RunFolder
from lastcall.routing import dataset
from lastcall.study import Study
from tests.measured import write_split
from tests.reference import routing as reference
from tests.synthetic import make_study

BOOKS = ["b", "a", "c"]


@pytest.fixture
def study() -> Study:
    return make_study(test=BOOKS, blocks={"horizon": 20, "context": 4})


@pytest.fixture
def run(study: Study, tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    write_split(run, study, "one", "fit", BOOKS, np.random.default_rng(0), d=5, dtype=torch.bfloat16)
    return run


def test_blocks_stand_in_the_order_of_the_books(study: Study, run: RunFolder) -> None:
    data = dataset.read(run, study, "one", "fit", BOOKS)
    assert data.books == ("b", "b", "a", "a", "c", "c")
    assert data.utility.shape == (6, 16)
    assert data.utility.dtype == torch.float32
    assert set(data.states) == {"bypass", "incoming"}
    assert all(s.shape == (6, 16, 5) and s.dtype == torch.bfloat16 for s in data.states.values())


def test_only_scored_positions_are_there_and_each_is_its_row(study: Study, run: RunFolder) -> None:
    data = dataset.read(run, study, "one", "fit", BOOKS)
    for i, book in enumerate(BOOKS):
        states = load_file(run.states("one", "fit", book))
        for row in pq.read_table(run.measured("one", "fit", book), partitioning=None).to_pylist():
            if not row["scored"]:
                continue
            at = 2 * i + row["block"], row["position"] - 4
            assert float(data.utility[at]) == pytest.approx(row["loss_bypass"] - row["loss_full"], abs=1e-6)
            for column in SCALARS:
                assert float(data.scalars[column.name][at]) == row[column.name]
            for name, value in reference.position(row["position"], 20).items():
                assert float(data.scalars[name][at]) == pytest.approx(value, rel=1e-6)
            for name, tensor in states.items():
                assert torch.equal(data.states[name][at], tensor[row["block"], row["position"]])


def test_scalars_are_those_of_section_3_and_no_loss_or_token_is_among_them(
    study: Study, run: RunFolder
) -> None:
    data = dataset.read(run, study, "one", "fit", BOOKS)
    seen = {name for names in reference.SEES.values() for name in names}
    assert set(data.scalars) == seen


@pytest.mark.parametrize("suffix", [".parquet", ".safetensors"])
@pytest.mark.parametrize("harm", ["missing", "torn", "empty"])
def test_a_file_that_is_not_whole_is_named(study: Study, run: RunFolder, suffix: str, harm: str) -> None:
    path = run.measured("one", "fit", "a").with_suffix(suffix)
    whole = path.read_bytes()
    path.unlink()
    if harm != "missing":
        path.write_bytes(whole[: len(whole) // 2] if harm == "torn" else b"")
    with pytest.raises(OutputError, match=re.escape(str(path))) as caught:
        dataset.read(run, study, "one", "fit", BOOKS)
    assert "\n" not in str(caught.value)
    assert "again" in str(caught.value)


def test_states_without_the_incoming_are_refused(study: Study, run: RunFolder) -> None:
    path = run.states("one", "fit", "c")
    save_file({"bypass": torch.zeros(2, 20, 5)}, path)
    with pytest.raises(OutputError, match=re.escape(str(path))):
        dataset.read(run, study, "one", "fit", BOOKS)


def test_a_record_of_other_blocks_is_refused(study: Study, run: RunFolder) -> None:
    longer = make_study(test=BOOKS, blocks={"horizon": 24, "context": 4})
    write_split(run, longer, "one", "fit", ["a"], np.random.default_rng(0), d=5)
    path = run.measured("one", "fit", "a")
    with pytest.raises(OutputError, match=f"{re.escape(str(path))} should have 40 rows: got 48"):
        dataset.read(run, study, "one", "fit", BOOKS)


def test_states_of_other_blocks_are_refused(study: Study, run: RunFolder) -> None:
    path = run.states("one", "fit", "c")
    save_file({name: torch.zeros(2, 24, 5) for name in ("bypass", "incoming")}, path)
    with pytest.raises(
        OutputError, match=r"c.safetensors should have \[2, 20\] blocks and positions: got \[2, 24\]"
    ):
        dataset.read(run, study, "one", "fit", BOOKS)
