"""The ports of policy versions: their registry, and what is counted of them. `PolicyEngine` stands in `ports`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from gateway.core.policies.versions import Standing, State, Version
from gateway.core.policies.watch import Figures


class PolicyRegistry(Protocol):
    """Policy versions with their states and audit, shared by every gateway on one database. Every call but `directory`
    raises Unavailable when the database is away; every change raises Conflict naming why it is not legal now."""

    def directory(self, version: Version) -> Path:
        """Where it lies on this host."""
        ...

    async def standing(self, name: str) -> Standing:
        """Who serves."""
        ...

    async def list(self, name: str | None = None) -> Sequence[Version]: ...
    async def get(self, version: str) -> Version: ...
    async def events(self, name: str, limit: int = 100) -> Sequence[Mapping[str, Any]]: ...
    async def shadowed(self, version: str) -> Mapping[str, Any]: ...

    async def figures(self, version: str, *, since: datetime, until: datetime | None, latest: int) -> Figures:
        """What it did on its `latest` requests of that time."""
        ...

    async def publish(
        self, directory: Path, *, by: str, why: str = "", gate: Mapping[str, Any] | None = None, forced: bool = False
    ) -> Version:
        """A candidate, or the version that directory is already. Raises VersionRefused, Conflict(gate_refused)."""
        ...

    async def move(self, version: str, state: State, *, by: str, why: str = "") -> Version: ...
    async def canary(self, version: str, percent: int, *, by: str, why: str = "") -> Version: ...

    async def rollback(self, name: str, *, by: str, why: str, cause: str = "person") -> Version:
        """Take back the canary, or the live version for the one it replaced; returns what was retired."""
        ...

    async def note(self, version: Version, what: str, *, by: str, why: str) -> None: ...


class PolicyMetrics(Protocol):
    """What is counted of policy versions."""

    def policy_standing(self, now: Standing, usable: Collection[str]) -> None:
        """Who serves, and which of them the engines hold."""
        ...

    def policy_rolled_back(self, cause: str) -> None: ...

    def policy_refused(self, version: str) -> None:
        """An engine would not take it."""
        ...

    def policy_shadowed(self, version: str, result: str) -> None:
        """A shadow plan: agrees | differs | alone | refused | dropped | unpaid."""
        ...
