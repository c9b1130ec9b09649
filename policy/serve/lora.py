"""A LoRA adapter in PEFT's files, merged into its base's weights: W + scale · B A (arXiv:2106.09685).

scale = alpha / r, or alpha / √r where `use_rslora` says so (arXiv:2312.03732). What PEFT can store beyond that (DoRA,
biases, ranks by module, whole modules) is refused, as vLLM or exactness would not follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from gateway.adapters.engines.sealed import SealedPolicy, read_object
from gateway.core.policies.manifest import ADAPTER_CONFIG_FILE, ADAPTER_TENSOR, ADAPTER_WEIGHTS_FILE, MANIFEST_FILE
from gateway.errors import VersionRefused
from policy.serve.manifest import read_complete
from policy.serve.shape import Array, read_tensors

UNSUPPORTED = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")


def base_of(adapter: SealedPolicy, known: Iterable[SealedPolicy]) -> SealedPolicy:
    """The full weights under an adapter: one of `known`, else the directory beside it that has its base's name. Raises
    VersionRefused(base)."""
    manifest, place = adapter.manifest, adapter.directory
    if not manifest.base_sha256:
        raise VersionRefused("base", f"{place}: an adapter must name its base's sha256; train it again")
    for one in known:
        if _is_base(one, manifest.base_sha256):
            return one
    beside = place.parent / Path(manifest.base).name
    if not manifest.base or not (beside / MANIFEST_FILE).is_file():
        name = manifest.base or "a base without a name"
        raise VersionRefused(
            "base", f"{place}: an adapter of {name}, which is neither loaded nor beside it; put its base at {beside}"
        )
    base = read_complete(beside)
    if not _is_base(base, manifest.base_sha256):
        raise VersionRefused("base", f"{place}: {beside} is not the base it was made for; put its base there")
    return base


def _is_base(policy: SealedPolicy, sha256: str) -> bool:
    return policy.manifest.kind == "full" and policy.manifest.weights_sha256 == sha256


def merged(directory: Path, base: Mapping[str, Array]) -> dict[str, Array]:
    """`base` (by name, float32) with the adapter in it; tensors it leaves alone are shared. Raises VersionRefused."""
    rank, scale = _config(directory / ADAPTER_CONFIG_FILE)
    path = directory / ADAPTER_WEIGHTS_FILE
    pairs: dict[str, dict[str, Array]] = {}
    for name, tensor in read_tensors(path).items():
        match = ADAPTER_TENSOR.match(name)
        if not match:
            raise VersionRefused("engine", f"{path}: {name} is no LoRA tensor")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor.astype(np.float32)
    if not pairs:
        raise VersionRefused("engine", f"{path}: it holds no tensor")
    changed = {f"{module}.weight": _merge(path, module, sides, base, rank, scale) for module, sides in pairs.items()}
    return {**base} | changed


def _config(path: Path) -> tuple[int, float]:
    """Rank and scale. Raises VersionRefused."""
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
