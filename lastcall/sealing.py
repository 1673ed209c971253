"""What the lock covers, gathered: hashed now, compared with what was locked, opened for an amendment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lastcall import lock as locking
from lastcall.errors import LockError, OutputError
from lastcall.lock import Contents
from lastcall.measure.corpus import LeftOut, cluster_of
from lastcall.records import RunFolder, read_json
from lastcall.study import Split
from lastcall.version import __version__
from lastcall.workspace import Workspace

BEFORE_THE_LOCK: tuple[Split, ...] = ("fit", "calibration")
"""Splits that routers and thresholds are made from."""
KINDS = ("weights", "tokenizer")
"""Kinds of a checkpoint's files."""


def contents(ws: Workspace) -> Contents:
    """What the lock covers, hashed now (section 7)."""
    names = [checkpoint.name for checkpoint in ws.study.checkpoints]
    facts = {name: {"facts": read_json(facts_file(ws.run, name))} for name in names}
    return {
        **origins(ws),
        "checkpoints": {name: {**facts[name], **ws.hashes[name]} for name in names},
        **fitted_sections(ws.run, names),
    }


def origins(ws: Workspace) -> Contents:
    """The sections that are there before anything is measured: software, plan, books."""
    return {
        "software": __version__,
        "plan": ws.study.plan(),
        "books": {
            book.id: {
                "split": book.split,
                "cluster": cluster_of(book, ws.study.books.cluster),
                "sha256": book.sha256,
            }
            for book in ws.used.books
        },
        "left_out": _left_out(ws.used.left_out),
        **({} if ws.longer is None else {"longer": {"left_out": _too_short(ws.longer)}}),
    }


def changes(ws: Workspace, locked: Contents) -> list[str]:
    """What of software, plan, books and checkpoints is no longer as it was locked, a clause each."""
    now = origins(ws)
    before = {name: locked["checkpoints"].get(name, {}) for name in ws.hashes}
    now["checkpoints"] = {name: {**before[name], **ws.hashes[name]} for name in ws.hashes}
    return locking.differences(locked, now)


def require_unchanged(ws: Workspace) -> None:
    """Refuse to go on where something a lock covers has changed, unless the lock is being amended."""
    ledger = locking.read(ws.run.lock)
    if ledger.locks and not ledger.pending:
        locking.require_none(changes(ws, ledger.current["contents"]))


def require_valid_lock(ws: Workspace) -> str:
    """The current lock's hash; LockError where there is none, or anything it covers has changed."""
    ledger = locking.read(ws.run.lock)
    current = ledger.current
    if ledger.pending:
        raise LockError("an amendment is open", todo="run `lastcall measure`, `fit` and `lock`, or `run`")
    locking.require(contents(ws), current["contents"])
    hash_: str = current["hash"]
    return hash_


def open_amendment(ws: Workspace, reason: str) -> None:
    """Enter in the ledger that the lock is being amended, why, and what has changed so far."""
    current = locking.read(ws.run.lock).current
    changed = changes(ws, current["contents"])
    locking.append(ws.run.lock, {"kind": "amending", "reason": reason, "changed": changed})


def facts_file(folder: RunFolder, checkpoint: str) -> Path:
    """measured/<checkpoint>/facts.json: what the loaded model was."""
    return folder.root / "measured" / checkpoint / "facts.json"


def fitted_from(folder: RunFolder, checkpoint: str, books: Mapping[Split, Sequence[str]]) -> str:
    """Digest of the records and states of `books`, by split: what a checkpoint's routers are fitted from."""
    paths = [
        path
        for split, ids in books.items()
        for book in ids
        for path in (folder.measured(checkpoint, split, book), folder.states(checkpoint, split, book))
    ]
    missing = next((path for path in paths if not path.is_file()), None)
    if missing is not None:
        raise OutputError(f"{missing} is missing", todo="run `lastcall measure` again")
    return locking.digest(locking.file_hashes({folder.relative(path): path for path in paths}))


def fitted_sections(folder: RunFolder, names: Sequence[str]) -> Contents:
    """The sections `fitted` and `thresholds`."""
    files = {folder.relative(p): p for name in names for p in folder.fitted_files(name)}
    thresholds = {name: read_json(folder.fitted(name) / "thresholds.json") for name in names}
    return {"fitted": locking.file_hashes(files), "thresholds": thresholds}


def _too_short(longer: Workspace) -> dict[str, str]:
    """Test books too short for the longer blocks of any checkpoint, each with the reason."""
    return {one.id: one.reason for one in longer.used.left_out}


def _left_out(left_out: Sequence[LeftOut]) -> list[str]:
    return [f"{one.id}: {one.reason}" for one in left_out]
