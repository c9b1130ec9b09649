"""The pool's workers behind one port: picks the adapter by kind and keeps each worker inside its concurrency limit.

A pool that takes another's place while traffic flows brings adapters of its own, with its own keys. A call is made by
those of the pool that its request began with, so that no key goes to an address that it was not given for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from gateway.adapters.upstream.http import HttpWorkers, http_client
from gateway.adapters.upstream.litellm import LiteLLMWorkers
from gateway.adapters.upstream.tool import ToolWorkers
from gateway.core.pool.workers import PoolFile, revision_of
from gateway.errors import UpstreamError, UpstreamRateLimited, UpstreamTimeout
from gateway.service.ports.pools import LoadedPool
from gateway.service.ports.request import WorkerCall, WorkerReply, Workers

WAITING_PER_PLACE_MAX = 16
_Chunks = AsyncGenerator[Mapping[str, Any], None]


class Adapter(Workers, Protocol):
    """Workers of one kind, with something to close."""

    async def close(self) -> None: ...


Adapters = Mapping[str, Adapter]  # by kind


@dataclass
class _Gate:
    """The places of one worker, the calls that wait for one and those that have one. `owed`: places that are to go,
    and are taken as they come free."""

    places: int
    waiting: int = 0
    busy: int = 0
    owed: int = 0
    free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.places)

    async def enter(self) -> None:
        """Wait for a place."""
        await self.free.acquire()
        while self.owed:
            self.owed -= 1
            await self.free.acquire()
        self.busy += 1

    def leave(self) -> None:
        """Give it back."""
        self.busy -= 1
        self._release()

    def resize(self, places: int) -> None:
        """From now on so many places; calls that have one keep it."""
        more, self.places = places - self.places, places
        self.owed += max(0, -more)
        for _ in range(max(0, more)):
            self._release()

    def _release(self) -> None:
        if self.owed:
            self.owed -= 1
        else:
            self.free.release()


class PooledWorkers:
    """`ports.Workers` over one adapter per kind, and `ports_pools.PoolWorkers`: `make` gives the adapters of another
    pool, `keep_s` is how long calls of the pool before it may still come. Kind `self` is no worker call: the rounds run
    it as a child loop."""

    def __init__(
        self,
        adapters: Adapters,
        *,
        revision: str = "",
        make: Callable[[LoadedPool], Adapters] | None = None,
        keep_s: float = 0.0,
    ) -> None:
        self._now = adapters
        self._by_revision = {revision: adapters}
        self._make = make
        self._keep_s = keep_s
        self._places: dict[str, int] = {}  # of the pool in use, where it is not the first
        self._gates: dict[str, _Gate] = {}

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """As `ports.Workers.complete`; waiting for a place counts into the call's time."""
        adapter = self._adapter(call)
        async with self._place(call) as timed:
            return await adapter.complete(timed)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """As `ports.Workers.stream`; the place is kept until the stream ends or is closed."""
        adapter = self._adapter(call)
        async with self._place(call) as timed, aclosing(cast(_Chunks, adapter.stream(timed))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def prepare(self, loaded: LoadedPool, revision: str) -> Callable[[], None]:
        """As `ports_pools.PoolWorkers.prepare`. LiteLLM may have to be loaded, which takes seconds, so in a thread."""
        if self._make is None:
            raise ValueError("these workers were not made from a pool file")
        adapters = await asyncio.to_thread(self._make, loaded)
        return lambda: self._take(loaded.pools, adapters, revision)

    async def close(self) -> None:
        """Close every adapter."""
        for adapters in [self._now, *self._by_revision.values()]:
            for adapter in adapters.values():
                await adapter.close()

    def _take(self, pools: PoolFile, adapters: Adapters, revision: str) -> None:
        """Use these from now on. All adapters share one client, whose idle connections close by themselves, so what is
        left of the pool before is its keys: they go when no request of it can be open any more."""
        before = self._now
        self._now = self._by_revision[revision] = adapters
        self._places = {worker.name: worker.concurrency_max for worker in pools.workers}
        for name in self._gates.keys() & self._places.keys():
            self._gates[name].resize(self._places[name])
        asyncio.get_running_loop().call_later(self._keep_s, self._forget, before)

    def _forget(self, adapters: Adapters) -> None:
        if adapters is not self._now:
            kept = {revision: one for revision, one in self._by_revision.items() if one is not adapters}
            self._by_revision = kept
        for name in [name for name, gate in self._gates.items() if not (gate.waiting or gate.busy)]:
            del self._gates[name]  # made again by the next call

    def _adapter(self, call: WorkerCall) -> Adapter:
        adapters = self._by_revision.get(call.revision) if call.revision else self._now
        if adapters is None:
            raise UpstreamError(f"worker {call.worker.name} is of a pool that is gone", dispatched=False)
        adapter = adapters.get(call.worker.kind)
        if adapter is None:
            what = f"worker {call.worker.name} is of kind {call.worker.kind}, which no adapter of this server calls"
            raise UpstreamError(what, dispatched=False)
        return adapter

    def _place(self, call: WorkerCall) -> AbstractAsyncContextManager[WorkerCall]:
        worker = call.worker
        gate = self._gates.get(worker.name)
        if gate is None:
            gate = self._gates[worker.name] = _Gate(self._places.get(worker.name, worker.concurrency_max))
        return _held(gate, call)


@asynccontextmanager
async def _held(gate: _Gate, call: WorkerCall) -> AsyncIterator[WorkerCall]:
    """One place at the worker; yields the call with the time that is left after waiting for it."""
    if gate.waiting >= gate.places * WAITING_PER_PLACE_MAX:
        raise UpstreamRateLimited(f"too many calls wait for worker {call.worker.name}", dispatched=False)
    now = asyncio.get_running_loop().time
    began = now()
    gate.waiting += 1
    try:
        async with asyncio.timeout(call.timeout_s):
            await gate.enter()
    except TimeoutError:
        raise UpstreamTimeout(f"worker {call.worker.name} had no free place in time", dispatched=False) from None
    finally:
        gate.waiting -= 1
    try:
        yield replace(call, timeout_s=max(call.timeout_s - (now() - began), 0.001))
    finally:
        gate.leave()


def pooled_workers(
    pool: PoolFile,
    secrets: Mapping[str, str],
    depth_secret: bytes,
    *,
    connections_max: int = 512,
    reply_bytes_max: int = 16 << 20,
    chunk_gap_s_max: float = 60.0,
    keep_s: float = 0.0,
) -> PooledWorkers:
    """The adapters that this pool needs: LiteLLM is loaded only if a worker is of that kind.

    Raises ConfigError where it is needed and not installed.
    """
    client = http_client(connections_max)

    def make(loaded: LoadedPool) -> Adapters:
        keys = loaded.secrets
        adapters: dict[str, Adapter] = {
            "openai": HttpWorkers(
                keys, depth_secret, client=client, reply_bytes_max=reply_bytes_max, chunk_gap_s_max=chunk_gap_s_max
            ),
            "tool": ToolWorkers(keys, depth_secret, client=client),
        }
        if any(worker.kind == "litellm" for worker in loaded.pools.workers):
            adapters["litellm"] = LiteLLMWorkers(keys)
        return adapters

    adapters = make(LoadedPool(pool, secrets))
    return PooledWorkers(adapters, revision=revision_of(pool), make=make, keep_s=keep_s)
