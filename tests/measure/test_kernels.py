"""Which kernels run is read from the functions that run; where one does not on CUDA, one sentence says so."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.utils import logging as their_logging

import lastcall.measure.checking as checking
from lastcall.measure.equivalence import stock_loss
from lastcall.measure.kernels import Kernel, describe, hush, kernels_of, slow
from lastcall.measure.loading import Loaded, load
from lastcall.progress import Reporter
from tests.tiny import checkpoint, token_blocks

Tiny = Callable[..., Loaded]
TOKENS = token_blocks(1)
PACKAGE = """
import torch

def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None):
    length, width = hidden_states.shape[-1], weight.shape[-1]
    rows = torch.nn.functional.pad(hidden_states, (width - 1, 0)).unfold(-1, width, 1)
    out = (rows * weight[:, None]).sum(-1)
    return torch.nn.functional.silu(out) if activation == "silu" else out
"""
"""A causal convolution under the name of the package that has its kernel, in torch so that a CPU runs it."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The delta net's convolution as transformers decorates it where causal_conv1d can be imported."""
    (tmp_path / "causal_conv1d.py").write_text(PACKAGE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = qwen3_5.causal_conv1d_fn.__wrapped__
    decorated = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")(own)
    monkeypatch.setattr(qwen3_5, "causal_conv1d_fn", decorated)
    yield decorated
    sys.modules.pop("causal_conv1d", None)


TORCH = {
    "qwen3_5": (
        "causal_conv1d_fn: torch, causal_conv1d_update: torch, chunk_gated_delta_rule: torch, "
        "recurrent_gated_delta_rule: torch"
    ),
    "lfm2": "causal_conv1d_fn: torch, causal_conv1d_update: torch",
    "falcon_h1": (
        "causal_conv1d_fn: torch, causal_conv1d_update: torch, mamba2_chunk_scan: torch, "
        "mamba2_selective_state_update: torch"
    ),
    "llama": "torch",
}


@pytest.mark.parametrize("name", TORCH)
def test_without_kernel_packages_every_function_runs_in_torch(name: str, tiny: Tiny) -> None:
    loaded = tiny(name)
    kernels = kernels_of(loaded.site.model)
    if not any(kernel.runs for kernel in kernels):  # a machine may have the packages
        assert loaded.facts["kernels"] == TORCH[name]
    assert loaded.facts["kernels"] == describe(kernels)
    assert [k.name for k in kernels] == [
        part.split(":")[0] for part in TORCH[name].split(", ") if ":" in part
    ]
    assert loaded.warnings == ()  # a CPU cannot run them


def test_a_function_of_a_package_is_told_from_torchs(
    installed: Any, tiny: Tiny, tiny_folder: Callable[[str], Path]
) -> None:
    loaded = load(checkpoint("tiny", tiny_folder("qwen3_5")))
    found = {kernel.name: kernel.runs for kernel in kernels_of(loaded.site.model)}
    assert found.pop("causal_conv1d_fn") is True
    assert loaded.facts["kernels"].startswith("causal_conv1d_fn: causal-conv1d")
    called = []
    package = sys.modules["causal_conv1d"]

    def counted(code: Any, event: str, _: Any) -> None:
        called.append(event == "call" and code.f_code is package.causal_conv1d_fn.__code__)

    sys.setprofile(counted)
    try:
        with torch.inference_mode():
            loss = stock_loss(loaded.site, TOKENS)
    finally:
        sys.setprofile(None)
    assert sum(called) == 2  # both delta nets ran what the fact says
    assert loss.isfinite().all()


def test_the_sentence_names_the_functions_and_the_packages() -> None:
    kernels = [
        Kernel("causal_conv1d_fn", "causal_conv1d", True),
        Kernel("chunk_gated_delta_rule", "fla", False),
        Kernel("recurrent_gated_delta_rule", "fla", False),
    ]
    assert slow(kernels) == (
        "chunk_gated_delta_rule, recurrent_gated_delta_rule run in torch, much slower than their kernels; "
        "pip install flash-linear-attention"
    )
    assert slow(kernels[:1]) is None
    assert slow([]) is None
    assert describe([Kernel("any", "pytest", True)]) == f"any: pytest {pytest.__version__}"


def test_transformers_own_notices_are_kept_back_and_nothing_else(tiny: Tiny) -> None:
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    site, said = tiny("lfm2").site, []
    if any(kernel.runs for kernel in kernels_of(site.model)):
        pytest.skip("the kernel package is installed here: there is no notice")

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, filters, before = Listener(), list(logger.filters), their_logging.get_verbosity()
    logger.addHandler(listener)
    their_logging.set_verbosity_warning()
    try:
        for quiet in (False, True):
            logger.filters = []
            their_logging.warning_once.cache_clear()
            if quiet:
                hush()
                hush()
                assert len(logger.filters) == 1
            stock_loss(site, TOKENS)
            logger.warning("something else")
            assert said[-1] == "something else"
            assert len(said) == (1 if quiet else 2), said
            said.clear()
    finally:
        logger.removeHandler(listener)
        logger.filters = filters
        their_logging.set_verbosity(before)


def test_checking_says_a_warning_once(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = dataclasses.replace(tiny("llama"), warnings=("tiny: slow",))
    monkeypatch.setattr(checking, "load", lambda *_: warned)
    said: list[str] = []

    class Listener(Reporter):
        def say(self, message: str) -> None:
            said.append(message)

        @contextlib.contextmanager
        def task(self, description: str, total: int) -> Iterator[Callable[[], None]]:
            yield lambda: None

    checking.check_checkpoint(warned.checkpoint, 0, Listener())
    assert said == ["Warning: tiny: slow"]


@pytest.mark.gpu
def test_on_a_gpu_a_fallback_is_one_sentence(tiny_folder: Callable[[str], Path]) -> None:
    loaded = load(checkpoint("tiny", tiny_folder("falcon_h1"), device="cuda"))
    missing = [kernel.name for kernel in kernels_of(loaded.site.model) if not kernel.runs]
    assert len(loaded.warnings) == (1 if missing else 0)
    for warning in loaded.warnings:
        assert warning.startswith(f"tiny: {', '.join(missing)} run in torch")
        assert "\n" not in warning
