"""The shape of a Qwen2 or Llama checkpoint (`config.json`) and its weights (`*.safetensors`), read and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.adapters.engines.files import Tensor, read_header
from gateway.adapters.engines.sealed import read_object
from gateway.core.policies.manifest import CONFIG_FILE, WEIGHTS_FILE
from gateway.errors import VersionRefused

Array = npt.NDArray[np.float32]
# model type → whether its query, key and value layers have a bias; else the two are one decoder
ARCHITECTURES = {"qwen2": True, "llama": False}
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # a tied model has no LM_HEAD
NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. `heads_kv` < `heads` is grouped-query attention; lengths are tokens."""

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
    bias: bool = True  # of the query, key and value layers

    @classmethod
    def from_config(cls, config: dict[str, Any], place: object = CONFIG_FILE) -> Shape:
        """Read Hugging Face's `config.json`. Raises VersionRefused(engine) where it is not a plain Qwen2 or Llama."""
        if config.get("model_type") not in ARCHITECTURES or config.get("hidden_act", "silu") != "silu":
            what = f"model_type={config.get('model_type')!r}, hidden_act={config.get('hidden_act')!r}"
            raise VersionRefused("engine", f"{place}: not a qwen2 or llama model with silu ({what}); serve it on vLLM")
        odd = [name for name in ("use_sliding_window", "attention_bias", "mlp_bias") if config.get(name)]
        if odd:
            raise VersionRefused("engine", f"{place}: {', '.join(odd)} is not supported; serve it on vLLM")
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
                bias=ARCHITECTURES[config["model_type"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise VersionRefused("engine", f"{place}: missing or bad field {error}") from error

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the checkpoint, in Hugging Face's names."""
        q, kv = self.heads * self.head_dim, self.heads_kv * self.head_dim
        yield EMBEDDING, (self.vocab, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (self.hidden,)
            for name, width in (("q", q), ("k", kv), ("v", kv)):
                yield at + f"self_attn.{name}_proj.weight", (width, self.hidden)
                if self.bias:
                    yield at + f"self_attn.{name}_proj.bias", (width,)
            yield at + "self_attn.o_proj.weight", (self.hidden, q)
            yield at + "post_attention_layernorm.weight", (self.hidden,)
            yield at + "mlp.gate_proj.weight", (self.inner, self.hidden)
            yield at + "mlp.up_proj.weight", (self.inner, self.hidden)
            yield at + "mlp.down_proj.weight", (self.hidden, self.inner)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield LM_HEAD, (self.vocab, self.hidden)

    def attached(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of all that the graph leaves out: the tensors and the rotary tables."""
        yield from self.tensors()
        yield "cos", (self.context, self.head_dim // 2)
        yield "sin", (self.context, self.head_dim // 2)


def load_shape(directory: Path) -> Shape:
    """The shape in `directory/config.json`. Raises VersionRefused."""
    path = directory / CONFIG_FILE
    return Shape.from_config(read_object(path), path)


def tokens_shape(config: dict[str, Any]) -> Shape:
    """The sizes of any decoder, of which only `vocab`, `context` and `eos_ids` hold: they have the same names
    everywhere. Raises VersionRefused."""
    plain = {"rms_norm_eps": 1e-6, **config, "model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False}
    odd = {name: None for name in ("attention_bias", "mlp_bias", "rope_scaling", "rope_parameters")}
    return Shape.from_config({**plain, **odd, "num_key_value_heads": 1})


def load_weights(directory: Path, shape: Shape, *, mapped: bool = False) -> dict[str, Array]:
    """The checkpoint's tensors as float32 by name, over all its shards, each checked against `shape`. `mapped`: those
    stored as float32 are views of the files, which must stay as they are. Raises VersionRefused."""
    tensors = {name: (path, tensor) for path in shards(directory) for name, tensor in read_header(path).items()}
    weights: dict[str, Array] = {}
    for name, dims in shape.tensors():
        path, tensor = tensors.get(name, (directory / WEIGHTS_FILE, None))
        if tensor is None or tensor.shape != dims:
            has = tensor.shape if tensor else "no such tensor"
            raise VersionRefused("shape", f"{path}: {name} should be {dims}, it has {has}")
        weights[name] = read_tensor(path, tensor, mapped=mapped)
        if not np.isfinite(weights[name]).all():
            raise VersionRefused("not_finite", f"{path}: {name} holds a NaN or an infinity")
    return weights


def shards(directory: Path) -> list[Path]:
    """The files that hold the weights of a checkpoint. Raises VersionRefused(missing)."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise VersionRefused("missing", f"{directory / WEIGHTS_FILE}: there is no such file; give a policy directory")
    return paths


def read_tensors(path: Path) -> dict[str, Array]:
    """Every tensor of a safetensors file as float32. Raises VersionRefused."""
    return {name: read_tensor(path, tensor) for name, tensor in read_header(path).items()}


def read_tensor(path: Path, tensor: Tensor, *, mapped: bool = False) -> Array:
    """One tensor of a safetensors file as float32. numpy has no bfloat16: it is the upper half of a float32. See
    `load_weights`."""
    try:
        if mapped and tensor.dtype == "F32" and tensor.at_bytes % 4 == 0 and 0 not in tensor.shape:
            return np.asarray(np.memmap(path, NUMPY["F32"], "r", tensor.at_bytes, tensor.shape))
        values = np.fromfile(path, NUMPY[tensor.dtype], math.prod(tensor.shape), offset=tensor.at_bytes)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter than its header says
        raise VersionRefused("engine", f"{path}: {error}") from error
    wide = (values.astype(np.uint32) << 16).view(np.float32) if tensor.dtype == "BF16" else values
    return np.ascontiguousarray(wide.reshape(tensor.shape), dtype=np.float32)


def rotary_tables(shape: Shape) -> dict[str, Array]:
    """cos and sin [context, head_dim/2] of arXiv:2104.09864, in the half-split layout of Hugging Face's models."""
    frequency = shape.rope_theta ** (-np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim)
    angle = np.arange(shape.context, dtype=np.float64)[:, None] * frequency
    return {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
