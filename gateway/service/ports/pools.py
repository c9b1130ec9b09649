"""Ports of the pool file under traffic: its source, the adapters of its workers, and the store of its revisions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

from gateway.core.access.audit import Act
from gateway.core.pool.breaker import Health
from gateway.core.pool.tools import Tool
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import UpstreamRefused
from gateway.service.ports.admin import KeyRow


@dataclass(frozen=True, slots=True)
class LoadedPool:
    """A pool file as it was read and checked, with the keys of its workers by worker name."""

    pools: PoolFile
    secrets: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sight:
    """What a look at a worker showed. `fix`: what to do; empty where nothing is to be done."""

    worker: str
    state: Literal["ok", "warn", "bad"]
    what: str
    fix: str = ""

    @property
    def line(self) -> str:
        """It in one line."""
        return f"{self.worker}: {self.what}{f'; {self.fix}' if self.fix else ''}"


class WorkerLooks(Protocol):
    """Looks at workers from outside, at no cost."""

    async def look(self, worker: WorkerSpec, secrets: Mapping[str, str]) -> Sight | None:
        """Whether it is there, takes its key and has its model; None where that cannot be known for nothing.
        `secrets`: those of the pool. In bounded time; raises nothing."""
        ...


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


@dataclass(frozen=True, slots=True)
class Swap:
    """A pool that is ready to replace another. `take` puts it into use and cannot fail; `close` ends what was started
    for a pool that is not taken."""

    take: Callable[[], None]
    close: Callable[[], Awaitable[None]]


class PoolWorkers(Protocol):
    """The adapters of a pool's workers."""

    async def prepare(self, loaded: LoadedPool, revision: str) -> Swap:
        """Do everything that can fail; return what puts the pool into use. Calls of the old revision end as they began.
        Raises ConfigError; then nothing of it is left."""
        ...


class ToolServers(Protocol):
    """The MCP servers of one pool file, which serve its workers of kind mcp."""

    async def start(self) -> None:
        """Connect to all of them and read their tools, in bounded time. One that is not there is tried again."""
        ...

    async def close(self) -> None:
        """End all connections and programs."""
        ...

    def tools(self, worker: str) -> tuple[Tool, ...]:
        """The tools of a worker that may be called now."""
        ...

    def problems(self, worker: str) -> tuple[str, ...]:
        """Why a worker offers nothing, or less than the pool file lists; a line each."""
        ...

    async def call(self, worker: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """What a tool answers, as text. Raises UpstreamError and its children; it allows another try only where the
        call has not left, or may be repeated."""
        ...


class NoServers:
    """`ToolServers` of a pool without workers of kind mcp."""

    async def start(self) -> None:
        """Connect to nothing."""

    async def close(self) -> None:
        """Close nothing."""

    def tools(self, worker: str) -> tuple[Tool, ...]:
        """No tools."""
        return ()

    def problems(self, worker: str) -> tuple[str, ...]:
        """No problems."""
        return ()

    async def call(self, worker: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Raises UpstreamRefused."""
        raise UpstreamRefused(f"worker {worker} has no tools", dispatched=False, code="tool_unknown")


NO_SERVERS = NoServers()


class NoToolboxes:
    """`Toolboxes` of workers among which none is of kind mcp."""

    def tools(self, worker: WorkerSpec, revision: str) -> tuple[Tool, ...]:
        """No tools."""
        return ()


NO_TOOLBOXES = NoToolboxes()


class RestStore(Protocol):
    """The breakers that processes and gateways share, by the id of a worker's place or account."""

    async def exchange(self, changed: Mapping[str, Health]) -> Mapping[str, Health]:
        """Store those of `changed` that are newer than what is stored, and return all that are stored. Raises
        Unavailable."""
        ...


class RestMetrics(Protocol):
    """Shows which workers rest."""

    def rested(self, worker: str, reason: str) -> None:
        """Count a rest that begins."""
        ...

    def resting(self, reasons: Mapping[str, str]) -> None:
        """Set for each worker of the pool why it rests; empty: it does not. Forget others."""
        ...


class NoRestStore:
    """`RestStore` of a process that shares nothing, and `RestMetrics` that nobody reads."""

    async def exchange(self, changed: Mapping[str, Health]) -> Mapping[str, Health]:
        """Nothing."""
        return {}

    def rested(self, worker: str, reason: str) -> None:
        """Count nothing."""

    def resting(self, reasons: Mapping[str, str]) -> None:
        """Show nothing."""


NO_STORE = NoRestStore()


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

    async def key_naming(self, pools: Sequence[str], workers: Sequence[str], limit: int) -> Sequence[KeyRow]:
        """Return up to `limit` keys that are not revoked and name one of those pools or workers, newest first. Raises
        Unavailable."""
        ...


class PoolMetrics(Protocol):
    """Figures of the pool in use."""

    def pool_in_use(self, revision: str, loaded_s: float) -> None:
        """Show the pool that serves now, and when it was read, in seconds since the epoch."""
        ...

    def pool_reloaded(self, result: str) -> None:
        """Count a reload of the file. `result`: changed | unchanged | refused."""
        ...
