"""The port of what is known about workers that changed: identities, flags, quarantines, and questions for probes.

Every call raises Unavailable when the store is away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from gateway.core.access.audit import Act
from gateway.core.pool.drift import Drift
from gateway.core.pool.identity import Identity
from gateway.core.pool.release import ReleaseTest


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A time in which a version of a worker is kept out of plans. `tests`: one for each flag; none where an operator
    put it there. `nano`: what its probes cost. `anew`: whether its release made what it does now the usual."""

    id: str
    worker: str
    version: str
    at: datetime
    by: str
    why: str
    tests: tuple[ReleaseTest, ...] = ()
    probes: int = 0
    nano: int = 0
    ended_at: datetime | None = None
    ended_by: str | None = None
    ended_why: str | None = None
    anew: bool = False


@dataclass(frozen=True, slots=True)
class KnownQuestion:
    """A logged request that a worker was asked as it came. `params`: the client's, as logged. `answer`: what a right
    reply says."""

    messages: Sequence[Mapping[str, Any]]
    params: Mapping[str, Any]
    tags: Mapping[str, Any]
    answer: str


class DriftStore(Protocol):
    """What all gateways over one database know about their workers."""

    async def meet(self, seen: Sequence[Identity], at: datetime) -> Sequence[Identity]:
        """Store identities, at most IDENTITIES_MAX of a version. Return the changes: those that are new for a version
        that had another one before. Each is a fact."""
        ...

    async def identities(self, workers: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Every identity of these workers, newest first: worker, version, model, fingerprint, first_at, last_at."""
        ...

    async def flagged(self, flag: Drift, at: datetime) -> None:
        """Store a flag as a fact, once a month."""
        ...

    async def facts(self, limit: int) -> Sequence[Mapping[str, Any]]:
        """The latest facts, newest first: at, worker, version, what, data. `what`: flagged, identity, quarantined or
        released."""
        ...

    async def put(self, worker: str, version: str, test: ReleaseTest | None, at: datetime, act: Act) -> bool:
        """Put a version of a worker in quarantine, audited. Return whether it was not there; where it was, the test
        joins those that it must pass."""
        ...

    async def release(self, worker: str, version: str, at: datetime, act: Act, *, anew: bool) -> Quarantine | None:
        """End a quarantine, audited; None where there is none."""
        ...

    async def standing(self, since: datetime) -> Sequence[Quarantine]:
        """The quarantines that last, and those that ended after `since`, oldest first."""
        ...

    async def questions(
        self, worker: str, version: str, task_type: str, before: datetime, limit: int
    ) -> Sequence[KnownQuestion]:
        """The latest questions of a kind of task that this version answered before a time, and whose right answer is
        known. Only those of requests that were logged in full, of text alone, without tools."""
        ...

    async def lend(self, quarantine_id: str, lease_s: float) -> Quarantine | None:
        """The quarantine, for one probe: no other gateway gets it for `lease_s`. None where another has it, or it
        ended."""
        ...

    async def probed(self, quarantine_id: str, tests: Sequence[ReleaseTest], nano: int, pause_s: float) -> None:
        """Store what a probe said and cost; the next one is lent after `pause_s`."""
        ...

    async def rest(self, quarantine_id: str, pause_s: float) -> None:
        """Give a quarantine back unprobed; it is lent again after `pause_s`."""
        ...

    async def sweep(self, limit: int) -> int:
        """Delete facts and ended quarantines that are older than 90 days, at most `limit` of each. Return their
        number."""
        ...
