"""What an engine wrote becomes a policy directory: its manifest says whose child it is and how it was made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import SealedPolicy
from gateway.core.policies.manifest import ADAPTER_FILES, Manifest
from gateway.errors import BadRequest
from policy.reward import taught_dial
from policy.serve.graph import write_graph
from policy.serve.manifest import REQUIRED_FILES, write_manifest
from policy.train.engines.rows import EngineSettings


def sealer(
    parent: SealedPolicy, version: str, settings: EngineSettings, rollouts: int, data: str, command: str
) -> Callable[[Path, dict[str, Any]], None]:
    """What `train_with_trl` calls last. `version`: NAME@N. Raises BadRequest for another name, and
    for an adapter where an adapter is to be trained."""
    name, _, number = version.partition("@")
    if not name or not number:
        raise BadRequest(f"{version!r} is no version; name it like conductor@8")
    manifest = parent.manifest
    if settings.lora_rank and manifest.kind == "adapter":
        raise BadRequest(f"{parent.directory} is an adapter: train one over its base, or merge it first")

    dial = taught_dial(manifest.config)

    def seal(directory: Path, probe: Mapping[str, Any]) -> None:
        born = replace(
            manifest,
            name=name,
            version=number,
            data=data,
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seed=settings.seed,
            parent=manifest.id,
            rollouts=rollouts,
            config=_plain(settings) | ({"settings": {"dial": list(dial)}} if dial else {}),
            probe=dict(probe),
        )
        if settings.lora_rank:
            _seal_adapter(directory, born, manifest)
        else:
            write_graph(directory)
            write_manifest(directory, born, REQUIRED_FILES)

    return seal


def _seal_adapter(directory: Path, born: Manifest, parent: Manifest) -> None:
    """Only the adapter's own files stay: the base has the rest."""
    for path in directory.iterdir():
        if path.name not in ADAPTER_FILES:
            path.unlink()
    base = parent.id
    config = json.loads((directory / ADAPTER_FILES[0]).read_text())
    (directory / ADAPTER_FILES[0]).write_text(json.dumps(config | {"base_model_name_or_path": base}, indent=2) + "\n")
    adapter = replace(born, kind="adapter", base=base, base_sha256=parent.weights_sha256)
    write_manifest(directory, adapter, ADAPTER_FILES)


def _plain(settings: EngineSettings) -> dict[str, Any]:
    return {"engine": "trl", **asdict(settings)}
