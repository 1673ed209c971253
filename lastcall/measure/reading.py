"""A checkpoint's files, or the recipe of a random one -> the model that computes its text.

Of an image-and-text checkpoint the text decoder alone is read. Code that comes with a checkpoint runs only
where it is trusted; without that, transformers' own class of the same model type takes its place.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from lastcall.errors import LastcallError, ModelError
from lastcall.measure.anatomy import FULL_SIZE, row_of
from lastcall.measure.location import Location
from lastcall.study import Checkpoint

_TEXT_NAMES = {r"^language_model\.model\.": "model.", r"^model\.language_model\.": "model."}
"""Names of text weights in an image-and-text checkpoint -> those in its text decoder."""


def read(checkpoint: Checkpoint, where: Location) -> nn.Module:
    """The model in the files of `where`, on the CPU.

    Raises ModelError where they cannot be read, are not whole, or need code that is not trusted;
    UnknownArchitectureError, before any weights are read, where the table has no row for them.
    """
    if where.kind == "gguf":
        return _read(checkpoint, where, gguf_file=where.name, trust_remote_code=False)
    trusted = checkpoint.trust_remote_code
    config = configuration(checkpoint, where, trusted)
    text = config.get_text_config()
    row_of(text)
    how: dict[str, Any] = {"use_safetensors": not where.pickled, "trust_remote_code": trusted}
    if trusted and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return _read(checkpoint, where, **how)
    if text is not config:
        text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
        if (quantised := getattr(config, "quantization_config", None)) is not None:
            text.quantization_config = quantised
        how["key_mapping"] = _TEXT_NAMES
    return _read(checkpoint, where, config=text, **how)


def draw(checkpoint: Checkpoint, name: str, device: torch.device) -> nn.Module:
    """The full-size architecture `name` with random weights, drawn on `device` from their own seed."""
    config = full_size(name)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(checkpoint.weights_seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, checkpoint.dtype), attn_implementation=checkpoint.attention
        )
    return model


def read_tokenizer(checkpoint: Checkpoint, where: Location) -> Any:
    """transformers' tokenizer of `checkpoint`; ModelError where it cannot be read."""
    gguf = {"gguf_file": where.name} if where.kind == "gguf" and where.tokenizer == where.folder else {}
    file = where.tokenizer / gguf["gguf_file"] if gguf and where.tokenizer else where.tokenizer
    trusted = checkpoint.trust_remote_code and not gguf
    if trusted and where.tokenizer:
        _refuse_code_elsewhere(checkpoint, where.tokenizer)
    with _one_line(checkpoint, f"cannot read the tokenizer of {checkpoint.name} in {file}"):
        return transformers.AutoTokenizer.from_pretrained(where.tokenizer, trust_remote_code=trusted, **gguf)


def _read(checkpoint: Checkpoint, where: Location, **how: Any) -> nn.Module:
    what = f"cannot load {checkpoint.name} from {where.folder}/{where.name}".rstrip("/")
    with _one_line(checkpoint, what):
        loaded: tuple[nn.Module, dict[str, Any]] = transformers.AutoModelForCausalLM.from_pretrained(
            where.folder,
            dtype=getattr(torch, checkpoint.dtype),
            attn_implementation=checkpoint.attention,
            output_loading_info=True,
            **how,
        )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers would draw them at random
        raise ModelError(
            f"the weights of {checkpoint.name} in {where.folder} are not whole",
            got=f"{len(missing)} tensors missing, {missing[0]} among them",
            todo="download or save the checkpoint again",
        )
    return model


def full_size(name: str) -> Any:
    """The configuration of the full-size architecture `name`; ModelError where there is none."""
    if name not in FULL_SIZE:
        raise ModelError(
            "no such full-size architecture", got=f'"{name}"', todo=f"known: {', '.join(FULL_SIZE)}"
        )
    model_type, values = FULL_SIZE[name]
    return transformers.AutoConfig.for_model(model_type, **values)


def configuration(checkpoint: Checkpoint, where: Location, trusted: bool) -> Any:
    """The configuration in a folder or a GGUF file; code that comes with it runs only where it is `trusted`.

    Raises ModelError where it cannot be read, or needs code that is not trusted or does not lie there.
    """
    if trusted and where.folder:
        _refuse_code_elsewhere(checkpoint, where.folder)
    gguf = {"gguf_file": where.name} if where.kind == "gguf" else {}
    with _one_line(checkpoint, f"cannot read {where.folder}/{where.name or 'config.json'}"):
        return transformers.AutoConfig.from_pretrained(where.folder, trust_remote_code=trusted, **gguf)


def _refuse_code_elsewhere(checkpoint: Checkpoint, folder: Path) -> None:
    """Refuse code that a folder names and does not hold: it would run unhashed."""
    for name in ("config.json", "tokenizer_config.json"):
        try:
            said = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):  # none, or unreadable: transformers refuses that
            continue
        named = (said.get("auto_map") or {}) if isinstance(said, dict) else {}
        for reference in _flat(named.values() if isinstance(named, dict) else named):
            if "--" in reference or "/" in reference:
                raise ModelError(
                    f"the code of {checkpoint.name} does not lie beside its {name}",
                    got=reference,
                    todo="copy it there and name it so, that it can be hashed",
                )


def _flat(references: Any) -> Iterator[str]:
    """Class references of an `auto_map`: each a string, or a list of strings and nulls."""
    for reference in references:
        yield from [reference] if isinstance(reference, str) else filter(None, reference or ())


@contextlib.contextmanager
def _one_line(checkpoint: Checkpoint, what: str) -> Iterator[None]:
    """Whatever transformers raises while reading a checkpoint, as a ModelError of one line."""
    try:
        yield
    except LastcallError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if "trust_remote_code=True" in str(error) and not checkpoint.trust_remote_code:
            raise ModelError(
                what,
                got="a checkpoint that needs the code it comes with, which can do whatever you can",
                todo="read that code and, if you trust it, set trust_remote_code (--trust-remote-code)",
            ) from None
        raise ModelError(
            what, got=reason[0], todo="check that the files are whole and of a known kind"
        ) from error
