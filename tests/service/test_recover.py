"""Recovery: balances come back from the ledger, and every abandoned hold is decided once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.core.log.events import Event, uuid7
from gateway.core.money.ledger import Balance, Hold, Scope
from gateway.errors import MoneyUnavailable
from gateway.service.money.recover import Recovery
from gateway.service.ports.request import Clock
from tests.fakes.budgets import FakeBudgets, FakeBudgetStore
from tests.fakes.journal import FakeJournal
from tests.fakes.store import FakeStore
from tests.waiting import BOUND_S, until

KEY = Scope("key:k", 1_000)
LEASE_S = 60.0


class FixedClock(Clock):
    """Stands still until told: `time` is the host's clock, which may be set, `steady_s` the one that may not."""

    def __init__(self) -> None:
        self.time = datetime.now(UTC)
        self.steady_s = 0.0

    def now(self) -> datetime:
        return self.time

    def monotonic_s(self) -> float:
        return self.steady_s


class World:
    """A budget store that can be emptied, and the ledger it is rebuilt from."""

    def __init__(self) -> None:
        self.redis_ms = 0
        self.redis = FakeBudgetStore(lambda: self.redis_ms)
        self.budgets = FakeBudgets(self.redis)
        self.store = FakeStore()
        self.journal = FakeJournal(self.store.ingest)
        self.clock = FixedClock()
        self.recovery = Recovery(self.budgets, self.store, self.journal, self.clock, lease_s=LEASE_S, sweep_s=0.01)

    async def event(self, kind: Any, hold_id: str, **payload: Any) -> None:
        ms = int(self.clock.time.timestamp() * 1000)
        body = {"hold_id": hold_id, "rollout_id": hold_id, "scopes": [["key:k", 1_000]], **payload}
        await self.journal.append(Event(uuid7(ms), kind, ms * 1000, body))

    async def hold(self, amount_nano: int, *, lease_s: float = LEASE_S) -> str:
        hold_id = uuid7(int(self.clock.time.timestamp() * 1000))
        await self.budgets.hold(hold_id, amount_nano, amount_nano, [KEY], lease_s)
        await self.event("hold", hold_id, amount_nano=amount_nano)
        return hold_id

    async def balance(self) -> tuple[int, int]:
        found = await self.budgets.balance("key:k")
        return found.posted_nano, found.held_nano

    def pass_s(self, seconds: float) -> None:
        """Time passes, on every clock alike."""
        self.clock.time += timedelta(seconds=seconds)
        self.clock.steady_s += seconds
        self.redis_ms += round(seconds * 1000)

    async def sweep_twice(self) -> int:
        """The doubt, and half a lease later the decision."""
        assert await self.recovery.sweep() == 0
        self.pass_s(LEASE_S / 2)
        return await self.recovery.sweep()


@pytest.fixture
async def world() -> World:
    world = World()
    await world.recovery.rebuild()
    return world


async def test_a_store_that_came_back_empty_is_rebuilt_with_what_is_open(world: World) -> None:
    spent = await world.hold(300)
    await world.event("settle", spent, state="posted", charged_nano=250)
    await world.budgets.post(spent, 250)
    await world.hold(400)
    world.redis.flush()
    with pytest.raises(MoneyUnavailable):
        await world.balance()
    await world.recovery.rebuild()
    assert await world.balance() == (250, 400)


async def test_holds_without_a_dispatch_are_voided_and_others_charged_for_what_was_dispatched(world: World) -> None:
    await world.hold(300)
    sent = await world.hold(400)
    for attempt, bound_nano in ((1, 100), (2, 20)):
        await world.event("dispatch", sent, step_id="1.0", attempt=attempt, worker="w", bound_nano=bound_nano)
    assert await world.sweep_twice() == 0  # their leases run
    world.pass_s(LEASE_S)
    assert await world.sweep_twice() == 2
    assert await world.balance() == (120, 0)
    assert {(e.payload["state"], e.payload["charged_nano"]) for e in world.journal.of_kind("settle")} == {
        ("voided", 0),
        ("uncertain", 120),
    }
    assert await world.sweep_twice() == 0  # once


