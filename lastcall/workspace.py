"""A study and its run folder: what a stage works on. No torch until a tokenizer or a model is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, final

from lastcall.errors import OutputError, StudyError
from lastcall.holding import Shard, holding, turn
from lastcall.lock import differences, digest
from lastcall.measure import location
from lastcall.measure.corpus import Blocked, Corpus, clusters, common_books, cut_blocks, load_corpus
from lastcall.progress import Reporter, Silent
from lastcall.records import RunFolder
from lastcall.study import Checkpoint, Study
from lastcall.study_file import read_study, save_study
from lastcall.version import __version__

if TYPE_CHECKING:
    from lastcall.measure.crew import Crew
    from lastcall.measure.loading import Loaded, Tokenizer


@final
class Workspace:
    """One study in one run folder. Books, tokenizers and who measures are kept in memory."""

    def __init__(
        self,
        study: Study,
        root: Path,
        reporter: Reporter | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """`trust_remote_code`: whether code that comes with a checkpoint may run where the study asks it."""
        self.study = study
        self.run = RunFolder(root)
        self.reporter: Reporter = reporter or Silent()
        self._tokenizers: dict[str, Tokenizer] = {}
        self._trusts = trust_remote_code
        self._held = False
        self._crew: Crew | None = None

    @classmethod
    def create(
        cls,
        source: str | Path,
        root: Path,
        reporter: Reporter | None = None,
        trust_remote_code: bool = False,
    ) -> Workspace:
        """The workspace of study `source` in `root`, made if need be.

        A study that is not locked may still change; what is stale is then measured again. Raises OutputError
        where `root` cannot be written, holds another study, is locked, or holds something else.
        """
        study, run = read_study(source), RunFolder(root)
        occupied = root.exists() and not _is_empty(root)
        if occupied and not run.study.exists():
            raise OutputError(f"{root} is not empty and is no run folder", todo="choose another --out")
        _make(root)
        with turn(root):
            before = read_study(run.study) if run.study.exists() else study
            _require_same(run, before, study)
            with contextlib.nullcontext() if before.plan() == study.plan() else holding(root, None):
                save_study(source, study, run.study)
        return cls(study, root, reporter, trust_remote_code)

    @classmethod
    def open(cls, root: Path, reporter: Reporter | None = None, trust_remote_code: bool = False) -> Workspace:
        """The workspace of the run folder `root`; OutputError where it is none."""
        run = RunFolder(root)
        if not run.study.is_file():
            raise OutputError(
                f"{root} is no run folder: it has no study.toml", todo="begin with `lastcall run`"
            )
        return cls(read_study(run.study), root, reporter, trust_remote_code)

    @contextlib.contextmanager
    def alone(self, shard: Shard | None = None) -> Iterator[None]:
        """Hold the run folder, so that no other process works in it, other shards aside, where this is one.

        OutputError where one does.
        """
        if self._held:
            yield
            return
        with holding(self.run.root, shard):
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """One's turn to write what every shard writes."""
        return turn(self.run.root)

    @cached_property
    def corpus(self) -> Corpus:
        """The study's books, read and split."""
        return load_corpus(self.study.books)

    @cached_property
    def blocked(self) -> dict[str, Blocked]:
        """Blocks of token ids by checkpoint; a book too short for one is left out for all."""
        study = self.study
        cut = []
        with self.reporter.task("Tokenising books", len(study.checkpoints)) as advance:
            for checkpoint in study.checkpoints:
                tokenize = self.tokenizer(checkpoint).tokenize
                cut.append(cut_blocks(self.corpus, tokenize, study.blocks, study.books.too_short))
                advance()
        names = [checkpoint.name for checkpoint in study.checkpoints]
        return dict(zip(names, common_books(cut), strict=True))

    @cached_property
    def longer(self) -> Workspace | None:
        """The same run folder for the longer blocks of the test books; None where none are asked for."""
        if (study := self.study.longer) is None:
            return None
        longer = Workspace(study, self.run.root, self.reporter, self._trusts)
        longer.corpus = Corpus(tuple(self.used.split("test")), ())
        longer._tokenizers, longer._crew = self._tokenizers, self.crew
        return longer

    @property
    def used(self) -> Corpus:
        """The books that are measured."""
        return next(iter(self.blocked.values())).corpus

    @property
    def clusters(self) -> tuple[tuple[str, str], ...]:
        """(book id, cluster id) of every test book."""
        return clusters(self.used, self.study.books.cluster)

    def tokenizer(self, checkpoint: Checkpoint) -> Tokenizer:
        """The checkpoint's tokenizer, loaded once."""
        from lastcall.measure.loading import load_tokenizer

        if checkpoint.trust_remote_code and not self._trusts:
            raise StudyError(
                f"the study asks to run code that comes with {checkpoint.name}",
                todo="give --trust-remote-code if you trust it; it can do whatever you can",
            )
        if checkpoint.name not in self._tokenizers:
            self._tokenizers[checkpoint.name] = load_tokenizer(checkpoint)
        return self._tokenizers[checkpoint.name]

    @property
    def crew(self) -> Crew:
        """Who measures: this process, unless `hire` says otherwise."""
        from lastcall.measure.crew import Here, Worker

        if self._crew is None:
            self._crew = Here(Worker(self._load, self.tokenizer))
        return self._crew

    def hire(self, workers: int, cluster: str | None = None) -> None:
        """Let `workers` processes measure, on the Ray cluster at address `cluster` or on this machine.

        Raises InputError where Ray is not installed.
        """
        from lastcall.measure.cluster import OnRay

        self._crew = OnRay(workers, cluster, self.reporter)

    def _load(self, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Loaded:
        from lastcall.measure.loading import load

        with self.reporter.task(f"Loading {checkpoint.name}", 1) as advance:
            loaded = load(checkpoint, tokenizer)
            advance()
        return loaded

    def sources(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Digest of everything a book's record is measured from, by book id: a record of another is stale."""
        from lastcall.measure.engine import batches

        study = self.study
        plan = study.plan()
        common = {
            "software": __version__,
            "checkpoint": next(c for c in plan["checkpoints"] if c["name"] == checkpoint.name),
            "files": self.hashes[checkpoint.name],
            "environment": self.crew.environment(checkpoint),
            "operation": plan["operation"],
            "blocks": plan["blocks"],
            "measure": plan["measure"],
        }
        hashes = {book.id: book.sha256 for book in self.used.books}
        sources: dict[str, str] = {}
        for split in ("fit", "calibration", "test"):
            books = [book for book in self.blocked[checkpoint.name].books if book.split == split]
            for batch in batches(books, study.measure.batch_books):
                texts = [hashes[book.id] for book in batch]
                for text, book in zip(texts, batch, strict=True):
                    sources[book.id] = digest({**common, "batch": texts, "book": text})
        return sources

    @cached_property
    def hashes(self) -> dict[str, dict[str, dict[str, str]]]:
        """Hashes of each checkpoint's weight and tokenizer files, by checkpoint and kind."""
        return {c.name: location.hashes(location.find(c)) for c in self.study.checkpoints}


def _require_same(run: RunFolder, before: Study, study: Study) -> None:
    """OutputError where the folder is another study's: of another name, or locked under another plan."""
    changed = differences({"plan": before.plan()}, {"plan": study.plan()})
    if changed and (before.name != study.name or run.lock.exists()):
        raise OutputError(
            f"{run.root} belongs to another study", got=changed[0], todo="choose another --out for this one"
        )


def _is_empty(root: Path) -> bool:
    """Whether `root` is a folder with nothing in it but what a shard may have begun."""
    return root.is_dir() and all(
        path.name.startswith((".held", ".turn", ".study")) for path in root.iterdir()
    )


def _make(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make {root}", got=error.strerror or str(error), todo="choose another --out"
        ) from None
