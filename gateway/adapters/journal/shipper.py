"""The shipper: journal → PostgreSQL, in order, in batches, at least once; inserts are idempotent, so once in effect.

PostgreSQL away: it waits (exponential backoff with jitter and a cap) and loses nothing. A record that PostgreSQL will
never take goes to `dead_letters` alone, found by halving its batch; the rest of the batch is stored. Parsing and
inserting run in one thread of its own, so that a large batch does not hold up requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psycopg
from sqlalchemy import Engine, select
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.exc import DBAPIError, StatementError

from gateway.adapters.journal.segments import Position
from gateway.adapters.journal.spool import MIB, LogWatch, Quiet, Spool
from gateway.adapters.postgres import rows
from gateway.adapters.postgres.store import insert_rows
from gateway.adapters.postgres.tables import dead_letters, metadata
from gateway.core.log.events import parse
from gateway.errors import BatonError

log = logging.getLogger("gateway.shipper")
# What a payload of the wrong shape makes Python raise on its way to becoming rows.
MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, BatonError)
# SQLSTATE classes that blame the data: 22 data exception, 23 integrity, 54 program limit exceeded.
POISON_CLASSES = ("22", "23", "54")


@dataclass(frozen=True, slots=True)
class ShipperLimits:
    """`linger_s`: how long an event waits for company, as a transaction and a mark cost the same for one as for many.
    Who waits for the log to be shipped (`Spool.shipped`) cuts it short."""

    records: int = 500
    batch_bytes: int = 4 * MIB
    linger_s: float = 0.2
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Item:
    """One journal record on its way. `kind` is None where the bytes are no event."""

    payload: bytes
    kind: str | None
    ts_us: int
    new: rows.Rows = field(default_factory=rows.Rows)
    error: str | None = None

    @property
    def answers(self) -> bool:
        """Whether it is the rollout of a client's request, and not of a loop inside one."""
        return self.kind == "rollout" and all(row["parent_id"] is None for row in self.new.rollouts)


class Shipper:
    """`start` it beside the gateway; `stop` waits for the statement under way. `engine` is used by its thread only."""

    def __init__(
        self,
        spool: Spool,
        engine: Engine,
        limits: ShipperLimits | None = None,
        watch: LogWatch | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.spool, self.engine = spool, engine
        self.limits, self.watch = limits or ShipperLimits(), watch or Quiet()
        self._now_s = now_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shipper")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self.run(), name="shipper")

    async def stop(self) -> None:
        """End; what is not shipped yet stays in the journal for the next start."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self.engine.dispose)

    async def run(self) -> None:
        """Ship for ever, whatever happens to PostgreSQL meanwhile."""
        wait_s = self.limits.backoff_first_s
        while True:
            try:
                await self.spool.wait_unshipped()
                await self.spool.wait_wanted(self.limits.linger_s)
                await self._catch_up(self.spool.durable)
                wait_s = self.limits.backoff_first_s
            except Exception as error:  # boundary: the log outlives any surprise; it is reported and tried again
                reason = _reason(error)
                log.warning("the log cannot be shipped now, again in %.2f s: %s", wait_s, reason)
                self.watch.retrying(reason, wait_s)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret
                wait_s = min(2 * wait_s, self.limits.backoff_max_s)

    async def _catch_up(self, until: Position) -> None:
        """Ship all that was written before `until`, batch by batch."""
        limits, position = self.limits, self.spool.acknowledged
        while position < until:
            batch = await self.spool.read(position, records_max=limits.records, bytes_max=limits.batch_bytes)
            if batch.payloads:
                await self._deliver(batch.payloads)
            if batch.damaged:
                position = await self.spool.set_aside(batch.position)
            elif batch.position == position:
                return  # nothing to read although something was written: looked at again, not in circles
            else:
                position = batch.position
                await self.spool.acknowledge(position)

    async def _deliver(self, payloads: Sequence[bytes]) -> None:
        loop = asyncio.get_running_loop()
        dead, logged_us, newest_us = await loop.run_in_executor(self._thread, self._store, payloads)
        for item in dead:
            log.error("a %s record cannot be stored and is in dead_letters: %s", item.kind or "nameless", item.error)
            self.watch.dead_letter(item.kind, str(item.error))
        self.watch.rollouts_stored(logged_us)
        self.watch.shipped(len(payloads), max(0.0, self._now_s() - newest_us / 1e6))

    # ---------------------------------------------------------------- in the thread

    def _store(self, payloads: Sequence[bytes]) -> tuple[list[_Item], list[int], int]:
        """Insert all; returns what could not be, the times of requests' rollouts that were, and the time of the newest
        event. Raises when PostgreSQL is away."""
        items = [_item(payload) for payload in payloads]
        dead = [item for item in items if item.error is not None]
        dead += self._insert([item for item in items if item.error is None])
        if dead:
            self._bury(dead)
        lost = {id(item.payload) for item in dead}
        logged_us = [item.ts_us for item in items if item.answers and id(item.payload) not in lost]
        return dead, logged_us, max((item.ts_us for item in items), default=0)

    def _insert(self, items: Sequence[_Item]) -> list[_Item]:
        """One transaction for all; halved and tried again when the data is at fault. Returns the poisonous ones."""
        if not items:
            return []
        new = rows.Rows()
        for item in items:
            new.extend(item.new)
        try:
            with self.engine.begin() as connection:
                insert_rows(connection, new)
        except (StatementError, *MISSHAPEN) as error:
            if isinstance(error, StatementError) and not self._is_poison(error):
                raise
            if len(items) == 1:
                return [replace(items[0], error=_reason(error))]
            half = len(items) // 2
            return self._insert(items[:half]) + self._insert(items[half:])
        return []

    def _is_poison(self, error: StatementError) -> bool:
        """Whether the record is at fault, and not the server, the network or a missing migration."""
        if not isinstance(error, DBAPIError):
            return True  # a value that could not even be bound
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            return isinstance(error.orig, psycopg.DataError | psycopg.ProgrammingError)
        return state[:2] in POISON_CLASSES or (state[:2] == "42" and self._schema_fits())

    def _schema_fits(self) -> bool:
        try:
            with self.engine.connect() as connection:
                for table in metadata.sorted_tables:
                    connection.execute(select(table).limit(0))
        except StatementError:
            return False
        return True

    def _bury(self, dead: Sequence[_Item]) -> None:
        values = [
            {
                "digest": hashlib.sha256(item.payload).hexdigest(),
                "kind": item.kind,
                "record": item.payload,
                "error": item.error,
            }
            for item in sorted(dead, key=lambda item: item.payload)
        ]
        with self.engine.begin() as connection:
            connection.execute(pg.insert(dead_letters).on_conflict_do_nothing(), values)


def _item(payload: bytes) -> _Item:
    kind, ts_us = None, 0
    try:
        event = parse(payload)
        kind, ts_us = str(event.kind), int(event.ts_us)
        return _Item(payload, kind, ts_us, rows.event_rows(event, is_clean=not rows.needs_cleaning(payload)))
    except MISSHAPEN as error:
        return _Item(payload, kind, ts_us, error=_reason(error))


def _reason(error: BaseException) -> str:
    """One line about an error that quotes no client's text: PostgreSQL's DETAIL would."""
    cause = getattr(error, "orig", None) or error
    diagnosis = getattr(cause, "diag", None)
    text = (diagnosis.message_primary if diagnosis else None) or str(cause)
    return f"{type(cause).__name__}: {rows.clean(text)}".splitlines()[0][:300]
