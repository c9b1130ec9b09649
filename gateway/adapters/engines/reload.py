"""Full weights replaced in place on one vLLM, guarded. One version at a time; for canaries use LoRA or two engines.

    VLLM_SERVER_DEV_MODE=1 vllm serve BASE …        (untied embeddings; the routes are unsafe to expose)

The order; each step avoids a fault that was measured: check files, config and shapes before the call (a bad path kills
the engine; tied embeddings would serve a mix) → let our own plans end, new ones wait → pause, `mode=wait` (the default
aborts) → reload → drop the prefix cache, which is of the old weights → label → resume in any case → probe. If the
reload or the probe fails, the old weights are loaded again.

vLLM answers under its one served name. So `ReloadConductor` stands before it: it lets plans through, delays them during
a swap, and names in each plan's end the version that decoded it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from gateway.adapters.engines.files import BaseWeights, PolicyFiles, check, check_full
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.vllm import DRIFT_MAX, check_drift, check_sampling
from gateway.errors import BatonError, ConductorError, EngineDown, NotFound, VersionRefused
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd

BASE_LABEL = "default"  # vLLM's label of the weights it started with
DRAIN_S = 60.0
RELOAD_S = 600.0  # to read the weights
Items = AsyncGenerator[ConductorChunk | ConductorEnd, None]


class VllmReload:
    """`ports.PolicyEngine` for the vLLM that serves `base` as `model`. `drain_s`: how long a swap waits for the plans
    in flight."""

    def __init__(self, api: EngineApi, model: str, base: Path, *, drain_s: float = DRAIN_S) -> None:
        self.model = model
        self.turns = Turns()
        self._api = api
        self._base = BaseWeights(base)
        self._drain_s = drain_s
        self._directories: dict[str, Path] = {BASE_LABEL: base}
        self._lock = asyncio.Lock()
        self._swapping: asyncio.Task[None] | None = None
        self._swaps = 0

    async def close(self) -> None:
        """Let a swap end, then close every connection."""
        if self._swapping is not None:
            await asyncio.wait({self._swapping})
        await self._api.close()

    async def load(self, version: str, directory: Path) -> None:
        """As the port says. When it returns, `version` answers and nothing else does. Cancelling the caller does not
        stop the swap."""
        self._swapping = asyncio.create_task(self._load(version, directory), name=f"load {version}")
        await asyncio.shield(self._swapping)

    async def _load(self, version: str, directory: Path) -> None:
        async with self._lock:
            self._swaps += 1
            before = await self._label()
            if before == version:
                self.turns.version = version
                return
            files = await asyncio.to_thread(self._checked, directory)
            async with self.turns.closed(self._drain_s):
                try:
                    await self._swap(version, files.sealed.files)
                    check_drift(version, await self._api.drift(self.model, files.manifest.probe), DRIFT_MAX)
                    sampled = await self._api.sampled_drift(self.model, files.manifest.probe)
                    check_sampling(version, sampled, DRIFT_MAX)
                except BatonError:
                    await self._undo(before)
                    raise
                self._directories[version] = files.sealed.files
                self.turns.version = version

    async def unload(self, version: str) -> None:
        """As the port says; the served version can only be replaced."""
        if version in await self.loaded():
            raise VersionRefused("held", f"{version} is what the engine serves; load another version in its place")

    async def loaded(self) -> set[str]:
        """The version in place; none after a restart of the engine. During a swap: the version before it."""
        swaps, label = self._swaps, await self._label()
        if swaps == self._swaps and not self._lock.locked():
            self.turns.version = None if label == BASE_LABEL else label
        return {self.turns.version} if self.turns.version else set()

    async def probe(self, version: str, probe: Mapping[str, Any]) -> float:
        if version not in await self.loaded():
            raise NotFound(f"the engine does not serve {version} now", code="model_not_found")
        return await self._api.drift(self.model, probe)

    def _checked(self, directory: Path) -> PolicyFiles:
        files = check(directory)
        check_full(files, self._base)
        return files

    async def _label(self) -> str:
        answer = await self._api.send("GET", "/weight_info")
        if answer.status != 200 or not isinstance(answer.body, dict):
            raise EngineDown(f"the engine at {self._api.url} has no /weight_info: start it with VLLM_SERVER_DEV_MODE=1")
        return str(answer.body.get("weight_version"))

    async def _swap(self, version: str, directory: Path) -> None:
        try:
            await self._api.do("/pause?mode=wait", timeout_s=self._drain_s)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await self._api.do("/collective_rpc", reload, timeout_s=RELOAD_S)
            await self._api.do("/reset_prefix_cache")
            await self._api.do("/update_weight_version", {"new_version": version})
        finally:
            await asyncio.shield(self._api.do("/resume"))

    async def _undo(self, before: str) -> None:
        """Load the weights of before, or the base if this process did not load them; `loaded` then names them."""
        label = before if before in self._directories else BASE_LABEL
        await self._swap(label, self._directories[label])
        self.turns.version = None if label == BASE_LABEL else label


class Turns:
    """Plans take turns with swaps: many plans at once, or one swap alone. `version` is the version that decodes
    plans."""

    def __init__(self) -> None:
        self.version: str | None = None
        self._plans = 0
        self._swapping = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def plan(self, wait_s: float) -> AsyncIterator[str | None]:
        """Wait for a plan's turn and yield the version that will decode it. Raises TimeoutError if a swap takes
        longer."""
        async with asyncio.timeout(wait_s), self._changed:
            await self._changed.wait_for(lambda: not self._swapping)
            self._plans += 1
        try:
            yield self.version
        finally:
            async with self._changed:
                self._plans -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def closed(self, drain_s: float) -> AsyncIterator[None]:
        """Wait until the plans in flight have ended, and keep new ones out. Raises EngineDown if they do not end in
        time."""
        self._swapping = True
        try:
            async with asyncio.timeout(drain_s), self._changed:
                await self._changed.wait_for(lambda: not self._plans)
        except TimeoutError:
            await self._reopen()
            raise EngineDown(
                f"the engine is busy: plans in flight did not end within {drain_s:g} s; try again"
            ) from None
        try:
            yield
        finally:
            await self._reopen()

    async def _reopen(self) -> None:
        async with self._changed:
            self._swapping = False
            self._changed.notify_all()


class ReloadConductor:
    """`ports.Conductor` before a `VllmReload`: it asks for vLLM's one served name and answers for exactly one
    version."""

    def __init__(self, conductor: Conductor, engine: VllmReload) -> None:
        self._conductor = conductor
        self._engine = engine

    async def decode(self, call: ConductorCall) -> Items:
        """As the port says. It refuses a version that is not in place; a swap that outlasts the call is `slow`."""
        try:
            async with self._engine.turns.plan(call.timeout_s) as version:
                if call.model is not None and call.model != version:
                    raise ConductorError("refused", f"the engine holds {version}, not {call.model}", billable=False)
                renamed = replace(call, model=self._engine.model)
                async with aclosing(cast(Items, self._conductor.decode(renamed))) as items:
                    async for item in items:
                        mark = isinstance(item, ConductorEnd) and version is not None
                        yield replace(item, model=version) if mark else item  # type: ignore[arg-type]
        except TimeoutError:
            raise ConductorError("slow", "a swap of weights took longer than the call", billable=False) from None

    async def ready(self) -> bool:
        return await self._conductor.ready()
