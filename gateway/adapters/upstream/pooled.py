"""The workers of the pool behind one port: chooses the adapter by kind, and enforces each worker's concurrency limit.

When another pool file replaces the pool under traffic, it gets its own adapters with its own keys. Each call uses the
adapters of the pool that its request began with, so that no key goes to an address that it is not meant for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, cast

from gateway.adapters.upstream.client import http_client
from gateway.adapters.upstream.http import HttpWorkers
from gateway.adapters.upstream.http1.ways import Way, Ways
from gateway.adapters.upstream.litellm import LiteLLMWorkers
from gateway.adapters.upstream.mcp import tool_servers
from gateway.adapters.upstream.tools import ToolWorkers
from gateway.core.pool.models import model_of
from gateway.core.pool.revision import revision_of
from gateway.core.pool.tools import Tool
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import UpstreamError, UpstreamRateLimited, UpstreamTimeout
from gateway.service.ports.counts import Count
from gateway.service.ports.pools import NO_SERVERS, LoadedPool, Swap, ToolServers
from gateway.service.ports.request import WorkerCall, WorkerReply, Workers

log = logging.getLogger("baton.workers")
LOG_EVERY_S = 10.0
WORDS_LOGGED = (401, 402, 403, 404, 407, 429)  # statuses whose messages are about the account, not about the request
SHARED_WAIT_S = 0.005  # between two looks at a place that another process has
THE_WORKER = "the worker"  # how an adapter's message about its worker begins
WAITING_PER_PLACE_MAX = 16


_Chunks = AsyncGenerator[Mapping[str, Any], None]


class Adapter(Workers, Protocol):
    """The workers of one kind, with connections to close."""

    async def close(self) -> None:
        """Close every connection."""
        ...


Adapters = Mapping[str, Adapter]  # by kind


@dataclass
class _Gate:
    """The concurrency limit of one worker. `places` is the limit, `waiting` and `busy` count calls. `owed` counts the
    places that a smaller limit removes as soon as calls free them. `shared` counts the calls of all processes."""

    places: int
    shared: Count | None = None
    waiting: int = 0
    busy: int = 0
    owed: int = 0
    free: asyncio.Semaphore = field(init=False)
    first: asyncio.Lock = field(default_factory=asyncio.Lock)  # of those that wait for another process

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.places)

    @property
    def is_open(self) -> bool:
        """Whether `enter` would not wait."""
        return not (self.owed or self.shared is not None or self.free.locked())

    async def enter(self) -> None:
        """Wait for a place."""
        await self.free.acquire()
        while self.owed:
            self.owed -= 1
            await self.free.acquire()
        if self.shared is not None:
            try:
                await self._enter_shared(self.shared)
            except asyncio.CancelledError:
                self._release()
                raise
        self.busy += 1

    async def _enter_shared(self, shared: Count) -> None:
        """Wait until all processes together leave a place. The pause is drawn, so that no process is always late."""
        if not self.first.locked() and shared.try_add(self.places):
            return
        async with self.first:
            while not shared.try_add(self.places):  # noqa: ASYNC110 - nobody wakes a waiter of another process
                await asyncio.sleep(SHARED_WAIT_S * random.uniform(0.5, 1.5))  # noqa: S311 - no secret

    def leave(self) -> None:
        """Release a place."""
        self.busy -= 1
        if self.shared is not None:
            self.shared.add(-1)
        self._release()

    def resize(self, places: int) -> None:
        """Change the limit. Calls that have a place keep it."""
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
    """`ports.Workers` over one adapter for each kind, and `ports.pools.PoolWorkers`. `make` makes the adapters of
    another pool. `keep_s` is the number of seconds for which calls of the previous pool may still arrive. `shared`
    gives the count by which processes of one gateway share a worker's limit. Kind `self` never gets here: the rounds
    run it as a child loop."""

    def __init__(
        self,
        adapters: Adapters,
        *,
        revision: str = "",
        make: Callable[[LoadedPool], Adapters] | None = None,
        keep_s: float = 0.0,
        shared: Callable[[str], Count] | None = None,
    ) -> None:
        self._now = adapters
        self._shared = shared
        self._by_revision = {revision: adapters}
        self._make = make
        self._keep_s = keep_s
        self._open = [adapters]  # of this pool, and of earlier ones whose calls may not have ended
        self._closing: set[asyncio.Task[None]] = set()  # of servers of earlier pools
        self._places: dict[str, int] = {}  # concurrency limits since the first replacement of the pool
        self._gates: dict[str, _Gate] = {}
        self._faults = _FaultLog()

    async def start(self) -> None:
        """Connect to the MCP servers of the pool, and read their tools. One that is not there is tried again."""
        await _servers(self._now).start()

    def tools(self, worker: WorkerSpec, revision: str) -> tuple[Tool, ...]:
        """See `ports.Toolboxes.tools`."""
        return _servers(self._by_revision.get(revision, {}) if revision else self._now).tools(worker.name)

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """See `ports.Workers.complete`. The wait for a place counts towards the call's time."""
        adapter, gate = self._adapter(call), self._gate(call)
        timed = await _entered(gate, call)
        try:
            return await adapter.complete(timed)
        except UpstreamError as error:
            self._faults.name(timed, error)
            raise
        finally:
            gate.leave()

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """See `ports.Workers.stream`. The call keeps its place until the stream ends or is closed."""
        adapter, gate = self._adapter(call), self._gate(call)
        timed = await _entered(gate, call)
        try:
            async with aclosing(cast(_Chunks, adapter.stream(timed))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UpstreamError as error:
            self._faults.name(timed, error)
            raise
        finally:
            gate.leave()

    async def prepare(self, loaded: LoadedPool, revision: str) -> Swap:
        """See `ports.pools.PoolWorkers.prepare`. Runs in a thread, because it may import LiteLLM, which takes
        seconds."""
        if self._make is None:
            raise ValueError("these workers were made without `make`, so no other pool can replace theirs")
        adapters = await asyncio.to_thread(self._make, loaded)
        servers = _servers(adapters)
        try:
            await servers.start()
        except BaseException:  # boundary: a cancelled start, too, leaves no program of a server behind
            await servers.close()
            raise
        return Swap(lambda: self._replace_pool(loaded.pools, adapters, revision), servers.close)

    async def close(self) -> None:
        """Close every adapter."""
        await asyncio.gather(*self._closing, return_exceptions=True)
        for adapters in self._open:
            for adapter in adapters.values():
                await adapter.close()

    def _replace_pool(self, pools: PoolFile, adapters: Adapters, revision: str) -> None:
        """Use these adapters from now on. All adapters share one client, whose idle connections close by themselves, so
        only the keys of the previous pool remain. They are dropped when no request of that pool can be open any
        more."""
        previous = self._now
        self._now = self._by_revision[revision] = adapters
        self._open.append(adapters)
        self._places = {worker.name: worker.concurrency_max for worker in pools.workers}
        for name in self._gates.keys() & self._places.keys():
            self._gates[name].resize(self._places[name])
        asyncio.get_running_loop().call_later(self._keep_s, self._forget, previous)

    def _forget(self, adapters: Adapters) -> None:
        if adapters is not self._now:
            others = {key: value for key, value in self._by_revision.items() if value is not adapters}
            self._by_revision = others
            self._open = [one for one in self._open if one is not adapters]
            task = asyncio.create_task(_servers(adapters).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name in [name for name, gate in self._gates.items() if not (gate.waiting or gate.busy)]:
            del self._gates[name]  # the next call makes it again

    def _adapter(self, call: WorkerCall) -> Adapter:
        adapters = self._by_revision.get(call.revision) if call.revision else self._now
        if adapters is None:
            problem = f"worker {call.worker.name} belongs to a pool that is no longer loaded"
            raise UpstreamError(problem, dispatched=False)
        adapter = adapters.get("openai" if call.worker.speaks_messages else call.worker.kind)
        if adapter is None:
            problem = f"worker {call.worker.name} is of kind {call.worker.kind}, for which this gateway has no adapter"
            raise UpstreamError(problem, dispatched=False)
        return adapter

    def _gate(self, call: WorkerCall) -> _Gate:
        worker = call.worker
        gate = self._gates.get(worker.name)
        if gate is None:
            shared = self._shared(f"worker {worker.name}") if self._shared else None
            gate = _Gate(self._places.get(worker.name, worker.concurrency_max), shared)
            self._gates[worker.name] = gate
        return gate


class _FaultLog:
    """Names the worker in its errors, and writes them into the log of the process: of one kind at most a line in
    LOG_EVERY_S seconds, with the number of those since the last."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str | None, int | None], tuple[float, int]] = {}  # when, and how many since

    def name(self, call: WorkerCall, error: UpstreamError) -> None:
        """Put the worker's name where a message says "the worker", its place beside the message, and in a time-out
        whether the call had less time than the worker may take. A vendor's own words stay as they are; they are not
        logged if they may quote the request."""
        worker = call.worker
        if isinstance(error, UpstreamTimeout):
            error.hasty = call.timeout_s < worker.silence_s_max
        what = error.message.removeprefix(THE_WORKER)
        if what != error.message:
            error.message = f"worker {worker.name}{what}"
        error.place = place_of(worker)
        status = error.upstream_status
        kind, now_s = (worker.name, error.code, status), time.monotonic()
        at_s, number = self._told.get(kind, (-LOG_EVERY_S, 0))
        if now_s - at_s < LOG_EVERY_S:
            self._told[kind] = at_s, number + 1
            return
        self._told[kind] = now_s, 0
        words = error.message.partition(": ")[0] if status is None else f"it answered {status}"
        words = error.message if status in WORDS_LOGGED else words
        words = words.removeprefix(f"worker {worker.name} ")
        more = f", and {number} more like it since the last line" if number else ""
        log.warning("worker %s (%s): %s; %s%s", worker.name, error.place, words, error.code, more)


def place_of(worker: WorkerSpec) -> str:
    """Where a worker is, and where its key comes from."""
    where = f"at {worker.host}" if worker.host else f"model {worker.model}" if worker.model else worker.kind
    return f"{where}, key `{worker.api_key}`" if worker.api_key else f"{where}, no key"


def _servers(adapters: Adapters) -> ToolServers:
    tools = adapters.get("mcp")
    return tools.servers if isinstance(tools, ToolWorkers) else NO_SERVERS


async def _entered(gate: _Gate, call: WorkerCall) -> WorkerCall:
    """Take a place at the worker. The call with the time that is left after the wait for it."""
    if gate.is_open:
        await gate.enter()
        return call
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
    return replace(call, timeout_s=max(call.timeout_s - (now() - began), 0.001))


def _ways_to(loaded: LoadedPool, ways: Ways) -> Mapping[str, Way]:
    """The ways to workers whose entries say more than the environment. Raises ConfigError, also for those that it
    gives."""
    every = {one.name: ways.of_worker(one, loaded.secrets) for one in loaded.pools.workers if _is_reached(one)}
    return {name: way for name, way in every.items() if any(loaded.pools.worker(name).detour)}


def _is_reached(worker: WorkerSpec) -> bool:
    return (worker.url or "").startswith("http")


def pooled_workers(
    pool: PoolFile,
    secrets: Mapping[str, str],
    depth_secret: bytes,
    *,
    places: Mapping[str, str] = MappingProxyType({}),
    ways: Ways | None = None,
    connections_max: int = 512,
    reply_bytes_max: int = 16 << 20,
    chunk_gap_s_max: float = 60.0,
    keep_s: float = 0.0,
    shared: Callable[[str], Count] | None = None,
) -> PooledWorkers:
    """Make the workers of a pool. Imports LiteLLM and `mcp` only for workers of those kinds. Raises ConfigError where
    one is needed and not installed."""
    ways = ways or Ways()
    client = http_client(connections_max, ways)

    def make(loaded: LoadedPool) -> Adapters:
        keys, to = loaded.secrets, _ways_to(loaded, ways)
        adapters: dict[str, Adapter] = {
            "openai": HttpWorkers(
                keys,
                depth_secret,
                places=places,
                client=client,
                ways=to,
                reply_bytes_max=reply_bytes_max,
                chunk_gap_s_max=chunk_gap_s_max,
            ),
            "tool": ToolWorkers(
                keys, depth_secret, client=client, ways=to, ask=lambda name, call: ask(loaded, name, call)
            ),
        }
        if any(worker.kind == "mcp" for worker in loaded.pools.workers):
            adapters["mcp"] = ToolWorkers(keys, depth_secret, client=client, servers=tool_servers(loaded, ways))

        async def ask(of: LoadedPool, name: str, call: WorkerCall) -> WorkerReply:
            spec = of.pools.worker(name)
            body = {**spec.params, **call.body}
            if model_of(spec).completion_tokens:
                body["max_completion_tokens"] = body.pop("max_tokens")
            kind = "openai" if spec.speaks_messages else spec.kind
            return await adapters[kind].complete(replace(call, worker=spec, body=body))

        if any(worker.kind == "litellm" and not worker.speaks_messages for worker in loaded.pools.workers):
            adapters["litellm"] = LiteLLMWorkers(keys, chunk_gap_s_max=chunk_gap_s_max)
        return adapters

    adapters = make(LoadedPool(pool, secrets))
    return PooledWorkers(adapters, revision=revision_of(pool), make=make, keep_s=keep_s, shared=shared)