@pytest.mark.parametrize("hours", [1, -1])
@pytest.mark.parametrize("whose", ["the host's", "the budget store's", "both"])
async def test_a_clock_that_is_set_frees_no_lease_early_and_keeps_none_long(
    world: World, hours: int, whose: str
) -> None:
    """A living gateway beside one that is dead; then somebody sets a clock by an hour."""
    dead, store = FakeBudgets(world.redis), world.store
    await dead.load({})
    abandoned = uuid7(1)
    await dead.hold(abandoned, 100, 100, [KEY], 3600)
    await world.event("hold", abandoned, amount_nano=100)
    await world.hold(300, lease_s=3600)
    if whose != "the budget store's":
        world.clock.time += timedelta(hours=hours)
    if whose != "the host's":
        world.redis_ms += hours * 3_600_000
    waited_s = 0.0
    while len(await store.open_holds()) == 2:
        world.pass_s(LEASE_S / 10)
        waited_s += LEASE_S / 10
        await world.recovery.watch()  # its heartbeat
        await world.recovery.sweep()
        assert waited_s <= 2 * LEASE_S
    assert waited_s > LEASE_S / 2
    for _ in range(30):
        world.pass_s(LEASE_S / 10)
        await world.recovery.watch()
        await world.recovery.sweep()
    assert await world.balance() == (0, 300)


async def test_a_hold_whose_gateway_beats_is_never_swept_however_long_it_runs(world: World) -> None:
    await world.hold(300, lease_s=3600)
    for _ in range(100):
        world.pass_s(LEASE_S / 10)
        await world.recovery.watch()
        assert await world.recovery.sweep() == 0
    assert await world.balance() == (0, 300)


async def test_a_settlement_that_redis_missed_is_posted_as_the_ledger_has_it(world: World) -> None:
    hold_id = await world.hold(500)
    await world.event("settle", hold_id, state="posted", charged_nano=120)
    unwritten = uuid7(1)
    await world.budgets.hold(unwritten, 70, 70, [KEY], LEASE_S)  # its event never reached the journal
    world.pass_s(LEASE_S)
    assert await world.sweep_twice() == 2
    assert await world.balance() == (120, 0)


async def test_a_settlement_the_ledger_missed_is_written_down_as_redis_has_it(world: World) -> None:
    """The journal's disk was full when the request ended, so only Redis heard of it."""
    for charged in (120, 0):
        hold_id = await world.hold(500)
        await world.event("dispatch", hold_id, step_id="1.0", attempt=1, worker="w", bound_nano=100)
        await (world.budgets.post(hold_id, charged) if charged else world.budgets.void(hold_id))
    assert await world.sweep_twice() == 2
    assert sorted(e.payload["charged_nano"] for e in world.journal.of_kind("settle")) == [0, 120]
    assert await world.balance() == (120, 0)


async def test_a_hold_that_only_the_ledger_knows_is_decided_too(world: World) -> None:
    """Its gateway died with its disk; the disk came back after the balances had been rebuilt."""
    hold_id = uuid7(1)
    await world.event("hold", hold_id, amount_nano=90)
    await world.event("dispatch", hold_id, step_id="1.0", attempt=1, worker="w", bound_nano=90)
    assert await world.sweep_twice() == 1
    assert await world.balance() == (90, 0)


async def test_the_journal_of_a_dead_gateway_counts_when_it_is_back(world: World) -> None:
    hold_id = uuid7(1)
    await world.event("hold", hold_id, amount_nano=90)
    await world.event("settle", hold_id, state="posted", charged_nano=80)
    known = await world.hold(50)
    await world.event("settle", known, state="posted", charged_nano=40)
    await world.budgets.post(known, 40)
    for _ in range(2):
        await world.recovery.count_left()
    assert await world.balance() == (120, 0)


async def test_a_settlement_is_forgotten_once_the_ledger_has_it_and_the_balances_are_younger(world: World) -> None:
    spent = await world.hold(300)
    await world.budgets.post(spent, 250)
    world.redis.away = True
    await world.recovery.confirm()
    assert list(world.budgets.unconfirmed()) == [spent]
    world.redis.away = False
    await world.recovery.confirm()
    assert list(world.budgets.unconfirmed()) == []


