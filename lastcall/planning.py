"""What a study will cost and whether it can work, before anything runs (`lastcall plan`).

Local books are read, split and tokenised as a run does it; PG-19 on the hub is left alone and its books are
the study file's counts. Checkpoints are known by their configurations. Nothing is written or downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from rich.table import Table
from rich.text import Text

from lastcall.errors import BookError, StudyError
from lastcall.measure.corpus import (
    LeftOut,
    clusters,
    common_books,
    cut_blocks,
    load_corpus,
    require_enough,
)
from lastcall.progress import Reporter, Silent
from lastcall.study import LEARNED_ROUTERS, SPLITS, Checkpoint, Part, Split, Study

if TYPE_CHECKING:
    from lastcall.measure.outline import Outline

RECORD_BYTES = 88
"""Bytes a measured row takes on disk: the demonstration's books, one local window."""
ROUTED_BYTES = 6
"""Bytes a routed row takes on disk: the demonstration's test books."""
FIT_SECONDS = (1.0e-6, 2.8e-9)
"""Seconds that fitting takes a router, seed, epoch and scored fit prediction: the first, and d times the
second. The nine learned routers on 28 blocks of 495, one core of an AMD EPYC, d = 576, 2,048 and 2,560."""

HUB_BOOKS: dict[Split, int] = {"fit": 28_602, "calibration": 50, "test": 100}
"""Books that PG-19 on the hub has for each split (measure/hub.py)."""


@final
@dataclass(frozen=True)
class SplitPlan:
    """What one checkpoint will measure of one split."""

    split: Part
    books: int
    blocks: int
    scored: int
    """Scored predictions."""
    tokens: int
    """Tokens that the model reads."""


@final
@dataclass(frozen=True)
class CheckpointPlan:
    """What one checkpoint will cost; None where it is not known."""

    name: str
    model: str
    known_from: str
    """Where its size is known from, or why it is not known."""
    splits: tuple[SplitPlan, ...]
    parameters: int | None
    load_bytes: int | None
    """Weight files, where they are here; else the weights in the type they compute in."""
    memory_bytes: int | None
    """Weights and a batch at work on the device, about."""
    device: str
    device_bytes: int | None
    """The device's memory, where it is a GPU here."""
    fits: bool | None
    """Whether the one is within the other."""
    disk_bytes: int | None
    """Records, states and routed rows, about."""
    measuring_seconds: float | None
    """About; shared by the workers, without loading and checks."""
    fitting_seconds: float | None
    """About; on this CPU."""


@final
@dataclass(frozen=True)
class Plan:
    """A whole study's."""

    study: str
    exact: bool
    """Whether every book was counted with every checkpoint's tokenizer; else there are at most so many."""
    counted: str
    """How the books were counted."""
    left_out: tuple[LeftOut, ...]
    """Books that will not be used, and why."""
    checkpoints: tuple[CheckpointPlan, ...]
    comparisons: dict[str, int]
    """Comparisons of each family over all checkpoints, `planned` first."""
    workers: int
    """Workers that share the measuring, each on a device of its own."""


def plan(
    study: Study, *, workers: int = 1, rate: float | None = None, reporter: Reporter | None = None
) -> Plan:
    """What `study` will cost on this machine's devices, or on a GPU of `rate` TFLOP/s.

    Raises what would stop the study later: BookError, ModelError, UnknownArchitectureError.
    """
    from lastcall.measure.outline import outline

    if workers < 1 or (rate is not None and not 0 < rate < math.inf):
        raise StudyError("workers and rate must be above 0", got=f"{workers} and {rate}")
    outlines = [outline(checkpoint) for checkpoint in study.checkpoints]
    on_hub = study.books.source == "pg19-hub" and study.books.path is None
    counted = _count_on_hub(study) if on_hub else _count(study, outlines, reporter or Silent())
    require_enough(counted.books["fit"], study.routers.holdout_every, counted.clusters)
    return Plan(
        study=study.name,
        exact=counted.exact,
        counted=counted.how,
        left_out=counted.left_out,
        checkpoints=tuple(_cost(study, one, counted.books, workers, rate) for one in outlines),
        comparisons={name: len(cs) * len(study.checkpoints) for name, cs in study.families.items()},
        workers=workers,
    )


@final
@dataclass(frozen=True)
class _Counted:
    """Books of each split, clusters of the test split, and how they were counted."""

    books: dict[Split, int]
    clusters: int
    exact: bool
    how: str
    left_out: tuple[LeftOut, ...] = ()


