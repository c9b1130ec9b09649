"""The workers of the pool behind one port: chooses the adapter by kind, and enforces each worker's concurrency limit.

When another pool file replaces the pool under traffic, it gets its own adapters with its own keys. Each call uses the
adapters of the pool that its request began with, so that no key goes to an address that it is not meant for.

Tool workers are programs that answer a step. `builtin:vote` runs here; every other tool answers over HTTP: Baton sends
POST `{"task": text, "seen": [{"handle", "task", "reply"}, …]}`, and the tool answers with status 200 and
`{"content": text}`. An optional `usage` object is billed if the pool file has token prices for the tool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, cast

import httpx

from gateway.adapters.upstream import client as upstream
from gateway.adapters.upstream.http import HttpWorkers, http_client
from gateway.adapters.upstream.litellm import LiteLLMWorkers
from gateway.core.loop import depth
from gateway.core.loop.digest import majority
from gateway.core.money.amounts import Usage
from gateway.core.openai.usage import read_usage, usage_body
from gateway.core.pool.workers import VOTE_URL, PoolFile, revision_of
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.pools import LoadedPool
from gateway.service.ports.request import WorkerCall, WorkerReply, Workers

WAITING_PER_PLACE_MAX = 16


class ToolWorkers:
    """`ports.Workers` for kind `tool`. `secrets` maps worker names to keys, which are sent as bearer tokens."""

    def __init__(
        self,
        secrets: Mapping[str, str],
        depth_secret: bytes,
        *,
        client: httpx.AsyncClient | None = None,
        reply_bytes_max: int = 4 << 20,
    ) -> None:
        self._secrets = dict(secrets)
        self._depth_secret = depth_secret
        self._client = client or http_client()
        self._reply_bytes_max = reply_bytes_max

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """See `ports.Workers.complete`. The reply is an OpenAI completion with the tool's answer as its content."""
        content, usage = _vote(call) if call.worker.url == VOTE_URL else await self._ask(call)
        return WorkerReply(_completion(call, content, usage), usage)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the complete reply as one chunk, then the usage."""
        reply = await self.complete(call)
        head = {"id": reply.body["id"], "object": "chat.completion.chunk", "created": 0, "model": call.worker.name}
        message = reply.body["choices"][0]["message"]
        yield {**head, "choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}
        yield {**head, "choices": [], "usage": reply.body["usage"]}

    async def _ask(self, call: WorkerCall) -> tuple[str, Usage]:
        """Call an HTTP tool; return its answer and usage. Raises UpstreamError."""
        secret = self._secrets.get(call.worker.name)
        seen = [{"handle": handle, "task": task, "reply": reply} for handle, task, reply in call.saw]
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        headers[depth.DEPTH_HEADER] = depth.sign(call.depth, self._depth_secret)
        if secret:
            headers["authorization"] = f"Bearer {secret}"
        request = self._client.build_request(
            "POST",
            call.worker.url or "",
            content=json.dumps({**call.worker.params, "task": task_text(call.body), "seen": seen}).encode(),
            headers=headers,
        )
        with upstream.transport_errors():
            async with asyncio.timeout(call.timeout_s):
                response = await self._client.send(request, stream=True)
                async with aclosing(response):
                    if response.status_code != 200:
                        raw = await upstream.error_body(response)
                        raise upstream.status_error(response.status_code, response.headers, raw, secret)
                    raw = await upstream.bounded_body(response, self._reply_bytes_max)
        answer = upstream.parse_object(raw)
        if not isinstance(answer.get("content"), str):
            raise UpstreamProtocol("the tool's reply has no text under `content`")
        return answer["content"], read_usage(answer) or Usage()


def task_text(body: Mapping[str, Any]) -> str:
    """The text of the last user message, which is the step's task. Empty if there is none."""
    for message in reversed(body.get("messages") or ()):
        if message.get("role") == "user":
            content = message.get("content")
            parts = [{"text": content}] if isinstance(content, str) else content or ()
            return "\n".join(str(part["text"]) for part in parts if part.get("text"))
    return ""


def _vote(call: WorkerCall) -> tuple[str, Usage]:
    """The first of the seen replies that give the most common answer. Raises UpstreamRefused without any reply."""
    if not call.saw:
        raise UpstreamRefused("vote sees no replies; let its step see at least one", dispatched=False)
    replies = [reply for _, _, reply in call.saw]
    return replies[majority(replies)], Usage()


