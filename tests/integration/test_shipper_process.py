"""The shipper's process against a real PostgreSQL: what it is sent, what it reports, and what its death changes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.journal import segments
from gateway.adapters.journal.carriers import ProcessCarrier
from gateway.adapters.journal.process import NICENESS
from gateway.adapters.journal.segments import segment_path
from gateway.adapters.journal.shipper import Shipper
from gateway.adapters.journal.spool import Spool, SpoolLimits
from gateway.adapters.postgres.tables import dead_letters, ledger, rollouts, steps
from tests.integration.test_shipper import FAST, PATIENT, Watch, count, holds
from tests.postgres_server import PostgresServer
from tests.records import a_rollout, event, rollout_event
from tests.waiting import BOUND_S, until

SMALL = SpoolLimits(segment_bytes=4_096, shipped_timeout_s=60)


@dataclass(slots=True)
class Log:
    """A journal whose shipper is a process."""

    spool: Spool
    shipper: Shipper
    carrier: ProcessCarrier
    watch: Watch

    async def append(self, *events: Any) -> None:
        await asyncio.gather(*(self.spool.append(one) for one in events))

    async def pid(self) -> int:
        return int(await until(lambda: self.carrier.process.pid))

    async def close(self) -> None:
        await self.shipper.stop()
        await self.spool.close()


async def opened(
    place: Path, url: str, limits: SpoolLimits = PATIENT, records: int = 500, order_s: float = BOUND_S
) -> Log:
    watch = Watch()
    spool = await Spool.open(place / "spool", limits, watch)
    told = {"database_url": url, "connect_s": 2.0, "directory": str(spool.directory), "embedder": None}
    carrier = ProcessCarrier(place, told | {"records": records}, order_s)
    shipper = Shipper(spool, carrier, FAST, watch)
    shipper.start()
    return Log(spool, shipper, carrier, watch)


@pytest.fixture
async def log(tmp_path: Path, database_url: str) -> AsyncIterator[Log]:
    log = await opened(tmp_path, database_url)
    yield log
    await log.close()


async def test_events_reach_postgres_and_the_gateway_counts_them(log: Log, pg_engine: AsyncEngine) -> None:
    record = a_rollout()
    await log.append(rollout_event(record), *holds(20), event("hold", {}))
    await log.spool.shipped()
    sizes = [await count(pg_engine, table) for table in (rollouts, steps, ledger, dead_letters)]
    assert sizes == [1, 2, 20, 1]
    assert sum(log.watch.batches) == 22
    assert log.watch.dead == ["hold"]
    assert log.spool.acknowledged == log.spool.durable


async def test_requests_go_first_where_processors_are_short(log: Log) -> None:
    pid, own = await log.pid(), os.getpriority(os.PRIO_PROCESS, 0)
    await until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + NICENESS))


async def test_a_killed_process_loses_nothing_and_stores_nothing_twice(
    tmp_path: Path, database_url: str, pg_engine: AsyncEngine
) -> None:
    log = await opened(tmp_path, database_url, SMALL, records=20)
    try:
        for _ in range(3):
            shipped = len(log.watch.batches)
            await log.append(*holds(600))
            await log.watch.shipped_more(shipped)
            os.kill(await log.pid(), signal.SIGKILL)  # in the midst of its batches
        await log.spool.shipped()
        assert await count(pg_engine, ledger) == 1800
        assert log.carrier.process.restarts == 3
    finally:
        await log.close()


async def test_a_report_that_is_lost_is_no_loss(
    log: Log, pg_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is stored, and the process dies before its report is read."""
    carry, lost = log.carrier.carry, iter([True])

    async def carried(*order: Any) -> Any:
        report = await carry(*order)
        if report.records and next(lost, None):
            os.kill(await log.pid(), signal.SIGKILL)
            raise OSError("lost")
        return report

    monkeypatch.setattr(log.carrier, "carry", carried)
    await log.append(*holds(30))
    await log.spool.shipped()
    assert await count(pg_engine, ledger) == 30


async def test_a_process_that_hangs_is_replaced(tmp_path: Path, database_url: str, pg_engine: AsyncEngine) -> None:
    log = await opened(tmp_path, database_url, order_s=1.0)
    try:
        await log.append(*holds(1))
        await log.spool.shipped()
        hung = await log.pid()
        os.kill(hung, signal.SIGSTOP)
        await log.append(*holds(1))
        await log.spool.shipped()
        assert await log.pid() != hung
        assert await count(pg_engine, ledger) == 2
    finally:
        await log.close()


async def test_postgres_away_loses_nothing(
    log: Log, database_url: str, pg_server: PostgresServer, pg_engine: AsyncEngine
) -> None:
    await log.append(*holds(5))
    await log.spool.shipped()
    pg_server.shut(database_url)
    await log.append(*holds(7))
    await log.watch.tried(3)
    pg_server.reopen(database_url)
    await log.spool.shipped()
    assert await count(pg_engine, ledger) == 12
    assert log.carrier.process.restarts == 0


async def test_damage_costs_one_record_which_is_buried(
    tmp_path: Path, database_url: str, pg_engine: AsyncEngine
) -> None:
    spool = await Spool.open(tmp_path / "spool", SMALL)
    for one in holds(60):
        await spool.append(one)
    await spool.close()
    first = segment_path(spool.directory, segments.numbers(spool.directory)[0])
    damaged = bytearray(first.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    first.write_bytes(damaged)
    log = await opened(tmp_path, database_url, SMALL)
    try:
        await log.spool.shipped()
        assert log.watch.damage == ["corrupt"]
        assert first.with_suffix(".bad").exists()
        assert await count(pg_engine, ledger) == 59
        assert log.watch.dead == [None]
    finally:
        await log.close()


async def test_closing_ends_the_process(tmp_path: Path, database_url: str) -> None:
    log = await opened(tmp_path, database_url)
    await log.append(*holds(1))
    await log.spool.shipped()
    pid = await log.pid()
    await log.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
