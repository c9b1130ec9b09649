"""Worker calls that real money pays for, under one cap, with each reply stored on disk, so that no call is paid twice.

A call holds its worst case on disk before it leaves, and settles what it cost when it has ended. A hold that a kill
left open counts in full for ever, so what is counted is never less than what was spent. A call with the same worker,
the same prompt and parameters, and the same sample number gets the stored reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gateway.core.money.amounts import Usage, nano_to_usd
from gateway.core.openai.reply import chunks_of
from gateway.core.openai.vendors.usage import usage_body
from gateway.errors import ConfigError, UpstreamError, UpstreamRefused
from gateway.service.ports.request import REFUSED_STATUSES, WorkerCall, WorkerReply
from policy.environments.simulated import vote

WAITS_S = (1.0, 4.0, 15.0)  # before a failed call is made again
STORE_BYTES_MAX = 4 << 30
CALLS_MAX = 8  # in flight
CONFIG = {"name", "kind", "model", "url", "version", "params", "task"}  # the part of a worker that decides its replies
Send = Callable[[WorkerCall], Awaitable["PaidReply"]]


class CallsEnded(Exception):
    """No further call can be made. No BatonError, so that no episode takes it for its own failure."""


class BudgetSpent(CallsEnded):
    """The cap has no room for another call."""


class WorkerLost(CallsEnded):
    """A worker does not answer, or refuses every call."""


class StoreFull(CallsEnded):
    """The disk takes no further hold, settlement or reply."""


class FailedCall(Exception):
    """One attempt that failed. `charged_nano`: what it cost all the same; None: nobody knows."""

    def __init__(self, error: UpstreamError, charged_nano: int | None) -> None:
        super().__init__(error.message)
        self.error, self.charged_nano = error, charged_nano


@dataclass(frozen=True, slots=True)
class PaidReply:
    """A worker's reply, what was charged for it, and how long it took. `refusal`: the worker's own refusal of this very
    call, as (message, status, code); the reply is empty then."""

    body: Mapping[str, Any]
    usage: Usage
    charged_nano: int
    seconds: float = 0.0
    refusal: tuple[str, int | None, str] | None = None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without lines that were cut off; none without the file. Raises ConfigError."""
    try:
        if path.stat().st_size > STORE_BYTES_MAX:
            raise ConfigError(f"{path}: over {STORE_BYTES_MAX} bytes; move it away to begin a new one")
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    records: list[dict[str, Any]] = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        records += [line] if isinstance(line, dict) else []
    return records


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add an object on a line of its own, also behind one that was cut off. Raises StoreFull on a full disk."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(line, ensure_ascii=True)}")
        path.chmod(0o600)
    except OSError as error:
        raise StoreFull(f"{path}: cannot be written ({error.strerror}); make room first") from None


class CallBudget:
    """What a run may spend on calls, in integer nano-dollars, its earlier attempts included. `path`: its ledger."""

    def __init__(self, path: Path, cap_nano: int) -> None:
        """Raises ConfigError for a ledger that cannot be read."""
        self.cap_nano = cap_nano
        self._path = path
        self._held: dict[int, int] = {}
        self._change = asyncio.Condition()
        self._reason: CallsEnded | None = None
        before: dict[int, int] = {}
        for line in read_lines(path):
            before[int(line["call"])] = int(line["settled"] if "settled" in line else line["held"])
        self._calls = max(before, default=0)
        self.spent_nano = sum(before.values())
        self.began_nano = self.spent_nano

    def end(self, reason: CallsEnded) -> None:
        """Refuse every later hold; calls that left may end."""
        self._reason = self._reason or reason

    async def hold(self, nano: int) -> int:
        """Take a call's worst case out of the cap, and return the number of the hold. Waits while calls in flight may
        give back enough. Raises BudgetSpent where they cannot, StoreFull, or the reason of an earlier `end`."""
        async with self._change:
            while self._reason is None and not self._fits(nano):
                if not self._held:
                    self._reason = BudgetSpent(self._shortage(nano))
                    self._change.notify_all()
                    break
                await self._change.wait()
            if self._reason is not None:
                raise self._reason
            self._calls += 1
            self._write({"call": self._calls, "held": nano})
            self._held[self._calls] = nano
            return self._calls

    def _fits(self, nano: int) -> bool:
        return self.spent_nano + sum(self._held.values()) + nano <= self.cap_nano

    def _shortage(self, nano: int) -> str:
        spent, cap, most = (nano_to_usd(value) for value in (self.spent_nano, self.cap_nano, nano))
        return f"spent ${spent} of the cap of ${cap}, and the next call may cost ${most}"

    async def settle(self, call: int, nano: int) -> None:
        """Close a hold at what the call cost. Raises StoreFull; the hold then counts in full."""
        async with self._change:
            del self._held[call]
            self.spent_nano += nano
            self._change.notify_all()
            self._write({"call": call, "settled": nano})

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            append_line(self._path, line)
        except StoreFull as full:
            self.end(full)
            raise


