"""Several engines as one.

Which engine for what: `engines_embedded` (policy.serve on CPU), `engines_vllm` (LoRA by name on vLLM),
`engines_reload` (full weights in place on vLLM).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gateway.service.ports.policies import PolicyEngine

log = logging.getLogger("gateway.engines")
T = TypeVar("T")


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
        """As the port says. Where one replica fails, those that this call loaded unload it again; those that had it
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
            if isinstance(result, BaseException):  # a dead engine forgets it by itself
                log.warning("%s could not be taken back from a replica: %s", version, result)
        raise failed[0]

    async def unload(self, version: str) -> None:
        """As the port says, on every replica, also where one fails; the first failure is raised."""
        await _all([engine.unload(version) for engine in self._engines])

    async def loaded(self) -> set[str]:
        """Versions that every replica answers for."""
        return set.intersection(*await _all([engine.loaded() for engine in self._engines]))

    async def probe(self, version: str, probe: Mapping[str, Any]) -> float:
        """The largest of all replicas."""
        return max(await _all([engine.probe(version, probe) for engine in self._engines]))


async def _all(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Every result, or the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
