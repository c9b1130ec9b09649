"""Write the manifest of a policy directory, and read a directory that the embedded runtime can load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from gateway.adapters.engines.sealed import SealedPolicy, file_sha256, read_policy
from gateway.core.policies.manifest import ADAPTER_FILES, CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, Manifest

GRAPH_FILE = "graph.onnx"
REQUIRED_FILES = (CONFIG_FILE, WEIGHTS_FILE, GRAPH_FILE, "tokenizer.json", "tokenizer_config.json")
OPTIONAL_FILES = ("chat_template.jinja", "generation_config.json")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "sealed": REQUIRED_FILES,
    "base": (CONFIG_FILE, "tokenizer.json", "tokenizer_config.json"),
    "adapter": ADAPTER_FILES,
}


def write_manifest(directory: Path, manifest: Manifest, files: Iterable[str] = REQUIRED_FILES) -> Manifest:
    """Hash `files`, and of OPTIONAL_FILES those that are there, into `manifest.json`; return what was written."""
    names = {*files, *(name for name in OPTIONAL_FILES if (directory / name).is_file())}
    written = replace(manifest, sha256={name: file_sha256(directory / name) for name in sorted(names)})
    write_document(directory, written)
    return written


def write_document(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` as it is. Raises OSError."""
    (directory / MANIFEST_FILE).write_text(json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n")


def read_complete(directory: Path) -> SealedPolicy:
    """A sealed policy with a complete manifest and every file that the embedded runtime needs. Raises
    VersionRefused."""
    return read_policy(directory, NEEDED, complete=True)
