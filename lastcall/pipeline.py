"""The stages in order, each resumable: measure, fit, lock, measure the test split, judge, report.

Stages that need torch import it when they run, so that judging and reporting never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lastcall import lock as locking
from lastcall.errors import BookError, LockError, OutputError, StudyError
from lastcall.holding import Shard
from lastcall.judging import judge
from lastcall.records import RunFolder, read_json, write_json
from lastcall.results import Judged
from lastcall.sealing import contents, facts_file, open_amendment, require_unchanged, require_valid_lock
from lastcall.study import LEARNED_ROUTERS, Checkpoint, Split
from lastcall.version import __version__
from lastcall.workspace import Workspace

if TYPE_CHECKING:
    from lastcall.measure.corpus import BookBlocks
    from lastcall.measure.engine import Batch
    from lastcall.routing.replay import Policies

P = ParamSpec("P")
R = TypeVar("R")

BEFORE_THE_LOCK: tuple[Split, ...] = ("fit", "calibration")


def _alone(stage: Callable[Concatenate[Workspace, P], R]) -> Callable[Concatenate[Workspace, P], R]:
    """`stage` while no other process works in the run folder."""

    @wraps(stage)
    def held(ws: Workspace, /, *given: P.args, **named: P.kwargs) -> R:
        with ws.alone():
            return stage(ws, *given, **named)

    return held


@_alone
def run(ws: Workspace) -> Judged:
    """Every stage that is still to do."""
    measure(ws, BEFORE_THE_LOCK)
    fit(ws)
    lock(ws)
    measure(ws, ("test",))
    judged = judge(ws)
    report(ws)
    return judged


def measure(ws: Workspace, splits: Sequence[Split], shard: Shard | None = None) -> None:
    """Measure what is not measured yet of `splits` (sections 2 and 3), or of a shard of their batches; route
    the test split as it comes.

    Raises LockError where the test split is asked for without a valid lock (section 7).
    """
    with ws.alone(shard):
        _enough_books(ws)
        require_unchanged(ws)
        lock_hash = require_valid_lock(ws) if "test" in splits else ""
        for checkpoint in ws.study.checkpoints:
            for split in splits:
                pending = _pending(ws, checkpoint, split, lock_hash, shard)
                if pending:
                    _measure_batches(ws, checkpoint, split, pending, lock_hash)


def _enough_books(ws: Workspace) -> None:
    """Refuse, before any model runs, a study whose later stages cannot work."""
    fit_books, every = len(ws.used.split("fit")), ws.study.routers.holdout_every
    if fit_books < every:
        raise BookError(
            "too few fit books to hold one out",
            got=f"{fit_books} where every {every}th is held out",
            todo="give more fit books or lower routers.holdout_every",
        )
    if len({cluster for _, cluster in ws.clusters}) < 2:
        raise BookError(
            "the test split has fewer than two clusters", todo="nothing can be resampled; add books"
        )


def _pending(
    ws: Workspace, checkpoint: Checkpoint, split: Split, lock_hash: str, shard: Shard | None = None
) -> list[Batch]:
    """Batches of a split that are still to be measured: from other sources, or not under this lock."""
    from lastcall.measure.engine import batches, is_done

    books = [book for book in ws.blocked[checkpoint.name].books if book.split == split]
    sources = ws.sources(checkpoint)
    written = locking.read(ws.run.lock).test_files(lock_hash)
    every = batches(books, ws.study.measure.batch_books)
    return [
        batch
        for batch in (every if shard is None else shard.of(every))
        if not is_done(ws.run, checkpoint.name, split, batch, sources)
        or (split == "test" and not _is_in_ledger(ws.run, written, checkpoint.name, batch))
    ]


def _is_in_ledger(folder: RunFolder, written: dict[str, str], checkpoint: str, batch: Batch) -> bool:
    """Whether every file of a batch of test books is there and in the ledger of the lock."""
    files = _test_files(folder, checkpoint, batch)
    return all(file in written and (folder.root / file).is_file() for file in files)


def _test_files(folder: RunFolder, checkpoint: str, batch: Sequence[BookBlocks]) -> list[str]:
    """Files of a batch of test books as the ledger names them, in the order they are written."""
    paths = [
        path
        for book in batch
        for path in (
            folder.states(checkpoint, "test", book.id),
            folder.measured(checkpoint, "test", book.id),
            folder.routed(checkpoint, book.id),
        )
    ]
    return [folder.relative(path) for path in paths]


def _measure_batches(
    ws: Workspace, checkpoint: Checkpoint, split: Split, pending: list[Batch], lock_hash: str
) -> None:
    import torch

    from lastcall.measure.crew import Job
    from lastcall.routing.replay import Policies

    books = tuple(book for batch in pending for book in batch)
    root, threads = ws.run.root.resolve(), torch.get_num_threads()
    job = Job(root, ws.study, checkpoint, split, books, ws.sources(checkpoint), threads)
    ready = ws.crew.prepare(job)
    for warning in ready.warnings:
        ws.reporter.say(f"Warning: {warning}")
    _require_or_record(ws, checkpoint.name, ready.facts, lock_hash)
    policies = Policies(ws.run, ws.study, checkpoint.name) if split == "test" else None
    with ws.reporter.task(f"Measuring {checkpoint.name}, {split}", len(pending)) as advance:
        for batch in ws.crew.measure(job, pending):
            if policies is not None:
                _route(ws, policies, batch, lock_hash)
            advance()


def _require_or_record(ws: Workspace, name: str, facts: dict[str, str], lock_hash: str) -> None:
    """Refuse a model that is not the one that was locked; before the lock, record what it is."""
    if lock_hash:
        locked = locking.read(ws.run.lock).current["contents"]
        now = {name: {**locked["checkpoints"][name], "facts": facts}}
        locking.require({"checkpoints": {**locked["checkpoints"], **now}}, locked)
        return
    with ws.turn():
        if not facts_file(ws.run, name).exists() or read_json(facts_file(ws.run, name)) != facts:
            write_json(facts_file(ws.run, name), facts)


def _route(ws: Workspace, policies: Policies, batch: Batch, lock_hash: str) -> None:
    """Score and call on a batch of test books just written, then enter its files in the ledger."""
    from lastcall.routing import dataset
    from lastcall.routing.replay import route

    name, ids = policies.checkpoint, [book.id for book in batch]
    route(ws.run, ws.study, policies, dataset.read(ws.run, ws.study, name, "test", ids))
    files = {file: ws.run.root / file for file in _test_files(ws.run, name, batch)}
    entry = {"kind": "measured", "lock": lock_hash, "checkpoint": name, "files": locking.file_hashes(files)}
    with ws.turn():
        locking.append(ws.run.lock, entry)


@_alone
def fit(ws: Workspace) -> None:
    """Fit every router on the fit split and cut its threshold on the calibration split (sections 4 and 5)."""
    from lastcall.routing import dataset
    from lastcall.routing.fitting import fit_all, is_fitted

    require_unchanged(ws)
    for checkpoint in ws.study.checkpoints:
        source = _fit_source(ws, checkpoint)
        if is_fitted(ws.run, checkpoint.name, source):
            continue
        _require_measured(ws, checkpoint)
        data = {
            split: dataset.read(
                ws.run, ws.study, checkpoint.name, split, [book.id for book in ws.used.split(split)]
            )
            for split in BEFORE_THE_LOCK
        }
        learned = [name for name in ws.study.routers.names if name in LEARNED_ROUTERS]
        total = len(learned) * len(ws.study.routers.seeds)
        with ws.reporter.task(f"Fitting routers on {checkpoint.name}", total) as advance:
            fit_all(
                ws.run, ws.study, checkpoint.name, data["fit"], data["calibration"], source, advance=advance
            )


def _fit_source(ws: Workspace, checkpoint: Checkpoint) -> str:
    """Digest of everything the routers are fitted from."""
    plan, sources = ws.study.plan(), ws.sources(checkpoint)
    books = [book.id for split in BEFORE_THE_LOCK for book in ws.used.split(split)]
    return locking.digest(
        {
            "software": __version__,
            "routers": plan["routers"],
            "quota": plan["quota"],
            "records": {book: sources[book] for book in books},
        }
    )


def _require_measured(ws: Workspace, checkpoint: Checkpoint) -> None:
    for split in BEFORE_THE_LOCK:
        if left := _pending(ws, checkpoint, split, ""):
            raise OutputError(
                f"the {split} split of {checkpoint.name} is not measured",
                got=f"{len(left)} batches to do",
                todo="run `lastcall measure` first",
            )


@_alone
def lock(ws: Workspace, amend: str | None = None) -> str:
    """Lock the plan, the checkpoints, the books, the fitted routers and their thresholds; the lock's hash.

    With a reason to `amend`, the lock there is is amended: at once where the routers are fitted from what has
    changed; else the amendment is opened, and what has changed may be measured, fitted and locked. Raises
    LockError where a lock exists, something locked has changed, and no reason was given.
    """
    if amend is not None and not amend.strip():
        raise StudyError("the reason to amend is empty", todo="say why; the report shows it for ever")
    if _test_seen_without_a_lock(ws):
        raise LockError(
            "the test split was measured here, but there is no lock.jsonl",
            todo="restore it, or begin again with another --out",
        )
    if unfitted := _unfitted(ws):
        if amend is None or not locking.read(ws.run.lock).locks:
            require_unchanged(ws)
            _require_measured(ws, unfitted[0])
            name = unfitted[0].name
            raise OutputError(f"the routers of {name} are not fitted", todo="run `lastcall fit` first")
        open_amendment(ws, amend)
        ws.reporter.say("Amendment opened; `lastcall run`, or measure, fit and lock, goes on from here")
        return str(locking.read(ws.run.lock).current["hash"])
    hash_, written = locking.lock(ws.run.lock, contents(ws), amend)
    ws.reporter.say(f"{'Locked' if written else 'Already locked'}: {hash_[:12]}")
    return hash_


def _test_seen_without_a_lock(ws: Workspace) -> bool:
    seen = (*ws.run.root.glob("measured/*/test/*.parquet"), *ws.run.root.glob("routed/*/*.parquet"))
    return bool(seen) and not locking.read(ws.run.lock).locks


def _unfitted(ws: Workspace) -> list[Checkpoint]:
    """Checkpoints whose routers are not fitted from what is there now."""
    from lastcall.routing.fitting import is_fitted

    return [c for c in ws.study.checkpoints if not is_fitted(ws.run, c.name, _fit_source(ws, c))]


@_alone
def report(ws: Workspace) -> None:
    """Draw report.html from judged.json; LockError where that was judged under another lock."""
    from lastcall.report.page import write_page

    judged = read_json(ws.run.judged)
    locks = locking.read(ws.run.lock).locks
    if locks and judged.get("lock", {}).get("hash") != locks[-1]["hash"]:
        raise LockError("judged.json was judged under another lock", todo="run `lastcall judge` again")
    write_page(judged, ws.run.report)
