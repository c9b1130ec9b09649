"""The policy that training begins with, before its weights are loaded: sealed, a base, an adapter, or a model without a
manifest. Our trainer and the engines begin with the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import SealedPolicy, file_sha256, read_object
from gateway.core.loop.prompt import PROMPT_VERSION, prompt_hash
from gateway.core.policies.manifest import CONFIG_FILE, MANIFEST_FILE, Manifest, weights_digest
from gateway.errors import ConfigError
from policy.serve.lora import base_of, read_config
from policy.serve.manifest import read_complete

# what a directory of full weights has beside them
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "graph.onnx",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class StartDirectory:
    """A policy directory, checked. `home`: where config, tokenizer and full weights lie. `sealed`: it has a manifest of
    its own. `base`: of an adapter, the policy that it changes."""

    directory: Path
    manifest: Manifest
    home: Path
    sealed: bool
    base: SealedPolicy | None

    @property
    def version(self) -> str:
        """As the registry names it."""
        return self.manifest.id

    @property
    def parent(self) -> str:
        """What the manifest of a trained version names as its parent."""
        return self.version if self.sealed else self.manifest.parent

    @property
    def lineage(self) -> Mapping[str, Any]:
        """The manifest's fields of an adapter that is trained from here: which weights it changes."""
        if self.base is not None:
            source, manifest = self.base.directory, self.base.manifest
        else:
            source, manifest = self.directory, self.manifest
        digest = manifest.weights_sha256 or weights_digest(
            {path.name: file_sha256(path) for path in self.home.glob("*.safetensors")}
        )
        return {"base": manifest.id, "base_sha256": digest, "base_source": str(source.resolve())}

    def rank(self, wanted: int) -> int:
        """The rank of the adapter that is trained, 0 for full weights. `wanted`: by the settings, 0 where they leave it
        open. Raises ConfigError for a rank that is not the given adapter's."""
        if self.base is None:
            return wanted
        rank, _ = read_config(self.directory)
        if wanted not in (0, rank):
            raise ConfigError(f"--set lora_rank={wanted}: {self.directory} goes on at its rank, {rank}")
        return rank


def open_start(directory: Path) -> StartDirectory:
    """Read a directory that training is to begin with. Raises VersionRefused for a bad one."""
    if not (directory / MANIFEST_FILE).is_file():
        read_object(directory / CONFIG_FILE)  # refuses what is no model either
        return StartDirectory(directory, unsealed(directory), directory, False, None)
    policy = read_complete(directory)
    base = base_of(policy, ()) if policy.manifest.kind == "adapter" else None
    return StartDirectory(directory, policy.manifest, (base or policy).files, True, base)


def unsealed(directory: Path) -> Manifest:
    """Of a model from elsewhere, an instruct model for instance: it reads the `full` prompt, as it would read any."""
    return Manifest(
        name="conductor",
        version="0",
        prompt_version=f"full-{PROMPT_VERSION}",
        prompt_hash=prompt_hash("full"),
        seed=0,
        data="",
        command="",
        created="",
        params=0,
        parent=directory.name,
    )
