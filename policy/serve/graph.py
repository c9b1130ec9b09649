"""Build the ONNX graph of a Qwen2 or Llama decoder from its shape: no weights in it, no torch needed.

    python -m policy.serve.graph MODEL_DIR      # writes MODEL_DIR/graph.onnx

The weights stay in `model.safetensors`; the runtime attaches them and the rotary tables by name, so that one set of
weights serves this runtime and vLLM. Only standard operators are used (opset 23: RMSNormalization, RotaryEmbedding,
Attention).

Inputs, for one sequence of `new` tokens after `past` cached ones:
  ids [new] int64 · positions [1, new] int64 · mask [new, past+new] float32 (0 or -inf, added to the scores)
  past_key.L, past_value.L [1, heads_kv, past, head_dim] float32
Outputs: logits [1, vocab] of the last token; key.L, value.L [1, heads_kv, past+new, head_dim].
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from policy.serve.manifest import GRAPH_FILE
from policy.serve.shape import Shape, load_shape

OPSET = 23
IR_VERSION = 11


class _Builder:
    """Collects nodes; each method returns the name of what it computes."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.nodes: list[Any] = []
        self.initializers: list[Any] = [_external(name, dims) for name, dims in shape.attached()]

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
        return self.linear(self.op("Squeeze", [mixed, "axis0"]), f"{at}o_proj.weight")

    def mlp(self, x: str, layer: int) -> str:
        at = f"model.layers.{layer}.mlp."
        gate = self.linear(x, at + "gate_proj.weight")
        silu = self.op("Mul", [gate, self.op("Sigmoid", [gate])])
        return self.linear(self.op("Mul", [silu, self.linear(x, at + "up_proj.weight")]), at + "down_proj.weight")

    def layer(self, x: str, layer: int) -> str:
        at = f"model.layers.{layer}."
        x = self.op("Add", [x, self.attention(self.norm(x, at + "input_layernorm.weight"), layer)])
        return self.op("Add", [x, self.mlp(self.norm(x, at + "post_attention_layernorm.weight"), layer)])


def _external(name: str, dims: tuple[int, ...]) -> Any:
    """A tensor whose bytes come from elsewhere: the runtime supplies them by name."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="model.safetensors")
    return tensor


def build_graph(shape: Shape) -> bytes:
    """The serialised ONNX model of that shape; see the module's docstring for its inputs and outputs."""
    build = _Builder(shape)
    build.constant("axis0", np.array([0], dtype=np.int64))
    build.constant("last", np.array([-1], dtype=np.int64))
    x = build.op("Gather", ["model.embed_tokens.weight", "ids"])
    for layer in range(shape.layers):
        x = build.layer(x, layer)
    x = build.norm(build.op("Gather", [x, "last"]), "model.norm.weight")
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    build.op("Gemm", [x, head], ["logits"], transB=1)
    graph = helper.make_graph(build.nodes, "decoder", _inputs(shape), _outputs(shape), build.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    return bytes(model.SerializeToString(deterministic=True))


def _inputs(shape: Shape) -> list[Any]:
    cache = [1, shape.heads_kv, "past", shape.head_dim]
    return [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["new"]),
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
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, shape.vocab]),
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
