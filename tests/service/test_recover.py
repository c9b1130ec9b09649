"""Recovery: balances come back from the ledger, and every abandoned hold is decided once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gateway.core.events import Event
from gateway.core.ids import uuid7
from gateway.errors import MoneyUnavailable
from gateway.service.ports import Scope
from gateway.service.recover import Recovery
from tests.fakes.budgets import FakeBudgets, FakeBudgetStore
from tests.fakes.journal import FakeJournal
from tests.fakes.store import FakeStore

KEY = Scope("key:k", 1_000)
LEASE_S = 60.0


class FixedClock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.time = datetime.now(UTC)

    def now(self) -> datetime:
        return self.time

    def monotonic_s(self) -> float:
        return 0.0


class World:
    """A budget store that can be emptied, and the ledger it is rebuilt from."""

    def __init__(self) -> None:
        self.redis = FakeBudgetStore()
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


async def test_what_was_never_dispatched_is_voided_and_what_was_is_charged_in_full(world: World) -> None:
    await world.hold(300)
    sent = await world.hold(400)
    await world.event("dispatch", sent, step_id="1.0", attempt=1, worker="w", bound_nano=100)
    assert await world.recovery.sweep() == 0  # their leases run
    world.clock.time += timedelta(seconds=LEASE_S + 1)
    assert await world.recovery.sweep() == 2
    assert await world.balance() == (400, 0)
    assert {(e.payload["state"], e.payload["charged_nano"]) for e in world.journal.of_kind("settle")} == {
        ("voided", 0),
        ("uncertain", 400),
    }
    assert await world.recovery.sweep() == 0  # once


async def test_a_settlement_that_redis_missed_is_posted_as_the_ledger_has_it(world: World) -> None:
    hold_id = await world.hold(500, lease_s=0.001)
    await world.event("settle", hold_id, state="posted", charged_nano=120)
    unwritten = uuid7(1)
    await world.budgets.hold(unwritten, 70, 70, [KEY], 0.001)  # its event never reached the journal
    await asyncio.sleep(0.01)
    assert await world.recovery.sweep() == 2
    assert await world.balance() == (120, 0)


async def test_it_runs_for_ever_and_says_when_balances_are_there_first() -> None:
    world = World()
    running = asyncio.create_task(world.recovery.run())
    await asyncio.wait_for(world.recovery.first.wait(), 1)
    world.redis.flush()
    async with asyncio.timeout(3):
        while not await world.budgets.ready():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await world.balance() == (0, 0)


async def test_a_journal_behind_the_database_keeps_money_closed() -> None:
    world = World()

    async def late() -> None:
        raise TimeoutError

    world.journal.shipped = late  # type: ignore[method-assign]
    with pytest.raises(MoneyUnavailable, match="not in the database yet"):
        await world.recovery.rebuild()
    assert not world.recovery.first.is_set()
