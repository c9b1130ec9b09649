"""A request being served, as its reader sees it: the chunks, the result, and the headers that tell its story."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.clocks import covered_us
from gateway.core.log.rollout import RolloutRecord
from gateway.core.money.amounts import Usage, nano_to_usd
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.reply import about
from gateway.errors import BatonError
from gateway.service.ports.request import RateState, Scope

QUEUE_CHUNKS_MAX = 32  # a slower reader than this holds the worker's stream back


@dataclass(frozen=True, slots=True)
class Progress:
    """Something that happened on the way to the reply."""

    event: Mapping[str, Any]


Said = Sequence[Mapping[str, Any]] | Progress  # choices of a chunk, or news


class Running:
    """A request being served. Read `chunks` (if it streams) and then `result`; `cancel` when the client leaves."""

    def __init__(
        self,
        record: RolloutRecord,
        chat: ChatRequest,
        rate: RateState,
        principal: Principal,
        scopes: Sequence[Scope] = (),
    ) -> None:
        self.record = record
        self.chat = chat
        self.rate = rate
        self.principal = principal
        self.scopes = scopes  # that its hold is in
        self.body: dict[str, Any] | None = None
        self.error: BatonError | None = None
        self.usage = Usage()
        self.said: dict[str, str] = {}  # by the reply about itself: `service_tier`, `system_fingerprint`
        self.finished = asyncio.Event()
        self.work: asyncio.Task[Mapping[str, Any]] | None = None
        self._queue: asyncio.Queue[Said | None] = asyncio.Queue(QUEUE_CHUNKS_MAX)

    async def chunk(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Sink: waits while the reader is QUEUE_CHUNKS_MAX chunks behind."""
        await self._queue.put(choices)

    def about(self, reply: Mapping[str, Any]) -> None:
        """Sink: what the reply says of itself."""
        self.said |= about(reply)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Say what happens, where the reader is not behind: news that is late is none."""
        if not self._queue.full():
            self._queue.put_nowait(Progress(event))

    async def chunks(self) -> AsyncIterator[Said]:
        """The reply's chunks until it is over; then `finished` is set and `body` or `error` is there."""
        while (choices := await self._next()) is not None:
            yield choices

    async def result(self) -> dict[str, Any]:
        """The whole reply. Raises what ended the request."""
        await self.finished.wait()
        if self.body is None:
            raise self.error or BatonError("the request ended without a reply")
        return self.body

    def cancel(self) -> None:
        """The client has left: stop every upstream call. Settling and logging go on."""
        if self.work is not None:
            self.work.cancel()

    async def _next(self) -> Said | None:
        """The next chunk, or None once the request has finished and the queue is empty."""
        if self.finished.is_set() and self._queue.empty():
            return None
        getting = asyncio.ensure_future(self._queue.get())
        ending = asyncio.ensure_future(self.finished.wait())
        try:
            await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            return None if self._queue.empty() else self._queue.get_nowait()
        finally:
            getting.cancel()
            ending.cancel()


def overhead_ms(record: RolloutRecord, now_us: int) -> float:
    """Milliseconds in which neither the conductor nor any worker was being waited for."""
    spans = [(planned.started_us, planned.finished_us) for planned in record.rounds if planned.planner == "conductor"]
    for step in record.steps:
        child = step.child_rollout_id is not None
        spans += (
            [(step.started_us, step.finished_us)] if child else [(a.started_us, a.finished_us) for a in step.attempts]
        )
    return (now_us - record.created_us - covered_us(spans)) / 1000


def reply_headers(record: RolloutRecord) -> dict[str, str]:
    """The x-baton headers, as far as they are known yet."""
    policy = record.policy_used or record.policy_requested
    version = f" ({record.policy_version})" if record.policy_version else ""
    headers = {
        "x-baton-rollout-id": record.id,
        "x-baton-policy": policy + version,
        "x-baton-workers": ",".join(step.worker for step in record.steps),
        "x-baton-steps": str(len(record.steps)),
        "x-baton-cost-usd": nano_to_usd(record.cost_nano),
        "x-baton-overhead-ms": f"{record.overhead_ms:.1f}",
    }
    if record.fallback:
        headers["x-baton-fallback"] = record.fallback
    if record.capped:
        headers["x-baton-capped"] = record.capped
    return {name: value.encode("ascii", "replace").decode() for name, value in headers.items()}
