"""The measurement, literally as sections 2 and 3 say it: whole float64 logits, one position at a time.

The final block of each architecture is written out by hand, from its weights and configuration; its input h
is transformers' own `output_hidden_states`. Nothing here comes from lastcall.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FULL = "full"
"""The block as the checkpoint runs it; otherwise 0 for bypass, or a local window's width."""
Branch = str | int


def incoming(model: Any, tokens: Tensor) -> Tensor:
    """h of one sequence [positions], float64 [positions, d]: what the block before the last one put out."""
    with torch.no_grad():
        output = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    # The last entry is the final norm's output; the one before it went into the final block.
    return output.hidden_states[model.config.num_hidden_layers - 1][0].double()


def state(model: Any, h: Tensor, branch: Branch) -> Tensor:
    """Final-norm output [positions, d] of one branch of the final block."""
    config, last = model.config, model.config.num_hidden_layers - 1
    weights = {name: value.detach().double() for name, value in model.state_dict().items()}
    own = {
        name.removeprefix(f"model.layers.{last}."): value
        for name, value in weights.items()
        if name.startswith(f"model.layers.{last}.")
    }
    block = {"llama": _plain, "smollm3": _plain, "qwen3_5_text": _qwen, "gemma3_text": _gemma}
    y = block[config.model_type](config, own, h, branch, last)
    return _rms(config, y, weights["model.norm.weight"])


def _plain(config: Any, own: dict[str, Tensor], h: Tensor, branch: Branch, last: int) -> Tensor:
    """Llama, and SmolLM3, whose NoPE blocks do not rotate."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    r = h
    if branch != 0:
        x = _rms(config, h, own["input_layernorm.weight"])
        q = _heads(_linear(own, "self_attn.q_proj", x), heads)
        k = _heads(_linear(own, "self_attn.k_proj", x), kv_heads)
        v = _heads(_linear(own, "self_attn.v_proj", x), kv_heads)
        if config.model_type == "llama" or config.no_rope_layers[last]:
            theta = config.rope_parameters["rope_theta"]
            q, k = _rope(q, theta, q.shape[-1]), _rope(k, theta, k.shape[-1])
        mixed = _attend(q, k, v, 1 / math.sqrt(q.shape[-1]), None, branch)
        r = h + _linear(own, "self_attn.o_proj", mixed)
    x = _rms(config, r, own["post_attention_layernorm.weight"])
    return r + _ffn(own, x, _silu)


def _qwen(config: Any, own: dict[str, Tensor], h: Tensor, branch: Branch, last: int) -> Tensor:
    """Qwen3.5: norms on queries and keys, a rotation of part of a head, a gate on what is attended to."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    r = h
    if branch != 0:
        x = _rms(config, h, own["input_layernorm.weight"])
        both = _heads(_linear(own, "self_attn.q_proj", x), heads)
        q, gate = both[..., :size], both[..., size:]
        q = _rms(config, q, own["self_attn.q_norm.weight"])
        k = _heads(_linear(own, "self_attn.k_proj", x), kv_heads)
        k = _rms(config, k, own["self_attn.k_norm.weight"])
        v = _heads(_linear(own, "self_attn.v_proj", x), kv_heads)
        theta = config.rope_parameters["rope_theta"]
        rotated = int(size * config.rope_parameters["partial_rotary_factor"])
        q, k = _rope(q, theta, rotated), _rope(k, theta, rotated)
        mixed = _attend(q, k, v, 1 / math.sqrt(size), None, branch)
        opened = mixed / (1 + torch.exp(-gate.reshape(len(h), -1)))
        r = h + _linear(own, "self_attn.o_proj", opened)
    x = _rms(config, r, own["post_attention_layernorm.weight"])
    return r + _ffn(own, x, _silu)


