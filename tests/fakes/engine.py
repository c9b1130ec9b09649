"""An engine that holds versions in memory and plans from a script. It passes the contract suite.

Its weights' "log-probs" are drawn from the checksum of the weights file, so a probe tells versions apart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from gateway.adapters.engines.files import BaseWeights, PolicyFiles, check, check_full
from gateway.adapters.engines.vllm import check_same
from gateway.errors import ConductorError, EngineDown, NotFound, VersionRefused
from gateway.service.ports.policies import PolicyEngine
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd
from tests.fakes.conductor import Script, ScriptedConductor

DRIFT_MAX = 0.005


def fake_logprobs(weights_sha256: str, token_ids: Sequence[int]) -> list[float]:
    """The log-probs that weights with this checksum give to the tokens: in [-5, 0), a function of both."""
    digests = (hashlib.sha256(f"{weights_sha256}{at}{token}".encode()).digest() for at, token in enumerate(token_ids))
    return [-5 * (digest[0] + 1) / 256 for digest in digests]


class FakeEngine(PolicyEngine):
    """Holds at most `versions_max`, of the shape of `base`. `down`: nothing answers. `dies_at`: that load kills it."""

    def __init__(
        self,
        script: Script = (),
        *,
        base: Path | None = None,
        versions_max: int = 4,
        gap_s: float = 0.0,
        dies_at: int = 0,
    ) -> None:
        self.conductor = FakeVersionsConductor(self, script, gap_s)
        self.held: dict[str, PolicyFiles] = {}
        self.down = False
        self.loads = 0
        self._versions_max = versions_max
        self._dies_at = dies_at
        self._base = BaseWeights(base) if base else None

    def restart(self) -> None:
        """Start again after a crash: up, and empty."""
        self.held.clear()
        self.down = False

    async def load(self, version: str, directory: Path) -> None:
        self._up()
        self.loads += 1
        if self.loads == self._dies_at:
            self.down = True
        self._up()
        if version in self.held:
            check_same(version, str(self.held[version].directory), directory)
            return
        files = check(directory)
        if self._base:
            check_full(files, self._base)
        if len(self.held) >= self._versions_max:
            raise VersionRefused("full", "no room; unload one first")
        if _drift(files, files.manifest.probe) > DRIFT_MAX:
            raise VersionRefused("probe", f"{version} does not give its probe's log-probs; publish it again")
        self.held[version] = files

    async def unload(self, version: str) -> None:
        self._up()
        self.held.pop(version, None)

    async def loaded(self) -> set[str]:
        self._up()
        return set(self.held)

    async def probe(self, version: str, probe: Mapping[str, Any]) -> float:
        self._up()
        if version not in self.held:
            raise NotFound(f"{version} is not loaded", code="model_not_found")
        return _drift(self.held[version], probe)

    def _up(self) -> None:
        if self.down:
            raise EngineDown("the fake engine is down")


class FakeVersionsConductor(ScriptedConductor):
    """Plans for versions its engine holds, by name."""

    def __init__(self, engine: FakeEngine, script: Script, gap_s: float) -> None:
        super().__init__(script, gap_s=gap_s)
        self._engine = engine

    async def decode(self, call: ConductorCall) -> AsyncGenerator[ConductorChunk | ConductorEnd, None]:
        if call.model not in self._engine.held:
            raise ConductorError("refused", f"{call.model} is not loaded", billable=False)
        async with aclosing(super().decode(call)) as items:
            async for item in items:
                yield item


def _drift(files: PolicyFiles, probe: Mapping[str, Any]) -> float:
    if not probe:
        return 0.0
    found = fake_logprobs(files.manifest.weights_sha256, probe["token_ids"])
    off = [abs(ours - theirs) for ours, theirs in zip(found, probe["logprobs"], strict=True)]
    return sum(off) / len(off) if all(map(math.isfinite, off)) else math.inf