class StoredReplies:
    """Replies on disk, by the key of their call."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._path = path
        self._replies: dict[str, PaidReply] = {}
        for line in read_lines(path):
            try:
                self._replies[str(line["key"])] = _reply_of(line)
            except (KeyError, TypeError, ValueError):
                continue

    def get(self, key: str) -> PaidReply | None:
        """Return the stored reply."""
        return self._replies.get(key)

    def put(self, key: str, worker: str, sample: int, reply: PaidReply) -> None:
        """Store a reply. Raises StoreFull."""
        self._replies[key] = reply
        append_line(self._path, {"key": key, "worker": worker, "sample": sample, **asdict(reply)})


def _reply_of(line: Mapping[str, Any]) -> PaidReply:
    """Raises KeyError or TypeError for a line of another shape."""
    refusal = tuple(line["refusal"]) if line["refusal"] else None
    return PaidReply(line["body"], Usage(**line["usage"]), int(line["charged_nano"]), float(line["seconds"]), refusal)


def key_of(call: WorkerCall, sample: int) -> str:
    """What makes two calls the same: the worker and its settings, the body sent to it, the number of the sample."""
    config = call.worker.model_dump(mode="json", include=CONFIG)
    text = json.dumps([config, call.body, sample], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(slots=True)
class CallCounts:
    """Calls of one run. `saved_nano`: what the calls that were answered from the store had cost when they were made."""

    made: int = 0
    stored: int = 0
    saved_nano: int = 0
    by_worker: Counter[str] = field(default_factory=Counter)


class PaidCalls:
    """The calls of all episodes of a run. `send` makes one attempt; it raises FailedCall. `worst_nano`: what an attempt
    may cost."""

    def __init__(
        self,
        send: Send,
        worst_nano: Callable[[WorkerCall], int],
        store: StoredReplies,
        allowance: CallBudget,
        calls_max: int = CALLS_MAX,
    ) -> None:
        """`calls_max`: calls in flight."""
        self._send, self._worst_nano = send, worst_nano
        self._slots = asyncio.Semaphore(calls_max)
        self._store, self.allowance = store, allowance
        self._open: dict[str, asyncio.Task[PaidReply]] = {}
        self._failed: dict[str, UpstreamError] = {}
        self.counts = CallCounts()

    async def reply(self, call: WorkerCall, sample: int) -> PaidReply:
        """The stored reply, or that of a call made now; equal calls in flight are one. The call goes on where the
        caller is cancelled. Raises UpstreamError for a call that this worker cannot do, and CallsEnded."""
        key = key_of(call, sample)
        if reply := self._store.get(key):
            self.counts.stored += 1
            self.counts.saved_nano += reply.charged_nano
            return reply
        if key in self._failed:
            raise self._failed[key]
        if key not in self._open:
            self._open[key] = task = asyncio.create_task(self._bought(key, call, sample))
            task.add_done_callback(lambda task: self._close(key, task))
        return await asyncio.shield(self._open[key])

    def _close(self, key: str, task: asyncio.Task[PaidReply]) -> None:
        self._open.pop(key, None)
        if not task.cancelled():
            task.exception()  # its waiter may be gone; then nobody else looks

    async def drain(self) -> None:
        """Wait until the calls in flight have ended and are stored; no other call is made."""
        self.allowance.end(CallsEnded("the run has ended"))
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def _bought(self, key: str, call: WorkerCall, sample: int) -> PaidReply:
        worker, answered = call.worker.name, -1
        for wait_s in (*WAITS_S, None):
            try:
                reply = await self._attempt(call)
            except FailedCall as failed:
                error = failed.error
                answered = self.counts.by_worker[worker] if answered < 0 else answered
                answers_others = self.counts.by_worker[worker] > answered
                if isinstance(error, UpstreamRefused) or (wait_s is None and not answers_others):
                    raise self._lost(worker, error) from None  # a bad key, no money behind it, or nobody there
                if wait_s is None:
                    self._failed[key] = error
                    raise error from None
                await asyncio.sleep(wait_s)
            else:
                self.counts.by_worker[worker] += 1
                self._put(key, worker, sample, reply)
                return reply
        raise AssertionError("the last attempt returns or raises")

    def _put(self, key: str, worker: str, sample: int, reply: PaidReply) -> None:
        """Store a reply. No other call is made where it cannot be stored."""
        try:
            self._store.put(key, worker, sample, reply)
        except StoreFull as full:
            self.allowance.end(full)
            raise

    async def _attempt(self, call: WorkerCall) -> PaidReply:
        async with self._slots:
            return await self._held_attempt(call)

    async def _held_attempt(self, call: WorkerCall) -> PaidReply:
        most_nano = self._worst_nano(call)
        hold = await self.allowance.hold(most_nano)
        self.counts.made += 1
        cost = most_nano
        try:
            reply = await self._send(call)
            cost = reply.charged_nano
            return reply
        except FailedCall as failed:
            error = failed.error
            cost = most_nano if failed.charged_nano is None else failed.charged_nano
            if isinstance(error, UpstreamRefused) and error.upstream_status in REFUSED_STATUSES:
                return PaidReply({}, Usage(), cost, 0.0, (error.message, error.upstream_status, error.code))
            raise
        finally:
            await self.allowance.settle(hold, cost)

    def _lost(self, worker: str, error: UpstreamError) -> WorkerLost:
        lost = WorkerLost(f"worker {worker} does not answer: {error.message}")
        self.allowance.end(lost)
        return lost


class CachedWorkers:
    """`ports.Workers` of one episode over PaidCalls. `first_sample`: the number of the first of equal calls of the
    episode; each further step with an equal call is a further sample."""

    def __init__(self, calls: PaidCalls, first_sample: int = 0) -> None:
        self._calls, self._first = calls, first_sample
        self._samples: dict[str, dict[tuple[str, str], int]] = {}
        self.seconds: dict[tuple[str, str], float] = {}

    async def complete(self, call: WorkerCall) -> WorkerReply:
        """Return the whole reply. Raises UpstreamError and its children, and CallsEnded."""
        if call.worker.kind == "tool":
            return vote(call)
        step = (call.rollout_id, call.step_id)
        steps = self._samples.setdefault(key_of(call, 0), {})
        sample = self._first + steps.setdefault(step, len(steps))
        paid = await self._calls.reply(call, sample)
        if paid.refusal is not None:
            message, status, code = paid.refusal
            raise UpstreamRefused(message, upstream_status=status, code=code)
        self.seconds[step] = self.seconds.get(step, 0.0) + paid.seconds
        return WorkerReply(paid.body, paid.usage)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the same reply as chunks, then its usage."""
        reply = await self.complete(call)
        for choices in chunks_of(reply.body):
            yield {"choices": choices}
        yield {"choices": [], "usage": usage_body(reply.usage)}
