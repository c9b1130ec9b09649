"""The shipper against a real PostgreSQL: idempotent, patient, never blocked by one record."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.journal import segments
from gateway.adapters.journal.carriers import Carrier, ThreadCarrier
from gateway.adapters.journal.segments import Position, segment_path
from gateway.adapters.journal.shipper import Shipper, ShipperLimits
from gateway.adapters.journal.spool import Quiet, Spool, SpoolLimits
from gateway.adapters.postgres.database import sync_engine
from gateway.adapters.postgres.migrate import upgrade
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.tables import dead_letters, ledger, rollouts, steps
from gateway.adapters.postgres.writer import LogWriter
from gateway.core.log.events import Event, canonical
from tests.postgres_server import PostgresServer
from tests.records import a_rollout, event, hold_event, new_id, rollout_event, settle_event
from tests.waiting import BOUND_S, until

FAST = ShipperLimits(backoff_first_s=0.02, backoff_max_s=0.1)
PATIENT = SpoolLimits(shipped_timeout_s=60)


class Watch(Quiet):
    def __init__(self) -> None:
        self.retries: list[str] = []
        self.dead: list[str | None] = []
        self.damage: list[str] = []
        self.batches: list[int] = []
        self.lags: list[float] = []
        self._retried = asyncio.Condition()

    def retrying(self, error: str, wait_s: float) -> None:
        self.retries.append(error)
        self._tell = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._retried:
            self._retried.notify_all()

    async def tried(self, times: int) -> None:
        """Wait until shipping was put off that often."""
        async with asyncio.timeout(BOUND_S), self._retried:
            await self._retried.wait_for(lambda: len(self.retries) >= times)

    async def shipped_more(self, batches: int) -> None:
        """Wait until more than that many batches are shipped."""
        await until(lambda: len(self.batches) > batches)

    def dead_letter(self, kind: str | None, error: str) -> None:
        self.dead.append(kind)

    def damaged(self, what: str, path: str, bytes_: int) -> None:
        self.damage.append(what)

    def shipped(self, records: int, lag_s: float) -> None:
        self.batches.append(records)
        self.lags.append(lag_s)


@dataclass(slots=True)
class Log:
    """A journal and what starts its shipper."""

    directory: Path
    url: str
    spool: Spool
    watch: Watch
    limits: ShipperLimits = FAST
    running: list[Shipper] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)

    def start(self, limits: ShipperLimits | None = None, writer: LogWriter | None = None, **more: Any) -> Shipper:
        shipper = Shipper(self.spool, self.carrier(writer), limits or self.limits, self.watch, **more)
        shipper.start()
        self.running.append(shipper)
        return shipper

    def carrier(self, writer: LogWriter | None = None) -> Carrier:
        return ThreadCarrier(self.spool, writer or self.writer())

    def writer(self) -> LogWriter:
        self.engines.append(sync_engine(self.url))
        return LogWriter(self.engines[-1])

    async def append(self, *events: Event) -> None:
        await asyncio.gather(*(self.spool.append(one) for one in events))

    async def close(self) -> None:
        for shipper in self.running:
            await shipper.stop()
        await self.spool.close()
        for engine in self.engines:
            engine.dispose()


@pytest.fixture
async def log(tmp_path: Path, database_url: str) -> AsyncIterator[Log]:
    watch = Watch()
    log = Log(tmp_path, database_url, await Spool.open(tmp_path, PATIENT, watch), watch)
    yield log
    await log.close()


async def count(engine: AsyncEngine, table: Any) -> int:
    async with engine.connect() as connection:
        return int(await connection.scalar(select(func.count()).select_from(table)) or 0)


def holds(n: int) -> list[Event]:
    return [hold_event(f"h{i}", new_id(), i, ("org:a", None)) for i in range(n)]


async def test_appended_events_reach_postgres(log: Log, pg_engine: AsyncEngine) -> None:
    log.start()
    record = a_rollout()
    await log.append(hold_event("h", record.id, 9_000, ("org:acme", None)))
    await log.append(rollout_event(record), settle_event("h", record.id, "posted", 805, "org:acme"))
    await log.spool.shipped()
    store = PostgresStore(pg_engine)
    tree = await store.rollout_get(record.id, "key1")
    assert tree is not None
    assert [row["kind"] for row in tree["ledger"]] == ["hold", "posted"]
    assert len(tree["steps"]) == 2
    assert (await store.books(0)).posted == {"org:acme": 805}


async def test_an_idle_shipper_wakes_at_once(log: Log) -> None:
    log.start(ShipperLimits(linger_s=10 * BOUND_S))
    for one in holds(20):
        await log.append(one)
        await asyncio.wait_for(log.spool.shipped(), BOUND_S)  # a caller that waits cuts the linger short


async def test_batches_are_bounded(log: Log, pg_engine: AsyncEngine) -> None:
    await log.append(*holds(1_050))
    log.start()
    await log.spool.shipped()
    assert await count(pg_engine, ledger) == 1_050
    assert sum(log.watch.batches) == 1_050
    assert max(log.watch.batches) == 500


async def test_a_crash_between_insert_and_mark_repeats_nothing(
    log: Log, pg_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = a_rollout()
    await log.append(rollout_event(record), *holds(20))

    inserted = asyncio.Event()

    async def die(_: Position) -> None:
        inserted.set()
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(log.spool, "acknowledge", die)
        shipper = log.start()
        await asyncio.wait_for(inserted.wait(), BOUND_S)
        await shipper.stop()
    assert await count(pg_engine, ledger) == 20
    assert log.spool.acknowledged == Position(0, 0)
    log.start()
    await log.spool.shipped()
    sizes = [await count(pg_engine, table) for table in (rollouts, steps, ledger)]
    assert sizes == [1, 2, 20]


async def test_shipping_goes_on_after_a_restart(log: Log, pg_engine: AsyncEngine) -> None:
    await log.append(*holds(3))
    log.start()
    await log.spool.shipped()
    await log.append(*holds(2))
    await log.close()
    log.running.clear()
    log.spool = await Spool.open(log.directory, PATIENT, log.watch)
    assert log.spool.acknowledged > Position(0, 0)
    await log.append(*holds(4))
    log.start()
    await log.spool.shipped()
    assert await count(pg_engine, ledger) == 9
    assert segments.numbers(log.directory) == [2]  # the first is shipped and deleted


async def test_postgres_away_loses_nothing(log: Log, pg_server: PostgresServer, pg_engine: AsyncEngine) -> None:
    log.start()
    await log.append(*holds(5))
    await log.spool.shipped()
    pg_server.shut(log.url)
    await log.append(*holds(7))
    await log.watch.tried(3)
    pg_server.reopen(log.url)
    await log.spool.shipped()
    assert await count(pg_engine, ledger) == 12
    assert log.watch.dead == []


async def test_a_surprise_is_reported_and_tried_again(
    log: Log, pg_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await log.append(*holds(2))
    writer = log.writer()
    store, failures = writer.store, iter([OSError("disk"), RuntimeError("a bug")])

    def fail_twice(payloads: Any) -> Any:
        if (failure := next(failures, None)) is not None:
            raise failure
        return store(payloads)

    monkeypatch.setattr(writer, "store", fail_twice)
    log.start(writer=writer)
    await log.spool.shipped()
    assert log.watch.retries == ["OSError: disk", "RuntimeError: a bug"]
    assert await count(pg_engine, ledger) == 2


async def test_a_database_without_tables_is_waited_for(log: Log, pg_server: PostgresServer) -> None:
    log.url = pg_server.create()
    log.start()
    await log.append(*holds(3))
    await log.watch.tried(2)
    await asyncio.to_thread(upgrade, log.url)
    await log.spool.shipped()
    assert log.watch.dead == []


POISON: list[tuple[str, dict[str, Any]]] = [
    ("settle", {"hold_id": "h", "rollout_id": None, "state": "lost", "charged_nano": 5}),
    ("settle", {"hold_id": "h", "rollout_id": "nonsense", "state": "posted", "charged_nano": 5}),
    ("hold", {"hold_id": "h", "amount_nano": -1, "scopes": []}),
    ("hold", {"hold_id": "h", "amount_nano": 2**70, "scopes": []}),
    ("hold", {"hold_id": "h", "amount_nano": "a lot", "scopes": []}),
    ("hold", {"hold_id": {"a": 1}, "amount_nano": 1, "scopes": []}),
    ("hold", {"hold_id": "h", "amount_nano": 1, "scopes": [7]}),
    ("hold", {}),
    ("hold", []),  # type: ignore[list-item]
    ("party", {"hold_id": "h"}),
    ("rollout", {"id": "not a uuid", "rounds": [], "steps": []}),
    ("rollout", {"id": "00000000-0000-7000-8000-000000000000", "rounds": 4, "steps": []}),
]


@pytest.mark.parametrize("number", range(len(POISON)))
async def test_a_poisonous_record_is_put_away_alone(log: Log, pg_engine: AsyncEngine, number: int) -> None:
    kind, payload = POISON[number]
    bad = event(kind, payload)  # type: ignore[arg-type]
    good = holds(9)
    log.start(ShipperLimits(linger_s=0.05))
    await log.append(*good[:5], bad, *good[5:])
    await log.spool.shipped()
    assert await count(pg_engine, ledger) == 9
    async with pg_engine.connect() as connection:
        (letter,) = (await connection.execute(select(dead_letters))).mappings()
    assert bytes(letter["record"]) == canonical(bad)
    assert letter["digest"] == hashlib.sha256(canonical(bad)).hexdigest()
    assert (letter["kind"], log.watch.dead) == (kind, [kind])
    assert letter["error"]


@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"not": "text"}},
        {"see": ["x"]},
        {"see": "all"},
        {"cost_nano": 1.5e30},
        {"finished_us": 10**30},
        {"round": None},
        {"step": "one"},
        {"step": 10**6},
    ],
)
async def test_a_rollout_with_a_bad_step_is_put_away_whole(
    log: Log, pg_engine: AsyncEngine, changes: dict[str, Any]
) -> None:
    bad = rollout_event(a_rollout())
    payload: dict[str, Any] = dict(bad.payload)
    payload["steps"] = [payload["steps"][0] | changes, payload["steps"][1]]
    good = a_rollout()
    await log.append(Event(bad.id, "rollout", bad.ts_us, payload), rollout_event(good))
    log.start()
    await log.spool.shipped()
    assert [await count(pg_engine, table) for table in (rollouts, steps, dead_letters)] == [1, 2, 1]
    assert await PostgresStore(pg_engine).rollout_get(good.id, "key1") is not None


async def test_bytes_that_are_no_event_are_put_away(log: Log, pg_engine: AsyncEngine) -> None:
    await log.append(*holds(1))
    deep = b"[" * 100_000
    with segment_path(log.directory, 1).open("ab") as file:
        file.write(segments.encode(b"hello") + segments.encode(deep) + segments.encode(canonical(holds(1)[0])))
    await log.spool.close()
    log.spool = await Spool.open(log.directory, PATIENT)
    log.start()
    await log.spool.shipped()
    assert await count(pg_engine, ledger) == 2
    assert log.watch.dead == [None, None]


async def test_damage_costs_one_record_which_is_a_dead_letter(log: Log, pg_engine: AsyncEngine) -> None:
    await log.append(*holds(5))
    path = segment_path(log.directory, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    log.start()
    await log.spool.shipped()
    await log.append(*holds(3))
    await log.spool.shipped()
    assert log.watch.damage == ["corrupt"]
    assert await count(pg_engine, ledger) == 4 + 3
    assert log.watch.dead == [None]
    assert segments.numbers(log.directory, "bad") == [1]


async def test_two_shippers_of_the_same_events_do_not_deadlock(
    log: Log, pg_engine: AsyncEngine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    events = [rollout_event(a_rollout()) for _ in range(300)]
    directory = tmp_path_factory.mktemp("other")
    other = Log(directory, log.url, await Spool.open(directory, PATIENT), Watch())
    await log.append(*events)
    await other.append(*reversed(events))
    log.start()
    other.start()
    await asyncio.gather(log.spool.shipped(), other.spool.shipped())
    await other.close()
    assert await count(pg_engine, rollouts) == 300
    assert log.watch.retries == other.watch.retries == []


async def test_the_lag_is_the_age_of_what_was_shipped(log: Log) -> None:
    log.start(now_s=lambda: 2_000_000_000.0)
    await log.append(event("hold", {"hold_id": "h", "amount_nano": 1}, 1_999_999_990_000_000))
    await log.spool.shipped()
    assert log.watch.lags == [10.0]


async def test_segments_go_once_they_are_shipped(log: Log, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("small")
    small = Log(
        directory, log.url, await Spool.open(directory, SpoolLimits(segment_bytes=2_000, shipped_timeout_s=60)), Watch()
    )
    small.start()
    for one in holds(60):
        await small.append(one)
    await small.spool.shipped()
    assert len(segments.numbers(directory)) == 1
    assert small.spool.bytes_on_disk < 4_000
    await small.close()
