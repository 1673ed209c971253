"""What can be told of a checkpoint without its weights: its shapes, its tokenizer, its files' size.

The architecture is built on torch's meta device, by the classes that a run uses: shapes without numbers. No
weights are read, nothing is downloaded, and no code that comes with a checkpoint runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
import transformers
from torch import nn

from lastcall.errors import ModelError
from lastcall.measure import location
from lastcall.measure.anatomy import Site, locate, row_of
from lastcall.measure.corpus import BookBlocks
from lastcall.measure.engine import check_fits
from lastcall.measure.loading import Loaded, Tokenizer, load_tokenizer
from lastcall.measure.location import Location
from lastcall.measure.reading import configuration, full_size
from lastcall.study import Checkpoint
from lastcall.study_file import is_local

PUBLISHED_AS = {"HuggingFaceTB/SmolLM3-3B-Base": "smollm3-3b", "Qwen/Qwen3.5-4B-Base": "qwen3.5-4b"}
"""Hub ids whose configuration is built in (anatomy.FULL_SIZE)."""


@final
@dataclass(frozen=True)
class Outline:
    """What is at hand of a checkpoint; None for what is not."""

    checkpoint: Checkpoint
    source: str
    """Where its shapes are known from, or why they are not known."""
    where: Location | None = None
    site: Site | None = None
    """Its site; the parameters are on the meta device, in the type they compute in."""
    tokenizer: Tokenizer | None = None

    @property
    def file_bytes(self) -> int | None:
        """Bytes of the weight files, where they are here."""
        files = [] if self.where is None else self.where.weight_files
        return sum(file.stat().st_size for file in files) or None

    def check(self, books: Sequence[BookBlocks], positions: int = 0) -> None:
        """Raise ModelError where these blocks, or longer ones to come, do not fit the context, or a token the
        vocabulary."""
        if self.where is not None and self.site is not None and self.tokenizer is not None:
            check_fits(Loaded(self.checkpoint, self.where, self.site, self.tokenizer, {}), books, positions)


def outline(checkpoint: Checkpoint) -> Outline:
    """The outline of `checkpoint`, as far as it is on this machine.

    Raises ModelError where a local model is missing, its configuration cannot be read or its final block has
    no attention; UnknownArchitectureError where the table has no row for it.
    """
    where = _find(checkpoint.model_copy(update={"tokenizer": "bytes"}), checkpoint.model)
    if checkpoint.trust_remote_code:
        return Outline(checkpoint, "unknown: its own code may run, and an outline runs none", where)
    tokenizer = _tokenizer(checkpoint, here=where is not None)
    if where is not None:
        return Outline(checkpoint, _SOURCES[where.kind], where, site(checkpoint, where), tokenizer)
    if (name := PUBLISHED_AS.get(checkpoint.model)) is None:
        return Outline(checkpoint, "unknown: not downloaded", tokenizer=tokenizer)
    where = Location("random", None, name, None)
    source = f"the built-in {name}: not downloaded"
    return Outline(checkpoint, source, where, site(checkpoint, where), tokenizer)


_SOURCES = {"folder": "its config.json", "gguf": "the GGUF file", "random": "the built-in configuration"}


def _find(checkpoint: Checkpoint, name: str) -> Location | None:
    """Where a checkpoint lies; None where `name`, what is looked for, is a hub id that is not downloaded."""
    try:
        return location.find(checkpoint, download=False)
    except ModelError:
        local = is_local(name) or name.startswith(("random:", "package:")) or Path(name).is_dir()
        if local or name.count("/") > 1:  # no hub id has two
            raise
        return None


def _tokenizer(checkpoint: Checkpoint, *, here: bool) -> Tokenizer | None:
    """The checkpoint's tokenizer, None where it is not downloaded; `here`: whether the model is."""
    if not here and checkpoint.tokenizer is None:
        return None
    own = checkpoint if here else checkpoint.model_copy(update={"model": "random:"})
    where = _find(own, checkpoint.tokenizer or checkpoint.model)
    return None if where is None else load_tokenizer(checkpoint, where)


def site(checkpoint: Checkpoint, where: Location) -> Site:
    """The site of the checkpoint that lies at `where`, on the meta device. Raises as `outline` does."""
    random = where.kind == "random"
    whole = full_size(where.name) if random else configuration(checkpoint, where, trusted=False)
    config = whole.get_text_config()
    row_of(config)
    config.tie_word_embeddings = config.tie_word_embeddings or whole.tie_word_embeddings
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, checkpoint.dtype)
        )
    return locate(model)
