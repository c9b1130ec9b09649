"""What a policy directory must be before any engine is shown it. A bad one can kill an engine or, worse, be served.

In order: the manifest and every checksum (`sealed.py`), the prompt it was trained on, weights complete and finite; then
whether they fit the weights that the engine runs (`BaseWeights`).

Safetensors files are read without a library, because the gateway brings no numerical one. The format: eight bytes with
the header's length (little-endian), a JSON object {name: {dtype, shape, data_offsets}}, then the tensors' bytes
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from gateway.adapters.engines.sealed import SealedPolicy, file_sha256, read_object, read_policy
from gateway.core.policies.manifest import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_TENSOR,
    ADAPTER_WEIGHTS_FILE,
    CONFIG_FILE,
    FIX,
    Manifest,
    check_prompt,
    weights_digest,
)
from gateway.errors import VersionRefused
from gateway.files import write_atomic

# fields of config.json about how the weights were saved, not about the weights
PASSING = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
# features of a PEFT adapter that a served low-rank update cannot have
LORA_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}
NULL_LAYER = "q_proj.weight"
HEADER_BYTES_MAX = 64 << 20
BLOCK_BYTES = 4 << 20  # a multiple of every item's size
# dtype: (bytes an item, how the item's last byte and the one before it show an exponent of all ones)
FLOATS = {"F64": (8, 0x7F, 0xF0), "F32": (4, 0x7F, 0x80), "BF16": (2, 0x7F, 0x80), "F16": (2, 0x7C, 0x00)}


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """A policy directory that passed `check`: the sealed policy, and its tensors by name."""

    sealed: SealedPolicy
    tensors: Mapping[str, Tensor]

    @property
    def directory(self) -> Path:
        """The absolute path, without links."""
        return self.sealed.directory.resolve()

    @property
    def manifest(self) -> Manifest:
        """The manifest as it was read."""
        return self.sealed.manifest


def check(directory: Path) -> PolicyFiles:
    """Make every check that needs only the directory. Raises VersionRefused. Blocks: it reads every byte."""
    if not directory.is_absolute():
        raise VersionRefused("missing", f"{directory}: give an absolute path; the engine has a directory of its own")
    sealed = read_policy(directory)
    check_prompt(sealed.manifest, directory)
    tensors: dict[str, Tensor] = {}
    for path in _weights(sealed):
        header = read_header(path)
        check_finite(path, header)
        tensors |= header
    return PolicyFiles(sealed, tensors)


def _weights(sealed: SealedPolicy) -> list[Path]:
    if sealed.manifest.kind == "adapter":
        return [sealed.files / ADAPTER_WEIGHTS_FILE]
    return [sealed.files / name for name in sorted(sealed.manifest.sha256) if name.endswith(".safetensors")]


@dataclass(frozen=True)
class BaseWeights:
    """The weights that an engine was started with, as a local directory: every version must fit them."""

    directory: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The object of config.json. Raises VersionRefused."""
        return read_object(self.directory / CONFIG_FILE)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, over all shards. Raises VersionRefused."""
        shards = sorted(self.directory.glob("*.safetensors"))
        return {name: tensor.shape for path in shards for name, tensor in read_header(path).items()}

    @cached_property
    def sha256(self) -> str:
        """The digest that names the weights in a manifest; empty if there are none."""
        return weights_digest({path.name: file_sha256(path) for path in self.directory.glob("*.safetensors")})


def check_base(files: PolicyFiles, base: BaseWeights | None) -> None:
    """Check that a base is the one that the engine was started with. Raises VersionRefused(base)."""
    if base is not None and base.sha256 != files.manifest.weights_sha256:
        place, ours = files.directory, base.sha256[:12] or "no weights"
        raise VersionRefused("base", f"{place}: not the weights served here ({ours}…); start an engine on this base")


def write_null_adapter(files: PolicyFiles, place: Path) -> None:
    """Write a LoRA adapter into `place` that changes nothing: an engine of adapters serves a base under a version's
    name by it. Rank 1 on one linear layer, all zeros. Raises VersionRefused(shape) for weights without such a layer."""
    name = next((name for name in sorted(files.tensors) if name.endswith(NULL_LAYER)), None)
    if name is None or len(files.tensors[name].shape) != 2:
        raise VersionRefused("shape", f"{files.directory}: no *{NULL_LAYER}; only decoders with such layers are served")
    outputs, inputs = files.tensors[name].shape
    module = name.removesuffix(".weight")
    header: dict[str, Any] = {}
    end = 0
    for side, shape in (("A", (1, inputs)), ("B", (outputs, 1))):
        size = math.prod(shape) * FLOATS["F32"][0]
        offsets = [end, end + size]
        header[f"base_model.model.{module}.lora_{side}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": offsets,
        }
        end += size
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "bias": "none"}
    config |= {"target_modules": [module.rpartition(".")[2]], "base_model_name_or_path": files.manifest.id}
    write_atomic(place / ADAPTER_WEIGHTS_FILE, content)
    write_atomic(place / ADAPTER_CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True))


def check_adapter(files: PolicyFiles, base: BaseWeights | None, rank_max: int) -> None:
    """Check that the files are a plain low-rank update of `base`. Raises VersionRefused(kind | base | rank | shape)."""
    place = files.directory
    if files.manifest.kind != "adapter":
        raise VersionRefused("kind", f"{place}: full weights, and this engine takes LoRA adapters; use another engine")
    config = read_object(place / ADAPTER_CONFIG_FILE)
    if odd := [name for name, plain in LORA_PLAIN.items() if config.get(name) not in plain]:
        raise VersionRefused("kind", f"{place}: {ADAPTER_CONFIG_FILE} uses {', '.join(odd)}; only plain LoRA is served")
    rank = config.get("r")
    if not isinstance(rank, int) or not 0 < rank <= rank_max:
        raise VersionRefused("rank", f"{place}: rank {rank}, the engine takes 1 to {rank_max}; train a lower rank")
    base_sha256 = files.manifest.base_sha256
    if base and base_sha256 and base.sha256 and base_sha256 != base.sha256:
        name = files.manifest.base
        raise VersionRefused("base", f"{place}: made for {name} ({base_sha256[:12]}…), not for the weights served here")
    _check_pairs(files, rank, base.shapes if base else None)


def _check_pairs(files: PolicyFiles, rank: int, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    """Check that each module has A [rank, in] and B [out, rank] for a weight [out, in] of the base."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in files.tensors.items():
        match = ADAPTER_TENSOR.match(name)
        if not match:
            raise VersionRefused("shape", f"{files.directory}: {name} is not a LoRA tensor; {FIX}")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor.shape
    if not pairs:
        raise VersionRefused("shape", f"{files.directory}: it holds no tensor; {FIX}")
    for module, sides in pairs.items():
        a, b = sides.get("A", ()), sides.get("B", ())
        weight = shapes.get(f"{module}.weight") if shapes is not None else (*b[:1], *a[1:])
        if weight is None or (a, b) != ((rank, weight[-1]), (weight[0], rank)):
            raise VersionRefused("shape", f"{files.directory}: {module} has A {a}, B {b} for a weight {weight}; {FIX}")


