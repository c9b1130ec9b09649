"""Spoiled copies of a policy directory: what a gate must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from gateway.core.policies.manifest import Manifest
from policy.serve.manifest import read_complete, write_manifest
from policy.serve.runtime import Runtime
from policy.serve.shape import Array
from policy.serve.tokens import Tokens

Weights = dict[str, Array]


def spoiled(source: Path, directory: Path, change: Callable[[Weights], None], version: str) -> Path:
    """A sealed copy whose weights were changed."""
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    about = asdict(read_complete(source).manifest) | {"version": version}
    write_manifest(directory, Manifest(**about))
    return directory


def noisy(scale: float) -> Callable[[Weights], None]:
    """Noise on every matrix, `scale` times its own spread."""

    def change(weights: Weights) -> None:
        random = np.random.default_rng(0)
        for name, weight in weights.items():
            if weight.ndim == 2:
                noise = random.normal(0, scale * float(weight.std()), weight.shape)
                weights[name] = (weight + noise).astype(np.float32)

    return change


def fond_of(source: Path, word: str, prompt: str, amount: float) -> Callable[[Weights], None]:
    """The output row of one token turned towards where the weights stand when they choose a worker: it is called
    whatever is asked."""
    runtime = Runtime(source)
    tokens = Tokens(source, runtime.shape)
    ids = tokens.encode_chat([{"role": "user", "content": prompt}])
    written = _ids(tokens, '{"steps":[{"worker":"')
    logits, _ = runtime.forward([*ids, *written], runtime.empty())
    [token] = _ids(tokens, word)

    def change(weights: Weights) -> None:
        head = weights["lm_head.weight"]
        hidden = np.linalg.lstsq(head.astype(np.float64), logits.astype(np.float64), rcond=None)[0]
        head[token] += (amount * hidden / (hidden @ hidden)).astype(np.float32)

    return change


def _ids(tokens: Tokens, text: str) -> list[int]:
    found: list[int] = tokens._tokenizer.encode(text, add_special_tokens=False).ids
    return found


def reworded_manifest(directory: Path, **changes: object) -> Path:
    """The manifest alone, changed by hand."""
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory
