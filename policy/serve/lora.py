"""A LoRA adapter in PEFT's files, merged into its base's weights: W + scale · B A (arXiv:2106.09685).

scale = alpha / r, or alpha / √r where `use_rslora` says so (arXiv:2312.03732). What PEFT can store beyond that (DoRA,
biases, ranks by module, whole modules) is refused, as vLLM or exactness would not follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from policy.serve.shape import Array, ModelError, read_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
UNSUPPORTED = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern")


def merged(directory: Path, base: Mapping[str, Array]) -> dict[str, Array]:
    """`base` (by name, float32) with the adapter in it; tensors it leaves alone are shared. Raises ModelError."""
    rank, scale = _config(directory)
    pairs: dict[str, dict[str, Array]] = {}
    for name, tensor in read_tensors(directory / WEIGHTS_FILE).items():
        found = TENSOR.match(name)
        if not found:
            raise ModelError(f"{WEIGHTS_FILE}: {name} is no LoRA tensor")
        pairs.setdefault(found["module"], {})[found["side"]] = tensor.astype(np.float32)
    if not pairs:
        raise ModelError(f"{WEIGHTS_FILE}: it holds no tensor")
    return {**base} | {f"{module}.weight": _merge(module, sides, base, rank, scale) for module, sides in pairs.items()}


def _config(directory: Path) -> tuple[int, float]:
    """Rank and scale. Raises ModelError."""
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG_FILE).read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{CONFIG_FILE}: {error!r}") from error
    odd = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") not in (None, "none"):
        odd.append("bias")
    if odd or rank < 1:
        raise ModelError(f"{CONFIG_FILE}: rank {rank}, and {odd or 'nothing else'}; only plain LoRA is served")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _merge(module: str, sides: Mapping[str, Array], base: Mapping[str, Array], rank: int, scale: float) -> Array:
    weight = base.get(f"{module}.weight")
    shapes = {side: array.shape for side, array in sides.items()}
    if weight is None or weight.ndim != 2:
        raise ModelError(f"{WEIGHTS_FILE}: the base has no matrix {module}.weight", "shape")
    if shapes != {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}:
        raise ModelError(f"{WEIGHTS_FILE}: {module} has {shapes} for a weight {weight.shape} at rank {rank}", "shape")
    merged_weight: Array = weight + np.float32(scale) * (sides["B"] @ sides["A"])
    if not np.isfinite(merged_weight).all():
        raise ModelError(f"{WEIGHTS_FILE}: {module} holds a NaN or an infinity", "not_finite")
    return merged_weight
