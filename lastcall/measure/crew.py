"""Who measures the batches: one process here, or many elsewhere (`cluster.py`), all by the same `Worker`.

A batch is the unit of work: the study fixes it, so the records are the same whoever measures them.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from lastcall.errors import InputError, ModelError, OutputError
from lastcall.measure import location
from lastcall.measure.corpus import BookBlocks
from lastcall.measure.engine import Batch, Measured, check_fits, measure_batch, write
from lastcall.measure.equivalence import gate
from lastcall.measure.loading import Loaded, Tokenizer, environment, load, load_tokenizer
from lastcall.records import RunFolder
from lastcall.study import Checkpoint, Part, Study
from lastcall.version import __version__

Load = Callable[[Checkpoint, Tokenizer], Loaded]


@final
@dataclass(frozen=True)
class Job:
    """What a worker must know to measure one part of one checkpoint."""

    root: Path
    """The run folder."""
    study: Study
    checkpoint: Checkpoint
    part: Part
    books: tuple[BookBlocks, ...]
    """The books to be measured; the first ones pass the gate."""
    sources: dict[str, str]
    """Book id to the digest of everything its record is measured from."""
    hashes: dict[str, dict[str, str]]
    """Of the checkpoint's files, as the run folder knows them; a worker's must be these."""
    positions: int
    """Most positions that any part of the study needs of the model."""
    threads: int
    """CPU threads of every worker: the order of a sum may depend on it."""
    software: str = __version__
    """Version of lastcall that asks, and must measure."""
    facts: dict[str, str] | None = None
    """What the workers said when they were ready; one that takes another's place must say the same."""


@final
@dataclass(frozen=True)
class Ready:
    """What a worker says once it is ready."""

    facts: dict[str, str]
    warnings: tuple[str, ...]
    process: int
    """Its process id."""


@final
class Worker:
    """Measures batches with one model at a time, on its own device, and writes their records.

    Only one batch at a time is on the device; another may be written meanwhile.
    """

    def __init__(
        self, load: Load = load, tokenizer: Callable[[Checkpoint], Tokenizer] = load_tokenizer
    ) -> None:
        self._load, self._tokenizer = load, tokenizer
        self._loaded: Loaded | None = None
        self._part: Part | None = None
        self._device = threading.Lock()

    def environment(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Device and library versions here."""
        return environment(checkpoint)

    def prepare(self, job: Job) -> Ready:
        """Load the model where another is loaded, and gate it on the first book (section 2).

        Raises EquivalenceError, ModelError; InputError where this lastcall is of another version, OutputError
        where the run folder is not seen from here.
        """
        with self._device:
            loaded = self._prepared(job)
        return Ready(loaded.facts, loaded.warnings, os.getpid())

    def measure(self, job: Job, batch: Batch) -> int:
        """Measure `batch` and write its records; the id of the process that did."""
        self.write(job, self.run(job, batch))
        return os.getpid()

    def run(self, job: Job, batch: Batch) -> list[Measured]:
        """Measure `batch`, as soon as the device is free."""
        with self._device:
            return measure_batch(self._prepared(job), job.study, batch)

    def write(self, job: Job, measured: Sequence[Measured]) -> None:
        """Write the records of a measured batch."""
        for one in measured:
            source = job.sources[one.book]
            write(RunFolder(job.root), job.study, job.checkpoint.name, job.part, one, source)

    def _prepared(self, job: Job) -> Loaded:
        """The model of `job`, loaded and gated where that is not done yet (a replaced worker has none)."""
        if self._loaded is not None and self._loaded.checkpoint == job.checkpoint:
            if self._part == job.part:
                return self._loaded
        else:
            _require_same(job)
            torch.set_num_threads(job.threads)
            self._loaded, self._part = None, None  # never two models in memory
            self._loaded = self._load(job.checkpoint, self._tokenizer(job.checkpoint))
            _require_facts(job, self._loaded.facts)
        check_fits(self._loaded, job.books, job.positions)
        tokens = torch.from_numpy(job.books[0].tokens).to(self._loaded.site.device).long()
        gate(self._loaded.site, tokens, job.checkpoint.dtype, job.checkpoint.name)
        self._part = job.part
        return self._loaded


def _require_same(job: Job) -> None:
    if job.software != __version__:
        raise InputError(
            "a worker has another lastcall",
            got=f"version {__version__}, not {job.software}",
            todo="install one version everywhere",
        )
    if not RunFolder(job.root).study.is_file():
        raise OutputError(
            f"a worker does not see the run folder {job.root}", todo="put it on a file system that all share"
        )
    if location.hashes(location.find(job.checkpoint)) != job.hashes:
        raise ModelError(
            f"a worker's files of {job.checkpoint.name} are not those of the run folder",
            todo="give every machine the same files, and pin the revision of a hub repository",
        )


def _require_facts(job: Job, facts: dict[str, str]) -> None:
    different = next((key for key in facts if job.facts is not None and job.facts[key] != facts[key]), None)
    if job.facts is not None and different is not None:
        raise InputError(
            f"the worker in another's place differs in {different}",
            got=f"{facts[different]}, not {job.facts[different]}",
            todo="use machines of one kind",
        )


class Crew(ABC):
    """One worker or many. `measure` may be called for one job at a time."""

    @abstractmethod
    def environment(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Device and library versions of the workers."""

    @abstractmethod
    def prepare(self, job: Job) -> Ready:
        """Make every worker ready for `job`; what all of them say. Raises what a worker raises."""

    @abstractmethod
    def measure(self, job: Job, pending: Sequence[Batch]) -> Iterator[Batch]:
        """Measure and write `pending`; each batch in order, once its records are written."""


@final
class Here(Crew):
    """This process: the device measures a batch while the one before is written."""

    def __init__(self, worker: Worker | None = None) -> None:
        self._worker = worker or Worker()

    def environment(self, checkpoint: Checkpoint) -> dict[str, str]:
        return self._worker.environment(checkpoint)

    def prepare(self, job: Job) -> Ready:
        return self._worker.prepare(job)

    def measure(self, job: Job, pending: Sequence[Batch]) -> Iterator[Batch]:
        with ThreadPoolExecutor(1) as writer:
            before: tuple[Batch, Future[None]] | None = None
            for batch in pending:
                measured = self._worker.run(job, batch)
                if before is not None:
                    before[1].result()
                    yield before[0]
                before = batch, writer.submit(self._worker.write, job, measured)
            if before is not None:
                before[1].result()
                yield before[0]
