"""Which implementation runs where transformers has several of one function: a kernel package's, or torch's.

transformers chooses when a modelling file is imported: the package's function where it can be imported, its
own in torch otherwise. The choice is read from the functions that the loaded modules call.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, final

from torch import nn

DISTRIBUTION = {
    "causal_conv1d": "causal-conv1d",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}
"""Import name of a kernel package to the name it is installed by."""

_TRAINING_ONLY = "split_conv1d_scan"
"""Part of the name of Mamba 2's fused pass, which runs in training alone."""


@final
@dataclass(frozen=True, order=True)
class Kernel:
    """A function that a package has a kernel of."""

    name: str
    package: str
    """Import name of the package."""
    runs: bool
    """Whether the package's kernel runs; transformers' own function in torch does otherwise."""


def kernels_of(model: nn.Module) -> list[Kernel]:
    """The functions of `model` that a package has a kernel of, in name order; empty where there are none."""
    found: set[Kernel] = set()
    for kind in {type(module) for module in model.modules()}:
        namespace = vars(sys.modules[kind.__module__])
        for name in _called(kind) & namespace.keys():
            choice = _choice(namespace[name])
            if choice is not None and _TRAINING_ONLY not in name:
                runs = choice["implementation"] is not choice["torch_function"]
                found.add(Kernel(name.removeprefix("torch_"), choice["package"], runs))
    return sorted(found)


def describe(kernels: Sequence[Kernel]) -> str:
    """The fact "kernels": each function and what runs it; "torch" where there is nothing to choose."""
    runners = (f"{kernel.name}: {_version(kernel.package) if kernel.runs else 'torch'}" for kernel in kernels)
    return ", ".join(runners) or "torch"


def slow(kernels: Sequence[Kernel]) -> str | None:
    """One sentence where functions run in torch for want of a package, else None."""
    missing = [kernel for kernel in kernels if not kernel.runs]
    if not missing:
        return None
    packages = sorted({DISTRIBUTION.get(kernel.package, kernel.package) for kernel in missing})
    names = ", ".join(kernel.name for kernel in missing)
    return f"{names} run in torch, much slower than their kernels; pip install {' '.join(packages)}"


def hush() -> None:
    """Keep transformers from printing its notice, several lines a function, of each fallback to torch."""
    logging.getLogger("transformers.integrations.hub_kernels").addFilter(_NOTICES)


@final
class _NoFallbackNotice(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "is falling back to its reference PyTorch implementation" not in record.getMessage()


_NOTICES = _NoFallbackNotice()


def _called(kind: type[nn.Module]) -> set[str]:
    """Global names that the methods of a class mention."""
    methods = [inspect.unwrap(method) for method in vars(kind).values() if inspect.isfunction(method)]
    return {name for method in methods for name in _names(method.__code__)}


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)


def _choice(candidate: Any) -> dict[str, Any] | None:
    """What transformers' decorator chose between: the variables its wrapper closes over, or None where
    `candidate` is no such function. The package `kernels`, where installed, makes a module of the wrapper."""
    function = type(candidate).forward if isinstance(candidate, nn.Module) else candidate
    if not inspect.isfunction(function):
        return None
    inside: dict[str, Any] = dict(inspect.getclosurevars(function).nonlocals)
    if {"implementation", "torch_function", "package"} <= inside.keys():
        return inside
    return _choice(inside["func"]) if inspect.isfunction(inside.get("func")) else None


def _version(package: str) -> str:
    """The package by the name it is installed by, and its version where it has one."""
    name = DISTRIBUTION.get(package, package)
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return name
