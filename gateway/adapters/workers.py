"""The pool's workers behind one port: picks the adapter by kind and keeps each worker inside its concurrency limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from gateway.adapters.workers_http import HttpWorkers, http_client
from gateway.adapters.workers_litellm import LiteLLMWorkers
from gateway.adapters.workers_tool import ToolWorkers
from gateway.core.pool import PoolFile
from gateway.errors import UpstreamError, UpstreamRateLimited, UpstreamTimeout
from gateway.service.ports import WorkerCall, WorkerReply, Workers

WAITING_PER_PLACE_MAX = 16
_Chunks = AsyncGenerator[Mapping[str, Any], None]


class Adapter(Workers, Protocol):
    """Workers of one kind, with something to close."""

    async def close(self) -> None: ...


@dataclass
class _Gate:
    """The places of one worker, and how many calls wait for one."""

    places: int
    waiting: int = 0
    free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.places)


class PooledWorkers:
    """`ports.Workers` over one adapter per kind. Kind `self` is no worker call: the rounds run it as a child loop."""

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        self._adapters = dict(adapters)
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

    async def close(self) -> None:
        """Close every adapter."""
        for adapter in self._adapters.values():
            await adapter.close()

    def _adapter(self, call: WorkerCall) -> Adapter:
        adapter = self._adapters.get(call.worker.kind)
        if adapter is None:
            what = f"worker {call.worker.name} is of kind {call.worker.kind}, which no adapter of this server calls"
            raise UpstreamError(what, dispatched=False)
        return adapter

    def _place(self, call: WorkerCall) -> AbstractAsyncContextManager[WorkerCall]:
        worker = call.worker
        gate = self._gates.get(worker.name)
        if gate is None or gate.places != worker.concurrency_max:
            gate = self._gates[worker.name] = _Gate(worker.concurrency_max)
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
            await gate.free.acquire()
    except TimeoutError:
        raise UpstreamTimeout(f"worker {call.worker.name} had no free place in time", dispatched=False) from None
    finally:
        gate.waiting -= 1
    try:
        yield replace(call, timeout_s=max(call.timeout_s - (now() - began), 0.001))
    finally:
        gate.free.release()


def pooled_workers(
    pool: PoolFile,
    secrets: Mapping[str, str],
    depth_secret: bytes,
    *,
    connections_max: int = 512,
    reply_bytes_max: int = 16 << 20,
    chunk_gap_s_max: float = 60.0,
) -> PooledWorkers:
    """The adapters that this pool needs: LiteLLM is loaded only if a worker is of that kind.

    Raises ConfigError where it is needed and not installed.
    """
    client = http_client(connections_max)
    http = HttpWorkers(
        secrets, depth_secret, client=client, reply_bytes_max=reply_bytes_max, chunk_gap_s_max=chunk_gap_s_max
    )
    adapters: dict[str, Adapter] = {
        "openai": http,
        "tool": ToolWorkers(secrets, depth_secret, client=client),
    }
    if any(worker.kind == "litellm" for worker in pool.workers):
        adapters["litellm"] = LiteLLMWorkers(secrets)
    return PooledWorkers(adapters)