def _count_on_hub(study: Study) -> _Counted:
    """PG-19's books as the study file counts or names them; BookError where it asks for what is not there."""
    books = study.books
    if books.counts is not None:
        asked = {split: int(getattr(books.counts, split)) for split in SPLITS}
    elif books.lists is not None:
        asked = {split: len(getattr(books.lists, split)) for split in SPLITS}
    else:
        raise BookError(
            "PG-19 from the hub has no counts and no lists", todo="add books.counts or books.lists"
        )
    for split, wanted in asked.items():
        if books.counts is not None and wanted > HUB_BOOKS[split]:
            got = f"counts.{split} = {wanted} where it has {HUB_BOOKS[split]:,}"
            raise BookError("PG-19 has too few books", got=got, todo="ask for fewer")
    if books.cluster == "author":
        todo = 'set books.cluster = "book"'
        raise BookError('books.cluster = "author" but PG-19 from the hub names no authors', todo=todo)
    return _Counted(asked, asked["test"], False, "from the study file; some may be too short")


def _count(study: Study, outlines: Sequence[Outline], reporter: Reporter) -> _Counted:
    """The books read, split and tokenised with every tokenizer at hand, as a run does it."""
    corpus = load_corpus(study.books)
    cut = []
    with reporter.task("Tokenising books", len(outlines)) as advance:
        for one in outlines:
            if one.tokenizer is not None:
                tokenize = one.tokenizer.tokenize
                cut.append((one, cut_blocks(corpus, tokenize, study.blocks, study.books.too_short)))
            advance()
    common = common_books([blocked for _, blocked in cut])
    for (one, _), blocked in zip(cut, common, strict=True):
        one.check(blocked.books, study.analyses.horizon or 0)
    used = common[0].corpus if common else corpus
    without = [one.checkpoint.name for one in outlines if one.tokenizer is None]
    how = f"read; the tokenizer of {', '.join(without)} is not here, and some may be too short for it"
    return _Counted(
        books={split: len(used.split(split)) for split in SPLITS},
        clusters=len({cluster for _, cluster in clusters(used, study.books.cluster)}),
        exact=not without,
        how=how if without else "read and tokenised",
        left_out=used.left_out,
    )


def _cost(
    study: Study, one: Outline, books: dict[Split, int], workers: int, rate: float | None
) -> CheckpointPlan:
    from lastcall.measure import costs

    checkpoint, site = one.checkpoint, one.site
    splits = tuple(_split(study, checkpoint, split, books[split]) for split in SPLITS)
    longer = study.longer
    more = () if longer is None else (_split(longer, checkpoint, "horizon", books["test"]),)
    machine = costs.here(checkpoint) if rate is None else costs.elsewhere(rate)
    memory = disk = measuring = fitting = None
    if site is not None:
        shape = (study.blocks.horizon + (checkpoint.bos == "bos"), len(study.measure.local_windows))
        batch = study.measure.batch_books * len(study.blocks.starts)
        eager = checkpoint.attention == "eager"
        memory = costs.weight_bytes(site) + costs.working_bytes(site, batch, *shape, machine.kind, eager)
        disk = _disk_bytes(study, splits, 2 * costs.width(site) * site.head.weight.element_size())
        measuring = costs.seconds(site, machine, sum(s.blocks for s in splits), *shape) / workers
        if longer is not None:
            long = (longer.blocks.horizon + (checkpoint.bos == "bos"), shape[1])
            working = costs.working_bytes(site, study.measure.batch_books, *long, machine.kind, eager)
            memory = max(memory, costs.weight_bytes(site) + working)
            disk += _disk_bytes(longer, more, 2 * costs.width(site) * site.head.weight.element_size())
            measuring += costs.seconds(site, machine, sum(s.blocks for s in more), *long) / workers
        fitting = _fitting_seconds(study, splits[0].scored, costs.width(site))
    return CheckpointPlan(
        name=checkpoint.name,
        model=checkpoint.model,
        known_from=one.source,
        splits=(*splits, *more),
        parameters=None if site is None else costs.parameters(site),
        load_bytes=one.file_bytes or (None if site is None else costs.weight_bytes(site)),
        memory_bytes=memory,
        device=machine.name,
        device_bytes=machine.memory,
        fits=None if memory is None or machine.memory is None else memory <= machine.memory,
        disk_bytes=disk,
        measuring_seconds=measuring,
        fitting_seconds=fitting,
    )