def _completion(call: WorkerCall, content: str, usage: Usage) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": f"tool-{call.rollout_id}-{call.step_id}", "object": "chat.completion", "created": 0}
    return {**head, "model": call.worker.name, "choices": [choice], "usage": usage_body(usage)}


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
    places that a smaller limit removes as soon as calls free them."""

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
        """Release a place."""
        self.busy -= 1
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
    another pool. `keep_s` is the number of seconds for which calls of the previous pool may still arrive. Kind `self`
    never gets here: the rounds run it as a child loop."""

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
        self._places: dict[str, int] = {}  # concurrency limits since the first replacement of the pool
        self._gates: dict[str, _Gate] = {}

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """See `ports.Workers.complete`. The wait for a place counts towards the call's time."""
        adapter = self._adapter(call)
        async with self._place(call) as timed:
            return await adapter.complete(timed)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """See `ports.Workers.stream`. The call keeps its place until the stream ends or is closed."""
        adapter = self._adapter(call)
        async with self._place(call) as timed, aclosing(cast(_Chunks, adapter.stream(timed))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def prepare(self, loaded: LoadedPool, revision: str) -> Callable[[], None]:
        """See `ports.pools.PoolWorkers.prepare`. Runs in a thread, because it may import LiteLLM, which takes
        seconds."""
        if self._make is None:
            raise ValueError("these workers were made without `make`, so no other pool can replace theirs")
        adapters = await asyncio.to_thread(self._make, loaded)
        return lambda: self._replace_pool(loaded.pools, adapters, revision)

    async def close(self) -> None:
        """Close every adapter."""
        for adapters in [self._now, *self._by_revision.values()]:
            for adapter in adapters.values():
                await adapter.close()

    def _replace_pool(self, pools: PoolFile, adapters: Adapters, revision: str) -> None:
        """Use these adapters from now on. All adapters share one client, whose idle connections close by themselves, so
        only the keys of the previous pool remain. They are dropped when no request of that pool can be open any
        more."""
        previous = self._now
        self._now = self._by_revision[revision] = adapters
        self._places = {worker.name: worker.concurrency_max for worker in pools.workers}
        for name in self._gates.keys() & self._places.keys():
            self._gates[name].resize(self._places[name])
        asyncio.get_running_loop().call_later(self._keep_s, self._forget, previous)

    def _forget(self, adapters: Adapters) -> None:
        if adapters is not self._now:
            others = {key: value for key, value in self._by_revision.items() if value is not adapters}
            self._by_revision = others
        for name in [name for name, gate in self._gates.items() if not (gate.waiting or gate.busy)]:
            del self._gates[name]  # the next call makes it again

    def _adapter(self, call: WorkerCall) -> Adapter:
        adapters = self._by_revision.get(call.revision) if call.revision else self._now
        if adapters is None:
            problem = f"worker {call.worker.name} belongs to a pool that is no longer loaded"
            raise UpstreamError(problem, dispatched=False)
        adapter = adapters.get(call.worker.kind)
        if adapter is None:
            problem = f"worker {call.worker.name} is of kind {call.worker.kind}, for which this gateway has no adapter"
            raise UpstreamError(problem, dispatched=False)
        return adapter

    def _place(self, call: WorkerCall) -> AbstractAsyncContextManager[WorkerCall]:
        worker = call.worker
        gate = self._gates.get(worker.name)
        if gate is None:
            gate = self._gates[worker.name] = _Gate(self._places.get(worker.name, worker.concurrency_max))
        return _hold_place(gate, call)


@asynccontextmanager
async def _hold_place(gate: _Gate, call: WorkerCall) -> AsyncIterator[WorkerCall]:
    """Hold one place at the worker. Yields the call with the time that is left after the wait for it."""
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
    places: Mapping[str, str] = MappingProxyType({}),
    connections_max: int = 512,
    reply_bytes_max: int = 16 << 20,
    chunk_gap_s_max: float = 60.0,
    keep_s: float = 0.0,
) -> PooledWorkers:
    """Make the workers of a pool. Imports LiteLLM only if a worker is of that kind; raises ConfigError if it is needed
    and not installed."""
    client = http_client(connections_max)

    def make(loaded: LoadedPool) -> Adapters:
        keys = loaded.secrets
        adapters: dict[str, Adapter] = {
            "openai": HttpWorkers(
                keys,
                depth_secret,
                places=places,
                client=client,
                reply_bytes_max=reply_bytes_max,
                chunk_gap_s_max=chunk_gap_s_max,
            ),
            "tool": ToolWorkers(keys, depth_secret, client=client),
        }
        if any(worker.kind == "litellm" for worker in loaded.pools.workers):
            adapters["litellm"] = LiteLLMWorkers(keys)
        return adapters

    adapters = make(LoadedPool(pool, secrets))
    return PooledWorkers(adapters, revision=revision_of(pool), make=make, keep_s=keep_s)