def check_full(files: PolicyFiles, base: BaseWeights) -> None:
    """Check that the weights can replace those of `base`. Raises VersionRefused(kind | tied | shape)."""
    place = files.directory
    if files.manifest.kind == "adapter":
        raise VersionRefused("kind", f"{place}: a LoRA adapter, and this engine takes full weights; use another engine")
    config = read_object(files.sealed.files / CONFIG_FILE)
    if config.get("tie_word_embeddings") or base.config.get("tie_word_embeddings"):
        raise VersionRefused("tied", f"{place}: tied embeddings; a reload in place would serve the old output layer")
    differ = {key for key in {*config, *base.config} - PASSING if config.get(key) != base.config.get(key)}
    if differ:
        raise VersionRefused("shape", f"{place}: config.json differs from the engine's in {', '.join(sorted(differ))}")
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    if wrong := sorted(name for name in {*shapes, *base.shapes} if shapes.get(name) != base.shapes.get(name)):
        name = wrong[0]
        mismatch = f"{name} is {shapes.get(name)}, the engine has {base.shapes.get(name)}"
        raise VersionRefused("shape", f"{place}: {mismatch}; {FIX}")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: its `dtype`, its `shape`, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    at_bytes: int

    @property
    def size_bytes(self) -> int:
        """The length of the tensor's bytes."""
        return math.prod(self.shape) * FLOATS[self.dtype][0]


def read_header(path: Path) -> dict[str, Tensor]:
    """Map each tensor's name to the tensor. Raises VersionRefused(missing | torn)."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= HEADER_BYTES_MAX:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        tensors = {name: _tensor(entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
        size = path.stat().st_size
    except FileNotFoundError:
        raise VersionRefused("missing", f"{path}: there is no such file; {FIX}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VersionRefused("torn", f"{path}: no readable safetensors file ({error}); {FIX}") from None
    _contiguous(path, tensors, 8 + length, size)
    return tensors


def _tensor(entry: Mapping[str, object], data_at: int) -> Tensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in FLOATS or not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError(f"dtype {dtype!r}, shape {shape!r}")
    if not all(isinstance(size, int) and size >= 0 for size in [*shape, *offsets]) or len(offsets) != 2:
        raise ValueError(f"shape {shape}, offsets {offsets}")
    tensor = Tensor(str(dtype), tuple(shape), data_at + offsets[0])
    if tensor.size_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{offsets[1] - offsets[0]} bytes for {dtype} {shape}")
    return tensor


def _contiguous(path: Path, tensors: Mapping[str, Tensor], data_at: int, size: int) -> None:
    end = data_at
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.at_bytes):
        if tensor.at_bytes != end:
            raise VersionRefused("torn", f"{path}: its tensors overlap or leave gaps; {FIX}")
        end += tensor.size_bytes
    if end != size:
        raise VersionRefused("torn", f"{path}: {size} bytes long, its header says {end}; {FIX}")


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises VersionRefused(not_finite), which names the first tensor with a NaN or an infinity."""
    with path.open("rb") as file:
        for name, tensor in tensors.items():
            file.seek(tensor.at_bytes)
            if any(_not_finite(block, tensor.dtype) for block in _blocks(file, tensor.size_bytes)):
                raise VersionRefused("not_finite", f"{path}: {name} holds a NaN or an infinity; {FIX}")


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    for at in range(0, size, BLOCK_BYTES):
        yield file.read(min(BLOCK_BYTES, size - at))


def _not_finite(block: bytes, dtype: str) -> bool:
    """Whether the exponent of an item is all ones. It tests both bytes of all items at once: each becomes 0 or 1, and
    two such strings are combined by one AND of big integers."""
    width, last, before = FLOATS[dtype]
    high = block[width - 1 :: width].translate(_marks(last))
    low = block[width - 2 :: width].translate(_marks(before))
    return bool(int.from_bytes(high, "little") & int.from_bytes(low, "little"))


def _marks(mask: int) -> bytes:
    return bytes(value & mask == mask for value in range(256))
