"""The stages in order, each resumable: measure, fit, lock, measure the test split, judge, report.

Stages that need torch import it when they run, so that judging and reporting never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from lastcall import lock as locking
from lastcall.analysing import analyse as answer
from lastcall.analysing import asked_of, current_answers
from lastcall.errors import BookError, LockError, OutputError, StudyError
from lastcall.holding import Shard
from lastcall.judging import judge
from lastcall.measure.corpus import cluster_of
from lastcall.measuring import enough_books, measure_batches, pending
from lastcall.records import read_json
from lastcall.results import Judged
from lastcall.sealing import (
    BEFORE_THE_LOCK,
    contents,
    fitted_from,
    open_amendment,
    require_unchanged,
    require_valid_lock,
)
from lastcall.secondary import Answers
from lastcall.study import LEARNED_ROUTERS, Checkpoint, Part, Split
from lastcall.version import __version__
from lastcall.workspace import Workspace

if TYPE_CHECKING:
    from lastcall.analyses.power import PowerRow

P = ParamSpec("P")
R = TypeVar("R")


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
    if not locking.read(ws.run.lock).locks:
        _say_power(ws)
    lock(ws)
    measure(ws, ("test",))
    judged = judge(ws)
    report(ws)
    if asked_of(ws):
        analyse(ws)
        report(ws)
    return judged


def measure(ws: Workspace, splits: Sequence[Split], shard: Shard | None = None) -> None:
    """Measure what is not measured yet of `splits` (sections 2 and 3), or of a shard of their batches; route
    the test split as it comes.

    Raises LockError where the test split is asked for without a valid lock (section 7).
    """
    with ws.alone(shard):
        enough_books(ws)
        require_unchanged(ws)
        lock_hash = require_valid_lock(ws) if "test" in splits else ""
        for checkpoint in ws.study.checkpoints:
            for split in splits:
                _measure(ws, checkpoint, split, lock_hash, shard)
            if lock_hash and (longer := ws.longer) is not None:
                _measure(longer, checkpoint, "horizon", lock_hash, shard)


def _measure(ws: Workspace, checkpoint: Checkpoint, part: Part, lock_hash: str, shard: Shard | None) -> None:
    left = pending(ws, checkpoint, part, lock_hash, shard)
    if left:
        measure_batches(ws, checkpoint, part, left, lock_hash if part in ("test", "horizon") else "")


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
        ids = {split: [book.id for book in ws.used.split(split)] for split in BEFORE_THE_LOCK}
        data = {s: dataset.read(ws.run, ws.study, checkpoint.name, s, ids[s]) for s in BEFORE_THE_LOCK}
        records = fitted_from(ws.run, checkpoint.name, ids)
        learned = [name for name in ws.study.routers.names if name in LEARNED_ROUTERS]
        total = len(learned) * len(ws.study.routers.seeds)
        with ws.reporter.task(f"Fitting routers on {checkpoint.name}", total) as advance:
            name, fitted, cut = checkpoint.name, data["fit"], data["calibration"]
            fit_all(ws.run, ws.study, name, fitted, cut, source, advance, records)


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
        if left := pending(ws, checkpoint, split, ""):
            raise OutputError(
                f"the {split} split of {checkpoint.name} is not measured",
                got=f"{len(left)} batches to do",
                todo="run `lastcall measure` first",
            )


@_alone
def power(ws: Workspace) -> list[PowerRow]:
    """What the planned comparisons can be expected to show, from fit and calibration books alone.

    Raises OutputError where the routers are not fitted from what is there now.
    """
    from lastcall.analyses.power import calibration_gains
    from lastcall.analyses.power import power as rows

    if unfitted := _unfitted(ws):
        name = unfitted[0].name
        raise OutputError(f"the routers of {name} are not fitted", todo="run `lastcall fit` first")
    books = ws.used.split("calibration")
    ids, cluster = [book.id for book in books], ws.study.books.cluster
    gains = {c.name: calibration_gains(ws.run, ws.study, c.name, ids) for c in ws.study.checkpoints}
    of_books = [cluster_of(book, cluster) for book in books]
    return rows(ws.study, gains, of_books, len({c for _, c in ws.clusters}))


def _say_power(ws: Workspace) -> None:
    """Say, before the lock, what the planned comparisons can show; or why that cannot be told."""
    try:
        rows = power(ws)
    except BookError as error:
        ws.reporter.say(f"Power: {error}")
        return
    for row in rows:
        low, high = row["detectable_best"]["estimate"], row["detectable_worst"]["estimate"]
        ws.reporter.say(
            f"Power: {row['a']} over {row['b']} on {row['checkpoint']}: a gain of {low:.4f} to {high:.4f} "
            f"nats a token is shown with 80% power, as far as {row['calibration_clusters']} calibration "
            "clusters can tell"
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
    kinds = ("measured/*/test", "measured/*/horizon", "routed/*", "routed/*/horizon")
    seen = [path for kind in kinds for path in ws.run.root.glob(f"{kind}/*.parquet")]
    return bool(seen) and not locking.read(ws.run.lock).locks


def _unfitted(ws: Workspace) -> list[Checkpoint]:
    """Checkpoints whose routers are not fitted from what is there now."""
    from lastcall.routing.fitting import is_fitted

    return [c for c in ws.study.checkpoints if not is_fitted(ws.run, c.name, _fit_source(ws, c))]


@_alone
def analyse(ws: Workspace) -> Answers | None:
    """Answer the study's secondary questions (section 8); None where it asks none."""
    return answer(ws)


@_alone
def report(ws: Workspace) -> None:
    """Draw report.html from judged.json, and analyses.json where it is of the same lock and records.

    Raises LockError where judged.json was judged under another lock.
    """
    from lastcall.report.page import write_page

    judged = read_json(ws.run.judged)
    locks = locking.read(ws.run.lock).locks
    if locks and judged.get("lock", {}).get("hash") != locks[-1]["hash"]:
        raise LockError("judged.json was judged under another lock", todo="run `lastcall judge` again")
    answers = current_answers(ws) if locks else None
    if answers is None and ws.run.analyses.exists():
        ws.reporter.say("analyses.json is of other records, not drawn; `lastcall analyse` makes it anew")
    write_page(judged, ws.run.report, answers)
