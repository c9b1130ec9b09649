"""A request that is being served, as its reader sees it: chunks, result, the x-baton headers, and the rates that count
it."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gateway.core.access.keys import Principal
from gateway.core.log.events import random_hex
from gateway.core.log.rollout import RolloutRecord
from gateway.core.loop.caps import Caps
from gateway.core.money.amounts import Usage, nano_to_usd
from gateway.core.money.ledger import Hold, Scope, org_scope
from gateway.core.money.sessions import Session
from gateway.core.openai.chat import ChatRequest
from gateway.core.openai.reply import reply_facts
from gateway.errors import BatonError, Unavailable
from gateway.service.loop.state import Checkpoints, HoldRecord, Loop
from gateway.service.ports.request import RateLimits, RateState

_NOT_PRINTABLE = re.compile(r"[^ -~]")
QUEUE_CHUNKS_MAX = 32  # a slower reader than this holds the worker's stream back


@dataclass(frozen=True, slots=True)
class ProgressNote:
    """An event on the way to the reply, for a client that asked for them."""

    event: Mapping[str, Any]


Progress = Literal["off", "on", "reasoning"]  # what a stream says of plans and steps: nothing, comments, reasoning
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


class Rates:
    """The rate limits of a request: its key's, and its organisation's where that has any."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits

    def counts(self, who: Principal) -> bool:
        """Whether requests of this key are counted."""
        return who.has_rate_limits or who.organisation.has_rate_limits

    async def enter(self, who: Principal) -> RateEntry:
        """Count a request of which nothing but its key is known. Raises RateLimited."""
        request_id = random_hex()
        if not self.counts(who):
            return RateEntry(who, request_id, RateState())
        return RateEntry(who, request_id, await self.admit(who, request_id, 0))

    async def weigh(self, entry: RateEntry, tokens: int) -> None:
        """Count the tokens that the request may use. Raises RateLimited, and TooLarge for more than fit in a minute."""
        if entry.who.tpm is not None or entry.who.organisation.tpm is not None:
            entry.state = await self.admit(entry.who, entry.id, tokens)

    async def leave(self, entry: RateEntry) -> None:
        """Count out a request that was not started; see `release`."""
        if entry.counts:
            await self.release(entry.who, entry.id, 0)
            return
        for name in _counted(entry.who):
            with suppress(Unavailable):
                await self._limits.withdraw(name, entry.id)

    async def admit(self, who: Principal, request_id: str, tokens: int) -> RateState:
        """Count the request in and return what is left to the key. A request that was counted before is counted once,
        with these tokens. Raises RateLimited; then neither counts it."""
        state = await self._limits.admit(who.public_id, request_id, tokens, who.rpm, who.tpm, who.concurrency)
        org = who.organisation
        if org.has_rate_limits:
            try:
                await self._limits.admit(org_scope(who.org), request_id, tokens, org.rpm, org.tpm, org.concurrency)
            except BaseException:  # boundary: whatever stopped it, the key's place in flight is given back
                with suppress(Unavailable):
                    await self._limits.release(who.public_id, request_id, 0)
                raise
        return state

    async def release(self, who: Principal, request_id: str, tokens_used: int | None) -> None:
        """Count the request out. A key without limits was never counted in. Where the counts are away its place comes
        free by itself, with its lease: no request that was served may fail or wait for that."""
        for name in _counted(who):
            with suppress(Unavailable):
                await self._limits.release(name, request_id, tokens_used)


class Entering:
    """Counts a request in for a block, and out at its end unless it was started there. `entry`: how it was counted
    before, by somebody who counts it out."""

    def __init__(self, rates: Rates, who: Principal, entry: RateEntry | None = None, *, counts: bool = True) -> None:
        self._rates, self._who, self._counts = rates, who, counts
        self._before, self._entry = entry, entry

    async def __aenter__(self) -> RateEntry:
        """Raises RateLimited, Unavailable."""
        if self._entry is None:
            self._entry = await self._rates.enter(self._who)
            self._entry.counts = self._counts
        return self._entry

    async def __aexit__(self, *_: object) -> None:
        entry = self._entry
        if self._before is None and entry is not None and not entry.started:
            entry.left = True
            await self._rates.leave(entry)


