"""Branches against the literal twin, the stock model and themselves, on every architecture and backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lastcall.measure.branches import Branches
from lastcall.measure.equivalence import full_is_stock, stock_loss
from lastcall.measure.loading import Loaded
from tests.reference import measure as twin
from tests.tiny import HORIZON, TINY, WINDOW, token_blocks

Tiny = Callable[..., Loaded]
EVERY = [(name, backend) for name in TINY for backend in ("sdpa", "eager")]
GEMMA = [name for name in TINY if name.startswith("gemma")]
TOKENS = token_blocks()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def branches(loaded: Loaded, tokens: torch.Tensor = TOKENS) -> Branches:
    return Branches(loaded.site, tokens[:, :-1])


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


class _Counted(TorchFunctionMode):
    """Counts the calls of torch functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


# --- against the twin and the stock model ---------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_every_branch_is_the_twins(name: str, backend: str, tiny: Tiny) -> None:
    loaded = tiny(name, backend)
    ours, model = branches(loaded), loaded.site.model
    mine = {twin.FULL: ours.full(), 0: ours.bypass(), 3: ours.local(3), 20: ours.local(20)}
    for i, block in enumerate(TOKENS):
        h = twin.incoming(model, block[:-1])
        assert apart(ours.incoming[i], h) == 0
        for branch, state in mine.items():
            assert apart(state[i], twin.state(model, h, branch)) < 2e-5


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_the_full_branch_is_the_stock_model(name: str, backend: str, tiny: Tiny) -> None:
    loaded = tiny(name, backend)
    check = full_is_stock(loaded.site, TOKENS, "float32")
    assert check.passed
    assert 0 < check.allowed <= 1e-5
    logits = loaded.site.model(input_ids=TOKENS[:, :-1], use_cache=False).logits
    assert torch.equal(loaded.site.model.lm_head(branches(loaded).full()), logits) or "softcap" in name


@pytest.mark.parametrize("name", TINY)
def test_the_stock_loss_is_the_twins(name: str, tiny: Tiny) -> None:
    loaded = tiny(name)
    want = torch.cat([twin.measure(loaded.site.model, block, ())["loss_full"] for block in TOKENS])
    assert apart(stock_loss(loaded.site, TOKENS), want) < 1e-5


@pytest.mark.parametrize("name", TINY)
def test_attention_matters_in_these_models(name: str, tiny: Tiny) -> None:
    ours = branches(tiny(name))
    assert (ours.full() - ours.bypass()).norm() > 0.03 * ours.full().norm()
    assert (ours.full() - ours.local(3)).norm() > 0.01 * ours.full().norm()


# --- bypass ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_the_bypassed_attention_executes_nothing(name: str, backend: str, tiny: Tiny) -> None:
    loaded = tiny(name, backend)
    ours, ran = branches(loaded), []
    inside = [m for m in loaded.site.attention.modules() if m is not loaded.site.attention]
    hooks = [m.register_forward_hook(lambda *_: ran.append(1)) for m in inside]
    try:
        with _Counted() as bypass:
            ours.bypass()
        assert ran == []
        with _Counted() as full:
            ours.full()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(ran) == len(inside) >= 4
    kernel = "scaled_dot_product_attention" if backend == "sdpa" else "softmax"
    assert (bypass.calls.get(kernel, 0), full.calls[kernel]) == (0, 1)


@pytest.mark.parametrize("name", TINY)
def test_the_bypass_adds_exactly_zero_to_the_residual(name: str, tiny: Tiny) -> None:
    loaded, seen = tiny(name), []
    norm = "pre_feedforward_layernorm" if name in GEMMA else "post_attention_layernorm"
    ours = branches(loaded)
    hook = getattr(loaded.site.block, norm).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    try:
        ours.bypass()
        ours.full()
    finally:
        hook.remove()
    assert torch.equal(seen[0], ours.incoming)
    assert not torch.equal(seen[1], ours.incoming)


# --- local ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_a_window_as_long_as_the_block_is_the_full_branch(name: str, backend: str, tiny: Tiny) -> None:
    ours = branches(tiny(name, backend))
    reach = WINDOW if name == "gemma3-sliding" else HORIZON
    for window in (HORIZON, HORIZON + 1, 10 * HORIZON, reach):
        assert apart(ours.local(window), ours.full()) < 2e-5
    assert apart(ours.local(reach - 1)[:, : reach - 1], ours.full()[:, : reach - 1]) < 2e-5
    assert apart(ours.local(reach - 1)[:, reach - 1], ours.full()[:, reach - 1]) > 1e-3


@pytest.mark.parametrize(("name", "backend"), EVERY)
def test_a_window_of_one_sees_itself_only(name: str, backend: str, tiny: Tiny) -> None:
    loaded = tiny(name, backend)
    alone = branches(loaded).local(1)[0]
    h = twin.incoming(loaded.site.model, TOKENS[0, :-1])
    for t in (0, 1, 17, HORIZON - 1):  # the block run on the one position by itself
        assert apart(alone[t], twin.state(loaded.site.model, h[t : t + 1], twin.FULL)[0]) < 2e-5


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_sliding_block_is_narrowed_and_never_widened(backend: str, tiny: Tiny) -> None:
    ours = branches(tiny("gemma3-sliding", backend))
    assert apart(ours.local(WINDOW + 5), ours.full()) < 2e-5
    assert apart(ours.local(WINDOW - 1), ours.full()) > 1e-3


@pytest.mark.parametrize("name", TINY)
def test_branches_do_not_depend_on_their_order_nor_on_other_blocks(name: str, tiny: Tiny) -> None:
    loaded = tiny(name)
    first, second = branches(loaded), branches(loaded)
    want = (first.full(), first.bypass(), first.local(3))
    got = (second.local(3), second.bypass(), second.full())
    assert all(torch.equal(a, b) for a, b in zip(want, reversed(got), strict=True))
    alone = branches(loaded, TOKENS[1:])
    assert apart(alone.full()[0], want[0][1]) < 2e-5
    assert apart(alone.bypass()[0], want[1][1]) < 2e-5


def test_the_trunk_runs_once_and_the_final_block_once_a_branch(tiny: Tiny) -> None:
    loaded, ran = tiny("llama"), []
    blocks = loaded.site.model.model.layers
    hooks = [block.mlp.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, block in enumerate(blocks)]
    try:
        ours = branches(loaded)
        assert ran == [0, 1, 2]
        ours.full(), ours.bypass(), ours.local(3)
    finally:
        for hook in hooks:
            hook.remove()
    assert ran == [0, 1, 2, 3, 3, 3]
