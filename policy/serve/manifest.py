"""The manifest of a policy version: what its files are, and what they were made from and for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from policy.serve.shape import ModelError

MANIFEST_FILE = "manifest.json"
REQUIRED_FILES = ("config.json", "model.safetensors", "graph.onnx", "tokenizer.json", "tokenizer_config.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PUBLIC_FIELDS = ("name", "version", "kind", "prompt_version", "prompt_hash", "pools", "params", "quality")
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """`sha256` maps each file to its hex digest; `prompt_hash` names the prompt builder the weights were trained on."""

    name: str
    version: str
    prompt_version: str
    prompt_hash: str
    seed: int
    data: str  # what it was trained on
    command: str  # what rebuilds it
    created: str  # ISO 8601, UTC
    params: int  # number of weights
    pools: tuple[str, ...] = ()  # pools whose handles it has seen; empty: reads any
    kind: Literal["full", "adapter"] = "full"
    base: str = ""  # of an adapter: the version whose weights it changes
    base_sha256: str = ""  # of that version's model.safetensors
    parent: str = ""  # the version that training began with
    rollouts: int = 0  # trained on
    rounds: int = 1  # plans a request may take, as it was trained
    quality: int | None = None  # the dial it is shown where a request sets none; None: it was trained without
    config: dict[str, Any] = field(default_factory=dict)  # training settings
    revision: str = ""  # of the code that trained it
    probe: dict[str, Any] = field(default_factory=dict)  # prompt_ids, token_ids, logprobs: what a swap is proven by
    sha256: dict[str, str] = field(default_factory=dict)

    @property
    def next_version(self) -> str:
        """One more, where it is a number."""
        return str(int(self.version) + 1) if self.version.isdigit() else f"{self.version}.1"

    def public(self) -> dict[str, Any]:
        """What the server tells about itself under `baton` in /v1/models."""
        return {name: getattr(self, name) for name in PUBLIC_FIELDS}


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(directory: Path, manifest: Manifest, files: Iterable[str] = REQUIRED_FILES) -> Manifest:
    """Hash `files` (and a chat template where there is one) into `manifest.json`; returns what was written."""
    names = [*files, *(n for n in ("chat_template.jinja", "generation_config.json") if (directory / n).is_file())]
    hashes = {name: sha256_of(directory / name) for name in sorted(set(names))}
    written = Manifest(**{**asdict(manifest), "pools": tuple(manifest.pools), "sha256": hashes})
    (directory / MANIFEST_FILE).write_text(json.dumps(asdict(written), indent=2, sort_keys=True) + "\n")
    return written


def read_manifest(directory: Path) -> Manifest:
    """Read `manifest.json` and check every file against it. Raises ModelError with one clear line."""
    manifest = _parse(directory)
    required = ADAPTER_FILES if manifest.kind == "adapter" else REQUIRED_FILES
    if missing := [name for name in required if name not in manifest.sha256]:
        raise ModelError(f"{MANIFEST_FILE}: sha256 lists no {', '.join(missing)}")
    for name, expected in sorted(manifest.sha256.items()):
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise ModelError(f"{name}: named in {MANIFEST_FILE} and not in {directory}")
        if sha256_of(path) != expected:
            raise ModelError(f"{name}: does not match its sha256 in {MANIFEST_FILE}; fetch or rebuild the model")
    return manifest


def _parse(directory: Path) -> Manifest:
    try:
        data = json.loads((directory / MANIFEST_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{MANIFEST_FILE}: {error}") from error
    required = {f.name for f in fields(Manifest) if f.default is MISSING and f.default_factory is MISSING}
    required |= {"pools", "sha256"}
    known = {f.name for f in fields(Manifest)}
    if not isinstance(data, dict) or not required <= set(data) <= known:
        wrong = sorted((required - set(data)) | (set(data) - known)) if isinstance(data, dict) else "not an object"
        raise ModelError(f"{MANIFEST_FILE}: fields missing or unknown: {wrong}")
    if not isinstance(data["sha256"], dict) or not isinstance(data["pools"], list):
        raise ModelError(f"{MANIFEST_FILE}: sha256 must be an object and pools a list")
    return Manifest(**{**data, "pools": tuple(data["pools"])})