def _counted(who: Principal) -> Iterator[str]:
    """Under which names the limits count a request of a key."""
    if who.has_rate_limits:
        yield who.public_id
    if who.organisation.has_rate_limits:
        yield org_scope(who.org)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What was reserved for a request: its money and, in a session, its worker calls; and the caps that follow from
    it. `answer_nano`: what the shortest answer may cost. `wanted_calls`: the most, of which a budget may have granted
    less."""

    money: Hold
    record: HoldRecord
    caps: Caps
    answer_nano: int = 0
    calls: Hold | None = None
    wanted_calls: int = 0
    session: Session | None = None


class Kept(Checkpoints, Protocol):
    """What was saved of a request before this gateway serves it, and what will be."""

    @property
    def rollout_id(self) -> str:
        """The id of its rollout, and of the hold of its money."""
        ...

    @property
    def created_us(self) -> int:
        """When the client asked, in microseconds since the epoch."""
        ...

    @property
    def suspending(self) -> bool:
        """Whether a cancellation means that another gateway goes on."""
        ...

    def abandon(self) -> None:
        """Leave the request to another gateway from now on."""
        ...

    def terms(self, most: int, least: int, scopes: Sequence[Scope]) -> tuple[int, int, Sequence[Scope]]:
        """The hold that was granted before, else these bounds and scopes."""
        ...

    async def begin(self, loop: Loop, money: Hold, calls: Hold | None) -> None:
        """Let `loop` go on from what was saved. Raises Conflict, Unavailable."""
        ...


class Running:
    """A request that is being served. If it streams, `take` items whenever it is `ready`; then read `result`. `cancel`
    it when the client leaves."""

    def __init__(
        self,
        record: RolloutRecord,
        chat: ChatRequest,
        entry: RateEntry,
        reserved: Reservation,
    ) -> None:
        self.record = record
        self.chat = chat
        self.entry = entry
        self.rate = entry.state
        self.principal = entry.who
        self.reserved = reserved
        self.progress: Progress = "off"
        self.body_bytes = 0  # of the request's body; 0: not known
        self.standing = ""  # how far the next rung of its planner is
        self.left: dict[str, str] = {}  # headers: what is left of its session
        self.stopped: BatonError | None = None  # why its session ended it
        self.kept: Kept | None = None  # of a request in the background: what is saved of it
        self.body: dict[str, Any] | None = None
        self.error: BatonError | None = None
        self.usage = Usage()
        self.input_tokens = 0  # of its prompt, by estimate
        self.reply_facts: dict[str, Any] = {}  # what the reply says of itself
        self.finished = asyncio.Event()
        self.work: asyncio.Task[Any] | None = None  # what `cancel` stops; None before and after it
        self._items: deque[StreamItem] = deque()
        self._writers: list[asyncio.Future[None]] = []  # each waits for room
        self._reader: asyncio.Future[bool] | None = None  # waits for an item, or for the end
        self._end: asyncio.Future[None] | None = None  # waits for the end

    async def chunk(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Sink: pass choices on. Waits while the reader is QUEUE_CHUNKS_MAX chunks behind."""
        while len(self._items) >= QUEUE_CHUNKS_MAX:
            room = asyncio.get_running_loop().create_future()
            self._writers.append(room)
            await room
        self._items.append(choices)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(True)

    def about(self, reply: Mapping[str, Any]) -> None:
        """Sink: note what the reply says about itself."""
        self.reply_facts |= reply_facts(reply)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Pass an event on. Drops it where the reader is behind: a late note is worth nothing."""
        if len(self._items) < QUEUE_CHUNKS_MAX:
            self._items.append(ProgressNote(event))
            self._wake()

    def finish(self) -> None:
        """Set `finished`: `body` or `error` is there, and no further chunk comes."""
        self.finished.set()
        self._wake()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def end(self) -> asyncio.Future[None]:
        """What is done once `finished` is set. One caller; it may cancel it."""
        self._end = end = asyncio.get_running_loop().create_future()
        if self.finished.is_set():
            end.set_result(None)
        return end

    async def ready(self, limit_s: float | None) -> bool:
        """Wait for an item or for the end; False where neither came within `limit_s`. One reader at a time: it costs
        no task, and a timer only where there is a limit."""
        if self.finished.is_set() or self._items:
            return True
        loop = asyncio.get_running_loop()
        self._reader = reader = loop.create_future()
        timer = loop.call_later(limit_s, self._wake, False) if limit_s else None
        try:
            came: bool = await reader
            return came
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def take(self) -> StreamItem | None:
        """The next item, None where there is none now."""
        if not self._items:
            return None
        for room in self._writers:
            if not room.done():
                room.set_result(None)
        self._writers.clear()
        return self._items.popleft()

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

    def stop(self, error: BatonError) -> None:
        """Stop every upstream call, because the session has ended. The reply is the best answer so far, else this
        error."""
        if self.stopped is None and self.work is not None:
            self.stopped = error
            self.cancel()

    def headers(self) -> dict[str, str]:
        """The x-baton headers, as far as they are known."""
        return reply_headers(self.record, self.standing) | self.left

    def _wake(self, came: bool = True) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(came)


def overhead_ms(record: RolloutRecord, now_us: int) -> float:
    """Milliseconds in which the request waited neither for the conductor nor for a worker."""
    spans = [(planned.started_us, planned.finished_us) for planned in record.rounds if planned.planner == "conductor"]
    for step in record.steps:
        child = step.child_rollout_id is not None
        spans += (
            [(step.started_us, step.finished_us)] if child else [(a.started_us, a.finished_us) for a in step.attempts]
        )
    return (now_us - record.created_us - covered_us(spans)) / 1000


def reply_headers(record: RolloutRecord, standing: str = "") -> dict[str, str]:
    """The x-baton headers, as far as they are known. `standing` goes behind the policy's name where the rule or the
    conductor planned, before the brackets of a version."""
    policy = record.policy_used or record.policy_requested
    policy += f"; {standing}" if standing and policy in ("rule", "conductor") else ""
    version = f" ({record.policy_version})" if record.policy_version else ""
    headers = {
        "x-baton-rollout-id": record.id,
        "x-baton-policy": policy + version,
        "x-baton-workers": ",".join(step.worker for step in record.steps),
        "x-baton-steps": str(len(record.steps)),
        "x-baton-cost-usd": nano_to_usd(record.cost_nano),
        "x-baton-overhead-ms": f"{record.overhead_ms:.1f}",
    }
    plans = [each.plan for each in record.rounds if each.plan and each.plan.get("steps")]
    if reasons := [str(plan["why"]) for plan in plans if plan.get("why")]:
        headers["x-baton-why"] = reasons[-1]
    if left_out := [name for step in record.steps for attempt in step.attempts for name in attempt.left_out]:
        headers["x-baton-left-out"] = ", ".join(dict.fromkeys(left_out))
    if record.fallback:
        headers["x-baton-fallback"] = record.fallback
    if (memory := record.memory) and memory["state"] != "fresh":
        age = f"; age={memory['age_s']:.0f}" if memory["state"] == "stale" else ""
        headers["x-baton-experience"] = memory["state"] + age
    if record.capped:
        headers["x-baton-capped"] = record.capped
    if by := record.caps.get("capped_by"):
        headers["x-baton-capped-by"] = by
    if record.steps and (lowered := record.steps[-1].lowered):
        names = [name for name in ("max_tokens", "asked", "by", "budget_tokens") if name in lowered]
        headers["x-baton-lowered"] = ", ".join(f"{name}={lowered[name]}" for name in names)
    if cut := [(step.step, attempt.cut) for step in record.steps for attempt in step.attempts if attempt.cut]:
        index, parts = cut[-1]
        headers["x-baton-cut"] = ", ".join(
            [f"step={index}", *(f"{name}={part}" for name, part in parts.items() if part)]
        )
    return {name: header_text(value) for name, value in headers.items()}


def header_text(text: str) -> str:
    """The text as a header may hold it: whatever is not printable ASCII becomes `?`."""
    return text if text.isascii() and text.isprintable() else _NOT_PRINTABLE.sub("?", text)


def covered_us(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of [start, end) spans, in microseconds: the time in which at least one is open."""
    total, reach = 0, 0
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total
