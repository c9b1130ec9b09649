"""The decoder on onnxruntime: token ids in, states or logits out, keys and values kept between calls.

The graph holds no weights; those of `model.safetensors` are attached by name. onnxruntime releases the interpreter lock
while it computes, so several sequences decode at once from several threads over one session. The head is multiplied
here: under a grammar often only a handful of its rows. A policy that was sealed with an older `graph.onnx`, which
computes the logits of the last token itself, is served by that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from gateway.errors import VersionRefused
from policy.serve.manifest import GRAPH_FILE
from policy.serve.shape import EMBEDDING, LM_HEAD, Array, Shape, load_shape, load_weights, rotary_tables

PARALLEL_WEIGHTS_MIN = 20_000_000  # from here on a pass is long enough to be shared by threads
INTRA_THREADS_MAX = 4
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of the first `length` tokens: per layer a pair [1, heads_kv, length, head_dim]. Immutable."""

    length: int
    arrays: tuple[Array, ...]

    @property
    def nbytes(self) -> int:
        """The memory it takes."""
        return sum(array.nbytes for array in self.arrays)

    def head(self, length: int) -> Cache:
        """The cache as it was after the first `length` tokens."""
        return (
            self
            if length == self.length
            else Cache(length, tuple(np.ascontiguousarray(array[:, :, :length]) for array in self.arrays))
        )


class Runtime:
    """One model in memory, shared by all sequences. `intra_threads` is per running call; by default one for a small
    model, up to INTRA_THREADS_MAX for a large one. `weights` (read-only; they may belong to several models) take the
    place of those in `directory`."""

    def __init__(
        self, directory: Path, intra_threads: int | None = None, weights: dict[str, Array] | None = None
    ) -> None:
        self.shape = shape = load_shape(directory)
        self.weights = load_weights(directory, shape, mapped=True) if weights is None else weights
        attached = self.weights | rotary_tables(shape)
        self._embedding = self.weights[EMBEDDING]
        self._head_rows = self.weights[EMBEDDING if shape.tied else LM_HEAD]
        threads = intra_threads or _threads(sum(array.size for array in self.weights.values()))
        path = directory / GRAPH_FILE
        self.several_rows = not path.is_file()
        if self.several_rows:
            decoder, head = _built(shape, path)
            inside = {name: array for name, array in attached.items() if name not in (EMBEDDING, LM_HEAD)}
            self._session = _session(path, decoder, inside, threads)
            self._head = _session(path, head, {EMBEDDING if shape.tied else LM_HEAD: self._head_rows}, threads)
        else:
            self._session = _session(path, path.read_bytes(), attached, threads)
        self._caches_in = [f"past_{kind}.{layer}" for layer in range(shape.layers) for kind in ("key", "value")]
        self._outputs = [output.name for output in self._session.get_outputs()]

    def forget_weights(self) -> None:
        """Let go of all weights but embedding and head: onnxruntime has its own copy. Other models cannot share them
        any more."""
        self.weights = {}

    def empty(self) -> Cache:
        """The cache before any token."""
        nothing = np.zeros((1, self.shape.heads_kv, 0, self.shape.head_dim), dtype=np.float32)
        return Cache(0, (nothing,) * len(self._caches_in))

    def forward(self, ids: Sequence[int], cache: Cache) -> tuple[Array, Cache]:
        """Feed `ids` after `cache`; return the last token's logits [vocab] and the longer cache."""
        states, longer = self.states(ids, cache)
        return self.logits(states[-1]), longer

    def states(self, ids: Sequence[int], cache: Cache, rows: int = 1) -> tuple[Array, Cache]:
        """Feed `ids` after `cache`; return the states of the last `rows` of them, [rows, hidden], and the longer cache.
        A state is what `logits` takes. More than one row needs `several_rows`."""
        new, past = len(ids), cache.length
        feeds: dict[str, npt.NDArray[np.generic]] = dict(zip(self._caches_in, cache.arrays, strict=True))
        feeds["positions"] = np.arange(past, past + new, dtype=np.int64)[None, :]
        feeds["mask"] = causal_mask(new, past)
        if self.several_rows:
            feeds["embedded"] = self._embedding[np.asarray(ids, dtype=np.intp)]
            feeds["rows"] = np.arange(new - rows, new, dtype=np.int64)
        else:
            feeds["ids"] = np.asarray(ids, dtype=np.int64)
        states, *arrays = self._session.run(self._outputs, feeds)
        return states, Cache(past + new, tuple(arrays))

    def logits(self, state: Array, tokens: Indices | None = None) -> Array:
        """The logits after a state: of `tokens`, else of the whole vocabulary."""
        if not self.several_rows:
            return state if tokens is None else state[tokens]
        if tokens is not None:
            return np.asarray(self._head_rows[tokens] @ state)
        return np.asarray(self._head.run(None, {"states": state[None]})[0][0])


def _threads(weights: int) -> int:
    """How many threads share one pass of a model of that many weights."""
    return min(INTRA_THREADS_MAX, len(os.sched_getaffinity(0))) if weights >= PARALLEL_WEIGHTS_MIN else 1


def causal_mask(new: int, past: int) -> Array:
    """[new, past+new]: 0 where a new token may look, -inf at what comes after it."""
    if new == 1:
        return np.zeros((1, past + 1), dtype=np.float32)
    return np.triu(np.full((new, past + new), -np.inf, dtype=np.float32), k=past + 1)


def _session(path: Path, graph: bytes, attached: dict[str, Array], intra_threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = intra_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a waiting thread must not eat a core
    options.add_session_config_entry("session.dynamic_block_base", "4")  # nor a busy core hold up the others
    options.add_external_initializers(list(attached), [ort.OrtValue.ortvalue_from_numpy(a) for a in attached.values()])
    try:
        session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # boundary: onnxruntime raises a dozen untyped errors for a bad graph
        raise VersionRefused("engine", f"{path}: {str(error).splitlines()[0]}") from error
    return session


def _built(shape: Shape, path: Path) -> tuple[bytes, bytes]:
    """The graphs of a checkpoint that brings none, as a base does: decoder and head. Raises VersionRefused."""
    try:
        from policy.serve.graph import build_decoder, build_head
    except ModuleNotFoundError:
        raise VersionRefused(
            "engine", f"{path}: missing, and building it needs onnx: `pip install '.[embedded]'`"
        ) from None
    return build_decoder(shape), build_head(shape)
