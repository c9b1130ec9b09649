"""What a run on TRL takes of each device's memory, by part, before any weights are read.

From `config.json` alone, for Qwen2 and Llama. Weights that all train are float32, with a gradient and AdamW's two
moments; under an adapter the base rests in bf16 or float32, and only the adapter has those. FSDP splits all of that
over the devices and gathers a layer at a time. Activations are those of one forward pass of `rows_per_device` rows:
with checkpointing each layer's input and one layer's insides, without it every layer's. The logits of a plan are kept
three times in float32: scaled, as log-probs, and as their gradient.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from gateway.errors import ConfigError
from policy.serve.shape import Shape, load_shape
from policy.train.engines.rows import EngineSettings

FLOAT32, BF16 = 4, 2
MOMENTS = 2
LOGITS_COPIES = 3
GIB = 1 << 30
RESERVE_SHARE = 0.06  # the device's own context, and what an allocator cannot use


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device, by part. `devices`: over which FSDP splits what it splits; 1 without it."""

    weights: int
    gathered: int  # in the type that is computed in: one layer's under FSDP, a copy of all under bf16 without it
    gradients: int
    optimizer: int
    activations: int
    logits: int
    devices: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by name."""
        names = ("weights", "gathered", "gradients", "optimizer", "activations", "logits")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def line(self) -> str:
        """For a person, in GiB."""
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items() if size)
        split = f" in shards over {self.devices} devices" if self.devices > 1 else ""
        return f"memory of a device: {self.total / GIB:.2f} GiB{split} ({parts})"


def memory(
    directory: Path, settings: EngineSettings, prompt_tokens: int, plan_tokens: int, *, shards: int = 1, rank: int = 0
) -> Memory:
    """Of a run on the model in `directory`. `prompt_tokens`, `plan_tokens`: the longest of each; `shards`: devices that
    FSDP splits over; `rank`: of the adapter, 0 where all weights train. Raises VersionRefused for another decoder."""
    shape = load_shape(directory)
    wide = BF16 if settings.bf16 else FLOAT32
    params = parameters(shape)
    trained = adapter_parameters(shape, rank) if rank else params
    resting = params * (wide if rank else FLOAT32) + (trained * FLOAT32 if rank else 0)
    rows = settings.rows_per_device * (prompt_tokens + plan_tokens)
    return Memory(
        weights=resting // shards,
        gathered=_gathered(shape, settings, shards=shards, rank=rank),
        gradients=trained * FLOAT32 // shards,
        optimizer=trained * FLOAT32 * MOMENTS // shards,
        activations=rows * _activations(shape, wide, rank, checkpointing=settings.gradient_checkpointing),
        logits=settings.rows_per_device * (plan_tokens + 1) * shape.vocab * FLOAT32 * LOGITS_COPIES,
        devices=shards,
    )


def check(found: Memory, device_bytes: int, device: str) -> None:
    """Raises ConfigError naming the largest part and what makes it smaller, where the device has less."""
    room = int(device_bytes * (1 - RESERVE_SHARE))
    if found.total <= room:
        return
    part = max(found.parts, key=lambda name: found.parts[name])
    raise ConfigError(
        f"{found.line()}; {device} has {device_bytes / GIB:.2f} GiB, of which {room / GIB:.2f} can be used. "
        f"The largest part is {part}: {_FIXES[part]}"
    )


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_SPLIT = "split it over more devices (deploy/accelerate/fsdp.yaml), or train an adapter (--set lora_rank=16)"
_FIXES = {
    "weights": f"--set bf16=true under an adapter, or {_SPLIT}",
    "gathered": _SPLIT,
    "gradients": _SPLIT,
    "optimizer": _SPLIT,
    "activations": "--set gradient_checkpointing=true, or a lower rows_per_device",
    "logits": "a lower rows_per_device; rows_per_step stays",
}


def parameters(shape: Shape) -> int:
    """How many weights the model has."""
    return sum(math.prod(dims) for _, dims in shape.tensors())


def adapter_parameters(shape: Shape, rank: int) -> int:
    """How many weights an adapter of all linear layers has, the head left out."""
    return rank * sum(sum(dims) for dims in _linear(shape)) * shape.layers


def _linear(shape: Shape) -> list[tuple[int, int]]:
    """(out, in) of a layer's linear maps."""
    q, kv = shape.heads * shape.head_dim, shape.heads_kv * shape.head_dim
    attention = [(q, shape.hidden), (kv, shape.hidden), (kv, shape.hidden), (shape.hidden, q)]
    return [*attention, (shape.inner, shape.hidden), (shape.inner, shape.hidden), (shape.hidden, shape.inner)]


def _gathered(shape: Shape, settings: EngineSettings, *, shards: int, rank: int) -> int:
    """Weights in the type that is computed in, beside those that rest: two layers and the embeddings under FSDP (the
    next is fetched while one computes), all of them where float32 weights compute in bf16."""
    wide = BF16 if settings.bf16 else FLOAT32
    if shards > 1:
        layer = sum(math.prod(dims) for name, dims in shape.tensors() if name.startswith("model.layers.0."))
        root = sum(math.prod(dims) for name, dims in shape.tensors() if not name.startswith("model.layers."))
        return (2 * layer + root) * wide
    return parameters(shape) * BF16 if settings.bf16 and not rank else 0


def _activations(shape: Shape, wide: int, rank: int, *, checkpointing: bool) -> int:
    """Bytes a token: of what a layer keeps for its backward pass. Its two normalisations keep their input in float32,
    and their output where their own weights train; each linear map keeps what it reads, an adapter what its first half
    gives; then there is the attention's own, and what the gate's product reads."""
    q, kv = shape.heads * shape.head_dim, shape.heads_kv * shape.head_dim
    normalised = 2 * (FLOAT32 + (0 if rank else wide)) * shape.hidden
    read = (2 * shape.hidden + q + shape.inner) * wide
    attention = (2 * q + 2 * kv) * wide
    gate = 3 * shape.inner * wide
    layer = normalised + read + attention + gate + rank * len(_linear(shape)) * wide
    kept = shape.hidden * wide
    return shape.layers * kept + layer if checkpointing else shape.layers * layer