def _gemma(config: Any, own: dict[str, Tensor], h: Tensor, branch: Branch, last: int) -> Tensor:
    """Gemma 3: norms before and after attention and FFN, sliding blocks with a rotation of their own."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    kind = config.layer_types[last]
    r = h
    if branch != 0:
        x = _rms(config, h, own["input_layernorm.weight"])
        q = _heads(_linear(own, "self_attn.q_proj", x), heads)
        k = _heads(_linear(own, "self_attn.k_proj", x), kv_heads)
        v = _heads(_linear(own, "self_attn.v_proj", x), kv_heads)
        q = _rms(config, q, own["self_attn.q_norm.weight"])
        k = _rms(config, k, own["self_attn.k_norm.weight"])
        theta = config.rope_parameters[kind]["rope_theta"]
        q, k = _rope(q, theta, q.shape[-1]), _rope(k, theta, k.shape[-1])
        sliding = config.sliding_window if kind == "sliding_attention" else None
        mixed = _attend(q, k, v, 1 / math.sqrt(config.query_pre_attn_scalar), sliding, branch)
        r = h + _rms(config, _linear(own, "self_attn.o_proj", mixed), own["post_attention_layernorm.weight"])
    x = _rms(config, r, own["pre_feedforward_layernorm.weight"])
    return r + _rms(config, _ffn(own, x, _gelu_tanh), own["post_feedforward_layernorm.weight"])


def _rms(config: Any, x: Tensor, weight: Tensor) -> Tensor:
    scale = weight if config.model_type in ("llama", "smollm3") else 1 + weight
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * scale


def _linear(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ own[f"{name}.weight"].T
    return y + own[f"{name}.bias"] if f"{name}.bias" in own else y


def _heads(x: Tensor, heads: int) -> Tensor:
    """[positions, heads · size] -> [positions, heads, size]."""
    return x.reshape(len(x), heads, -1)


def _rope(x: Tensor, theta: float, rotated: int) -> Tensor:
    """Each pair (i, i + rotated / 2) of a head turned by t · theta^(−2 i / rotated)."""
    out = x.clone()
    half = rotated // 2
    for t in range(len(x)):
        for i in range(half):
            angle = t * theta ** (-2 * i / rotated)
            a, b = x[t, :, i], x[t, :, i + half]
            out[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out[t, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sliding: int | None, branch: Branch) -> Tensor:
    """[positions, heads · size]: each query over the most recent positions it may see, its own included."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    for t in range(len(q)):
        seen = t + 1
        if sliding is not None:
            seen = min(seen, sliding)
        if branch != FULL:
            seen = min(seen, int(branch))
        for head in range(q.shape[1]):
            keys, values = k[t + 1 - seen : t + 1, head // group], v[t + 1 - seen : t + 1, head // group]
            weight = torch.exp(keys @ q[t, head] * scale - (keys @ q[t, head] * scale).max())
            out[t, head] = (weight / weight.sum()) @ values
    return out.reshape(len(q), -1)


def _ffn(own: dict[str, Tensor], x: Tensor, activation: Any) -> Tensor:
    gated = activation(_linear(own, "mlp.gate_proj", x)) * _linear(own, "mlp.up_proj", x)
    return _linear(own, "mlp.down_proj", gated)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def log_probabilities(model: Any, s: Tensor) -> Tensor:
    """Whole next-token log-probabilities [positions, vocabulary], float64."""
    config = model.config
    head = model.lm_head.weight.detach().double()
    return normalised(head, None, getattr(config, "final_logit_softcapping", None), s)


def normalised(weight: Tensor, bias: Tensor | None, softcap: float | None, s: Tensor) -> Tensor:
    """Log-probabilities of a head, float64."""
    logits = s.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    biggest = logits.max(-1, keepdim=True).values
    return logits - biggest - torch.log(torch.exp(logits - biggest).sum(-1, keepdim=True))


def losses(log_p: Tensor, targets: Tensor) -> Tensor:
    """Next-token negative log-likelihoods."""
    return torch.stack([-log_p[t, targets[t]] for t in range(len(targets))])


def uncertainty(log_p: Tensor) -> dict[str, Tensor]:
    """Entropy, largest log-probability and margin of the top two, by sorting the whole vocabulary."""
    ordered = log_p.sort(-1, descending=True).values
    return {
        "entropy": -(torch.exp(log_p) * log_p).sum(-1),
        "top_logprob": ordered[:, 0],
        "margin": ordered[:, 0] - ordered[:, 1],
    }


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q), token by token of the vocabulary."""
    return (torch.exp(log_p) * (log_p - log_q)).sum(-1)


def trajectory(s: Tensor) -> dict[str, Tensor]:
    """Displacement, extrapolation error, curvature and error change of states [positions, d], in float64."""
    s = s.double()
    names = ("displacement", "extrapolation_error", "curvature", "error_change")
    out = {name: torch.zeros(len(s), dtype=torch.float64) for name in names}
    for t in range(len(s)):
        if t >= 1:
            out["displacement"][t] = _norm(s[t] - s[t - 1]) / _norm(s[t - 1])
        if t >= 2:
            a, b = s[t] - s[t - 1], s[t - 1] - s[t - 2]
            out["extrapolation_error"][t] = _error(s, t)
            out["curvature"][t] = 1 - (a * b).sum() / (_norm(a) * _norm(b))
        if t >= 3:
            out["error_change"][t] = _error(s, t) - _error(s, t - 1)
    return out


def _error(s: Tensor, t: int) -> Tensor:
    return _norm(s[t] - (2 * s[t - 1] - s[t - 2])) / _norm(s[t - 1])


def _norm(x: Tensor) -> Tensor:
    return torch.sqrt((x * x).sum())


def measure(model: Any, block: Tensor, windows: tuple[int, ...], bos: int | None = None) -> dict[str, Tensor]:
    """Every column of one block [horizon + 1] that the model decides, and its states."""
    seen = block[:-1] if bos is None else torch.cat([torch.tensor([bos]), block[:-1]])
    skip = 0 if bos is None else 1
    h = incoming(model, seen)
    branches: dict[str, Branch] = {"full": FULL, "bypass": 0, **{f"local{w}": w for w in windows}}
    states = {name: state(model, h, branch)[skip:] for name, branch in branches.items()}
    log_p = {name: log_probabilities(model, s) for name, s in states.items()}
    h = h[skip:]
    return {
        **{f"loss_{name}": losses(each, block[1:]) for name, each in log_p.items()},
        "kl": kl(log_p["full"], log_p["bypass"]),
        **uncertainty(log_p["bypass"]),
        **trajectory(states["bypass"]),
        **{f"incoming_{name}": value for name, value in trajectory(h).items()},
        "states": states["bypass"],
        "incoming_states": h,
    }
