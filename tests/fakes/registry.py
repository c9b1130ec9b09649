"""`PolicyRegistry` in memory: the states, moves and audit of PostgreSQL's (tests/contract/test_registry.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import read_document
from gateway.core.policies.versions import (
    CODE,
    PERCENTS,
    Holder,
    Standing,
    State,
    Version,
    check_gate,
    check_move,
    check_report,
    is_same,
    number_for,
    parent_of,
    parse,
    standing,
)
from gateway.core.policies.watch import Figures
from gateway.errors import BadRequest, Conflict, NotFound, Unavailable


class FakeRegistry:
    """Set `away` to make every call raise Unavailable; `told` gives the figures of versions by name."""

    def __init__(self, policies: Path = Path("/policies")) -> None:
        self.policies = policies
        self.versions: dict[str, Version] = {}
        self.written: list[dict[str, Any]] = []
        self.told: dict[str, Figures] = {}
        self.away = False

    async def place(self, version: Version) -> Path:
        return self.policies / version.directory

    async def share(self, version: Version) -> bool:
        return True

    async def standing(self, name: str) -> Standing:
        self._up()
        return standing(self._of(name))

    async def list(self, name: str | None = None) -> Sequence[Version]:
        self._up()
        found = [one for one in self.versions.values() if name in (None, one.name)]
        return sorted(found, key=lambda one: (one.name, -one.number))

    async def get(self, version: str) -> Version:
        self._up()
        name, number = parse(version)
        return self._one(f"{name}@{number}")

    async def events(self, name: str, limit: int = 100) -> Sequence[Mapping[str, Any]]:
        self._up()
        found = [one for one in self.written if name in (one["version"], one["version"].split("@")[0])]
        return found[::-1][:limit]

    async def shadowed(self, version: str) -> Mapping[str, Any]:
        return {"n": 0, "refused": 0, "agreed": 0, "latency_ms_mean": None, "cost_nano": 0}

    async def figures(self, version: str, *, since: datetime, until: datetime | None, latest: int) -> Figures:
        self._up()
        return self.told.get(version, Figures(version))

    async def publish(
        self,
        directory: Path,
        *,
        by: str,
        why: str = "",
        gate: Mapping[str, Any] | None = None,
        forced: bool = False,
        name: str = "conductor",
    ) -> Version:
        self._up()
        check_gate(gate, forced, why)
        manifest = read_document(directory)
        check_report(gate, manifest, forced)
        have = self._of(name)
        same = next((one for one in have if one.state != "retired" and is_same(one.manifest, manifest)), None)
        if same is not None:
            return same
        number = number_for(manifest, have)
        now = datetime.now(UTC)
        place = f"{name}@{number}"
        version = Version(name, number, "candidate", parent_of(manifest), None, None, place, manifest, gate, now, now)
        detail = {"refusals": (gate or {}).get("refusals", []), "gated": gate is not None}
        return self._write(version, None, "published", by, why, forced, detail)

    async def move(self, version: str, state: State, *, by: str, why: str = "", forced: bool = False) -> Version:
        return self._move(version, state, None, by, why, forced)

    async def canary(self, version: str, percent: int, *, by: str, why: str = "") -> Version:
        if percent not in PERCENTS:
            raise BadRequest("a canary takes 1, 5, 25, 100 % of requests", param="percent")
        return self._move(version, "canary", percent, by, why, False)

    async def rollback(self, name: str, *, by: str, why: str, cause: str = "person") -> Version:
        self._up()
        plain = parse(name)[0] if "@" in name else name
        now = standing(self._of(plain))
        wanted = self._one(name) if "@" in name else now.canary or now.live
        if wanted is None or wanted.state not in ("canary", "live"):
            raise Conflict("there is nothing to roll back", code=CODE)
        if wanted.state == "live" and now.previous is None:
            raise Conflict(f"{wanted.id} replaced no other version", code=CODE)
        detail = {"cause": cause}
        retired = replace(wanted, state="retired", percent=None)
        self._write(retired, wanted.state, "rolled back", by, why, False, detail)
        if wanted.state == "live" and now.previous is not None:
            restored = replace(now.previous, state="live")
            self._write(restored, now.previous.state, "restored", by, why, False, detail)
        return retired

    async def note(self, version: Version, what: str, *, by: str, why: str) -> None:
        self._up()
        self._write(version, version.state, what, by, why, False, {})

    def _move(self, version: str, state: State, percent: int | None, by: str, why: str, forced: bool) -> Version:
        self._up()
        moving = self._one(version)
        check_move(moving, state, self._of(moving.name))
        live = standing(self._of(moving.name)).live
        if state == "live":
            if live is not None:
                self._write(replace(live, state="retired"), "live", "replaced", by, f"replaced by {version}", False, {})
            moving = replace(moving, previous=live.number if live else None)
        what = {"live": "promoted", "shadow": "shadowed"}.get(state, state)
        became = replace(moving, state=state, percent=percent)
        return self._write(became, moving.state, what, by, why, forced, {})

    def _write(
        self, version: Version, was: str | None, what: str, by: str, why: str, forced: bool, detail: Mapping[str, Any]
    ) -> Version:
        version = replace(version, changed_at=datetime.now(UTC))
        self.versions[version.id] = version
        row = {"id": len(self.written) + 1, "version": version.id, "what": what, "was": was, "state": version.state}
        row |= {"percent": version.percent, "who": by, "why": why, "forced": forced, "detail": dict(detail)}
        self.written.append(row | {"at": version.changed_at.isoformat()})
        return version

    def _of(self, name: str) -> Sequence[Version]:
        return [one for one in self.versions.values() if one.name == name]

    def _one(self, version: str) -> Version:
        if version not in self.versions:
            raise NotFound(f"no policy version {version}", param="version")
        return self.versions[version]

    def _up(self) -> None:
        if self.away:
            raise Unavailable("the registry is not available", code="store_unavailable")


class FakeGateways:
    """`PolicyGateways` in memory; every gateway in it was seen just now."""

    def __init__(self) -> None:
        self.seen: dict[str, Holder] = {}

    async def attend(self, gateway: Holder) -> None:
        self.seen[gateway.id] = gateway

    async def attending(self, within_s: float) -> Sequence[Holder]:
        return list(self.seen.values())

    async def leave(self, gateway: str) -> None:
        self.seen.pop(gateway, None)
