"""Build the ONNX graph of a Qwen2 or Llama decoder from its shape: no weights in it, no torch needed.

    python -m policy.serve.graph MODEL_DIR      # writes MODEL_DIR/graph.onnx

The weights stay in `model.safetensors`; the runtime attaches them and the rotary tables by name, so that one set of
weights serves this runtime and vLLM. Only standard operators are used (opset 23: RMSNormalization, RotaryEmbedding,
Attention).

Inputs, for one sequence of `new` tokens after `past` cached ones:
  ids [new] int64 · positions [1, new] int64 · mask [new, past+new] float32 (0 or -inf, added to the scores)
  past_key.L, past_value.L [1, heads_kv, past, head_dim] float32
Outputs: logits [1, vocab] of the last token; key.L, value.L [1, heads_kv, past+new, head_dim].

A base brings no graph; the runtime builds two in memory. The decoder's takes `embedded` [new, hidden] in the place of
ids, and `rows` [r] int64, which of the new tokens count; it gives `states` [r, hidden] in the place of logits. The
head's turns one state into logits. So a tied matrix is held once, several tokens can be looked at in one pass, and a
grammar that allows few tokens costs few rows of the head.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from policy.serve.manifest import GRAPH_FILE
from policy.serve.shape import EMBEDDING, LM_HEAD, Shape, load_shape

OPSET = 23
IR_VERSION = 11


class _Builder:
    """Collects nodes; each method returns the name of what it computes."""

    def __init__(self, shape: Shape, last: str, outside: tuple[str, ...] = ()) -> None:
        self.shape = shape
        self.last = last  # the tokens whose states are wanted
        self.nodes: list[Any] = []
        self.initializers: list[Any] = [_external(name, dims) for name, dims in shape.attached() if name not in outside]

    def op(self, kind: str, inputs: list[str], outputs: list[str] | None = None, **attributes: Any) -> str:
        names = outputs or [f"t{len(self.nodes)}"]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names[0]

    def constant(self, name: str, value: Any) -> str:
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def linear(self, x: str, weight: str, bias: str | None = None) -> str:
        """x [n, in] times a weight kept as [out, in], the checkpoint's own layout."""
        return self.op("Gemm", [x, weight, *([bias] if bias else [])], transB=1)

    def bias(self, layer: str) -> str | None:
        return f"{layer}.bias" if self.shape.bias else None

    def norm(self, x: str, weight: str) -> str:
        return self.op("RMSNormalization", [x, weight], axis=-1, epsilon=self.shape.norm_eps)

    def attention(self, x: str, layer: int) -> str:
        at, shape = f"model.layers.{layer}.self_attn.", self.shape
        q, k, v = (
            self.op("Unsqueeze", [self.linear(x, f"{at}{n}_proj.weight", self.bias(f"{at}{n}_proj")), "axis0"])
            for n in "qkv"
        )
        q = self.op("RotaryEmbedding", [q, "cos", "sin", "positions"], num_heads=shape.heads)
        k = self.op("RotaryEmbedding", [k, "cos", "sin", "positions"], num_heads=shape.heads_kv)
        mixed = self.op(
            "Attention",
            [q, k, v, "mask", f"past_key.{layer}", f"past_value.{layer}"],
            [f"mixed.{layer}", f"key.{layer}", f"value.{layer}"],
            q_num_heads=shape.heads,
            kv_num_heads=shape.heads_kv,
        )
        return self.op("Squeeze", [mixed, "axis0"])

    def mlp(self, x: str, layer: int) -> str:
        at = f"model.layers.{layer}.mlp."
        gate = self.linear(x, at + "gate_proj.weight")
        silu = self.op("Mul", [gate, self.op("Sigmoid", [gate])])
        return self.linear(self.op("Mul", [silu, self.linear(x, at + "up_proj.weight")]), at + "down_proj.weight")

    def layer(self, x: str, layer: int) -> str:
        at = f"model.layers.{layer}."
        mixed = self.attention(self.norm(x, at + "input_layernorm.weight"), layer)
        if layer == self.shape.layers - 1:  # from here on nothing reads the other tokens
            x, mixed = (self.op("Gather", [name, self.last]) for name in (x, mixed))
        x = self.op("Add", [x, self.linear(mixed, at + "self_attn.o_proj.weight")])
        return self.op("Add", [x, self.mlp(self.norm(x, at + "post_attention_layernorm.weight"), layer)])

    def states(self, x: str, output: str | None = None) -> str:
        """The normalised states of `last` after all layers."""
        self.constant("axis0", np.array([0], dtype=np.int64))
        for layer in range(self.shape.layers):
            x = self.layer(x, layer)
        outputs = [output] if output else None
        return self.op("RMSNormalization", [x, "model.norm.weight"], outputs, axis=-1, epsilon=self.shape.norm_eps)


