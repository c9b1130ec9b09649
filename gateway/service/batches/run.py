"""The runner of batches: one in each gateway process. Any gateway continues any batch.

Lines yield to live requests. One gateway serves at most `lines_max` lines at the same time, and one less for each live
request; at least one, as long as live requests fill less than half of the gateway's places. A worker's or a gateway's
"too many requests" puts a line off, and never fails it before its batch's time is over. Nor does a conversation that
another turn has, which may be a line of the same batch: such lines are served one after another.

After a kill, the claims of the dead process run out with their lease, and this runner or another takes the lines. A
line whose result is stored is never served again. A line that was being served is: its first attempt stays in the
ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from uuid import uuid4

from gateway.core.access.keys import Principal
from gateway.core.log.events import random_hex
from gateway.core.money.ledger import Scope
from gateway.core.openai.batches.lines import BROKEN, CANCELLED, EXPIRED, InputReader, body_of, not_served, replied
from gateway.core.openai.batches.objects import BatchLine, LineResult, OpenBatch, Status
from gateway.errors import BatonError, ConversationLocked, NotFound
from gateway.service.batches.rests import Rests
from gateway.service.ports.batches import BatchStore, FileStore, LineReply, LineServer, LiveRequests
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.batches")
ATTEMPTS_MAX = 4  # of a line that a worker fails; one that could not be begun does not count
DELAY_S, DELAY_S_MAX = 2.0, 60.0
RENEWALS = 3  # in the time of one lease
STORE_PAUSE_S = 1.0
BATCHES_KNOWN_MAX = 256
KeyOf = Callable[[str], Awaitable[Principal]]  # by id; raises Unauthorized for a key that may no longer be used


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """`lines_max`: lines served at the same time; `places`: live requests that the gateway serves at the same time;
    `lease_s`: how long a line of a dead gateway waits; `poll_s`: how long a runner rests after work, and the shortest
    rest of an idle one; `line_bytes_max`: of one line."""

    lines_max: int
    places: int
    lease_s: float
    poll_s: float
    line_bytes_max: int


class BatchRunner:
    """Carries out batches until it is stopped."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        server: LineServer,
        key_of: KeyOf,
        live: LiveRequests,
        clock: Clock,
        limits: RunnerLimits,
    ) -> None:
        self._store = store
        self._files = files
        self._server = server
        self._key_of = key_of
        self._live = live
        self._clock = clock
        self._limits = limits
        self._id = str(uuid4())
        self._lines: dict[asyncio.Task[None], BatchLine] = {}
        self._held: str | None = None  # the batch that is being validated or ended
        self._batches: dict[str, OpenBatch] = {}
        self._rests = Rests(limits.poll_s)
        self._stopping = False

    @property
    def serving(self) -> int:
        """The number of lines that are being served."""
        return len(self._lines)

    def wake(self) -> None:
        """Look for work at once: a batch was made here."""
        self._rests.wake()

    async def run(self) -> None:
        """Work for ever. While the store is away, lines that are being served go on, and the rest waits."""
        renewing = asyncio.create_task(self._renew())
        try:
            while not self._stopping:
                self._rests.begin()
                has_more = worked = False
                try:
                    has_more, worked = await self._step()
                except BatonError as error:
                    log.warning("batches wait: %s", error.message)
                except Exception:  # boundary: one broken batch must not stop the others
                    log.exception("a batch could not be carried on")
                if not has_more:
                    await self._rests.rest(worked=worked or bool(self._lines))
        finally:
            renewing.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Begin no further line, wait for those under way, and give up the claims."""
        self._stopping = True
        self.wake()
        if self._lines:
            await asyncio.wait(set(self._lines), timeout=timeout_s)
        try:
            await self._store.release(self._id)
        except BatonError as error:
            log.warning("the claims of batches are given up once their lease is over: %s", error.message)

    def room(self) -> int:
        """The number of lines that may begin now."""
        limits = self._limits
        if not limits.lines_max:
            return 0
        live = max(0, self._live() - self.serving)
        least = int(2 * live < limits.places)
        return max(least, limits.lines_max - live) - self.serving

    # ------------------------------------------------------------ the loop

    async def _step(self) -> tuple[bool, bool]:
        """Do what is to be done now; return whether there may be more at once, and whether there was anything."""
        batch = await self._store.claim(self._id, self._limits.lease_s)
        if batch is not None:
            self._held = batch.id
            try:
                await (self._validate(batch) if batch.status == "validating" else self._end(batch))
            finally:
                self._held = None
        room = self.room()
        lines = await self._store.take(self._id, room, self._limits.lease_s) if room > 0 else ()
        for line in lines:
            task = asyncio.create_task(self._serve(line))
            self._lines[task] = line
            task.add_done_callback(self._done)
        return batch is not None, bool(batch or lines)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._lines[task]
        self.wake()  # for the next line, or the end of the batch

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._limits.lease_s / RENEWALS)
            try:
                await self._store.renew(self._id, tuple(self._lines.values()), self._held, self._limits.lease_s)
            except BatonError as error:
                log.warning("leases of batches are not renewed: %s", error.message)

    # ------------------------------------------------------------ a batch

    async def _validate(self, batch: OpenBatch) -> None:
        """Read the input file, and store its requests as lines or end the batch as `failed`."""
        reader = InputReader(batch.id, batch.order.endpoint, self._limits.line_bytes_max)
        total = 0
        if await self._files.get(batch.key_id, batch.order.input_file_id) is None:
            reader.note("file_not_found", "The input file was deleted or has expired.", line=None)
        else:
            async for piece in self._files.content(batch.order.input_file_id):
                lines = await asyncio.to_thread(reader.feed, piece)
                total += len(lines)
                await self._store.add_lines(lines)
            lines = reader.end()
            total += len(lines)
            await self._store.add_lines(lines)
        if reader.errors:
            await self._store.refuse(batch.id, self._id, reader.errors, self._now_s())
        else:
            await self._store.begin(batch.id, self._id, total, self._now_s())

    async def _end(self, batch: OpenBatch) -> None:
        """Write the files of a batch whose lines are done or will not be served."""
        done = batch.counts[1] + batch.counts[2] == batch.counts[0]
        if batch.status == "in_progress" and done:
            await self._store.note_finalizing(batch.id, self._id, self._now_s())
        status, reason = _ending(batch, done=done)
        file_ids = f"file-{random_hex()}", f"file-{random_hex()}"
        await self._store.end(replace(batch, status=status), self._id, file_ids, reason, self._now_s())
        self._batches.pop(batch.id, None)

    # ------------------------------------------------------------ a line

    async def _serve(self, line: BatchLine) -> None:
        """Serve a line and store its result, or put it off. An attempt whose result cannot be stored ends with the
        lease."""
        try:
            reply = await self._reply(line)
            if (delay_s := self._delay_s(line, reply)) is not None:
                counts = not _is_turned_away(reply)
                await self._insist(lambda: self._store.postpone(line, self._id, delay_s, counts=counts))
                return
            result = replied(line, reply.status, reply.request_id, reply.body)
            await self._insist(lambda: self._keep(line, result))
        except Exception:  # boundary: a line is tried again, a finite number of times
            log.exception("line %d of %s was not served", line.n, line.batch_id)
            await self._put_off(line)

    async def _put_off(self, line: BatchLine) -> None:
        """Let a line that met a bug come again, or end it with an error. Where that cannot be stored, it comes once
        its lease is over."""
        try:
            if line.attempts + 1 < ATTEMPTS_MAX:
                delay_s = min(DELAY_S_MAX, DELAY_S * float(2**line.attempts))
                await self._store.postpone(line, self._id, delay_s, counts=True)
            else:
                await self._keep(line, not_served(line, BROKEN))
        except Exception:  # boundary: the line comes again once its lease is over
            log.exception("line %d of %s cannot be put off", line.n, line.batch_id)

    async def _reply(self, line: BatchLine) -> LineReply:
        try:
            batch = await self._batch(line.batch_id)
            who = unlimited(await self._key_of(batch.key_id))
        except BatonError as error:
            again_s = DELAY_S if error.status == 503 else None
            return LineReply(error.status, f"req_{random_hex()}", error.body(), again_s)
        budget = Scope(f"batch:{batch.id}", batch.order.budget_nano)
        body = await asyncio.to_thread(body_of, line)
        return await self._server.serve(who, batch.order.endpoint, body, batch.order.options, (budget,))

    def _delay_s(self, line: BatchLine, reply: LineReply) -> float | None:
        """Seconds until the line is served again; None: this reply is its result."""
        if reply.retry_after_s is None or (not _is_turned_away(reply) and line.attempts + 1 >= ATTEMPTS_MAX):
            return None
        return min(DELAY_S_MAX, max(reply.retry_after_s, DELAY_S * float(2**line.attempts)))

    async def _keep(self, line: BatchLine, result: LineResult) -> None:
        if not await self._store.keep(line, self._id, result):
            log.warning("line %d of %s was served twice: its lease was over", line.n, line.batch_id)

    async def _insist(self, write: Callable[[], Awaitable[None]]) -> None:
        """Write, and again while the store is away, as long as another runner does not take the line over."""
        tries = max(1, int(self._limits.lease_s / STORE_PAUSE_S))
        for left in reversed(range(tries)):
            try:
                return await write()
            except BatonError:
                if not left:
                    raise
                await asyncio.sleep(STORE_PAUSE_S)

    async def _batch(self, batch_id: str) -> OpenBatch:
        """The order of a batch, which never changes."""
        if (batch := self._batches.get(batch_id)) is None:
            batch = await self._store.owner(batch_id)
            if batch is None:
                raise NotFound(f"No batch found with id '{batch_id}'.")
            if len(self._batches) >= BATCHES_KNOWN_MAX:
                self._batches.clear()
            self._batches[batch_id] = batch
        return batch

    def _now_s(self) -> int:
        return int(self._clock.now().timestamp())


def _is_turned_away(reply: LineReply) -> bool:
    """Whether the line was not begun: there was no place for it, or another turn has its conversation."""
    if reply.status != ConversationLocked.status:
        return reply.status in (429, 503)
    error = reply.body.get("error") if isinstance(reply.body, dict) else None
    return isinstance(error, dict) and error.get("code") == ConversationLocked.code


def _ending(batch: OpenBatch, *, done: bool) -> tuple[Status, tuple[str, str] | None]:
    """The last status of a batch, and the reason of its lines that were not served."""
    if batch.status == "cancelling":
        return "cancelled", CANCELLED
    return ("completed", None) if done or batch.status == "finalizing" else ("expired", EXPIRED)


def unlimited(who: Principal) -> Principal:
    """The key without its rates: those are for live requests, and lines have a pace of their own. Its budgets hold."""
    org = replace(who.organisation, rpm=None, tpm=None, concurrency=None)
    return replace(who, rpm=None, tpm=None, concurrency=None, organisation=org)
