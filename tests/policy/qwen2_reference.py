"""A Qwen2 forward pass in plain numpy, written from the model's description: what the graph is checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from policy.serve.shape import Array, Shape

Doubles = npt.NDArray[np.float64]


def reference_logits(shape: Shape, weights: Mapping[str, Array], ids: Sequence[int]) -> Doubles:
    """Logits [tokens, vocab] in double precision, without any cache."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][list(ids)]
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        x = x + _attention(shape, w, at + "self_attn.", _norm(x, w[at + "input_layernorm.weight"], shape.norm_eps))
        y = _norm(x, w[at + "post_attention_layernorm.weight"], shape.norm_eps)
        gate = y @ w[at + "mlp.gate_proj.weight"].T
        up = y @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    logits: Doubles = _norm(x, w["model.norm.weight"], shape.norm_eps) @ head.T
    return logits


def _norm(x: Doubles, weight: Doubles, eps: float) -> Doubles:
    normed: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return normed


def _rotate(x: Doubles, theta: float) -> Doubles:
    """Rotary embedding of x [heads, tokens, head_dim], halves paired (arXiv:2104.09864 as Hugging Face lays it out)."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], axis=-1
    )


def _attention(shape: Shape, w: Mapping[str, Doubles], at: str, x: Doubles) -> Doubles:
    def heads(name: str, count: int) -> Doubles:
        projected = x @ w[f"{at}{name}_proj.weight"].T + w[f"{at}{name}_proj.bias"]
        return projected.reshape(len(x), count, shape.head_dim).transpose(1, 0, 2)

    q = _rotate(heads("q", shape.heads), shape.rope_theta)
    k = np.repeat(_rotate(heads("k", shape.heads_kv), shape.rope_theta), shape.heads // shape.heads_kv, axis=0)
    v = np.repeat(heads("v", shape.heads_kv), shape.heads // shape.heads_kv, axis=0)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(shape.head_dim) + np.triu(np.full((len(x), len(x)), -np.inf), k=1)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (share / share.sum(-1, keepdims=True)) @ v
    out: Doubles = mixed.transpose(1, 0, 2).reshape(len(x), -1) @ w[at + "o_proj.weight"].T
    return out
