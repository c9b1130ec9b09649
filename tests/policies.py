"""Policy directories for tests: tiny and sealed; they pass every check that comes before an engine."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash


def write_weights(path: Path, values: Sequence[float]) -> None:
    """A safetensors file with one tensor `w` of 32-bit floats."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, 4 * len(values)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + struct.pack(f"<{len(values)}f", *values))


def write_policy(directory: Path, version: str = "1", values: Sequence[float] = (1.0, 2.0), **manifest: Any) -> Path:
    """A sealed policy directory of kind `full`; `manifest` overrides fields."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    write_weights(directory / "model.safetensors", values)
    files = ("config.json", "model.safetensors")
    hashes = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in files}
    sealed = {
        "name": "tiny",
        "version": version,
        "kind": "full",
        "parent": "",
        "prompt_version": f"compact-{PROMPT_VERSION}",
        "prompt_hash": prompt_hash("compact"),
        "sha256": hashes,
    }
    (directory / "manifest.json").write_text(json.dumps(sealed | manifest))
    return directory
