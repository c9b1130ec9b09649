"""The shape of a Qwen2 checkpoint (`config.json`) and its weights (`model.safetensors`), read and checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from gateway.adapters.engines.sealed import read_object
from gateway.core.policies.manifest import CONFIG_FILE, WEIGHTS_FILE
from gateway.errors import VersionRefused

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen2 decoder. `heads_kv` < `heads` is grouped-query attention; lengths are tokens."""

    layers: int
    hidden: int
    inner: int
    heads: int
    heads_kv: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def from_config(cls, config: dict[str, Any], place: object = CONFIG_FILE) -> Shape:
        """Read Hugging Face's `config.json`. Raises VersionRefused(engine) where it is not a plain Qwen2."""
        if config.get("model_type") != "qwen2" or config.get("hidden_act", "silu") != "silu":
            what = f"model_type={config.get('model_type')!r}"
            raise VersionRefused("engine", f"{place}: not a qwen2 model with silu ({what}); no other is served here")
        if config.get("use_sliding_window"):
            raise VersionRefused("engine", f"{place}: sliding windows are not supported")
        try:
            eos = config["eos_token_id"]
            heads = int(config["num_attention_heads"])
            rope = config.get("rope_parameters") or {}
            if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
                raise VersionRefused("engine", f"{place}: only the default rotary embedding is supported")
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=int(config["hidden_size"]),
                inner=int(config["intermediate_size"]),
                heads=heads,
                heads_kv=int(config["num_key_value_heads"]),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                vocab=int(config["vocab_size"]),
                context=int(config["max_position_embeddings"]),
                rope_theta=float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
                norm_eps=float(config["rms_norm_eps"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                eos_ids=tuple(eos) if isinstance(eos, list) else (int(eos),),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise VersionRefused("engine", f"{place}: missing or bad field {error}") from error

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the checkpoint, in Hugging Face's names."""
        q, kv = self.heads * self.head_dim, self.heads_kv * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (self.hidden,)
            for name, width in (("q", q), ("k", kv), ("v", kv)):
                yield at + f"self_attn.{name}_proj.weight", (width, self.hidden)
                yield at + f"self_attn.{name}_proj.bias", (width,)
            yield at + "self_attn.o_proj.weight", (self.hidden, q)
            yield at + "post_attention_layernorm.weight", (self.hidden,)
            yield at + "mlp.gate_proj.weight", (self.inner, self.hidden)
            yield at + "mlp.up_proj.weight", (self.inner, self.hidden)
            yield at + "mlp.down_proj.weight", (self.hidden, self.inner)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def attached(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of all that the graph leaves out: the tensors and the rotary tables."""
        yield from self.tensors()
        yield "cos", (self.context, self.head_dim // 2)
        yield "sin", (self.context, self.head_dim // 2)


def load_shape(directory: Path) -> Shape:
    """The shape in `directory/config.json`. Raises VersionRefused."""
    path = directory / CONFIG_FILE
    return Shape.from_config(read_object(path), path)


def load_weights(directory: Path, shape: Shape) -> dict[str, Array]:
    """The checkpoint's tensors as float32 by name, each checked against `shape`. Raises VersionRefused."""
    path = directory / WEIGHTS_FILE
    stored = read_tensors(path)
    weights: dict[str, Array] = {}
    for name, dims in shape.tensors():
        if name not in stored or stored[name].shape != dims:
            found = stored[name].shape if name in stored else "nothing"
            raise VersionRefused("shape", f"{path}: {name} should be {dims}, found {found}")
        weights[name] = np.ascontiguousarray(stored[name], dtype=np.float32)
        if not np.isfinite(weights[name]).all():
            raise VersionRefused("not_finite", f"{path}: {name} holds a NaN or an infinity")
    return weights


def read_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Every tensor of a safetensors file. Raises VersionRefused."""
    try:
        tensors: dict[str, npt.NDArray[Any]] = load_file(path)
    except Exception as error:  # boundary: safetensors raises its own untyped errors for a torn file
        raise VersionRefused("engine", f"{path}: {error}") from error
    return tensors


def rotary_tables(shape: Shape) -> dict[str, Array]:
    """cos and sin [context, head_dim/2] of arXiv:2104.09864, in the half-split layout of Hugging Face's models."""
    frequency = shape.rope_theta ** (-np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim)
    angle = np.arange(shape.context, dtype=np.float64)[:, None] * frequency
    return {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
