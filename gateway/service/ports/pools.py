"""Ports of the pool file while traffic flows: where it is read, who calls its workers, where its revisions lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from gateway.core.access.audit import Act
from gateway.core.pool.workers import PoolFile
from gateway.service.ports.keys import KeyRow


@dataclass(frozen=True, slots=True)
class Loaded:
    """A pool file as it was read, checked whole, with the keys of its workers by worker name."""

    pools: PoolFile
    secrets: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PoolRevision:
    """A pool as it was first loaded: `hash` is the SHA-256 of `file`, its canonical text without secrets."""

    hash: str
    file: str
    at: datetime
    actor: str
    why: str = ""


class PoolSource(Protocol):
    """Where the pool file is."""

    async def read(self) -> Loaded:
        """Raises ConfigError for the first mistake, named by line and field, with its fix."""
        ...


class PoolWorkers(Protocol):
    """What calls the workers of a pool."""

    async def prepare(self, loaded: Loaded, revision: str) -> Callable[[], None]:
        """All that can fail, done; the function returned takes the pool and cannot fail. Calls of the revision before
        it end as they began. Raises ConfigError."""
        ...


class PoolRevisions(Protocol):
    """Every pool that ever served, for good. Calls raise Unavailable when the store is away."""

    async def note(self, revision: PoolRevision, after: Mapping[str, Any]) -> bool:
        """A pool that was read at a start: kept and audited (`pool.loaded`) if it is new; whether it was."""
        ...

    async def change(self, revision: PoolRevision, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """A pool about to take another's place: audited (`pool.reloaded`) in the transaction that keeps it."""
        ...

    async def list(self, limit: int) -> Sequence[PoolRevision]:
        """Newest first."""
        ...

    async def get(self, hash_: str) -> PoolRevision | None: ...


class Keys(Protocol):
    """The keys that may name pools and workers."""

    async def key_list(self) -> Sequence[KeyRow]:
        """Every key, revoked ones too. Raises Unavailable."""
        ...


class PoolMetrics(Protocol):
    """What the pools say of themselves."""

    def pool_in_use(self, revision: str, loaded_s: float) -> None:
        """The pool that serves from now on, and when it was read, in seconds since the epoch."""
        ...

    def pool_reloaded(self, result: str) -> None:
        """A file was read anew: changed, unchanged or refused."""
        ...


def by(revision: PoolRevision) -> Act:
    """Who loaded it, as the audit names them."""
    return Act(revision.actor, revision.why)
