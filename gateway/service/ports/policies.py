"""The ports of policies: the registry of their versions, the engines that hold them, their counts, and the jobs."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from gateway.core.policies.jobs import Job, JobSpec
from gateway.core.policies.versions import Holder, Standing, State, Version
from gateway.core.policies.watch import Figures


class PolicyRegistry(Protocol):
    """Policy versions with their states and audit, shared by every gateway on one database. Every call but `place`
    raises Unavailable when the database is away; every illegal change raises Conflict with the reason."""

    async def place(self, version: Version) -> Path:
        """Return the version's directory on this host, fetched where another host published it. Raises NotFound,
        Unavailable, VersionRefused."""
        ...

    async def share(self, version: Version) -> bool:
        """Make this host's copy of the version available to other hosts, if it is not yet. Return False where the copy
        is too large, or not here."""
        ...

    async def standing(self, name: str) -> Standing:
        """Return the versions that serve."""
        ...

    async def list(self, name: str | None = None) -> Sequence[Version]: ...
    async def get(self, version: str) -> Version: ...
    async def events(self, name: str, limit: int = 100) -> Sequence[Mapping[str, Any]]: ...
    async def shadowed(self, version: str) -> Mapping[str, Any]: ...

    async def figures(self, version: str, *, since: datetime, until: datetime | None, latest: int) -> Figures:
        """Return the figures of the version's `latest` requests in that time."""
        ...

    async def publish(
        self, directory: Path, *, by: str, why: str = "", gate: Mapping[str, Any] | None = None, forced: bool = False
    ) -> Version:
        """Register a candidate and return it; a directory that is a version already returns that version. Raises
        VersionRefused, Conflict(gate_refused)."""
        ...

    async def move(self, version: str, state: State, *, by: str, why: str = "") -> Version: ...
    async def canary(self, version: str, percent: int, *, by: str, why: str = "") -> Version: ...

    async def rollback(self, name: str, *, by: str, why: str, cause: str = "person") -> Version:
        """Roll back the canary, or replace the live version by the one before it; return the retired version."""
        ...

    async def note(self, version: Version, what: str, *, by: str, why: str) -> None: ...


class PolicyGateways(Protocol):
    """Which running gateway can serve which version. Every call raises Unavailable when the database is away."""

    async def attend(self, gateway: Holder) -> None:
        """The heartbeat of this gateway: record that it runs, and what it holds."""
        ...

    async def attending(self, within_s: float) -> Sequence[Holder]:
        """Return the gateways whose last heartbeat is at most `within_s` old."""
        ...

    async def leave(self, gateway: str) -> None:
        """Forget this gateway, which stops."""
        ...


class PolicyEngine(Protocol):
    """The side of a conductor's server that holds policy versions. A request names its version as its model.

    A version keeps its directory for ever: it is never changed in place, and not deleted before `unload`. An engine
    forgets everything when it restarts; `service.policies.versions` loads the versions again.
    """

    async def load(self, version: str, directory: Path) -> None:
        """Check the directory, load it under `version`, prove it by its manifest's probe. Loading it again does
        nothing. Raises VersionRefused (nothing has changed, and the engine goes on) or EngineDown."""
        ...

    async def unload(self, version: str) -> None:
        """Stop serving the version; requests in flight finish on it. Does nothing if it is not loaded. Raises
        EngineDown, and VersionRefused(held) if the engine has no other weights to serve."""
        ...

    async def loaded(self) -> set[str]:
        """Return the versions that the engine serves; after a restart, those it was started with. Raises EngineDown."""
        ...

    async def probe(self, version: str, probe: Mapping[str, Any]) -> float:
        """Return the mean |Δ log-prob| (natural) over `probe["token_ids"]` after `probe["prompt_ids"]`, no grammar
        mask, temperature 1, against `probe["logprobs"]`; infinity where one is NaN. Raises EngineDown, NotFound."""
        ...


class PolicyMetrics(Protocol):
    """Counts of policy versions."""

    def policy_standing(self, now: Standing, usable: Collection[str]) -> None:
        """Show the versions that serve, and those that the engines hold."""
        ...

    def policy_rolled_back(self, cause: str) -> None: ...

    def policy_refused(self, version: str) -> None:
        """Count a version that an engine refused."""
        ...

    def policy_shadowed(self, version: str, result: str) -> None:
        """Count a shadow plan. `result`: agrees | differs | alone | refused | dropped | unpaid."""
        ...


class Jobs(Protocol):
    """Jobs by id. Every call raises Unavailable when the store is away; those by id raise NotFound."""

    async def submit(self, policy: str, spec: JobSpec, by: str) -> Job:
        """Queue a job. Raises Conflict, which names it, if the policy has a job that is queued or running."""
        ...

    async def get(self, job_id: str) -> Job: ...

    async def list(self, policy: str | None = None, limit: int = 50) -> Sequence[Job]:
        """Jobs, newest first."""
        ...

    async def log(self, job_id: str, after: int = 0, limit: int = 1_000) -> builtins.list[Mapping[str, Any]]:
        """Lines {n, at, line} with numbers above `after`, oldest first."""
        ...

    async def cancel(self, job_id: str, by: str = "baton") -> Job:
        """Cancel a job. Raises Conflict for one that has ended."""
        ...

    async def resume(self, job_id: str, by: str = "baton", gate_usd_max: str = "") -> Job:
        """Queue the job again. Raises Conflict for one that neither failed nor was cancelled, and if its policy has
        another."""
        ...
