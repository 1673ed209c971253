"""The lock: canonical JSON, the ledger and its refusals, each naming what changed."""

from __future__ import annotations

import copy
import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastcall.errors import LockError, OutputError
from lastcall.lock import (
    append,
    canonical,
    differences,
    digest,
    file_hash,
    file_hashes,
    lock,
    read,
    require,
    require_records,
)

GOLDEN = Path(__file__).parent / "golden" / "lock.json"
HASH = "0123456789ab" + "c" * 52
OTHER = "ba9876543210" + "d" * 52
CONTENTS: dict[str, Any] = {
    "software": "0.1.0",
    "plan": {
        "name": "golden",
        "blocks": {"horizon": 512, "starts": [0.25, 0.75]},
        "checkpoints": [{"name": "one", "dtype": "float32"}, {"name": "two", "dtype": "float32"}],
        "inference": {"draws": 10000, "practical_threshold": 0.005},
    },
    "books": {
        "12": {"split": "test", "cluster": "12", "sha256": HASH, "tokens": {"one": 1539}},
        "naïve ‘book’": {"split": "fit", "cluster": "Brontë", "sha256": HASH, "tokens": {"one": 2000}},
    },
    "left_out": [],
    "checkpoints": {
        "one": {"facts": {"bos": "none"}, "weights": {"model.safetensors": HASH}, "tokenizer": {}}
    },
    "fitted": {"fitted/one/J32-0.safetensors": HASH, "fitted/one/thresholds.json": HASH},
    "thresholds": {"one": {"J32": {"0": 0.1, "1": -2.5e-08}}},
}


def put(*path: Any, value: Any) -> dict[str, Any]:
    """CONTENTS with `value` at `path`; None removes."""
    contents = copy.deepcopy(CONTENTS)
    *sections, key = path
    here: Any = contents
    for section in sections:
        here = here[section]
    if value is None:
        del here[key]
    else:
        here[key] = value
    return contents


# Canonical JSON


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


