"""A study and its run folder: what a stage works on. No torch until a tokenizer or a model is asked for."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, final

from lastcall.errors import OutputError
from lastcall.lock import differences, digest, file_hashes
from lastcall.measure import location
from lastcall.measure.corpus import Blocked, Corpus, clusters, common_books, cut_blocks, load_corpus
from lastcall.progress import Reporter, Silent
from lastcall.records import RunFolder
from lastcall.study import Checkpoint, Study
from lastcall.study_file import read_study, save_study
from lastcall.version import __version__

if TYPE_CHECKING:
    from lastcall.measure.loading import Loaded, Tokenizer


@final
class Workspace:
    """One study in one run folder. Books, tokenizers and the model last used are kept in memory."""

    def __init__(self, study: Study, root: Path, reporter: Reporter | None = None) -> None:
        self.study = study
        self.run = RunFolder(root)
        self.reporter: Reporter = reporter or Silent()
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loaded: Loaded | None = None
        self._held = False

    @classmethod
    def create(cls, source: str | Path, root: Path, reporter: Reporter | None = None) -> Workspace:
        """The workspace of study `source` in `root`, made if need be.

        A study that is not locked may still change; what is stale is then measured again. Raises OutputError
        where `root` cannot be written, holds another study, is locked, or holds something else.
        """
        study, run = read_study(source), RunFolder(root)
        if run.study.exists():
            _require_same(run, read_study(run.study), study)
            save_study(source, study, run.study)
        elif root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise OutputError(f"{root} is not empty and is no run folder", todo="choose another --out")
        else:
            _make(root)
            save_study(source, study, run.study)
        return cls(study, root, reporter)

    @classmethod
    def open(cls, root: Path, reporter: Reporter | None = None) -> Workspace:
        """The workspace of the run folder `root`; OutputError where it is none."""
        run = RunFolder(root)
        if not run.study.is_file():
            raise OutputError(
                f"{root} is no run folder: it has no study.toml", todo="begin with `lastcall run`"
            )
        return cls(read_study(run.study), root, reporter)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the run folder, so that no other process works in it; OutputError where one does."""
        if self._held:
            yield
            return
        with _opened(self.run.root / ".held") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = f"another lastcall is at work in {self.run.root}"
                raise OutputError(what, todo="wait for it, or choose another --out") from None
            self._held = True
            try:
                yield
            finally:
                self._held = False

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

        if checkpoint.name not in self._tokenizers:
            self._tokenizers[checkpoint.name] = load_tokenizer(checkpoint)
        return self._tokenizers[checkpoint.name]

    def model(self, checkpoint: Checkpoint) -> Loaded:
        """The checkpoint's model; only the last one asked for is kept."""
        from lastcall.measure.loading import load

        if self._loaded is None or self._loaded.checkpoint != checkpoint:
            self._loaded = None
            with self.reporter.task(f"Loading {checkpoint.name}", 1) as advance:
                self._loaded = load(checkpoint, self.tokenizer(checkpoint))
                advance()
        return self._loaded

    def sources(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Digest of everything a book's record is measured from, by book id: a record of another is stale."""
        from lastcall.measure.engine import batches
        from lastcall.measure.loading import environment

        study = self.study
        plan = study.plan()
        common = {
            "software": __version__,
            "checkpoint": next(c for c in plan["checkpoints"] if c["name"] == checkpoint.name),
            "files": self.hashes[checkpoint.name],
            "environment": environment(checkpoint),
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
        return {c.name: checkpoint_hashes(location.find(c)) for c in self.study.checkpoints}


def _require_same(run: RunFolder, before: Study, study: Study) -> None:
    """OutputError where the folder is another study's: of another name, or locked under another plan."""
    changed = differences({"plan": before.plan()}, {"plan": study.plan()})
    if changed and (before.name != study.name or run.lock.exists()):
        raise OutputError(
            f"{run.root} belongs to another study", got=changed[0], todo="choose another --out for this one"
        )


def checkpoint_hashes(where: location.Location) -> dict[str, dict[str, str]]:
    """Hashes of a checkpoint's `weights` and `tokenizer` files, by file name."""
    return {
        "weights": file_hashes({path.name: path for path in where.weight_files}),
        "tokenizer": file_hashes({path.name: path for path in where.tokenizer_files}),
    }


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w")
    except OSError as error:
        what = f"cannot write in {path.parent}"
        raise OutputError(what, got=error.strerror or str(error), todo="choose another --out") from None


def _make(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make {root}", got=error.strerror or str(error), todo="choose another --out"
        ) from None
