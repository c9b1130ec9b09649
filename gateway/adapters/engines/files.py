"""What a policy directory must be before any engine is shown it. A bad one can kill an engine or, worse, be served.

In order: the manifest and every checksum (`sealed.py`), the prompt it was trained on, weights complete and finite; then
whether they fit the weights that the engine runs (`Base`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import SealedPolicy, file_sha256, read_object, read_policy
from gateway.adapters.engines.tensors import Tensor, check_finite, read_header
from gateway.core.policies.manifest import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    FIX,
    NEEDED,
    WEIGHTS_FILE,
    Manifest,
    check_prompt,
)
from gateway.errors import VersionRefused

# fields of config.json that say how the weights were saved, not what they are
PASSING = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
LORA_NAME = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
# what PEFT can put into an adapter and a served low-rank update is not
LORA_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


@dataclass(frozen=True, slots=True)
class PolicyFiles:
    """A policy directory that an engine may be shown: the sealed policy, and its tensors by name."""

    sealed: SealedPolicy
    tensors: Mapping[str, Tensor]

    @property
    def directory(self) -> Path:
        """Absolute, without links."""
        return self.sealed.directory.resolve()

    @property
    def manifest(self) -> Manifest:
        """As it was read."""
        return self.sealed.manifest


def check(directory: Path) -> PolicyFiles:
    """All checks of a directory by itself. Raises VersionRefused. Blocks: it reads every byte."""
    if not directory.is_absolute():
        raise VersionRefused("missing", f"{directory}: give an absolute path; the engine has a directory of its own")
    sealed = read_policy(directory)
    check_prompt(sealed.manifest, directory)
    weights = directory / NEEDED[sealed.manifest.kind][1]
    tensors = read_header(weights)
    check_finite(weights, tensors)
    return PolicyFiles(sealed, tensors)


@dataclass(frozen=True)
class Base:
    """The weights an engine was started with, as a local directory: what every version must fit."""

    directory: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json. Raises VersionRefused."""
        return read_object(self.directory / CONFIG_FILE)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each of its tensors, over all shards. Raises VersionRefused."""
        shards = sorted(self.directory.glob("*.safetensors"))
        return {name: tensor.shape for path in shards for name, tensor in read_header(path).items()}

    @cached_property
    def sha256(self) -> str:
        """Of its model.safetensors; empty where it lies in shards."""
        path = self.directory / WEIGHTS_FILE
        return file_sha256(path) if path.is_file() else ""


def check_adapter(files: PolicyFiles, base: Base | None, rank_max: int) -> None:
    """That it is a plain low-rank update of `base`. Raises VersionRefused(kind | base | rank | shape)."""
    place = files.directory
    if files.manifest.kind != "adapter":
        raise VersionRefused("kind", f"{place}: full weights, and this engine takes LoRA adapters; use another engine")
    config = read_object(place / ADAPTER_CONFIG_FILE)
    if odd := [name for name, plain in LORA_PLAIN.items() if config.get(name) not in plain]:
        raise VersionRefused("kind", f"{place}: {ADAPTER_CONFIG_FILE} uses {', '.join(odd)}; only plain LoRA is served")
    rank = config.get("r")
    if not isinstance(rank, int) or not 0 < rank <= rank_max:
        raise VersionRefused("rank", f"{place}: rank {rank}, the engine takes 1 to {rank_max}; train a lower rank")
    wanted = files.manifest.base_sha256
    if base and wanted and base.sha256 and wanted != base.sha256:
        name = files.manifest.base
        raise VersionRefused("base", f"{place}: made for {name} ({wanted[:12]}…), not for the weights served here")
    _check_pairs(files, rank, base.shapes if base else None)


def _check_pairs(files: PolicyFiles, rank: int, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    """Each module has A [rank, in] and B [out, rank] for a weight [out, in] of the base."""
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in files.tensors.items():
        found = LORA_NAME.match(name)
        if not found:
            raise VersionRefused("shape", f"{files.directory}: {name} is no LoRA tensor; {FIX}")
        pairs.setdefault(found["module"], {})[found["side"]] = tensor.shape
    if not pairs:
        raise VersionRefused("shape", f"{files.directory}: it holds no tensor; {FIX}")
    for module, sides in pairs.items():
        a, b = sides.get("A", ()), sides.get("B", ())
        weight = shapes.get(f"{module}.weight") if shapes is not None else (*b[:1], *a[1:])
        if weight is None or (a, b) != ((rank, weight[-1]), (weight[0], rank)):
            raise VersionRefused("shape", f"{files.directory}: {module} has A {a}, B {b} for a weight {weight}; {FIX}")


def check_full(files: PolicyFiles, base: Base) -> None:
    """That its weights can take the place of `base`'s. Raises VersionRefused(kind | tied | shape)."""
    place = files.directory
    if files.manifest.kind != "full":
        raise VersionRefused("kind", f"{place}: a LoRA adapter, and this engine takes full weights; use another engine")
    config = read_object(place / CONFIG_FILE)
    if config.get("tie_word_embeddings") or base.config.get("tie_word_embeddings"):
        raise VersionRefused("tied", f"{place}: tied embeddings; a reload in place would serve the old output layer")
    differ = {key for key in {*config, *base.config} - PASSING if config.get(key) != base.config.get(key)}
    if differ:
        raise VersionRefused("shape", f"{place}: config.json differs from the engine's in {', '.join(sorted(differ))}")
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    if wrong := sorted(name for name in {*shapes, *base.shapes} if shapes.get(name) != base.shapes.get(name)):
        name = wrong[0]
        found = f"{name} is {shapes.get(name)}, the engine has {base.shapes.get(name)}"
        raise VersionRefused("shape", f"{place}: {found}; {FIX}")
