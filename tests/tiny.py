"""Tiny random models, at least one a row of the architecture table, in which the final attention matters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from lastcall.measure.corpus import BookBlocks
from lastcall.study import Blocks, Checkpoint, Measure, Study

VOCABULARY = 331
"""Prime, over 256: bytes are ids, and no tile divides it."""
HORIZON = 40
"""Longer than the sliding window, of more than one chunk's remainder in the delta net."""
WINDOW = 9
"""Sliding window of the Gemma models."""
BOS = 300
"""Id of the beginning-of-text token, outside the bytes."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_QWEN: dict[str, Any] = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "num_hidden_layers": 3,
}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "qwen3_5": ("qwen3_5_text", {**_QWEN, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]}),
    "gemma3-sliding": ("gemma3_text", {**_GEMMA, "layer_types": [_SLIDING, _FULL, _SLIDING]}),
    "gemma3-full": ("gemma3_text", {**_GEMMA, "layer_types": [_SLIDING, _SLIDING, _FULL]}),
    "gemma3-softcap": (
        "gemma3_text",
        {**_GEMMA, "layer_types": [_SLIDING, _SLIDING, _FULL], "final_logit_softcapping": 2.0},
    ),
}
"""Name to transformers' model type and configuration."""
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
_SCALED = {"logits_scaling": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "logit_scale": 0.25}),
    "falcon_h1": ("falcon_h1", {**_MAMBA, "lm_head_multiplier": 0.5, "attention_out_multiplier": 0.7}),
    "gemma2": ("gemma2", {**_GEMMA, "layer_types": [_FULL, _FULL, _SLIDING]}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "granite": ("granite", _SCALED),
    "lfm2": ("lfm2", {"layer_types": ["conv", _FULL, "conv", _FULL]}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", _MOE),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW}),
    "olmoe": ("olmoe", _MOE),
    "phi3": ("phi3", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_QWEN, **_MOE, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "qwen3_next": ("qwen3_next", {**_QWEN, **_MOE, "layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]}),
    "stablelm": ("stablelm", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
}
"""Rows of the table that have no hand-written twin: held to plain transformers run twice."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5-linear-end": ("qwen3_5_text", {**_QWEN, "layer_types": [_LINEAR, _FULL, _FULL, _LINEAR]}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 1}),
}
"""What is refused: a final block without attention, architectures without a row."""


def build(name: str, seed: int = 0) -> Any:
    """The random model `name`; norms and biases are drawn too, so that none is an identity."""
    model_type, values = {**TINY, **ROWS, **OTHERS}[name]
    own_names = {n: _SIZES[n] for n in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")}
    sizes = own_names if model_type in ("gpt2", "mamba") else _SIZES
    config = transformers.AutoConfig.for_model(model_type, **{**sizes, **values})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
    return model


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """Save the random model `name` into `folder`, without a tokenizer."""
    build(name, seed).save_pretrained(folder)
    return folder


def checkpoint(name: str, model: Path | str, **values: Any) -> Checkpoint:
    """A checkpoint whose tokens are bytes, on the CPU, unless `values` say otherwise."""
    return Checkpoint(name=name, model=str(model), **{"tokenizer": "bytes", "device": "cpu", **values})


def with_tokenizer(folder: Path, *, bos: bool = True) -> Path:
    """Save a word-level tokenizer beside the model, with a token it would put first of its own accord."""
    vocabulary = {f"w{i}": i for i in range(BOS)} | {"<bos>": BOS}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    special = {"bos_token": "<bos>"} if bos else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def token_blocks(blocks: int = 2, length: int = HORIZON + 1, seed: int = 0) -> torch.Tensor:
    """Random token ids [blocks, length], bytes, so that a bytes tokenizer could have made them."""
    return torch.randint(256, (blocks, length), generator=torch.Generator().manual_seed(seed))


def book(name: str, tokens: torch.Tensor) -> BookBlocks:
    """A book whose blocks are `tokens` [blocks, horizon + 1], one after the other."""
    count, length = tokens.shape
    starts = tuple(7 + i * length for i in range(count))
    return BookBlocks(name, "fit", 7 + count * length, starts, tokens.numpy().astype(np.int32))


def study(
    checkpoints: Sequence[Checkpoint] = (),
    *,
    windows: Sequence[int] = (3,),
    horizon: int = HORIZON,
    context: int = 5,
    batch_books: int = 4,
) -> Study:
    """A study of blocks of `horizon` predictions and these local windows."""
    return Study.model_validate(
        {
            "name": "tiny",
            "books": {"source": "folder", "path": ".", "counts": {"fit": 1, "calibration": 1, "test": 1}},
            "checkpoints": list(checkpoints) or [{"name": "tiny", "model": "random:tiny"}],
            "blocks": Blocks(horizon=horizon, context=context),
            "measure": Measure(local_windows=tuple(windows), batch_books=batch_books),
        }
    )


_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
IMAGE_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {"vision_config": {**_VISION, "num_position_embeddings": 16}}),
    "qwen3_5_moe": ("qwen3_5_moe", {"vision_config": {**_VISION, "num_position_embeddings": 16}}),
    "gemma3-full": ("gemma3", {"vision_config": _SIGLIP, "mm_tokens_per_image": 4}),
}
"""Text model to the image-and-text model around it: transformers' model type and configuration."""


def build_image_text(name: str, text: Any) -> Any:
    """The image-and-text model around `text`, the random model `name`, with the same text weights."""
    model_type, values = IMAGE_TEXT[name]
    config = transformers.AutoConfig.for_model(model_type, text_config=text.config.to_dict(), **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return whole
