"""The lock: canonical JSON, hashes, differences, and what a stage requires."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.errors import LockError, OutputError
from lastcall.lock import (
    canonical,
    differences,
    digest,
    file_hash,
    file_hashes,
    require,
    require_records,
)
from tests.locked import CONTENTS, put, reordered

GOLDEN = Path(__file__).parent / "golden" / "lock.json"


def test_the_golden_lock_hashes_as_it_always_did() -> None:
    """A lock made by any earlier version must hash to itself; the golden file is never regenerated."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden["contents"] == CONTENTS
    assert canonical(golden["contents"]) == golden["canonical"]
    assert digest(golden["contents"]) == golden["hash"]
    assert hashlib.sha256(golden["canonical"].encode()).hexdigest() == golden["hash"]


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)
SECTIONS = st.fixed_dictionaries({"plan": JSON, "books": JSON, "thresholds": JSON})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every value that holds no other."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, v in inner for leaf in leaves(v, (*path, key))]
    yield from found or [path]


@given(JSON)
def test_a_digest_does_not_depend_on_the_order_or_on_going_through_a_file(value: Any) -> None:
    assert digest(reordered(value)) == digest(value)
    assert digest(json.loads(canonical(value))) == digest(value)
    assert digest(json.loads(json.dumps(value, indent=2))) == digest(value)
    assert "\n" not in canonical(value)


@given(SECTIONS, st.data())
def test_a_digest_changes_with_any_value_and_the_difference_is_named(value: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(leaves(value))))
    other = copy.deepcopy(value)
    here = other
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = [here[path[-1]], "more"]
    assert digest(other) != digest(value)
    [clause] = differences(value, other)
    name = {"plan": "plan", "books": "book", "thresholds": "threshold"}[path[0]]
    steps = [str(k + 1) if isinstance(k, int) else k for k in path[1:]]
    assert clause.startswith(" ".join([name, *steps]))


@given(SECTIONS, SECTIONS)
def test_there_is_a_difference_exactly_where_digests_differ(a: Any, b: Any) -> None:
    assert bool(differences(a, b)) == (digest(a) != digest(b))
    assert differences(a, copy.deepcopy(a)) == []


@pytest.mark.parametrize(("a", "b"), [(1, True), (0, False), (1, 1.0), (0.0, -0.0), ([], {}), ("1", 1)])
def test_values_that_python_takes_for_equal_are_told_apart(a: Any, b: Any) -> None:
    assert digest(a) != digest(b)
    assert differences({"plan": {"x": a}}, {"plan": {"x": b}})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_cannot_say_is_not_hashed(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest({"x": value})


def test_files_are_hashed_by_their_bytes(tmp_path: Path) -> None:
    paths = {f"{i}": tmp_path / f"{i}" for i in range(9)}
    for name, path in paths.items():
        path.write_bytes(name.encode() * 100_000)
    expected = {name: hashlib.sha256(name.encode() * 100_000).hexdigest() for name in paths}
    assert file_hashes(paths) == expected
    assert file_hash(paths["3"]) == expected["3"]


def test_another_version_is_refused_or_warned_of() -> None:
    other = {"software": "0.2.0", "plan": CONTENTS["plan"]}
    assert require(other, CONTENTS, version_may_differ=True) == ["software version was 0.1.0, is 0.2.0"]
    with pytest.raises(
        LockError, match=r"the lock is broken: got software version was 0\.1\.0, is 0\.2\.0; restore"
    ):
        require(other, CONTENTS)


def test_a_version_that_may_differ_excuses_nothing_else() -> None:
    other = put("thresholds", "one", "J32", "0", value=0.2) | {"software": "0.2.0"}
    with pytest.raises(LockError, match="broken: got threshold one J32 0 was") as caught:
        require(other, CONTENTS, version_may_differ=True)
    assert "software" not in str(caught.value)


def test_sections_that_are_not_asked_for_are_not_compared() -> None:
    assert require({"plan": CONTENTS["plan"]}, CONTENTS) == []
    assert require({}, CONTENTS) == []


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Five test files and their hashes, by path inside the run folder."""
    names = [f"routed/one/{i}.parquet" for i in range(5)]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return file_hashes({name: tmp_path / name for name in names})


def test_records_as_measured_pass(tmp_path: Path, files: dict[str, str]) -> None:
    assert require_records(tmp_path, files, list(files)) == []


def test_one_byte_changed_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    path = tmp_path / "routed/one/3.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"T")
    with pytest.raises(LockError) as caught:
        require_records(tmp_path, files, list(files)[:1])
    assert "test records changed after they were measured: got routed/one/3.parquet; restore" in str(
        caught.value
    )


def test_many_that_changed_are_counted(tmp_path: Path, files: dict[str, str]) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(LockError, match=r"0\.parquet, .*1\.parquet, .*2\.parquet and 2 more; restore"):
        require_records(tmp_path, files, [])


def test_a_missing_required_record_is_named_and_a_missing_other_is_returned(
    tmp_path: Path, files: dict[str, str]
) -> None:
    (tmp_path / "routed/one/2.parquet").unlink()
    required = [name for name in files if name != "routed/one/2.parquet"]
    assert require_records(tmp_path, files, required) == ["routed/one/2.parquet"]
    with pytest.raises(OutputError, match=r"routed/one/2\.parquet is missing; run `lastcall measure` again"):
        require_records(tmp_path, files, list(files))


def test_a_required_record_that_is_in_no_ledger_is_missing(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "routed/one/new.parquet").write_bytes(b"")
    with pytest.raises(OutputError, match=r"new\.parquet is missing"):
        require_records(tmp_path, files, ["routed/one/new.parquet"])
