"""Ports of the pool file under traffic: its source, the adapters of its workers, and the store of its revisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from gateway.core.access.audit import Act
from gateway.core.pool.workers import PoolFile
from gateway.service.ports.admin import KeyRow


@dataclass(frozen=True, slots=True)
class LoadedPool:
    """A pool file as it was read and checked, with the keys of its workers by worker name."""

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

    @property
    def act(self) -> Act:
        """The operator or process that loaded it, as the audit names it."""
        return Act(self.actor, self.why)


class PoolSource(Protocol):
    """The source of the pool file, which is read again at each reload."""

    async def read(self) -> LoadedPool:
        """Read the file. Raises ConfigError for the first mistake, with its line, field and fix."""
        ...


class PoolWorkers(Protocol):
    """The adapters of a pool's workers."""

    async def prepare(self, loaded: LoadedPool, revision: str) -> Callable[[], None]:
        """Do everything that can fail; return a function that puts the pool into use and cannot fail. Calls of the old
        revision end as they began. Raises ConfigError."""
        ...


class PoolRevisions(Protocol):
    """Every pool that ever served. Calls raise Unavailable when the store is away."""

    async def note(self, revision: PoolRevision, after: Mapping[str, Any]) -> bool:
        """Store and audit (`pool.loaded`) a pool that was read at a start, if it is new; return whether it was."""
        ...

    async def change(self, revision: PoolRevision, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Store a pool that is about to replace another, and audit it (`pool.reloaded`), in one transaction."""
        ...

    async def list(self, limit: int) -> Sequence[PoolRevision]:
        """Return revisions, newest first."""
        ...

    async def get(self, hash_: str) -> PoolRevision | None: ...


class Keys(Protocol):
    """The keys, which may name pools and workers."""

    async def key_list(self) -> Sequence[KeyRow]:
        """Return every key, revoked ones too. Raises Unavailable."""
        ...


class PoolMetrics(Protocol):
    """Figures of the pool in use."""

    def pool_in_use(self, revision: str, loaded_s: float) -> None:
        """Show the pool that serves now, and when it was read, in seconds since the epoch."""
        ...

    def pool_reloaded(self, result: str) -> None:
        """Count a reload of the file. `result`: changed | unchanged | refused."""
        ...
