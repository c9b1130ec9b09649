"""The decoder on onnxruntime: token ids in, logits out, keys and values kept between calls.

`graph.onnx` holds no weights; those of `model.safetensors` are attached by name. onnxruntime releases the interpreter
lock while it computes, so several sequences decode at once from several threads over one session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from gateway.errors import VersionRefused
from policy.serve.manifest import GRAPH_FILE
from policy.serve.shape import Array, load_shape, load_weights, rotary_tables


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of the first `length` tokens: per layer a pair [1, heads_kv, length, head_dim]. Immutable."""

    length: int
    arrays: tuple[Array, ...]

    def head(self, length: int) -> Cache:
        """The cache as it was after the first `length` tokens."""
        return Cache(length, tuple(np.ascontiguousarray(array[:, :, :length]) for array in self.arrays))


class Runtime:
    """One model in memory, shared by all sequences. `intra_threads` is per running call. `weights` (read-only; they may
    belong to several models) take the place of those in `directory`."""

    def __init__(self, directory: Path, intra_threads: int = 1, weights: dict[str, Array] | None = None) -> None:
        self.shape = load_shape(directory)
        self.weights = load_weights(directory, self.shape) if weights is None else weights
        self._tables = rotary_tables(self.shape)  # onnxruntime borrows all these buffers: keep them alive
        self._session = _session(directory, self.weights | self._tables, intra_threads)
        self._caches_in = [f"past_{kind}.{layer}" for layer in range(self.shape.layers) for kind in ("key", "value")]
        self._outputs = [output.name for output in self._session.get_outputs()]

    def empty(self) -> Cache:
        """The cache before any token."""
        nothing = np.zeros((1, self.shape.heads_kv, 0, self.shape.head_dim), dtype=np.float32)
        return Cache(0, (nothing,) * len(self._caches_in))

    def forward(self, ids: Sequence[int], cache: Cache) -> tuple[Array, Cache]:
        """Feed `ids` after `cache`; returns the last token's logits [vocab] and the longer cache."""
        new, past = len(ids), cache.length
        feeds: dict[str, npt.NDArray[np.generic]] = dict(zip(self._caches_in, cache.arrays, strict=True))
        feeds["ids"] = np.asarray(ids, dtype=np.int64)
        feeds["positions"] = np.arange(past, past + new, dtype=np.int64)[None, :]
        feeds["mask"] = causal_mask(new, past)
        logits, *arrays = self._session.run(self._outputs, feeds)
        return logits[0], Cache(past + new, tuple(arrays))


def causal_mask(new: int, past: int) -> Array:
    """[new, past+new]: 0 where a new token may look, -inf at what comes after it."""
    if new == 1:
        return np.zeros((1, past + 1), dtype=np.float32)
    return np.triu(np.full((new, past + new), -np.inf, dtype=np.float32), k=past + 1)


def _session(directory: Path, attached: dict[str, Array], intra_threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = intra_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a waiting thread must not eat a core
    options.add_external_initializers(list(attached), [ort.OrtValue.ortvalue_from_numpy(a) for a in attached.values()])
    path = directory / GRAPH_FILE
    graph = path.read_bytes() if path.is_file() else _built(directory)
    try:
        session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # boundary: onnxruntime raises a dozen untyped errors for a bad graph
        raise VersionRefused("engine", f"{path}: {str(error).splitlines()[0]}") from error
    return session


def _built(directory: Path) -> bytes:
    """The graph of a checkpoint that brings none, as a base does. Raises VersionRefused."""
    try:
        from policy.serve.graph import build_graph
    except ModuleNotFoundError:
        raise VersionRefused(
            "engine", f"{directory / GRAPH_FILE}: missing, and building it needs onnx: `pip install 'baton[embedded]'`"
        ) from None
    return build_graph(load_shape(directory))
