"""Versions on the embedded server (`python -m policy.serve --admin-key-file FILE`): full weights and adapters, each
under its own name, side by side in one process.

The server checks, merges, warms up and proves a version before its name appears; see `policy/serve/versions.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.adapters.engines.files import check
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.vllm import check_same, check_sampling
from gateway.errors import EngineDown, VersionRefused

# the reasons of VersionRefused, as the server names them
DRIFT_MAX = 0.005  # nats: float32 on both sides
REASONS = {"missing", "manifest", "checksum", "shape", "not_finite", "base", "full", "taken", "held", "probe"}


class EmbeddedEngine:
    """`ports.PolicyEngine`. `api` carries the server's admin key."""

    def __init__(self, api: EngineApi) -> None:
        self._api = api

    async def close(self) -> None:
        """Close every connection."""
        await self._api.close()

    async def load(self, version: str, directory: Path) -> None:
        models = await self._api.models()
        if version in models:
            check_same(version, str(models[version].get("root")), directory)
            return
        files = await asyncio.to_thread(check, directory)
        await self._admin("/v1/load_policy", {"name": version, "directory": str(files.directory)})
        try:
            check_sampling(version, await self._api.sampled_drift(version, files.manifest.probe), DRIFT_MAX)
        except VersionRefused:
            with suppress(VersionRefused):  # it stays where it is all that is served
                await self.unload(version)
            raise

    async def unload(self, version: str) -> None:
        """As the port says; raises VersionRefused(held) for the last version."""
        await self._admin("/v1/unload_policy", {"name": version})

    async def loaded(self) -> set[str]:
        return set(await self._api.models())

    async def probe(self, version: str, probe: Mapping[str, Any]) -> float:
        return await self._api.drift(version, probe)

    async def _admin(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._api.send("POST", path, body)
        if answer.status == 200:
            return
        if answer.status in (401, 404, 405):
            raise EngineDown(f"the engine at {self._api.url} has no {path}: start it with this gateway's admin key")
        if answer.status >= 500:
            raise EngineDown(f"the engine at {self._api.url} failed at {path}: {answer.message()}; see its log")
        reason = answer.code() if answer.code() in REASONS else "engine"
        raise VersionRefused(reason, answer.message())
