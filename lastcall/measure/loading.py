"""A located checkpoint -> a frozen model, its tokenizer and the facts the lock records."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
import transformers
from torch import nn

import lastcall.measure.location as location
import lastcall.measure.reading as reading
from lastcall.errors import ModelError
from lastcall.measure.anatomy import Site, locate
from lastcall.measure.corpus import Tokenize
from lastcall.measure.kernels import Kernel, describe, hush, kernels_of, slow
from lastcall.measure.location import Location
from lastcall.measure.scoring import is_fused
from lastcall.study import Checkpoint


@final
@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, loaded without its model."""

    tokenize: Tokenize
    bos: int | None
    """Id of the beginning-of-text token put before each block, or None."""


BYTES = Tokenizer(lambda texts: [list(text.encode()) for text in texts], None)
"""UTF-8 bytes as ids, for a model without a tokenizer."""


@final
@dataclass(frozen=True)
class Loaded:
    """A frozen model ready to be measured."""

    checkpoint: Checkpoint
    location: Location
    site: Site
    tokenizer: Tokenizer
    facts: dict[str, str]
    """What the lock records: architecture, dtype, attention backend, kernels, bos rule, versions."""
    warnings: tuple[str, ...] = ()
    """What a person should know before it is measured, a sentence each."""


def load(checkpoint: Checkpoint, tokenizer: Tokenizer | None = None) -> Loaded:
    """Load `checkpoint` onto its device, in evaluation mode, without gradients.

    Raises ModelError where it is missing, unreadable or unsuitable, UnknownArchitectureError where its
    architecture is not in the table.
    """
    where = location.find(checkpoint)
    device = _device(checkpoint.device)
    tokenizer = tokenizer or load_tokenizer(checkpoint, where)
    with _quiet():
        model = (
            reading.draw(checkpoint, where.name, device)
            if where.kind == "random"
            else reading.read(checkpoint, where)
        )
    model = model.to(device).eval().requires_grad_(False)
    hush()
    kernels = kernels_of(model)
    facts = _facts(checkpoint, model, where, describe(kernels))
    return Loaded(checkpoint, where, locate(model), tokenizer, facts, _warnings(checkpoint, device, kernels))


def load_tokenizer(checkpoint: Checkpoint, where: Location | None = None) -> Tokenizer:
    """The tokenizer of `checkpoint` alone; UTF-8 bytes where it has none."""
    where = where or location.find(checkpoint)
    if where.tokenizer is None:
        if checkpoint.bos == "bos":
            raise ModelError(f'{checkpoint.name}: bos = "bos" needs a tokenizer', got="UTF-8 bytes as ids")
        return BYTES
    with _quiet():
        tokenizer = reading.read_tokenizer(checkpoint, where)
    if checkpoint.bos == "bos" and tokenizer.bos_token_id is None:
        raise ModelError(
            f'{checkpoint.name}: bos = "bos", but its tokenizer has no such token', todo='use "none"'
        )

    def tokenize(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return Tokenizer(tokenize, tokenizer.bos_token_id if checkpoint.bos == "bos" else None)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError("cannot use this device", got=f'"{name}"', todo=str(error).splitlines()[0]) from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError("only cpu and cuda devices are measured on", got=f'"{name}"')
    return device


def _warnings(checkpoint: Checkpoint, device: torch.device, kernels: list[Kernel]) -> tuple[str, ...]:
    """A sentence where a function runs in torch though its kernel could run; on a CPU none can."""
    sentence = slow(kernels) if device.type == "cuda" else None
    return () if sentence is None else (f"{checkpoint.name}: {sentence}",)


def _facts(checkpoint: Checkpoint, model: nn.Module, where: Location, kernels: str) -> dict[str, str]:
    config: Any = model.config
    own_code = not type(model).__module__.startswith("transformers.")
    facts = {
        "architecture": f"{type(model).__name__} ({config.model_type}, {config.num_hidden_layers} blocks)",
        "code": "the checkpoint's own" if own_code else "transformers",
        "weights": {"gguf": "GGUF, dequantised", "random": f"random, {where.name}"}.get(
            where.kind, "pickle" if where.pickled else "safetensors"
        ),
        "dtype": checkpoint.dtype,
        "attention backend": checkpoint.attention,
        "kernels": "not known: the checkpoint's own code" if own_code else kernels,
        "scoring pass": "triton" if is_fused(next(model.parameters()).device) else "torch",
        "beginning of text": checkpoint.bos,
        "tokens": "UTF-8 bytes as ids" if where.tokenizer is None else "the checkpoint's tokenizer",
        **environment(checkpoint),
    }
    if where.kind == "random":
        facts["weights"] += f", seed {checkpoint.weights_seed}, sha256 {_drawn_hash(model)}"
    return facts


def _drawn_hash(model: nn.Module) -> str:
    """SHA-256 of drawn parameters, in name order: random weights have no file to hash."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(name.encode())
        total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def environment(checkpoint: Checkpoint) -> dict[str, str]:
    """What a number may depend on beside the study and its files: device and library versions."""
    device = _device(checkpoint.device)
    return {
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' own progress bars and notices off: ours are shown instead, facts are recorded."""
    logging = transformers.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
