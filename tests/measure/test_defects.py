"""Defects reported of models and their kernels: each is broken on purpose, and its row sees it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
from torch import nn

from lastcall.measure.anatomy import Site
from lastcall.measure.branches import Branches
from lastcall.measure.corpus import Blocked, cut_blocks, load_corpus
from lastcall.measure.engine import measure_batch
from lastcall.measure.equivalence import Check, check_all
from lastcall.measure.loading import Loaded, load
from lastcall.study import Books
from tests.tiny import BOS, HORIZON, build, checkpoint, save, study, token_blocks, with_tokenizer

Tiny = Callable[..., Loaded]
Folder = Callable[[str], Path]
TOKENS = token_blocks()
CACHED = "cached continuation = whole (max |Δ| of loss)"
BATCH = "alone = in a batch (max |Δ| of loss)"
BACKEND = "torch's choice of attention = its plain one (max |Δ| of loss)"
ROTARY = "final block's rotary positions not as its interval says"


def rows(site: Site) -> dict[str, Check]:
    return {check.name: check for check in check_all(site, TOKENS, "float32")}


def failed(site: Site) -> list[str]:
    return [name for name, check in rows(site).items() if not check.passed]


# --- a cached continuation ------------------------------------------------------------------------------


@pytest.mark.parametrize("longer_than", [0, 1])
def test_a_recurrent_state_dropped_on_a_continuation_is_found(
    longer_than: int, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delta net's state goes missing where several tokens continue a cache, not where one does."""
    site, own = tiny("qwen3_5").site, qwen3_5.torch_chunk_gated_delta_rule
    assert failed(site) == []
    seen: list[int] = []

    @functools.wraps(own)
    def forgetful(query: torch.Tensor, *given: Any, **named: Any) -> Any:
        if named["initial_state"] is not None and query.shape[1] > longer_than:
            seen.append(query.shape[1])
            named["initial_state"] = None
        return own(query, *given, **named)

    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", forgetful)
    assert failed(site) == [CACHED]
    assert min(seen) > 1  # a single token takes the recurrent rule, which is whole


# --- attention backends ---------------------------------------------------------------------------------


def test_an_attention_backend_that_disagrees_is_found(tiny: Tiny) -> None:
    own = nn.functional.scaled_dot_product_attention

    class Wrong(torch.overrides.TorchFunctionMode):
        """A fast backend that is a little off; the plain one is right."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            fast = func is own and torch.backends.cuda.flash_sdp_enabled()
            return output + 1e-3 * output.flip(-1) if fast else output

    for name in ("llama", "qwen3_5", "gemma3-sliding"):
        site = tiny(name).site
        assert rows(site)[BACKEND].found > 0  # two backends ran
        with Wrong():
            assert failed(site) == [BACKEND]


def test_where_nothing_calls_torchs_attention_there_is_no_such_row(tiny: Tiny) -> None:
    assert BACKEND in rows(tiny("llama").site)
    assert BACKEND not in rows(tiny("llama", "eager").site)


# --- the batch's shape ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["mlp", "self_attn"])
def test_a_result_that_goes_by_the_batchs_shape_is_found(inside: str, tiny_folder: Folder) -> None:
    site = load(checkpoint("tiny", tiny_folder("llama"))).site
    assert rows(site)[BATCH].passed

    def leaking(_: nn.Module, __: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        mixed = tensor + 1e-3 * tensor.mean(0, keepdim=True) * (len(tensor) > 2)
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

    site.model.get_submodule(f"model.layers.1.{inside}").register_forward_hook(leaking)
    assert failed(site) == [BATCH]


# --- the beginning-of-text token ------------------------------------------------------------------------


def cut(loaded: Loaded, folder: Path) -> Blocked:
    """Blocks of three books of words, by the loaded checkpoint's own tokenizer."""
    for i, name in enumerate("abc"):
        words = " ".join(f"w{(7 * i + 3 * n) % 299}" for n in range(200))
        (folder / f"{name}.txt").write_text(words, "utf-8")
    lists = {"fit": ["a"], "calibration": ["b"], "test": ["c"]}
    books = Books.model_validate({"source": "folder", "path": folder, "lists": lists})
    return cut_blocks(load_corpus(books), loaded.tokenizer.tokenize, study().blocks, "refuse")


@pytest.mark.parametrize("bos", ["none", "bos"])
def test_a_tokenizer_that_begins_a_text_of_its_own_accord_begins_no_block_twice(
    bos: str, tmp_path: Path
) -> None:
    folder = with_tokenizer(save("llama", tmp_path / "tiny"))
    loaded = load(checkpoint("tiny", folder, tokenizer=None, bos=bos))
    (tmp_path / "books").mkdir()
    blocked = cut(loaded, tmp_path / "books")
    assert all((book.tokens != BOS).all() for book in blocked.books)
    given: list[torch.Tensor] = []
    embedding = loaded.site.model.get_submodule("model.embed_tokens")
    embedding.register_forward_pre_hook(lambda _, ids: given.append(ids[0].clone()))
    measured = measure_batch(loaded, study(), blocked.books)
    (ids,) = given
    begun = int(bos == "bos")
    assert ids.shape == (6, HORIZON + begun)
    assert (ids == BOS).sum(1).tolist() == [begun] * 6
    assert (ids[:, 0] == BOS).tolist() == [bool(begun)] * 6
    assert all(len(one.columns["token"]) == 2 * HORIZON for one in measured)


# --- SmolLM3's blocks without rotary positions ----------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "interval", "flags", "right"),
    [
        (4, 4, [1, 1, 1, 0], True),
        (4, 4, [0, 0, 0, 1], False),
        (3, 4, [1, 1, 1], True),
        (3, 4, [0, 0, 0], False),
        (3, 3, [1, 1, 0], True),
        (4, 4, None, True),
    ],
)
def test_flags_of_rotary_positions_are_held_to_the_interval(
    blocks: int,
    interval: int,
    flags: list[int] | None,
    right: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    values = {"no_rope_layers": flags, "no_rope_layer_interval": interval, "num_hidden_layers": blocks}
    monkeypatch.setitem(build.__globals__["TINY"], "smollm3", ("smollm3", values))
    site = load(checkpoint("tiny", save("smollm3", tmp_path))).site
    row = rows(site)[ROTARY]
    assert (row.found, row.passed) == (float(not right), right)
    assert failed(site) == ([] if right else [ROTARY])


def test_flags_are_told_by_what_runs_not_by_what_they_say(tiny_folder: Folder) -> None:
    site = load(checkpoint("tiny", tiny_folder("smollm3"))).site
    site.attention.use_rope = 1  # the configuration still says 0
    assert ROTARY in failed(site)


def test_other_architectures_have_no_such_row(tiny: Tiny) -> None:
    assert ROTARY not in rows(tiny("llama").site)


# --- Qwen3.5's gate -------------------------------------------------------------------------------------


def test_the_bypass_drops_the_attention_with_its_gate(tiny_folder: Folder) -> None:
    site = load(checkpoint("tiny", tiny_folder("qwen3_5"))).site
    assert "sigmoid" in inspect.getsource(type(site.attention).forward)
    projection: Any = site.attention.q_proj  # queries and gate, a head after another
    with torch.inference_mode():
        before = Branches(site, TOKENS[:, :-1])
        full, bypass = before.full(), before.bypass()
        heads = projection.weight.view(4, 2, 32, -1)
        heads[:, 1].neg_()  # the gate alone
        after = Branches(site, TOKENS[:, :-1])
        assert torch.equal(after.bypass(), bypass)
        assert (after.full() - full).abs().max() > 0.05
