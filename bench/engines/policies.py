"""Policy versions to try engines with: real directories with manifests and probes, and every way to spoil one.

The weights are the base's plus noise, so that versions differ and none is any good. What a version's probe should say
is computed here, by the embedded runtime.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gateway.adapters.engines.sealed import file_sha256
from gateway.core.policies.manifest import ADAPTER_FILES, NEEDED, Manifest
from policy.serve.engine import Engine
from policy.serve.lora import merge_adapter
from policy.serve.manifest import REQUIRED_FILES, read_complete, write_manifest
from policy.serve.runtime import Runtime
from policy.serve.shape import Array, load_shape, load_weights
from policy.serve.tokens import Tokens

MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROBE_PROMPT, PROBE_TOKENS = 48, 16
NOISE = 0.02


def write_adapter(base: Path, directory: Path, seed: int, rank: int = 1, scale: float = 0.1) -> Path:
    """A random LoRA over `base`, as PEFT would save it. At a `scale` of 0.003 it plans as its base does."""
    random, shape = np.random.default_rng(seed), load_shape(base)
    tensors: dict[str, Array] = {}
    for name, dims in shape.tensors():
        module = name.removesuffix(".weight")
        if module.endswith(MODULES):
            at = f"base_model.model.{module}.lora_"
            tensors[f"{at}A.weight"] = random.normal(0, dims[1] ** -0.5, (rank, dims[1])).astype(np.float32)
            tensors[f"{at}B.weight"] = random.normal(0, scale, (dims[0], rank)).astype(np.float32)
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": list(MODULES), "base_model_name_or_path": str(base), "inference_mode": True}
    (directory / ADAPTER_FILES[0]).write_text(json.dumps(config))
    save_file(tensors, directory / ADAPTER_FILES[1])
    weights = merge_adapter(directory, load_weights(base, shape))
    about = read_complete(base).manifest
    params = sum(tensor.size for tensor in tensors.values())
    seal(
        directory,
        replace(about, kind="adapter", version=str(seed), base=base.name, params=params, seed=seed,
                base_sha256=about.sha256["model.safetensors"], probe=probe_of(base, weights, seed)),
    )  # fmt: skip
    return directory


def write_full(base: Path, directory: Path, seed: int) -> Path:
    """Write all weights of the base, with noise."""
    random, shape = np.random.default_rng(seed), load_shape(base)
    weights = {
        name: (array + random.normal(0, NOISE, array.shape)).astype(np.float32)
        for name, array in load_weights(base, shape).items()
    }
    shutil.copytree(base, directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    about = read_complete(base).manifest
    seal(directory, replace(about, version=str(seed), parent=base.name, seed=seed, probe=probe_of(base, weights, seed)))
    return directory


def probe_of(home: Path, weights: dict[str, Array], seed: int) -> dict[str, Any]:
    """A random sequence and the log-probs that `weights` give it on the embedded runtime."""
    runtime = Runtime(home, weights=weights)
    engine = Engine(runtime, Tokens(home, runtime.shape), threads=1)
    ids = np.random.default_rng(seed).integers(3, runtime.shape.vocab, PROBE_PROMPT + PROBE_TOKENS).tolist()
    scored = engine.scored(ids, first=PROBE_PROMPT)
    engine.close()
    return {"prompt_ids": ids[:PROBE_PROMPT], "token_ids": ids[PROBE_PROMPT:], "logprobs": list(scored.logprobs)}


def seal(directory: Path, manifest: Manifest) -> None:
    """Write the manifest with the checksums of what is there now."""
    write_manifest(directory, manifest, ADAPTER_FILES if manifest.kind == "adapter" else REQUIRED_FILES)


def manifest_of(directory: Path) -> dict[str, Any]:
    """Return the manifest as JSON."""
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return manifest


# ---------------------------------------------------------------- spoiling


def reseal(directory: Path, **changes: Any) -> None:
    """Change fields and renew the checksums, so that only the content can reveal it."""
    manifest = manifest_of(directory) | changes
    manifest["sha256"] = {name: file_sha256(directory / name) for name in manifest["sha256"]}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _weights(directory: Path) -> Path:
    return directory / NEEDED[manifest_of(directory)["kind"]][1]


def _flip(directory: Path) -> None:
    data = bytearray(_weights(directory).read_bytes())
    data[-1] ^= 1
    _weights(directory).write_bytes(bytes(data))


def _truncate(directory: Path) -> None:
    data = _weights(directory).read_bytes()
    _weights(directory).write_bytes(data[: len(data) // 2])
    reseal(directory)


def _garbage(directory: Path) -> None:
    _weights(directory).write_bytes(b"\xff" * 4096)
    reseal(directory)


def _tensors(directory: Path, change: Callable[[Array], Array]) -> None:
    """Change one tensor, the last by name that is a matrix."""
    tensors = load_file(_weights(directory))
    name = max(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, _weights(directory), metadata={"format": "pt"})
    reseal(directory)


def _nan(array: Array) -> Array:
    array = array.copy()
    array.flat[array.size // 2] = np.nan
    return array


def _off(directory: Path) -> None:
    probe = manifest_of(directory)["probe"]
    reseal(directory, probe=probe | {"logprobs": [value - 0.5 for value in probe["logprobs"]]})


SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "bad path": (lambda d: shutil.rmtree(d), "missing"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "missing"),
    "checksum mismatch": (_flip, "checksum"),
    "truncated": (_truncate, "torn"),
    "corrupt": (_garbage, "torn"),
    "wrong shape": (lambda d: _tensors(d, lambda array: array[:-1]), "shape"),
    "NaN weights": (lambda d: _tensors(d, _nan), "not_finite"),
    "wrong prompt version": (lambda d: reseal(d, prompt_version="compact-999"), "prompt"),
    "wrong prompt hash": (lambda d: reseal(d, prompt_hash="0" * 64), "prompt"),
    "other weights than its probe": (_off, "probe"),
    "weights beside the manifest": (lambda d: (d / "more.safetensors").write_bytes(b""), "manifest"),
}


def spoil(directory: Path, how: str) -> str:
    """Spoil a good directory; return the reason with which an engine must refuse it."""
    change, reason = SPOILS[how]
    change(directory)
    return reason
