"""The port of jobs: what the admin API needs of whoever keeps them."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.core.policies.jobs import Job, JobSpec


class Jobs(Protocol):
    """Jobs by id. Every call raises Unavailable when the store is away; those by id raise NotFound."""

    async def submit(self, policy: str, spec: JobSpec, by: str) -> Job:
        """Queue a job. Raises Conflict naming the policy's job that is queued or running."""
        ...

    async def get(self, job_id: str) -> Job: ...

    async def list(self, policy: str | None = None, limit: int = 50) -> Sequence[Job]:
        """Newest first."""
        ...

    async def log(self, job_id: str, after: int = 0, limit: int = 1_000) -> builtins.list[Mapping[str, Any]]:
        """Lines {n, at, line} that come after number `after`, oldest first."""
        ...

    async def cancel(self, job_id: str, by: str = "baton") -> Job:
        """Raises Conflict for a job that has ended."""
        ...

    async def resume(self, job_id: str, by: str = "baton") -> Job:
        """Raises Conflict for a job that neither failed nor was cancelled, and where its policy has another."""
        ...
