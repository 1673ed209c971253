"""Other optional operations than the attention: each against the stock model run whole, in every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lastcall.errors import ModelError
from lastcall.measure.anatomy import Site, locate
from lastcall.measure.branches import Branches
from lastcall.operation import Operation
from tests.tiny import HORIZON, ROWS, TINY, VOCABULARY, build

NAMES = [*TINY, *ROWS]
HEADS = (1, 2)


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, HORIZON), generator=torch.Generator().manual_seed(seed))


def hooked(site: Site, kind: str, ids: Tensor) -> Tensor:
    """Final states of the stock model run whole, the operation computed and its output then thrown away."""

    def nothing(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * 0, *output[1:]) if isinstance(output, tuple) else output * 0

    def unchanged(_: Any, given: Any, named: Any, output: Any) -> Any:
        hidden = given[0] if given else named["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def headless(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        width = given[0].shape[-1] // site.heads
        kept = given[0].clone()
        for head in HEADS:
            kept[..., head * width : (head + 1) * width] = 0
        return (kept, *given[1:])

    if kind == "ffn":
        hook = site.ffn.register_forward_hook(nothing)
    elif kind == "block":
        hook = site.block.register_forward_hook(unchanged, with_kwargs=True)
    else:
        hook = site.projection.register_forward_pre_hook(headless)
    states: list[Tensor] = []
    seen = site.norm.register_forward_hook(lambda _, __, output: states.append(output))
    try:
        site.model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
        seen.remove()
    return states[-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("operation", ["ffn", "block", "heads:1,2"])
@torch.inference_mode()
def test_the_bypass_is_the_whole_model_with_the_output_thrown_away(name: str, operation: str) -> None:
    site, ids = locate(build(name).eval()), tokens()
    branches = Branches(site, ids)
    found = branches.bypass(Operation.parse(operation))
    torch.testing.assert_close(found, hooked(site, operation.partition(":")[0], ids), atol=2e-5, rtol=1e-5)
    assert (found - branches.full()).abs().max() > 1e-3
    torch.testing.assert_close(branches.full(), Branches(site, ids).full(), atol=0, rtol=0)


@pytest.mark.parametrize("operation", ["ffn", "block", "attention"])
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "mixtral", "gpt2"])
@torch.inference_mode()
def test_a_bypassed_module_does_not_run(name: str, operation: str) -> None:
    site, ran = locate(build(name).eval()), []
    module = {"ffn": site.ffn, "block": site.block, "attention": site.attention}[operation]
    inner = [m for m in module.modules() if m is not module]
    hooks = [m.register_forward_hook(lambda m, *_: ran.append(type(m).__name__)) for m in inner]
    branches = Branches(site, tokens())
    ran.clear()
    branches.bypass(Operation.parse(operation))
    assert ran == []
    branches.full()
    assert ran
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_window_with_sinks_is_the_model_that_cannot_see_the_rest(name: str) -> None:
    """At each position: the literal loop over which keys it may see, by moving every other token's state."""
    site, ids = locate(build(name).eval()), tokens()
    window, sinks = 5, 3
    branches = Branches(site, ids)
    found = branches.bypass(Operation.parse(f"window:{window}+{sinks}"))
    whole = branches.bypass(Operation.parse(f"window:{HORIZON}"))
    torch.testing.assert_close(whole, branches.full(), atol=2e-5, rtol=1e-5)
    at = HORIZON - 1
    hidden = branches.incoming.clone()
    unseen = [t for t in range(at) if at - t >= window and t >= sinks]
    hidden[:, unseen] = torch.randn(hidden[:, unseen].shape, generator=torch.Generator().manual_seed(1))
    call = branches._call
    object.__setattr__(branches, "_call", type(call)(hidden, call.arguments))
    moved = branches.bypass(Operation.parse(f"window:{window}+{sinks}"))
    if name not in ("falcon_h1",):  # its block has a state space beside the attention, which sees everything
        torch.testing.assert_close(moved[:, at], found[:, at], atol=1e-5, rtol=1e-5)
        hidden[:, 0] = hidden[:, at]  # a sink: seen, unless the model's own window hides it
        if not name.startswith(("mistral", "gemma3-sliding", "gemma2", "olmo3", "cohere2")):
            seen = branches.bypass(Operation.parse(f"window:{window}+{sinks}"))
            assert (seen[:, at] - found[:, at]).abs().max() > 1e-4


def test_a_head_that_is_not_there_is_refused() -> None:
    site = locate(build("llama").eval())
    with pytest.raises(
        ModelError, match="the final attention has no head 4: got heads 0 to 3; mend the study"
    ):
        Branches(site, tokens()).bypass(Operation.parse("heads:1,4"))


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(1, 999), st.integers(1, 99))
def test_names_are_read_back(heads: set[int], window: int, sinks: int) -> None:
    assert Operation.parse("heads:" + ",".join(map(str, sorted(heads)))).heads == tuple(sorted(heads))
    assert Operation.parse(f"window:{window}") == Operation("window", window=window)
    assert Operation.parse(f"window:{window}+{sinks}") == Operation("window", window=window, sinks=sinks)


@pytest.mark.parametrize(
    "text",
    ["", "mlp", "attention:1", "heads", "heads:2,1", "heads:1,1", "window:0", "window:3+0", "window:+4"],
)
def test_what_is_no_operation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no such operation|once each, in rising order"):
        Operation.parse(text)
