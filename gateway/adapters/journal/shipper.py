"""The shipper: from the journal to PostgreSQL, in order, in batches, at least once; inserts are idempotent.

While PostgreSQL is away it waits (exponential back-off with jitter and a cap) and loses nothing. A carrier reads,
parses and inserts, in a process or a thread of its own; marks, deletion and damage of the journal stay here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from gateway.adapters.journal.carriers import Carrier, Shipment
from gateway.adapters.journal.segments import Position
from gateway.adapters.journal.spool import LogWatch, Quiet, Spool
from gateway.errors import BatonError

log = logging.getLogger("gateway.shipper")
REASON_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class ShipperLimits:
    """`linger_s`: how long an event waits for others, because a transaction and a mark cost the same for one as for
    many. A caller that waits for the log to be shipped (`Spool.shipped`) cuts it short."""

    linger_s: float = 0.2
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0


class Shipper:
    """`start` runs it beside the gateway; `stop` closes the carrier."""

    def __init__(
        self,
        spool: Spool,
        carrier: Carrier,
        limits: ShipperLimits | None = None,
        watch: LogWatch | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.spool = spool
        self.limits, self.watch = limits or ShipperLimits(), watch or Quiet()
        self._carrier = carrier
        self._now_s = now_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.run(), name="shipper")

    async def stop(self) -> None:
        """Stop. The next start ships what is still in the journal."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._carrier.close()

    async def run(self) -> None:
        """Ship for ever, through any failure of PostgreSQL. After a success the next pause is short again."""
        pause = wait_exponential(multiplier=self.limits.backoff_first_s, max=self.limits.backoff_max_s)
        retries = AsyncRetrying(
            retry=retry_if_exception_type(Exception),  # boundary: shipping goes on after any error
            wait=lambda state: pause(state) * random.uniform(0.5, 1.0),  # noqa: S311 - jitter, no secret
            before_sleep=self._report,
        )
        await retries(self._carrier.open)
        while True:
            await retries(self._ship)

    async def _ship(self) -> None:
        await self.spool.wait_unshipped()
        await self.spool.wait_wanted(self.limits.linger_s)
        await self._catch_up(self.spool.durable)

    def _report(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        why = "" if error is None else reason(error)
        log.warning("the log cannot be shipped now, again in %.2f s: %s", state.upcoming_sleep, why)
        self.watch.retrying(why, state.upcoming_sleep)

    async def _catch_up(self, until: Position) -> None:
        """Ship everything that was written before `until`, batch by batch."""
        position = self.spool.acknowledged
        while position < until:
            report = await self._carrier.carry(position, until)
            self._count(report)
            if report.damaged:
                position = await self.spool.set_aside(report.position)
            elif report.position == position:
                return  # a record is only partly written: look again later, without spinning
            else:
                position = report.position
                await self.spool.acknowledge(position)

    def _count(self, report: Shipment) -> None:
        if not report.records:
            return
        delivery = report.delivery
        for kind, why in delivery.dead:
            log.error("a %s record cannot be stored and is in dead_letters: %s", kind or "nameless", why)
            self.watch.dead_letter(kind, why)
        self.watch.rollouts_stored(delivery.rollouts_us)
        self.watch.shipped(report.records, max(0.0, self._now_s() - delivery.newest_us / 1e6))


def reason(error: BaseException) -> str:
    """Describe an error in one line; the writer says which error of PostgreSQL it was."""
    text = error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0][:REASON_CHARS_MAX]
