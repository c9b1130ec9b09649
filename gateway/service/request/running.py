"""A request that is being served, as its reader sees it: chunks, result, and the x-baton headers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.access.keys import Principal
from gateway.core.log.rollout import RolloutRecord
from gateway.core.money.amounts import Usage, nano_to_usd
from gateway.core.money.ledger import Scope
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.reply import reply_facts
from gateway.errors import BatonError
from gateway.service.ports.request import RateState

_NOT_PRINTABLE = re.compile(r"[^ -~]")
QUEUE_CHUNKS_MAX = 32  # a slower reader than this holds the worker's stream back


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """An event on the way to the reply, for a client that asked for them."""

    event: Mapping[str, Any]


StreamItem = Sequence[Mapping[str, Any]] | ProgressNote  # the choices of a chunk, or a note


@dataclass(slots=True)
class RateEntry:
    """A request that the limits of its key have counted, under `id`, before its body was read."""

    who: Principal
    id: str
    state: RateState
    counts: bool = True  # whether it stays counted as a request where it is not started
    started: bool = False  # whether the completer serves it, and counts it out at its end
    left: bool = False  # whether it was counted out


class Running:
    """A request that is being served. Read `chunks` if it streams, then `result`; `cancel` it when the client
    leaves."""

    def __init__(
        self,
        record: RolloutRecord,
        chat: ChatRequest,
        entry: RateEntry,
        scopes: Sequence[Scope] = (),
    ) -> None:
        self.record = record
        self.chat = chat
        self.entry = entry
        self.rate = entry.state
        self.principal = entry.who
        self.scopes = scopes  # of its hold
        self.body: dict[str, Any] | None = None
        self.error: BatonError | None = None
        self.usage = Usage()
        self.reply_facts: dict[str, str] = {}  # `service_tier`, `system_fingerprint` of the reply
        self.finished = asyncio.Event()
        self.work: asyncio.Task[Mapping[str, Any]] | None = None
        self._queue: asyncio.Queue[StreamItem | None] = asyncio.Queue(QUEUE_CHUNKS_MAX)

    async def chunk(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Sink: pass choices on. Waits while the reader is QUEUE_CHUNKS_MAX chunks behind."""
        await self._queue.put(choices)

    def about(self, reply: Mapping[str, Any]) -> None:
        """Sink: note what the reply says about itself."""
        self.reply_facts |= reply_facts(reply)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Pass an event on. Drops it where the reader is behind: a late note is worth nothing."""
        if not self._queue.full():
            self._queue.put_nowait(ProgressNote(event))

    async def chunks(self) -> AsyncIterator[StreamItem]:
        """Yield the reply's chunks. Ends when `finished` is set; then `body` or `error` is there."""
        while (choices := await self._next()) is not None:
            yield choices

    async def result(self) -> dict[str, Any]:
        """Wait for the whole reply. Raises the error that ended the request."""
        await self.finished.wait()
        if self.body is None:
            raise self.error or BatonError("the request ended without a reply")
        return self.body

    def cancel(self) -> None:
        """Stop every upstream call, because the client has left. Settling and logging go on."""
        if self.work is not None:
            self.work.cancel()

    async def _next(self) -> StreamItem | None:
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
    """Milliseconds in which the request waited neither for the conductor nor for a worker."""
    spans = [(planned.started_us, planned.finished_us) for planned in record.rounds if planned.planner == "conductor"]
    for step in record.steps:
        child = step.child_rollout_id is not None
        spans += (
            [(step.started_us, step.finished_us)] if child else [(a.started_us, a.finished_us) for a in step.attempts]
        )
    return (now_us - record.created_us - covered_us(spans)) / 1000


def reply_headers(record: RolloutRecord) -> dict[str, str]:
    """The x-baton headers, as far as they are known."""
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
    if reasons := [str(each.plan["why"]) for each in record.rounds if each.plan and each.plan.get("why")]:
        headers["x-baton-why"] = reasons[-1]
    if left_out := [name for step in record.steps for attempt in step.attempts for name in attempt.left_out]:
        headers["x-baton-left-out"] = ", ".join(dict.fromkeys(left_out))
    if record.fallback:
        headers["x-baton-fallback"] = record.fallback
    if record.capped:
        headers["x-baton-capped"] = record.capped
    if record.steps and (lowered := record.steps[-1].lowered):
        headers["x-baton-lowered"] = f"max_tokens={lowered['max_tokens']}, asked={lowered['asked']}, by={lowered['by']}"
    return {name: header_text(value) for name, value in headers.items()}


def header_text(text: str) -> str:
    """The text as a header may hold it: whatever is not printable ASCII becomes `?`."""
    return _NOT_PRINTABLE.sub("?", text)


def covered_us(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of [start, end) spans, in microseconds: the time in which at least one is open."""
    total, reach = 0, 0
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total
