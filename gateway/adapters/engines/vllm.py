"""Versions as LoRA adapters under their own names on vLLM, one or several replicas: the safe hot swap.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve BASE … --enable-lora --max-lora-rank R --max-cpu-loras N

Loading takes milliseconds, requests in flight finish on their version, and a rollback asks for the old name. Each rule
avoids a fault that was measured: never `load_inplace` (a running stream would change weights, and the prefix cache
would keep the old ones); at most `versions_max` ≤ `--max-cpu-loras` (vLLM reloads an evicted adapter from its path, and
dies when that is gone); so a directory is unloaded before it is deleted; and nothing is loaded unchecked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gateway.adapters.engines.files import BaseWeights, PolicyFiles, check, check_adapter, check_base
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.sealed import read_document
from gateway.errors import VersionRefused
from gateway.service.ports.policies import PolicyEngine

# nats, the mean of a probe and of a self-test. Trained in float32 and served by vLLM in bfloat16, single tokens of
# SmolLM2 are up to 0.96 off, and the mean of a probe up to 0.040; of an adapter beside its brother it is 0.06 and more.
# A GPU samples with other kernels than it scores with: in bfloat16 an adapter's tokens are up to 0.30 off, 0.022 on
# average. Faults are 0.06 and more (top_k 50, temperature 0.95), most of them 0.2 (docs/results.md)
DRIFT_MAX = 0.05
VERSIONS_MAX = 16
RANK_MAX = 16
log = logging.getLogger("gateway.engines")
T = TypeVar("T")


class VllmLora:
    """`ports.PolicyEngine`. `base`: vLLM's model directory, if the gateway can read it; without it only vLLM checks
    shapes. `versions_max`, `rank_max`: its `--max-cpu-loras` and `--max-lora-rank`. `drift_max`: in nats."""

    def __init__(
        self,
        api: EngineApi,
        *,
        base: Path | None = None,
        versions_max: int = VERSIONS_MAX,
        rank_max: int = RANK_MAX,
        drift_max: float = DRIFT_MAX,
    ) -> None:
        self._api = api
        self._base = BaseWeights(base) if base else None
        self._versions_max = versions_max
        self._rank_max = rank_max
        self._drift_max = drift_max
        self._lock = asyncio.Lock()
        self._unproven: str | None = None

    async def close(self) -> None:
        """Close every connection."""
        await self._api.close()

    async def load(self, version: str, directory: Path) -> None:
        async with self._lock:
            roots = await self._roots()
            if version in roots:
                check_same(version, roots[version], directory)
                await self._check_sampling(version, read_document(directory).get("probe") or {})
                return
            files = await asyncio.to_thread(self._checked, directory)
            if len(roots) >= self._versions_max:
                names = ", ".join(sorted(roots))
                raise VersionRefused("full", f"the engine holds {len(roots)} versions ({names}); unload one first")
            self._unproven = version
            try:
                await self._prove(version, files)
            finally:
                self._unproven = None

    async def unload(self, version: str) -> None:
        """As the port says; vLLM lets running streams of the version end."""
        async with self._lock:
            await self._drop(version)

    async def loaded(self) -> set[str]:
        """As the port says; the base model is not a version."""
        return set(await self._roots()) - {self._unproven}

    async def probe(self, version: str, probe: Mapping[str, Any]) -> float:
        return await self._api.drift(version, probe)

    async def _prove(self, version: str, files: PolicyFiles) -> None:
        """Load checked files and probe the version. If anything fails, unload it again."""
        try:
            await self._api.do("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(files.directory)})
        except VersionRefused:
            if version not in await self._roots():  # otherwise another gateway has just loaded it
                raise
        try:
            check_drift(version, await self._api.drift(version, files.manifest.probe), self._drift_max)
            await self._check_sampling(version, files.manifest.probe)
        except BaseException:  # boundary: unloaded, and raised again
            await asyncio.shield(self._drop(version))
            raise

    async def _check_sampling(self, version: str, probe: Mapping[str, Any]) -> None:
        check_sampling(version, await self._api.sampled_drift(version, probe), self._drift_max)

    def _checked(self, directory: Path) -> PolicyFiles:
        files = check(directory)
        if files.manifest.kind == "base":  # served under the version's name, by the adapter that changes nothing
            check_base(files, self._base)
        else:
            check_adapter(files, self._base, self._rank_max)
        return files

    async def _roots(self) -> dict[str, str]:
        models = await self._api.models()
        return {name: str(entry.get("root")) for name, entry in models.items() if entry.get("parent")}

    async def _drop(self, version: str) -> None:
        if version in await self._roots():
            await self._api.do("/v1/unload_lora_adapter", {"lora_name": version})


def check_same(version: str, root: str, directory: Path) -> None:
    """A version keeps its directory for ever. Raises VersionRefused(taken)."""
    if Path(root).resolve() != directory.resolve():
        raise VersionRefused("taken", f"{version} is loaded from {root} already; give other weights another version")


def check_drift(version: str, drift: float, drift_max: float) -> None:
    """Raises VersionRefused(probe) if the loaded weights are not those that the trainer measured."""
    if drift > drift_max:
        raise VersionRefused(
            "probe",
            f"{version} gives its probe log-probs {drift:.4g} nats off on average (at most {drift_max:g}): these are "
            "not the weights it was published with, or not on this base; publish it again",
        )


class Replicas:
    """`ports.PolicyEngine` over copies of one engine: a version is loaded on all of them or on none.

    `load_lora_adapter` reaches only the process that answers, so each replica has its own engine here; requests may go
    through any balancer in front of them.
    """

    def __init__(self, engines: Sequence[PolicyEngine]) -> None:
        if not engines:
            raise ValueError("no replica")
        self._engines = tuple(engines)

    async def load(self, version: str, directory: Path) -> None:
        """As the port says. If one replica fails, those that this call loaded unload the version. Those that had it
        before keep it: a replica that comes back broken must not take a live version from the others."""
        had = [version in held for held in await _all([engine.loaded() for engine in self._engines])]
        results = await asyncio.gather(
            *(engine.load(version, directory) for engine in self._engines), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        if not failed:
            return
        fresh = [engine for engine, before in zip(self._engines, had, strict=True) if not before]
        for result in await asyncio.gather(*(engine.unload(version) for engine in fresh), return_exceptions=True):
            if isinstance(result, BaseException):  # an engine that died has forgotten the version
                log.warning("%s could not be taken back from a replica: %s", version, result)
        raise failed[0]

    async def unload(self, version: str) -> None:
        """As the port says, on every replica, even if one fails; raises the first error."""
        await _all([engine.unload(version) for engine in self._engines])

    async def loaded(self) -> set[str]:
        """Versions that every replica has loaded."""
        return set.intersection(*await _all([engine.loaded() for engine in self._engines]))

    async def probe(self, version: str, probe: Mapping[str, Any]) -> float:
        """The largest drift of all replicas."""
        return max(await _all([engine.probe(version, probe) for engine in self._engines]))


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Every result; raises the first error once all calls have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def check_sampling(version: str, drift: float, drift_max: float) -> None:
    """Raises VersionRefused(propensity) if the log-probs that the engine samples with are not the weights' own."""
    if drift > drift_max:
        raise VersionRefused(
            "propensity",
            f"{version}: the engine samples with log-probs that are {drift:.4g} nats off those that it scores, on "
            f"average (at most {drift_max:g}): top_k, a temperature or a penalty is on; start it as deploy/vllm.sh "
            "does",
        )
