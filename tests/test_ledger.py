"""The ledger in lock.jsonl: locks, amendments, test files; refusals that name what changed."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastcall.errors import LockError, OutputError
from lastcall.lock import (
    append,
    canonical,
    differences,
    digest,
    lock,
    read,
    require,
)
from tests.locked import CONTENTS, HASH, OTHER, put, reordered


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
        {"lock": first, "files": 3, "repeated": 1, "used": False},
        {"lock": second, "files": 1, "repeated": 0, "used": True},
    ]


def test_a_lock_returned_to_is_counted_once(path: Path) -> None:
    first, _ = lock(path, CONTENTS, None)
    append(path, measured(first, a="1"))
    lock(path, put("plan", "name", value="other"), "away")
    assert lock(path, CONTENTS, "and back") == (first, True)
    ledger = read(path)
    assert ledger.current["hash"] == first
    assert [a["reason"] for a in ledger.amendments] == ["away", "and back"]
    assert ledger.test_measurements == [{"lock": first, "files": 1, "repeated": 0, "used": True}]


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
        with pytest.raises(LockError, match=r"lock.jsonl was altered at or before line [12]; restore it"):
            act()


@pytest.mark.parametrize("order", [(1, 2), (0, 2), (0, 2, 1), (0, 0, 1, 2), (2,)])
def test_a_line_dropped_moved_or_repeated_is_refused(path: Path, order: tuple[int, ...]) -> None:
    first, _ = lock(path, CONTENTS, None)
    append(path, measured(first, a="1"))
    lock(path, put("plan", "name", value="other"), "why")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[i] for i in order), encoding="utf-8")
    with pytest.raises(LockError, match=r"lock\.jsonl was altered at or before line"):
        read(path)


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


def test_the_lock_never_names_a_clock_or_a_folder(path: Path) -> None:
    lock(path, CONTENTS, None)
    [entry] = read(path).entries
    assert set(entry) == {"kind", "hash", "contents", "previous"}
    assert str(path.parent) not in path.read_text(encoding="utf-8")
