"""What an engine wrote becomes a policy directory: its manifest says whose child it is and how it was made."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.adapters.engines.files import read_header
from gateway.core.policies.manifest import ADAPTER_CONFIG_FILE, ADAPTER_FILES, ADAPTER_WEIGHTS_FILE, Manifest
from gateway.errors import BadRequest, VersionRefused
from policy.reward import taught_dial
from policy.serve.manifest import REQUIRED_FILES, write_manifest
from policy.train.engines.rows import EngineSettings
from policy.train.weights.start import StartDirectory


def sealer(
    start: StartDirectory, version: str, settings: EngineSettings, rollouts: int, data: str, command: str
) -> Callable[[Path, dict[str, Any]], None]:
    """What `train_with_trl` calls last. `version`: NAME@N. Raises BadRequest for another name, ConfigError for a rank
    that is not that of the adapter to go on from."""
    name, _, number = version.partition("@")
    if not name or not number:
        raise BadRequest(f"{version!r} is no version; name it like conductor@8")
    dial, adapter = taught_dial(start.manifest.config), start.rank(settings.lora_rank) > 0

    def seal(directory: Path, probe: Mapping[str, Any]) -> None:
        born = replace(
            start.manifest,
            name=name,
            version=number,
            data=data,
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seed=settings.seed,
            kind="adapter" if adapter else "sealed",
            source="",
            parent=start.parent,
            rollouts=rollouts,
            config=_plain(settings) | ({"settings": {"dial": list(dial)}} if dial else {}),
            probe=dict(probe),
        )
        if adapter:
            _seal_adapter(directory, born, start.lineage)
        else:
            _seal_full(directory, born)

    return seal


def _seal_full(directory: Path, born: Manifest) -> None:
    """With our runtime's graph where it runs such a model; other models are vLLM's to serve."""
    with suppress(ModuleNotFoundError, VersionRefused):
        import_module("policy.serve.graph").write_graph(directory)
    files = [name for name in REQUIRED_FILES if (directory / name).is_file()]
    paths = sorted(directory.glob("*.safetensors"))
    write_manifest(directory, replace(born, params=sum(map(_numbers, paths))), {*files, *(path.name for path in paths)})


def _seal_adapter(directory: Path, born: Manifest, lineage: Mapping[str, Any]) -> None:
    """Only the adapter's own files stay: the base has the rest."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)  # PEFT's copy of the reference, where the loss has one
        elif path.name not in ADAPTER_FILES:
            path.unlink()
    config = json.loads((directory / ADAPTER_CONFIG_FILE).read_text()) | {"base_model_name_or_path": lineage["base"]}
    (directory / ADAPTER_CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    params = _numbers(directory / ADAPTER_WEIGHTS_FILE)
    write_manifest(directory, replace(born, params=params, **lineage), ADAPTER_FILES)


def _numbers(path: Path) -> int:
    """How many numbers a safetensors file holds."""
    return sum(math.prod(tensor.shape) for tensor in read_header(path).values())


def _plain(settings: EngineSettings) -> dict[str, Any]:
    return {"engine": "trl", **asdict(settings)}
