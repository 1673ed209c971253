"""The lock (section 7): hashes over everything a verdict rests on, before any test utility exists.

`lock.jsonl` holds one JSON object a line: a lock, later amendments beside it, and the ledger of test files
as they are written. Each line holds the digest of the line before, so that none can be altered, dropped or
moved unnoticed but at the end. It holds no times and no paths but those inside the run folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from lastcall.errors import LockError, OutputError
from lastcall.records import write_text
from lastcall.results import Amendment, TestMeasurement

MOST = 5
"""Changes that a message lists."""

Contents = dict[str, Any]
"""What a lock covers: software, plan, books, left_out, longer (books too short for longer blocks, where there
are some), checkpoints (facts, weights, tokenizer), fitted, thresholds."""


def canonical(value: Any) -> str:
    """The one JSON text of `value`: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256, in hex, of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256, in hex, of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(paths: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 by name; hashing releases the interpreter, so files are read side by side."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(paths, pool.map(file_hash, paths.values()), strict=True))


@final
@dataclass(frozen=True)
class Ledger:
    """Everything in lock.jsonl, in order."""

    entries: tuple[dict[str, Any], ...]

    @property
    def locks(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["kind"] == "lock"]

    @property
    def current(self) -> dict[str, Any]:
        """The last lock; LockError where there is none."""
        if not self.locks:
            raise LockError("there is no lock", todo="run `lastcall lock` before the test split is measured")
        return self.locks[-1]

    @property
    def pending(self) -> dict[str, Any] | None:
        """The amendment that was opened after the last lock and waits for its own, or None."""
        after = [e for e in self.entries if e["kind"] in ("lock", "amending")]
        return after[-1] if after and after[-1]["kind"] == "amending" else None

    @property
    def amendments(self) -> list[Amendment]:
        return [Amendment(lock=e["hash"], reason=e["reason"], changed=e["changed"]) for e in self.locks[1:]]

    def test_files(self, lock: str) -> dict[str, str]:
        """Hashes of the test files written under `lock`, by path inside the run folder."""
        files: dict[str, str] = {}
        for entry in self.entries:
            if entry["kind"] == "measured" and entry["lock"] == lock:
                files.update(entry["files"])
        return files

    @property
    def test_measurements(self) -> list[TestMeasurement]:
        """Every measurement of the test split that was made, under any lock."""
        used = self.locks[-1]["hash"] if self.locks else ""
        made: dict[str, list[str]] = {}
        for entry in self.entries:
            if entry["kind"] == "measured":
                made.setdefault(entry["lock"], []).extend(entry["files"])
        return [
            TestMeasurement(lock=h, files=len(set(f)), repeated=len(f) - len(set(f)), used=h == used)
            for h, f in made.items()
        ]


def read(path: Path) -> Ledger:
    """The ledger in `path`; an empty one where there is no file.

    LockError where a line was altered, dropped or moved, the last ones aside.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        entries = tuple(json.loads(line) for line in text.removesuffix("\n").split("\n") if text)
        before = ["", *map(digest, entries)]
        broken = [
            i
            for i, e in enumerate(entries)
            if e["previous"] != before[i] or (e["kind"] == "lock" and digest(e["contents"]) != e["hash"])
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LockError(
            f"cannot read {path}", got=str(error), todo="restore it; it cannot be remade"
        ) from None
    if broken:
        raise LockError(f"{path} was altered at or before line {broken[0] + 1}", todo="restore it")
    return Ledger(entries)


def append(path: Path, entry: dict[str, Any]) -> None:
    """Add one line to the ledger, chained to the last, as one atomic step."""
    ledger = read(path)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    previous = digest(ledger.entries[-1]) if ledger.entries else ""
    write_text(path, f"{before}{canonical({**entry, 'previous': previous})}\n")


def lock(path: Path, contents: Contents, amend: str | None) -> tuple[str, bool]:
    """Lock `contents`, or amend the lock there is; the hash, and whether a line was written.

    The reason is `amend`, or that of an opened amendment. Raises LockError, naming what changed, where a
    lock exists, differs, and there is no reason to amend it; and where there is a reason but no lock yet.
    """
    ledger = read(path)
    if amend is not None and not ledger.locks:
        raise LockError("there is nothing to amend: no lock yet", todo="run `lastcall lock` without --amend")
    if amend is None and ledger.pending:
        amend = ledger.pending["reason"]
    entry: dict[str, Any] = {"kind": "lock", "hash": digest(contents), "contents": contents}
    if ledger.locks:
        if ledger.current["hash"] == entry["hash"]:
            return entry["hash"], False
        changed = differences(ledger.current["contents"], contents)
        if amend is None:
            raise LockError(
                "the study is locked and something locked has changed",
                got=_some(changed),
                todo='restore it, or say why: `lastcall lock --amend "…"`, which the report shows for ever',
            )
        entry |= {"reason": amend, "changed": changed}
    append(path, entry)
    return entry["hash"], True


def require(contents: Contents, locked: Contents, *, version_may_differ: bool = False) -> list[str]:
    """Refuse, with a LockError that names every difference, where `contents` (any sections) differs.

    Returns warnings: where `version_may_differ`, another software version is one of them.
    """
    changed = differences(locked, contents)
    warnings = [c for c in changed if c.startswith("software version") and version_may_differ]
    require_none([c for c in changed if c not in warnings])
    return warnings


def require_none(changed: Sequence[str]) -> None:
    """LockError where anything is in `changed`, named."""
    if changed:
        raise LockError(
            "the lock is broken",
            got=_some(changed),
            todo='restore what changed, or amend: `lastcall lock --amend "…"`',
        )


def differences(locked: Contents, present: Contents) -> list[str]:
    """What of `present` is not as `locked`, a clause each; sections `present` lacks are not compared."""
    changed: list[str] = []
    for section, label in _LABELS.items():
        if section in present:
            _compare(label, locked.get(section, {}), present[section], changed)
    return changed


_LABELS = {
    "software": "software version",
    "plan": "plan",
    "books": "book",
    "left_out": "list of left out books",
    "longer": "longer blocks",
    "checkpoints": "checkpoint",
    "fitted": "fitted file",
    "thresholds": "threshold",
}


def _compare(name: str, locked: Any, present: Any, changed: list[str]) -> None:
    if isinstance(locked, dict) and isinstance(present, dict):
        for key in sorted({*locked, *present}):
            if key not in present:
                changed.append(f"{name} {key} is missing")
            elif key not in locked:
                changed.append(f"{name} {key} is new")
            else:
                _compare(f"{name} {key}", locked[key], present[key], changed)
    elif isinstance(locked, list) and isinstance(present, list) and len(locked) == len(present):
        for i, (before, after) in enumerate(zip(locked, present, strict=True), 1):
            _compare(f"{name} {i}", before, after, changed)
    elif isinstance(locked, list) and isinstance(present, list):
        changed.append(f"{name} had {len(locked)} entries, has {len(present)}")
    elif canonical(locked) != canonical(present):
        changed.append(f"{name} was {_short(locked)}, is {_short(present)}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else canonical(value)
    return text if len(text) <= 60 else f"{text[:12]}…"


def require_records(root: Path, files: Mapping[str, str], required: Iterable[str]) -> list[str]:
    """Re-hash the test files of the ledger that are here; returns those that are not.

    Raises LockError naming each that changed, OutputError where a required one is missing.
    """
    here = {name: root / name for name in files if (root / name).is_file()}
    missing = [name for name in required if name not in here]
    if missing:
        raise OutputError(f"{root / missing[0]} is missing", todo="run `lastcall measure` again")
    changed = [name for name, found in file_hashes(here).items() if found != files[name]]
    if changed:
        raise LockError(
            "test records changed after they were measured",
            got=_listed(changed),
            todo="restore them, or delete them and run `lastcall measure` again",
        )
    return [name for name in files if name not in here]


def _some(changed: Sequence[str]) -> str:
    """Changes, causes first, cut where they are many."""
    more = f"; and {len(changed) - MOST} more" if len(changed) > MOST else ""
    return "; ".join(changed[:MOST]) + more


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