def reordered(value: Any) -> Any:
    """The same with every dictionary the other way round."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(v) for v in value] if isinstance(value, list) else value


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


# The ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock.jsonl"


def measured(lock_hash: str, **files: str) -> dict[str, Any]:
    return {"kind": "measured", "lock": lock_hash, "checkpoint": "one", "files": files}


def test_there_is_no_lock_before_there_is_one(path: Path) -> None:
    ledger = read(path)
    assert (ledger.entries, ledger.amendments, ledger.test_measurements) == ((), [], [])
    with pytest.raises(
        LockError, match="there is no lock; run `lastcall lock` before the test split is measured"
    ):
        _ = ledger.current


def test_locking_again_writes_nothing(path: Path) -> None:
    assert lock(path, CONTENTS, None) == (digest(CONTENTS), True)
    written = path.read_bytes()
    assert lock(path, reordered(CONTENTS), None) == (digest(CONTENTS), False)
    assert lock(path, CONTENTS, "no reason needed") == (digest(CONTENTS), False)
    assert path.read_bytes() == written
    assert read(path).current["contents"] == CONTENTS
    assert read(path).amendments == []


def test_a_line_is_canonical_json(path: Path) -> None:
    lock(path, CONTENTS, None)
    append(path, measured(digest(CONTENTS), a=HASH))
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [canonical(json.loads(line)) for line in lines[:-1]] == lines[:-1]
    assert (len(lines), lines[-1]) == (3, "")


CHANGES = [
    (put("plan", "inference", "draws", value=500), "plan inference draws was 10000, is 500"),
    (put("plan", "blocks", "starts", value=[0.25, 0.5]), "plan blocks starts 2 was 0.75, is 0.5"),
    (put("plan", "blocks", "starts", value=[0.5]), "plan blocks starts had 2 entries, has 1"),
    (
        put("plan", "checkpoints", 1, "dtype", value="bfloat16"),
        "plan checkpoints 2 dtype was float32, is bfloat16",
    ),
    (put("plan", "name", value=None), "plan name is missing"),
    (put("plan", "new", value=1), "plan new is new"),
    (put("books", "12", "sha256", value=OTHER), "book 12 sha256 was 0123456789ab…, is ba9876543210…"),
    (put("books", "12", value=None), "book 12 is missing"),
    (put("books", "13", value={}), "book 13 is new"),
    (put("left_out", value=["13"]), "list of left out books had 0 entries, has 1"),
    (
        put("checkpoints", "one", "weights", "model.safetensors", value=OTHER),
        "checkpoint one weights model.safetensors was 0123456789ab…, is ba9876543210…",
    ),
    (put("checkpoints", "one", "facts", "bos", value="bos"), "checkpoint one facts bos was none, is bos"),
    (
        put("fitted", "fitted/one/J32-0.safetensors", value=OTHER),
        "fitted file fitted/one/J32-0.safetensors was 0123456789ab…, is ba9876543210…",
    ),
    (
        put("fitted", "fitted/one/J32-0.safetensors", value=None),
        "fitted file fitted/one/J32-0.safetensors is missing",
    ),
    (put("thresholds", "one", "J32", "0", value=0.2), "threshold one J32 0 was 0.1, is 0.2"),
    (put("software", value="0.2.0"), "software version was 0.1.0, is 0.2.0"),
]


@pytest.mark.parametrize(("contents", "clause"), CHANGES, ids=[clause[:40] for _, clause in CHANGES])
def test_a_change_is_named_and_refused(path: Path, contents: dict[str, Any], clause: str) -> None:
    lock(path, CONTENTS, None)
    written = path.read_bytes()
    for act in (lambda: lock(path, contents, None), lambda: require(contents, CONTENTS)):
        with pytest.raises(LockError) as caught:
            act()
        assert f": got {clause}; restore" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 1
    assert path.read_bytes() == written


def test_every_difference_is_named(path: Path) -> None:
    contents = copy.deepcopy(CONTENTS)
    contents["plan"]["name"] = "other"
    contents["thresholds"]["one"]["J32"] = {"0": 0.3, "1": 0.4}
    clauses = differences(CONTENTS, contents)
    assert clauses == [
        "plan name was golden, is other",
        "threshold one J32 0 was 0.1, is 0.3",
        "threshold one J32 1 was -2.5e-08, is 0.4",
    ]
    with pytest.raises(LockError) as caught:
        require(contents, CONTENTS)
    assert "; ".join(clauses) in str(caught.value)


def test_an_amendment_stands_beside_the_old_lock_and_lists_what_changed(path: Path) -> None:
    first, _ = lock(path, CONTENTS, None)
    old = path.read_bytes()
    contents = put("plan", "inference", "draws", value=500)
    second, written = lock(path, contents, "fewer draws, for a laptop")
    assert written
    assert second != first
    assert path.read_bytes().startswith(old)
    ledger = read(path)
    assert [entry["hash"] for entry in ledger.locks] == [first, second]
    assert ledger.current["contents"] == contents
    assert ledger.amendments == [
        {
            "lock": second,
            "reason": "fewer draws, for a laptop",
            "changed": ["plan inference draws was 10000, is 500"],
        }
    ]


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b", "a\nb\r\n", "‘é’ 漢"])
def test_any_text_stays_within_its_line(path: Path, text: str) -> None:
    lock(path, CONTENTS, None)
    lock(path, put("plan", "name", value=text), text)
    assert read(path).amendments[0]["reason"] == text
    assert read(path).current["contents"]["plan"]["name"] == text


def test_test_files_are_those_of_their_lock(path: Path) -> None:
    first, _ = lock(path, CONTENTS, None)
    append(path, measured(first, a="1", b="2"))
    append(path, measured(first, b="3", c="4"))
    second, _ = lock(path, put("plan", "name", value="other"), "why")
    append(path, measured(second, a="5"))
    ledger = read(path)
    assert ledger.test_files(first) == {"a": "1", "b": "3", "c": "4"}
    assert ledger.test_files(second) == {"a": "5"}
    assert ledger.test_files("none") == {}
    assert ledger.test_measurements == [
        {"lock": first, "files": 3, "used": False},
        {"lock": second, "files": 1, "used": True},
    ]


def test_a_lock_returned_to_is_counted_once(path: Path) -> None:
    first, _ = lock(path, CONTENTS, None)
    append(path, measured(first, a="1"))
    lock(path, put("plan", "name", value="other"), "away")
    assert lock(path, CONTENTS, "and back") == (first, True)
    ledger = read(path)
    assert ledger.current["hash"] == first
    assert [a["reason"] for a in ledger.amendments] == ["away", "and back"]
    assert ledger.test_measurements == [{"lock": first, "files": 1, "used": True}]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"draws":10000', '"draws":10001'),
        ('"draws":10000', '"draws":10000.0'),
        (HASH, OTHER),
        (digest(CONTENTS), OTHER),
    ],
)
def test_an_altered_lock_is_refused(path: Path, before: str, after: str) -> None:
    lock(path, CONTENTS, None)
    append(path, measured(digest(CONTENTS), a="1"))
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    for act in (lambda: read(path), lambda: lock(path, CONTENTS, None), lambda: lock(path, CONTENTS, "x")):
        with pytest.raises(
            LockError, match=r"lock.jsonl was altered: lock .* does not hash to itself; restore it"
        ):
            act()


@pytest.mark.parametrize(
    "line", ["", "{", "3", "[]", '"lock"', "{}", '{"kind":"lock"}', '{"kind":"lock","hash":""}']
)
def test_a_line_that_is_no_entry_is_refused(path: Path, line: str) -> None:
    lock(path, CONTENTS, None)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    with pytest.raises(LockError, match=r"cannot read .*lock.jsonl.*restore it; it cannot be remade"):
        read(path)


def test_a_torn_last_line_is_refused(path: Path) -> None:
    lock(path, CONTENTS, None)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(LockError, match="cannot read"):
        read(path)


def test_a_failure_while_writing_leaves_the_old_ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(path, CONTENTS, None)
    old = path.read_bytes()

    def torn(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text.encode(encoding)[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(KeyboardInterrupt):
        append(path, measured("x", a="1"))
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_a_kill_while_writing_leaves_the_old_ledger(path: Path) -> None:
    lock(path, CONTENTS, None)
    old = path.read_bytes()
    code = (
        "import os, signal, sys; from pathlib import Path; from lastcall.lock import append\n"
        "os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)\n"
        "append(Path(sys.argv[1]), {'kind': 'measured', 'lock': 'x', 'files': {}})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == old
    append(path, measured("x", a="1"))
    assert len(read(path).entries) == 2


def test_a_ledger_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*lock.jsonl: got .*; choose another --out"):
        append(tmp_path / "file" / "lock.jsonl", {"kind": "measured"})


# What a stage requires


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


def test_the_lock_never_names_a_clock_or_a_folder(path: Path) -> None:
    lock(path, CONTENTS, None)
    [entry] = read(path).entries
    assert set(entry) == {"kind", "hash", "contents"}
    assert str(path.parent) not in path.read_text(encoding="utf-8")
