"""The architecture table: where a decoder keeps its blocks, attention, final norm and head.

Support grows by rows. An architecture without a row is refused by name, never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from lastcall.errors import ModelError, UnknownArchitectureError


@final
@dataclass(frozen=True)
class Anatomy:
    """One architecture: module paths from the causal-LM module, and within a block."""

    model_type: str
    """transformers' `config.model_type` of the text decoder."""
    trunk: str = "model"
    """The decoder: embedding, blocks, final norm."""
    blocks: str = "model.layers"
    norm: str = "model.norm"
    """Final norm."""
    attention: str = "self_attn"
    """Within a block; a block of another kind (a delta net) does not have it."""
    ffn: str = "mlp"
    """Within a block."""
    projection: str = "o_proj"
    """Within the attention: its output projection, which reads every head's output side by side."""
    softcap: str | None = None
    """Config key of the final logits' soft cap c: c · tanh(logits / c); a null value means none."""
    scale: str | None = None
    """Config key of a factor the logits are multiplied by."""
    divisor: str | None = None
    """Config key of a number the logits are divided by."""


TABLE = {
    row.model_type: row
    for row in (
        Anatomy("cohere2", scale="logit_scale"),
        Anatomy("falcon_h1", norm="model.final_layernorm", ffn="feed_forward", scale="lm_head_multiplier"),
        Anatomy("gemma2", softcap="final_logit_softcapping"),
        Anatomy("gemma3_text", softcap="final_logit_softcapping"),
        Anatomy("gpt2", "transformer", "transformer.h", "transformer.ln_f", "attn", projection="c_proj"),
        Anatomy(
            "gpt_neox",
            "gpt_neox",
            "gpt_neox.layers",
            "gpt_neox.final_layer_norm",
            "attention",
            projection="dense",
        ),
        Anatomy("granite", divisor="logits_scaling"),
        Anatomy("lfm2", norm="model.embedding_norm", ffn="feed_forward", projection="out_proj"),
        Anatomy("llama"),
        Anatomy("mistral"),
        Anatomy("mixtral"),
        Anatomy("olmo2"),
        Anatomy("olmo3"),
        Anatomy("olmoe"),
        Anatomy("phi3"),
        Anatomy("qwen2"),
        Anatomy("qwen3"),
        Anatomy("qwen3_5_moe_text"),
        Anatomy("qwen3_5_text"),
        Anatomy("qwen3_moe"),
        Anatomy("qwen3_next"),
        Anatomy("smollm3"),
        Anatomy("stablelm"),
    )
}

FULL_SIZE: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "tie_word_embeddings": True,
        },
    ),
    "smollm3-3b": (
        "smollm3",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    "qwen3.5-4b": (
        "qwen3_5_text",
        {
            "vocab_size": 248320,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-1b": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
}
"""Full-size configurations for `random:NAME`, from the published config.json of each checkpoint."""


@final
@dataclass(frozen=True)
class Head:
    """The vocabulary projection, callable a slice of the vocabulary at a time."""

    weight: torch.Tensor
    """[vocabulary, d]."""
    bias: torch.Tensor | None
    softcap: float | None = None
    scale: float | None = None
    divisor: float | None = None

    @property
    def vocabulary(self) -> int:
        return int(self.weight.shape[0])

    def logits(self, states: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Logits [rows, last − first] of `states` [rows, d], as the model computes them, in its own type."""
        bias = None if self.bias is None else self.bias[first:last]
        logits = nn.functional.linear(states, self.weight[first:last], bias)
        if self.scale is not None:
            logits = logits * self.scale
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@final
@dataclass(frozen=True)
class Site:
    """The modules of one loaded model that the intervention needs."""

    model: nn.Module
    """The causal language model, whole."""
    trunk: nn.Module
    block: nn.Module
    """The final block."""
    attention: nn.Module
    """Its self-attention."""
    ffn: nn.Module
    projection: nn.Module
    """The attention's output projection; reads [.., heads · head width]."""
    heads: int
    """Query heads."""
    norm: nn.Module
    head: Head
    context: int
    """Most positions the model takes."""

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def row_of(config: Any) -> Anatomy:
    """The table's row for a text model's configuration; UnknownArchitectureError where there is none."""
    row = TABLE.get(config.model_type)
    if row is None:
        raise UnknownArchitectureError(
            "this architecture is not in the table",
            got=f'model_type "{config.model_type}"',
            todo=f"known are {', '.join(sorted(TABLE))}; a new one is a row of lastcall/measure/anatomy.py",
        )
    return row


def locate(model: nn.Module) -> Site:
    """The site of `model` by its row of the table.

    Raises UnknownArchitectureError where the table has no row, ModelError where the final block has no
    attention (the message lists the blocks that have).
    """
    config: Any = model.config
    row = row_of(config)
    blocks = list(_module(model, row.blocks).children())
    attention = getattr(blocks[-1], row.attention, None)
    if attention is None:
        having = [i for i, block in enumerate(blocks) if hasattr(block, row.attention)]
        raise ModelError(
            f"the final block (number {len(blocks) - 1}) of this {row.model_type} has no attention",
            got=f"attention in blocks {having}",
            todo="only a final block with attention can be measured",
        )
    return Site(
        model=model,
        trunk=_module(model, row.trunk),
        block=blocks[-1],
        attention=attention,
        ffn=_module(blocks[-1], row.ffn),
        projection=_module(attention, row.projection),
        heads=int(config.num_attention_heads),
        norm=_module(model, row.norm),
        head=_head(model, row),
        context=int(config.max_position_embeddings),
    )


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise UnknownArchitectureError(
            f'this {type(model).__name__} does not have the module "{path}" its row names',
            todo="mend the row of lastcall/measure/anatomy.py",
        ) from None


def _head(model: Any, row: Anatomy) -> Head:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnknownArchitectureError(
            f"the head of this {row.model_type} is not an nn.Linear", got=type(head).__name__
        )

    def of(key: str | None) -> float | None:
        return None if key is None else getattr(model.config, key)

    return Head(head.weight, head.bias, of(row.softcap), of(row.scale), of(row.divisor))
