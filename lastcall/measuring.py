"""Measuring a part of a study: what is still to do, the gate, the records, and the ledger of test files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lastcall import lock as locking
from lastcall.errors import BookError, OutputError
from lastcall.holding import Shard
from lastcall.measure.corpus import require_enough
from lastcall.records import RunFolder, read_json, write_json
from lastcall.sealing import facts_file
from lastcall.study import Checkpoint, Part
from lastcall.workspace import Workspace

if TYPE_CHECKING:
    from lastcall.measure.corpus import BookBlocks
    from lastcall.measure.engine import Batch
    from lastcall.routing.replay import Policies


def enough_books(ws: Workspace) -> None:
    """Refuse, before any model runs, a study whose later stages cannot work."""
    clusters = len({cluster for _, cluster in ws.clusters})
    require_enough(len(ws.used.split("fit")), ws.study.routers.holdout_every, clusters)
    if ws.longer is not None and len({cluster for _, cluster in ws.longer.clusters}) < 2:
        raise BookError(
            "fewer than two test clusters are long enough for the longer blocks",
            got=f"analyses.horizon = {ws.study.analyses.horizon:,}",
            todo="shorten it, or add longer books",
        )


def pending(
    ws: Workspace, checkpoint: Checkpoint, part: Part, lock_hash: str, shard: Shard | None = None
) -> list[Batch]:
    """Batches of a part that are still to be measured: from other sources, or not under this lock.

    `ws` is the workspace of the longer blocks for the part `horizon`.
    """
    from lastcall.measure.engine import batches, is_done

    split = "test" if part == "horizon" else part
    books = [book for book in ws.blocked[checkpoint.name].books if book.split == split]
    sources = ws.sources(checkpoint)
    written = locking.read(ws.run.lock).test_files(lock_hash)
    every = batches(books, ws.study.measure.batch_books)
    return [
        batch
        for batch in (every if shard is None else shard.of(every))
        if not is_done(ws.run, checkpoint.name, part, batch, sources)
        or (split == "test" and not _is_in_ledger(ws.run, written, checkpoint.name, part, batch))
    ]


def _is_in_ledger(
    folder: RunFolder, written: dict[str, str], checkpoint: str, part: Part, batch: Batch
) -> bool:
    """Whether every file of a batch of test books is there and in the ledger of the lock."""
    files = _test_files(folder, checkpoint, part, batch)
    return all(file in written and (folder.root / file).is_file() for file in files)


def _test_files(folder: RunFolder, checkpoint: str, part: Part, batch: Sequence[BookBlocks]) -> list[str]:
    """Files of a batch of test books as the ledger names them, in the order they are written."""
    paths = [
        path
        for book in batch
        for path in (
            folder.states(checkpoint, part, book.id),
            folder.measured(checkpoint, part, book.id),
            folder.routed(checkpoint, book.id, part),
        )
    ]
    return [folder.relative(path) for path in paths]


def measure_batches(
    ws: Workspace, checkpoint: Checkpoint, part: Part, pending: Sequence[Batch], lock_hash: str
) -> None:
    """Measure `pending` and write its records; of test books also scores, calls and a line of the ledger."""
    import torch

    from lastcall.measure.crew import Job
    from lastcall.routing.replay import Policies

    books = tuple(book for batch in pending for book in batch)
    job = Job(
        ws.run.root.resolve(),
        ws.study,
        checkpoint,
        part,
        books,
        ws.sources(checkpoint),
        ws.hashes[checkpoint.name],
        max(ws.study.blocks.horizon, ws.study.analyses.horizon or 0),
        torch.get_num_threads(),
    )
    ready = ws.crew.prepare(job)
    job = replace(job, facts=ready.facts)
    for warning in ready.warnings:
        ws.reporter.say(f"Warning: {warning}")
    _require_or_record(ws, checkpoint.name, ready.facts, lock_hash)
    policies = Policies(ws.run, ws.study, checkpoint.name) if lock_hash else None
    what = f"{ws.study.blocks.horizon:,} positions" if part == "horizon" else part
    with ws.reporter.task(f"Measuring {checkpoint.name}, {what}", len(pending)) as advance:
        for batch in ws.crew.measure(job, pending):
            if policies is not None:
                _route(ws, policies, part, batch, lock_hash)
            advance()


def _require_or_record(ws: Workspace, name: str, facts: dict[str, str], lock_hash: str) -> None:
    """Refuse a model that is not the one that was locked; before the lock, record what it is."""
    if lock_hash:
        locked = locking.read(ws.run.lock).current["contents"]
        now = {name: {**locked["checkpoints"][name], "facts": facts}}
        locking.require({"checkpoints": {**locked["checkpoints"], **now}}, locked)
        return
    file = facts_file(ws.run, name)
    with ws.turn():
        before = read_json(file) if file.exists() else facts
        different = next((key for key in facts if before.get(key) != facts[key]), None)
        if different is not None and _any_measured(ws, name):
            raise OutputError(
                f"some records of {name} were measured with another {different}",
                got=f"{before.get(different)}, now {facts[different]}",
                todo=f"measure as before, or delete {ws.run.root / 'measured' / name} and measure all again",
            )
        if not file.exists() or different is not None:
            write_json(file, facts)


def _any_measured(ws: Workspace, name: str) -> bool:
    """Whether any fit or calibration record of a checkpoint is of the study as it is now."""
    from lastcall.measure.engine import is_done

    checkpoint = next(c for c in ws.study.checkpoints if c.name == name)
    sources, blocked = ws.sources(checkpoint), ws.blocked[name].books
    return any(
        is_done(ws.run, name, book.split, (book,), sources) for book in blocked if book.split != "test"
    )


def _route(ws: Workspace, policies: Policies, part: Part, batch: Batch, lock_hash: str) -> None:
    """Score and call on a batch of test books just written, then enter its files in the ledger."""
    from lastcall.routing import dataset
    from lastcall.routing.replay import route

    name, ids = policies.checkpoint, [book.id for book in batch]
    route(ws.run, ws.study, policies, dataset.read(ws.run, ws.study, name, part, ids), part)
    files = {file: ws.run.root / file for file in _test_files(ws.run, name, part, batch)}
    entry = {"kind": "measured", "lock": lock_hash, "checkpoint": name, "files": locking.file_hashes(files)}
    with ws.turn():
        locking.append(ws.run.lock, entry)