def _external(name: str, dims: tuple[int, ...]) -> Any:
    """A tensor whose bytes come from elsewhere: the runtime supplies them by name."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="model.safetensors")
    return tensor


def build_graph(shape: Shape) -> bytes:
    """The serialised ONNX model of that shape; see the module's docstring for its inputs and outputs."""
    build = _Builder(shape, "last")
    build.constant("last", np.array([-1], dtype=np.int64))
    states = build.states(build.op("Gather", [EMBEDDING, "ids"]))
    build.op("Gemm", [states, head_name(shape)], ["logits"], transB=1)
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["new"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, shape.vocab])
    return _serialised(build, [ids, *_inputs(shape)], [logits, *_outputs(shape)])


def build_decoder(shape: Shape) -> bytes:
    """The serialised decoder of a base: without embedding and head, the states of several tokens."""
    build = _Builder(shape, "rows", outside=(EMBEDDING, LM_HEAD))
    build.states("embedded", "states")
    embedded = helper.make_tensor_value_info("embedded", TensorProto.FLOAT, ["new", shape.hidden])
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, ["rows"])
    states = helper.make_tensor_value_info("states", TensorProto.FLOAT, ["rows", shape.hidden])
    return _serialised(build, [embedded, rows, *_inputs(shape)], [states, *_outputs(shape)])


def build_head(shape: Shape) -> bytes:
    """The serialised head of a base: `states` [1, hidden] in, `logits` [1, vocab] out."""
    build = _Builder(shape, "", outside=tuple(name for name, _ in shape.attached() if name != head_name(shape)))
    build.op("Gemm", ["states", head_name(shape)], ["logits"], transB=1)
    states = helper.make_tensor_value_info("states", TensorProto.FLOAT, [1, shape.hidden])
    return _serialised(build, [states], [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, shape.vocab])])


def head_name(shape: Shape) -> str:
    """The name of the head's weight, [vocab, hidden]: that of the embedding in a tied model."""
    return EMBEDDING if shape.tied else LM_HEAD


def _serialised(build: _Builder, inputs: list[Any], outputs: list[Any]) -> bytes:
    graph = helper.make_graph(build.nodes, "decoder", inputs, outputs, build.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes(model.SerializeToString(deterministic=True))


def _inputs(shape: Shape) -> list[Any]:
    cache = [1, shape.heads_kv, "past", shape.head_dim]
    return [
        helper.make_tensor_value_info("positions", TensorProto.INT64, [1, "new"]),
        helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["new", "total"]),
        *(
            helper.make_tensor_value_info(f"past_{kind}.{layer}", TensorProto.FLOAT, cache)
            for layer in range(shape.layers)
            for kind in ("key", "value")
        ),
    ]


def _outputs(shape: Shape) -> list[Any]:
    cache = [1, shape.heads_kv, "total", shape.head_dim]
    return [
        *(
            helper.make_tensor_value_info(f"{kind}.{layer}", TensorProto.FLOAT, cache)
            for layer in range(shape.layers)
            for kind in ("key", "value")
        ),
    ]


def write_graph(directory: Path) -> Path:
    """Write `graph.onnx` beside the config it was built from; raises VersionRefused when that is neither."""
    path = directory / GRAPH_FILE
    path.write_bytes(build_graph(load_shape(directory)))
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{write_graph(Path(sys.argv[1]))}\n")
