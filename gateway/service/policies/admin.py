"""What an operator does with policy versions: publish, shadow, canary, promote, roll back, and look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.core.policies.versions import Version
from gateway.core.policies.watch import Figures
from gateway.errors import BadRequest
from gateway.service.policies.versions import Versions
from gateway.service.policies.watcher import Watcher
from gateway.service.ports.policies import PolicyRegistry

EVENTS_SHOWN = 50


class PolicyAdmin:
    """The use case behind `baton policy` and the admin API. `by` names who asks; it is kept in the audit."""

    def __init__(self, registry: PolicyRegistry, versions: Versions, watcher: Watcher) -> None:
        self._registry = registry
        self._versions = versions
        self._watcher = watcher

    async def overview(self) -> dict[str, Any]:
        """Every version, the two being compared with their figures, and the latest events."""
        found = await self._registry.list(self._versions.name)
        pair = self._watcher.pair()
        compared = await self._watcher.figures(*pair) if pair else ()
        return {
            "object": "list",
            "name": self._versions.name,
            "data": [self._line(version) for version in found],
            "compared": [figures(one) for one in compared],
            "events": list(await self._registry.events(self._versions.name, EVENTS_SHOWN)),
        }

    async def show(self, version: str) -> dict[str, Any]:
        """One version: its manifest, gate report, shadow plans and events."""
        found = await self._registry.get(version)
        return {
            **self._line(found),
            "manifest": dict(found.manifest),
            "gate": found.gate,
            "shadowed": dict(await self._registry.shadowed(found.id)),
            "events": list(await self._registry.events(found.id, EVENTS_SHOWN)),
        }

    async def publish(
        self, directory: Path, by: str, why: str, gate: Mapping[str, Any] | None, forced: bool
    ) -> dict[str, Any]:
        """A candidate. Raises VersionRefused, Conflict(gate_refused), Unavailable."""
        if not directory.is_absolute():
            raise BadRequest("give the absolute path of the directory, on the gateway's host", param="directory")
        version = await self._registry.publish(directory, by=by, why=why, gate=gate, forced=forced)
        return self._line(version)

    async def shadow(self, version: str, by: str, why: str) -> dict[str, Any]:
        """Let a candidate plan beside the live version. The engines must take it first."""
        await self._admit(version)
        return await self._done(await self._registry.move(version, "shadow", by=by, why=why))

    async def canary(self, version: str, percent: int, by: str, why: str) -> dict[str, Any]:
        """Give it a share of requests, or another share."""
        self._versions.check_share(percent)
        await self._admit(version)
        return await self._done(await self._registry.canary(version, percent, by=by, why=why))

    async def promote(self, version: str, by: str, why: str) -> dict[str, Any]:
        """Make the canary live; what was live stays loaded, to come back in a rollback."""
        await self._admit(version)
        return await self._done(await self._registry.move(version, "live", by=by, why=why))

    async def retire(self, version: str, by: str, why: str) -> dict[str, Any]:
        """Take a candidate, a shadow or a canary out."""
        return await self._done(await self._registry.move(version, "retired", by=by, why=why))

    async def rollback(self, name: str, by: str, why: str) -> dict[str, Any]:
        """Take back the canary, else the live version: the one before it is live again."""
        return await self._done(await self._registry.rollback(name, by=by, why=why))

    async def _admit(self, version: str) -> None:
        if not self._versions.held(version):
            await self._versions.admit(await self._registry.get(version))

    async def _done(self, version: Version) -> dict[str, Any]:
        await self._versions.sync()  # here at once; in other gateways within their poll
        return self._line(version)

    def _line(self, version: Version) -> dict[str, Any]:
        manifest = version.manifest
        return {
            "version": version.id,
            "state": version.state,
            "percent": version.percent,
            "parent": version.parent,
            "previous": None if version.previous is None else f"{version.name}@{version.previous}",
            "kind": manifest.get("kind", "full"),
            "rollouts": manifest.get("rollouts", 0),
            "prompt_version": manifest.get("prompt_version"),
            "gated": None if version.gate is None else version.gate.get("passed") is True,
            "held": self._versions.held(version.id),
            "created_at": version.created_at.isoformat(),
            "changed_at": version.changed_at.isoformat(),
        }


def figures(of: Figures) -> dict[str, Any]:
    """JSON of what one version did: counts, and the rates an operator reads."""
    rates: Sequence[str] = ("validity", "outcome_mean", "cost_nano_mean")
    counts = {name: value for name, value in asdict(of).items() if not name.endswith("_sum")}
    return counts | {name: getattr(of, name) for name in rates}
