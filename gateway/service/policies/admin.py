"""An operator's actions on policy versions: list, show, publish, shadow, canary, promote, retire and roll back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.core.policies.manifest import manifest_of
from gateway.core.policies.versions import State, Version, check_move, check_percent
from gateway.core.policies.watch import Figures
from gateway.errors import BadRequest
from gateway.service.policies.attendance import Attendance
from gateway.service.policies.versions import PolicyVersions
from gateway.service.policies.watcher import Watcher
from gateway.service.ports.policies import PolicyRegistry

EVENTS_SHOWN = 50


class PolicyAdmin:
    """The use case behind `baton policy` and the admin API. `by` is the actor and `why` the reason that the audit
    records."""

    def __init__(
        self, registry: PolicyRegistry, versions: PolicyVersions, watcher: Watcher, attendance: Attendance
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._watcher = watcher
        self._attendance = attendance

    async def overview(self) -> dict[str, Any]:
        """All versions, the figures of the two that the watcher compares, and the latest events."""
        versions = await self._registry.list(self._versions.name)
        pair = self._watcher.pair()
        compared = await self._watcher.figures(*pair) if pair else ()
        return {
            "object": "list",
            "name": self._versions.name,
            "data": [self._line(version) for version in versions],
            "compared": [figures_json(figures) for figures in compared],
            "events": list(await self._registry.events(self._versions.name, EVENTS_SHOWN)),
            "gateways": [asdict(gateway) for gateway in await self._attendance.running()],
        }

    async def show(self, version: str) -> dict[str, Any]:
        """One version with its manifest, gate report, shadow plans and events. Raises NotFound."""
        row = await self._registry.get(version)
        return {
            **self._line(row),
            "manifest": dict(row.manifest),
            "gate": row.gate,
            "shadowed": dict(await self._registry.shadowed(row.id)),
            "events": list(await self._registry.events(row.id, EVENTS_SHOWN)),
        }

    async def publish(
        self, directory: Path, by: str, why: str, gate: Mapping[str, Any] | None, forced: bool
    ) -> dict[str, Any]:
        """Publish a directory as a candidate. Raises BadRequest, VersionRefused, Conflict(gate_refused),
        Unavailable."""
        if not directory.is_absolute():
            raise BadRequest("give the absolute path of the directory, on the gateway's host", param="directory")
        version = await self._registry.publish(directory, by=by, why=why, gate=gate, forced=forced)
        return self._line(version)

    async def shadow(self, version: str, by: str, why: str) -> dict[str, Any]:
        """Make a candidate the shadow, which plans beside the live version. Every engine loads it first."""
        await self._check(version, "shadow")
        await self._admit(version)
        return await self._done(await self._registry.move(version, "shadow", by=by, why=why))

    async def canary(self, version: str, percent: int, by: str, why: str) -> dict[str, Any]:
        """Give a version `percent` of the requests. Every engine of every gateway loads it first."""
        check_percent(percent)
        self._versions.check_share(percent)
        await self._check(version, "canary")
        await self._admit(version)
        await self._attendance.everywhere(version)
        return await self._done(await self._registry.canary(version, percent, by=by, why=why))

    async def promote(self, version: str, by: str, why: str) -> dict[str, Any]:
        """Make the canary live once every gateway holds it. The previous live version stays loaded for a rollback."""
        await self._check(version, "live")
        await self._admit(version)
        await self._attendance.everywhere(version)
        return await self._done(await self._registry.move(version, "live", by=by, why=why))

    async def retire(self, version: str, by: str, why: str) -> dict[str, Any]:
        """Retire a candidate, a shadow or a canary."""
        return await self._done(await self._registry.move(version, "retired", by=by, why=why))

    async def rollback(self, name: str, by: str, why: str) -> dict[str, Any]:
        """Retire the canary; without one, retire the live version and make the one before it live again."""
        return await self._done(await self._registry.rollback(name, by=by, why=why))

    async def _check(self, version: str, to: State) -> None:
        """Raises Conflict(illegal_move) before anybody loads or waits for a version that may not become that."""
        check_move(await self._registry.get(version), to, await self._registry.list(self._versions.name))

    async def _admit(self, version: str) -> None:
        if not self._versions.holds(version):
            await self._versions.admit(await self._registry.get(version))

    async def _done(self, version: Version) -> dict[str, Any]:
        await self._versions.sync()  # this gateway follows at once, other gateways at their next poll
        return self._line(version)

    def _line(self, version: Version) -> dict[str, Any]:
        manifest = version.manifest
        return {
            "version": version.id,
            "state": version.state,
            "percent": version.percent,
            "parent": version.parent,
            "previous": None if version.previous is None else f"{version.name}@{version.previous}",
            "kind": manifest_of(manifest).kind,
            "rollouts": manifest.get("rollouts", 0),
            "prompt_version": manifest.get("prompt_version"),
            "gated": None if version.gate is None else version.gate.get("passed") is True,
            "held": self._versions.holds(version.id),
            "created_at": version.created_at.isoformat(),
            "changed_at": version.changed_at.isoformat(),
        }


def figures_json(figures: Figures) -> dict[str, Any]:
    """One version's figures as JSON data: its counts, and the rates that an operator reads."""
    rates: Sequence[str] = ("validity", "outcome_mean", "cost_nano_mean")
    counts = {name: value for name, value in asdict(figures).items() if not name.endswith("_sum")}
    return counts | {name: getattr(figures, name) for name in rates}
