"""Records: schemas that explain themselves, the same bytes for the same data, and writes that are whole."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lastcall import records
from lastcall.errors import OutputError
from lastcall.records import (
    MEASURED,
    ROUTED,
    SCALARS,
    SOURCE,
    Column,
    RunFolder,
    atomic,
    measured_columns,
    read_json,
    read_tables,
    write_json,
    write_table,
    write_text,
)
from tests.disk import fill

COLUMNS = (
    Column("book", pa.dictionary(pa.int32(), pa.string()), "", "book id"),
    Column("position", pa.int32(), "tokens", "t"),
    Column("loss", pa.float32(), "nats", "a loss"),
    Column("call", pa.bool_(), "", "whether"),
)


def data(book: str = "a", rows: int = 5) -> dict[str, Any]:
    loss = np.linspace(0, 1, rows)
    return {"book": [book] * rows, "position": np.arange(rows), "loss": loss, "call": loss > 0.5}


# Atomic writes


def test_a_write_makes_its_folders_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.txt"
    write_text(path, "é\n")
    write_text(path, "ü\n")
    assert path.read_bytes() == "ü\n".encode()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError(errno.EIO, "Input/output error")])
@pytest.mark.parametrize("old", [None, "old"])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, error: Any, old: str | None) -> None:
    path = tmp_path / "x.txt"
    if old is not None:
        path.write_text(old)
    expected = OutputError if isinstance(error, OSError) else error
    with pytest.raises(expected), atomic(path) as temporary:  # noqa: PT012  (the block is what fails)
        temporary.write_text("half")
        raise error
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_the_old_file_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent
    assert path.read_text() == "new"


def test_a_write_that_writes_nothing_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"cannot write .*x\.txt: got No such file"),
        atomic(tmp_path / "x.txt"),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "sub" / "x.json"
    for act in (
        lambda: write_json(path, {}),
        lambda: write_text(path, ""),
        lambda: write_table(path, COLUMNS, data()),
    ):
        with pytest.raises(OutputError) as caught:
            act()
        assert str(caught.value) == f"cannot write {path}: got Not a directory; choose another --out"


@pytest.mark.parametrize("name", ["x.json", "x.parquet"])
def test_a_full_disk_asks_for_space_and_keeps_the_old_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("old")
    fill(path)
    with pytest.raises(OutputError) as caught:
        write_json(path, [0] * 10_000) if name == "x.json" else write_table(path, COLUMNS, data())
    assert str(caught.value).startswith(f"cannot write {path}: got ")
    assert str(caught.value).endswith("; free some space and run again")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


# JSON


def test_json_keeps_order_and_text_and_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"b": 1, "a": ["é", 0.1, None]})
    assert path.read_text(encoding="utf-8") == '{\n "b": 1,\n "a": [\n  "é",\n  0.1,\n  null\n ]\n}\n'
    assert read_json(path) == {"b": 1, "a": ["é", 0.1, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"b": float("nan")})
    assert read_json(path)["b"] == 1


@pytest.mark.parametrize("harm", [None, b"", b'{"a": ', b"\xff\xfe", b'{"a": 1}\n{'])
def test_json_that_is_not_whole_is_one_line(tmp_path: Path, harm: bytes | None) -> None:
    path = tmp_path / "x.json"
    if harm is not None:
        path.write_bytes(harm)
    with pytest.raises(OutputError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path} is missing" if harm is None else f"cannot read {path}")
    assert "\n" not in str(caught.value)


# Tables


def test_a_table_reads_back_as_written_in_the_order_of_its_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.parquet" for name in "ba"]
    for path in paths:
        write_table(path, COLUMNS, data(path.stem), source="src")
    table = read_tables(paths)
    assert table.column("book").to_pylist() == ["b"] * 5 + ["a"] * 5
    assert table.column("position").to_pylist() == [0, 1, 2, 3, 4] * 2
    assert table.column("loss").to_pylist() == [0, 0.25, 0.5, 0.75, 1] * 2
    assert read_tables(paths[:1], ["call", "loss"]).column_names == ["call", "loss"]


def test_the_same_data_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_table(tmp_path / name, COLUMNS, data(rows=3000), source="src")
    write_table(tmp_path / "z", COLUMNS, data(rows=3000), source="other")
    x, y, z = ((tmp_path / name).read_bytes() for name in "xyz")
    assert x == y
    assert x != z


@pytest.mark.parametrize("columns", [measured_columns([32, 8]), ROUTED], ids=["measured", "routed"])
def test_every_column_on_disk_says_its_unit_and_meaning(tmp_path: Path, columns: tuple[Column, ...]) -> None:
    path = tmp_path / "x.parquet"
    values: dict[str, Any] = {c.name: [0, 1] for c in columns} | {"book": ["a", "a"], "router": ["B", "B"]}
    values |= {"scored": [False, True], "call": [True, False]}
    write_table(path, columns, {c.name: values[c.name] for c in columns}, source="src")
    schema = pq.read_schema(path)
    assert schema.names == [c.name for c in columns]
    for column in columns:
        field = schema.field(column.name)
        assert field.type == column.type
        assert not field.nullable
        assert {k: field.metadata[k].decode() for k in (b"unit", b"meaning")} == {
            b"unit": column.unit,
            b"meaning": column.meaning,
        }
        assert column.meaning
    assert schema.metadata[b"lastcall_schema"] == str(records.VERSION).encode()
    assert schema.metadata[SOURCE] == b"src"


def test_columns_are_named_once_and_losses_are_in_nats() -> None:
    columns = measured_columns([32, 8])
    assert [c.name for c in columns[-2:]] == ["loss_local32", "loss_local8"]
    for schema in (columns, ROUTED):
        assert len({c.name for c in schema}) == len(schema)
    assert {c.unit for c in columns if c.name.startswith("loss")} == {"nats"}
    assert set(SCALARS) <= set(MEASURED)


def test_a_missing_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises((ValueError, pa.ArrowException)):
        write_table(tmp_path / "x.parquet", COLUMNS, data() | {"loss": [1, 2, None, 4, 5]})
    with pytest.raises(KeyError, match="loss"):
        write_table(tmp_path / "x.parquet", COLUMNS, {k: v for k, v in data().items() if k != "loss"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["missing", "torn", "empty", "foreign", "folder"])
def test_a_table_that_is_not_whole_is_one_line(tmp_path: Path, harm: str) -> None:
    whole, path = tmp_path / "whole.parquet", tmp_path / "x.parquet"
    write_table(whole, COLUMNS, data(rows=3000))
    content = whole.read_bytes()
    harmed = {"torn": content[: len(content) // 2], "empty": b"", "foreign": b"hello" * 100}
    if harm in harmed:
        path.write_bytes(harmed[harm])
    elif harm == "folder":
        path.mkdir()
    with pytest.raises(OutputError) as caught:
        read_tables([whole, path])
    assert str(caught.value).startswith(f"{path} is missing" if harm == "missing" else f"cannot read {path}")
    assert "again" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "x.parquet", COLUMNS, data())
    with pytest.raises(OutputError, match=r"cannot read .*x\.parquet: got .*kl"):
        read_tables([tmp_path / "x.parquet"], ["loss", "kl"])


@pytest.mark.parametrize("wanted", [None, ["loss"], ["a column of the next version"]])
def test_another_schema_version_is_refused_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[str] | None
) -> None:
    path = tmp_path / "x.parquet"
    with monkeypatch.context() as later:
        later.setattr(records, "VERSION", 2)
        write_table(path, COLUMNS, data())
    message = f"{re.escape(str(path))} has another schema: got version 2; this lastcall reads 1"
    with pytest.raises(OutputError, match=message):
        read_tables([path], wanted)


def test_a_table_of_no_known_version_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"loss": [1.0]}), tmp_path / "x.parquet")
    with pytest.raises(OutputError, match=r"has another schema: got version \?"):
        read_tables([tmp_path / "x.parquet"])


# The run folder


def test_paths_of_a_run_are_the_documented_ones() -> None:
    run = RunFolder(Path("/r"))
    named = [run.study, run.lock, run.judged, run.report, run.fitted("m"), run.routed("m", "12")]
    named += [run.measured("m", "fit", "1.5"), run.states("m", "fit", "1.5")]
    assert [run.relative(path) for path in named] == [
        "study.toml",
        "lock.jsonl",
        "judged.json",
        "report.html",
        "fitted/m",
        "routed/m/12.parquet",
        "measured/m/fit/1.5.parquet",
        "measured/m/fit/1.5.safetensors",
    ]
