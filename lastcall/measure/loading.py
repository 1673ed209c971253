"""A located checkpoint -> a frozen model, its tokenizer and the facts the lock records."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
import transformers
from torch import nn

import lastcall.measure.location as location
from lastcall.errors import LastcallError, ModelError
from lastcall.measure.anatomy import FULL_SIZE, TABLE, Site, locate
from lastcall.measure.corpus import Tokenize
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
            _random(checkpoint, where.name, device) if where.kind == "random" else _read(checkpoint, where)
        )
    model = model.to(device).eval().requires_grad_(False)
    return Loaded(checkpoint, where, locate(model), tokenizer, _facts(checkpoint, model, where))


def load_tokenizer(checkpoint: Checkpoint, where: Location | None = None) -> Tokenizer:
    """The tokenizer of `checkpoint` alone; UTF-8 bytes where it has none."""
    where = where or location.find(checkpoint)
    if where.tokenizer is None:
        if checkpoint.bos == "bos":
            raise ModelError(f'{checkpoint.name}: bos = "bos" needs a tokenizer', got="UTF-8 bytes as ids")
        return BYTES
    gguf = {"gguf_file": where.name} if where.kind == "gguf" and where.tokenizer == where.folder else {}
    file = where.tokenizer / gguf["gguf_file"] if gguf else where.tokenizer
    with _quiet(), _one_line(f"cannot read the tokenizer of {checkpoint.name} in {file}"):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(where.tokenizer, **gguf)
    if checkpoint.bos == "bos" and tokenizer.bos_token_id is None:
        raise ModelError(
            f'{checkpoint.name}: bos = "bos", but its tokenizer has no such token', todo='use "none"'
        )

    def tokenize(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return Tokenizer(tokenize, tokenizer.bos_token_id if checkpoint.bos == "bos" else None)


def _read(checkpoint: Checkpoint, where: Location) -> nn.Module:
    gguf = {"gguf_file": where.name} if where.kind == "gguf" else {}
    if not gguf:
        _refuse_unknown(where.folder)
    with _one_line(f"cannot load {checkpoint.name} from {where.folder}/{where.name}".rstrip("/")):
        loaded: tuple[nn.Module, dict[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
            where.folder,
            dtype=getattr(torch, checkpoint.dtype),
            attn_implementation=checkpoint.attention,
            output_loading_info=True,
            **gguf,
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
        raise ModelError(
            f"the weights of {checkpoint.name} in {where.folder} are not whole",
            got=f"{len(missing)} tensors missing, {missing[0]} among them",
            todo="download or save the checkpoint again",
        )
    return model


def _refuse_unknown(folder: Path | None) -> None:
    """Refuse an architecture without a row before its weights are read."""
    with _one_line(f"cannot read {folder}/config.json"):
        config = transformers.AutoConfig.from_pretrained(folder)
    if config.get_text_config().model_type not in TABLE:
        locate(_Bare(config))


@final
class _Bare(nn.Module):
    """A module with nothing but a config: enough for `locate` to refuse it by name."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def _random(checkpoint: Checkpoint, name: str, device: torch.device) -> nn.Module:
    if name not in FULL_SIZE:
        raise ModelError(
            "no such full-size architecture", got=f'"{name}"', todo=f"known: {', '.join(FULL_SIZE)}"
        )
    model_type, values = FULL_SIZE[name]
    config = transformers.AutoConfig.for_model(model_type, **values)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(checkpoint.weights_seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, checkpoint.dtype), attn_implementation=checkpoint.attention
        )
    return model


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


def _facts(checkpoint: Checkpoint, model: nn.Module, where: Location) -> dict[str, str]:
    config: Any = model.config
    facts = {
        "architecture": f"{type(model).__name__} ({config.model_type}, {config.num_hidden_layers} blocks)",
        "weights": {"gguf": "GGUF, dequantised", "random": f"random, {where.name}"}.get(
            where.kind, "safetensors"
        ),
        "dtype": checkpoint.dtype,
        "attention backend": checkpoint.attention,
        "kernels": _kernels(config),
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


def _kernels(config: Any) -> str:
    """Which kernel paths run where an architecture has several."""
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return "torch"
    names = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
    return ", ".join(f"{n}: {'yes' if find_spec(m) else 'torch fallback'}" for n, m in names.items())


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Whatever transformers raises while reading a checkpoint, as a ModelError of one line."""
    try:
        yield
    except LastcallError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            what, got=reason[0], todo="check that the files are whole and of a known kind"
        ) from error


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