async def test_a_late_settlement_that_reached_the_ledger_first_is_what_counts_in_the_end(
    world: World,
) -> None:
    """A gateway was held up for longer than a lease; another one charged its hold in full meanwhile."""
    hold_id = await world.hold(500)
    other = FakeBudgets(world.redis)
    await other.join()
    await other.uncertain(hold_id)
    await world.event("settle", hold_id, state="posted", charged_nano=120)
    assert await world.budgets.post(hold_id, 120) == 500
    assert await world.balance() == (500, 0)
    await world.recovery.confirm()
    assert await world.balance() == (120, 0)


async def test_a_decision_that_reached_the_ledger_first_is_what_counts_in_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway that was held up is back while another one writes its decision down."""
    hold_id = await world.hold(500)
    await world.event("dispatch", hold_id, step_id="1.0", attempt=1, worker="w", bound_nano=500)
    world.pass_s(LEASE_S)
    late, write = FakeBudgets(world.redis), world.journal.append
    await late.join()

    async def meanwhile(*events: Event) -> None:
        await late.post(hold_id, 120)
        await write(*events)

    monkeypatch.setattr(world.journal, "append", meanwhile)
    assert await world.sweep_twice() == 1
    assert await world.balance() == (120, 0)
    await world.recovery.confirm()
    assert await world.balance() == (500, 0)


async def test_a_gateway_that_starts_sees_to_it_that_the_balances_have_what_the_ledger_has(world: World) -> None:
    hold_id = await world.hold(500)
    await world.event("settle", hold_id, state="posted", charged_nano=120)
    other = FakeBudgets(world.redis)
    await other.join()
    await other.uncertain(hold_id)
    await world.recovery.count_left()
    assert await world.balance() == (120, 0)


async def test_balances_another_gateway_made_are_joined_without_the_ledger(world: World) -> None:
    other = FakeBudgets(world.redis)
    world.redis.flush()
    await other.load({"key:k": 5})
    world.store.away = True
    await world.recovery.watch()
    assert await world.balance() == (5, 0)


async def test_a_surprise_ends_no_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = asyncio.Event()

    async def explode() -> None:
        if len(surprises) > 2:
            seen.set()
        surprises.append(1)
        raise RuntimeError("a bug")

    surprises: list[int] = []
    monkeypatch.setattr(world.recovery, "confirm", explode)
    running = asyncio.create_task(world.recovery.run(lambda _: asyncio.sleep(0)))
    await asyncio.wait_for(seen.wait(), BOUND_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_it_runs_for_ever_and_says_when_balances_are_there_first() -> None:
    world = World()
    running = asyncio.create_task(world.recovery.run())
    await asyncio.wait_for(world.recovery.first.wait(), BOUND_S)
    world.redis.flush()
    await until(world.budgets.ready)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await world.balance() == (0, 0)


async def test_a_journal_behind_the_database_keeps_money_closed() -> None:
    world = World()

    async def late() -> None:
        raise TimeoutError

    world.journal.shipped = late  # type: ignore[method-assign]
    with pytest.raises(MoneyUnavailable, match="has not reached the database yet"):
        await world.recovery.rebuild()
    assert not world.recovery.first.is_set()


async def test_a_grown_hold_is_charged_for_what_left_under_it_and_comes_back_whole(world: World) -> None:
    hold_id = await world.hold(100)
    await world.event("dispatch", hold_id, step_id="1.0", attempt=1, worker="w", bound_nano=90)
    grown = await world.budgets.grow(Hold(hold_id, 100, (KEY,)), 250)
    await world.event("hold", hold_id, amount_nano=grown.granted_nano)
    await world.event("dispatch", hold_id, step_id="1.1", attempt=1, worker="w", bound_nano=120)
    world.redis.flush()
    other = FakeBudgets(world.redis)
    await Recovery(other, world.store, world.journal, world.clock, lease_s=LEASE_S, sweep_s=0.01).rebuild()
    assert await other.balance("key:k") == Balance(0, 250)
    world.pass_s(LEASE_S * 2)
    recovery = Recovery(other, world.store, world.journal, world.clock, lease_s=LEASE_S, sweep_s=0.01)
    assert await recovery.sweep() == 0
    world.pass_s(LEASE_S / 2)
    assert await recovery.sweep() == 1
    assert await other.balance("key:k") == Balance(210, 0)
