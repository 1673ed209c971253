"""The secondary questions of a run folder, answered section by section into analyses.json; each is resumable.

They need the records of every split, the fitted routers and the lock, but neither the books nor the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from lastcall import lock as locking
from lastcall.errors import LockError, ModelError, OutputError
from lastcall.judging import check_records, clusters_in, longer_books
from lastcall.records import read_json, write_json
from lastcall.sealing import BEFORE_THE_LOCK, fitted_from, fitted_sections
from lastcall.secondary import SCHEMA, Answers, Section
from lastcall.study import SPLITS, Split
from lastcall.version import __version__
from lastcall.workspace import Workspace

if TYPE_CHECKING:
    from lastcall.analyses.answers import Material

Answer = Callable[[Workspace, "Material"], Any]


def analyse(ws: Workspace) -> Answers | None:
    """Answer what the study asks and is not answered yet; None where it asks nothing.

    Raises LockError where the records are not those of the current lock.
    """
    asked = asked_of(ws)
    if not asked:
        return None
    answers = current_answers(ws) or _unanswered(ws)
    left = [section for section in asked if section not in answers]
    if left:
        material = _material(ws)
        with ws.reporter.task("Answering secondary questions", len(left)) as advance:
            for section in left:
                if (answer := _ANSWERS[section](ws, material)) is not None:
                    cast(dict[str, Any], answers)[section] = answer
                    write_json(ws.run.analyses, answers)
                advance()
    return answers


def asked_of(ws: Workspace) -> list[Section]:
    """The sections that the study asks for, the quick ones first."""
    asked = ws.study.analyses
    wanted: Mapping[Section, object] = {
        "costs": True,
        "curves": asked.quotas,
        "ceilings": asked.ceilings,
        "controllers": asked.controllers,
        "horizon": asked.horizon,
        "third_action": asked.third_action,
        "independence": asked.independence,
        "learners": asked.learners,
    }
    found = [section for section, value in wanted.items() if value]
    return found if len(found) > 1 else []


def current_answers(ws: Workspace) -> Answers | None:
    """What analyses.json holds, where it is of the current lock and records; else None."""
    try:
        found, same = read_json(ws.run.analyses), _unanswered(ws)
    except OutputError:  # missing or torn: answered again
        return None
    if not isinstance(found, dict) or any(found.get(key) != value for key, value in same.items()):
        return None
    return cast(Answers, found)


def _unanswered(ws: Workspace) -> Answers:
    ledger = locking.read(ws.run.lock)
    current = ledger.current
    return {
        "schema": SCHEMA,
        "software": __version__,
        "study": ws.study.name,
        "lock": current["hash"],
        "records": locking.digest(ledger.test_files(current["hash"])),
        "alpha": ws.study.inference.alpha,
        "practical_threshold": ws.study.inference.practical_threshold,
    }


def _material(ws: Workspace) -> Material:
    from lastcall.analyses.answers import Material

    ledger = locking.read(ws.run.lock)
    if ledger.pending:
        raise LockError("an amendment is open", todo="lock first: `lastcall run`, or measure, fit and lock")
    locked, files = ledger.current["contents"], ledger.test_files(ledger.current["hash"])
    names = list(locked["checkpoints"])
    locking.require({"plan": ws.study.plan(), **fitted_sections(ws.run, names)}, locked)
    check_records(ws, files, locked)
    longer = longer_books(ws, files, locked)
    if ws.study.analyses.horizon is not None and longer is None:
        raise LockError("the longer blocks are not all measured", todo="run `lastcall measure` first")
    ids = {split: [book for book, _ in clusters_in(locked, split)] for split in SPLITS}
    for name in names:
        _require_fitted_from(ws, name, ids)
    return Material(ws.study, ws.run, ids, clusters_in(locked, "test"), longer or ())


def _require_fitted_from(ws: Workspace, name: str, ids: Mapping[Split, Sequence[str]]) -> None:
    """LockError where the fit and calibration records are not those the locked routers were fitted from."""
    from lastcall.routing.fitting import TRAINING

    made = read_json(ws.run.fitted(name) / TRAINING).get("records")
    if fitted_from(ws.run, name, {split: ids[split] for split in BEFORE_THE_LOCK}) != made:
        raise LockError(
            f"the fit and calibration records of {name} are not those its routers were fitted from",
            todo="restore them",
        )


def _by_checkpoint(name: str) -> Answer:
    """A section with an entry a checkpoint: the function `name` of answers.py."""

    def answered(ws: Workspace, material: Material) -> dict[str, Any]:
        from lastcall.analyses import answers

        return {c.name: getattr(answers, name)(material.of(c.name)) for c in ws.study.checkpoints}

    return answered


def _listed(name: str) -> Answer:
    """A section that is a list over checkpoints."""
    each = _by_checkpoint(name)
    return lambda ws, material: list(each(ws, material).values())


def _learners(ws: Workspace, material: Material) -> Any:
    from lastcall.analyses.answers import learners

    return learners(material, [c.name for c in ws.study.checkpoints])


def _costs(ws: Workspace, _: Material) -> Any:
    """What a call saves; None, to be asked again, where a checkpoint is not here."""
    from lastcall.measure.savings import call_costs

    found = []
    for checkpoint in ws.study.checkpoints:
        try:
            cost = call_costs(checkpoint, ws.study)
        except ModelError as error:  # a run folder elsewhere: its checkpoint is not here
            ws.reporter.say(f"What a call of {checkpoint.name} would save is left out: {error}")
            return None
        if cost is None:
            return None
        found.append(cost)
    return found


_ANSWERS: dict[Section, Answer] = {
    "costs": _costs,
    "curves": _by_checkpoint("curves"),
    "ceilings": _by_checkpoint("ceilings"),
    "controllers": _by_checkpoint("controllers"),
    "horizon": _listed("longer"),
    "third_action": _listed("three_actions"),
    "independence": _listed("independent"),
    "learners": _learners,
}