def _split(study: Study, checkpoint: Checkpoint, split: Part, books: int) -> SplitPlan:
    blocks = books * len(study.blocks.starts)
    inputs = study.blocks.horizon + (checkpoint.bos == "bos")
    return SplitPlan(split, books, blocks, blocks * study.blocks.scored, blocks * inputs)


def _disk_bytes(study: Study, splits: Sequence[SplitPlan], state_bytes: int) -> int:
    """Bytes of measured records, states (`state_bytes` a prediction) and routed rows."""
    predictions = sum(s.blocks for s in splits) * study.blocks.horizon
    policies = sum(len(study.seeds_of(name)) for name in study.routers.names)
    routed = next(s.scored for s in splits if s.split in ("test", "horizon")) * policies
    return predictions * (RECORD_BYTES + state_bytes) + routed * ROUTED_BYTES


def _fitting_seconds(study: Study, scored: int, width: int) -> float:
    learned = sum(name in LEARNED_ROUTERS for name in study.routers.names)
    passes = learned * len(study.routers.seeds) * study.routers.epochs
    each, per_width = FIT_SECONDS
    return passes * scored * (each + per_width * width)


def tables(found: Plan) -> list[Table]:
    """What is measured, a row a checkpoint and split; what it costs, a row a checkpoint."""
    most = "" if found.exact else " (at most)"
    counts = _table(f"{found.study}: what is measured{most}", "checkpoint", "split")
    for heading in ("books", "blocks", "scored", "tokens read"):
        counts.add_column(heading, justify="right")
    costs = _table(f"{found.study}: what it costs, about", "checkpoint")
    for heading in ("parameters", "to load", "memory", "disk", "measuring", "fitting"):
        costs.add_column(heading, justify="right")
    for one in found.checkpoints:
        for s in one.splits:
            numbers = (s.books, s.blocks, s.scored, s.tokens)
            counts.add_row(Text(one.name), s.split, *(f"{n:,}" for n in numbers))
        sizes = (one.load_bytes, one.memory_bytes, one.disk_bytes)
        millions = _number(one.parameters, 1e6, "M")
        times = (duration(one.measuring_seconds), duration(one.fitting_seconds))
        costs.add_row(Text(one.name), millions, *(_number(n, 1e9, "GB") for n in sizes), *times)
    return [counts, costs]


def _table(title: str, *headings: str) -> Table:
    table = Table(title=Text(title))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _number(value: int | None, unit: float, name: str) -> str:
    if value is None:
        return "unknown"
    return f"{value / unit:,.0f} {name}" if value >= 100 * unit else f"{value / unit:.2g} {name}"


def duration(seconds: float | None) -> str:
    """Seconds in the words of a plan: `14 min`, `3.5 h`."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return "under 1 min"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def sentences(found: Plan) -> list[str]:
    """What the tables do not say: how it was counted, where sizes are from, what fits, the comparisons."""
    said = [f"Books: {found.counted}; {len(found.left_out)} left out."]
    said += [f"Left out: {one.id}: {one.reason}" for one in found.left_out]
    for one in found.checkpoints:
        said.append(
            f"{one.name}: size from {one.known_from}." if one.parameters else f"{one.name}: {one.known_from}."
        )
        if one.fits is not None and one.memory_bytes and one.device_bytes:
            need, have = one.memory_bytes / 1e9, one.device_bytes / 1e9
            verdict = "fits" if one.fits else "does not fit: lower measure.batch_books or use 16 bits"
            said.append(f"{one.name}: {need:.1f} GB of {one.device}'s {have:.1f} GB; it {verdict}.")
    return [*said, _time_sentence(found), _comparisons_sentence(found)]


def _time_sentence(found: Plan) -> str:
    devices = " and ".join(dict.fromkeys(one.device for one in found.checkpoints))
    shared = f", shared by {found.workers} workers with one each" if found.workers > 1 else ""
    known = [o for o in found.checkpoints if o.measuring_seconds is not None]
    total = sum((o.measuring_seconds or 0.0) + (o.fitting_seconds or 0.0) for o in known)
    rest = "".join(f" and unknown for {o.name}" for o in found.checkpoints if o not in known)
    todo = "fitting on this CPU, without downloads, loading and checks; --rate TFLOPS plans for another GPU"
    return f"Time: about {duration(total)}{rest}, measuring on {devices}{shared}, {todo}."


def _comparisons_sentence(found: Plan) -> str:
    planned, *others = found.comparisons.items()
    secondary = "; ".join(f"{name} {count}" for name, count in others)
    outside = f"; outside it: {secondary}" if secondary else ""
    return f"Comparisons: {planned[1]} planned, one family{outside}."
