"""A LoRA adapter in PEFT's files, merged into its base's weights: W + scale · B A (arXiv:2106.09685).

scale = alpha / r, or alpha / √r where `use_rslora` says so (arXiv:2312.03732). What PEFT can store beyond that (DoRA,
biases, ranks by module, whole modules) is refused, as vLLM or exactness would not follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from gateway.adapters.engines.sealed import SealedPolicy, read_document, read_object
from gateway.core.policies.manifest import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_TENSOR,
    ADAPTER_WEIGHTS_FILE,
    MANIFEST_FILE,
    Manifest,
    manifest_of,
)
from gateway.errors import VersionRefused
from policy.serve.manifest import read_complete
from policy.serve.shape import Array, read_tensors

BASES = "bases"  # the folder of a data directory with pretrained models, beside that of the versions
SIBLINGS_MAX = 10_000  # directories of one folder that are looked at for a base
UNSUPPORTED = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")


def base_of(adapter: SealedPolicy, policies: Iterable[SealedPolicy], places: Sequence[Path] = ()) -> SealedPolicy:
    """The weights under an adapter: one of `policies`, else a directory with them beside it, where its base lay when it
    was trained, in the data directory that it lies in, or in one of `places`. Raises VersionRefused(base), which names
    all folders that were looked at."""
    manifest, place = adapter.manifest, adapter.directory
    if not manifest.base_sha256:
        raise VersionRefused("base", f"{place}: an adapter must name its base's sha256; train it again")
    for one in policies:
        if _is_base(one.manifest, manifest.base_sha256):
            return one
    folders = tuple(dict.fromkeys(each.resolve() for each in (place.parent, place.parent.parent / BASES, *places)))
    for directory in _candidates(adapter, folders):
        if _is_base(manifest_of(read_document(directory)), manifest.base_sha256):
            return read_complete(directory)
    name = manifest.base or "a base without a name"
    looked = ", ".join(map(str, [*folders, *_source(adapter)]))
    raise VersionRefused(
        "base",
        f"{place}: an adapter of {name} ({manifest.base_sha256[:12]}…), which is neither loaded nor in {looked}; put "
        f"its base at {place.parent / Path(manifest.base).name}",
    )


def _candidates(adapter: SealedPolicy, folders: Sequence[Path]) -> Iterator[Path]:
    """Directories with a manifest in which an adapter's base may lie, the likeliest first."""
    named, *others = ([folder / Path(adapter.manifest.base).name, *_inside(folder)] for folder in folders)
    for directory in chain(named, _source(adapter), *others):
        if directory.resolve() != adapter.directory.resolve() and (directory / MANIFEST_FILE).is_file():
            yield directory


def _inside(folder: Path) -> Sequence[Path]:
    return sorted(folder.iterdir())[:SIBLINGS_MAX] if folder.is_dir() else ()


def _source(adapter: SealedPolicy) -> Sequence[Path]:
    """Where the base lay when the adapter was trained, if that is known."""
    return [Path(adapter.manifest.base_source)] if adapter.manifest.base_source else []


def _is_base(manifest: Manifest, sha256: str) -> bool:
    return manifest.kind != "adapter" and manifest.weights_sha256 == sha256


def merge_adapter(directory: Path, base: Mapping[str, Array]) -> dict[str, Array]:
    """`base` (by name, float32) with the adapter in it; tensors it leaves alone are shared. Raises VersionRefused."""
    rank, scale = read_config(directory)
    path = directory / ADAPTER_WEIGHTS_FILE
    pairs = read_pairs(directory)
    changed = {f"{module}.weight": _merge(path, module, sides, base, rank, scale) for module, sides in pairs.items()}
    return {**base} | changed


def read_pairs(directory: Path) -> dict[str, dict[str, Array]]:
    """An adapter's matrices as float32: module → {"A": [rank, in], "B": [out, rank]}. Raises VersionRefused."""
    path = directory / ADAPTER_WEIGHTS_FILE
    pairs: dict[str, dict[str, Array]] = {}
    for name, tensor in read_tensors(path).items():
        match = ADAPTER_TENSOR.match(name)
        if not match:
            raise VersionRefused("engine", f"{path}: {name} is no LoRA tensor")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    if not pairs:
        raise VersionRefused("engine", f"{path}: it holds no tensor")
    return pairs


def read_config(directory: Path) -> tuple[int, float]:
    """An adapter's rank and scale. Raises VersionRefused."""
    path = directory / ADAPTER_CONFIG_FILE
    config = read_object(path)
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise VersionRefused("engine", f"{path}: {error!r}") from error
    odd = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") not in (None, "none"):
        odd.append("bias")
    if odd or rank < 1:
        what = f"rank {rank}, and {odd or 'nothing else'}"
        raise VersionRefused("engine", f"{path}: {what}; only plain LoRA is served")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _merge(
    path: Path, module: str, sides: Mapping[str, Array], base: Mapping[str, Array], rank: int, scale: float
) -> Array:
    weight = base.get(f"{module}.weight")
    shapes = {side: array.shape for side, array in sides.items()}
    if weight is None or weight.ndim != 2:
        raise VersionRefused("shape", f"{path}: the base has no matrix {module}.weight")
    if shapes != {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}:
        raise VersionRefused("shape", f"{path}: {module} has {shapes} for a weight {weight.shape} at rank {rank}")
    merged_weight: Array = weight + np.float32(scale) * (sides["B"] @ sides["A"])
    if not np.isfinite(merged_weight).all():
        raise VersionRefused("not_finite", f"{path}: {module} holds a NaN or an infinity")
    return merged_weight
