"""Budgets by month and day end to end: real Redis, real PostgreSQL, a clock of our own."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.store import TOTALS_LOCK_KEY, PostgresStore
from gateway.adapters.redis.budgets import RedisBudgets
from gateway.core.access.keys import Allowance, Organisation, Principal
from gateway.core.money.ledger import is_past, scopes_of, windows
from gateway.errors import BudgetExceeded, NotFound
from gateway.service.money.credits import Credits, describe_uncertain
from gateway.service.ports.request import Clock
from tests.records import hold_event, new_id, settle_event
from tests.redis_server import RedisServer

START = datetime(2026, 11, 27, 12, 0, tzinfo=UTC)
WHO = Principal(
    *("keyAAAAAAAAA", "data", "app", "acme", ()),
    budget_day_nano=1_000,
    per_user=Allowance(day_nano=400),
    organisation=Organisation(Allowance(month_nano=4_000)),
)


class HandClock(Clock):
    def __init__(self) -> None:
        self.at = START

    def now(self) -> datetime:
        return self.at

    def monotonic_s(self) -> float:
        return self.at.timestamp()


@pytest.fixture
async def budgets(redis_server: RedisServer) -> RedisBudgets:
    made = RedisBudgets(redis_server.url, prefix=secrets.token_hex(4), deadline_s=5.0)
    await made.load({})
    return made


async def test_spending_is_bounded_in_each_window_and_rebuilt_to_the_nano_dollar(
    budgets: RedisBudgets, redis_server: RedisServer, pg_engine: AsyncEngine
) -> None:
    draw, clock, store = random.Random(7), HandClock(), PostgresStore(pg_engine)
    spent: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    events = []
    while clock.at < START + timedelta(days=9):
        scopes = scopes_of(WHO, draw.choice(["ann", "bob", None]), clock.at)
        hold, rollout = new_id(), new_id()
        try:
            granted = await budgets.hold(hold, 90, 60, scopes, 60.0)
        except BudgetExceeded as error:
            refused[error.scope.partition(":")[0] + str(error.scope.count("-"))] += 1
        else:
            actual = draw.randint(0, granted.granted_nano)
            await budgets.post(hold, actual)
            names = [scope.name for scope in scopes]
            spent.update(dict.fromkeys(names, actual))
            events += [hold_event(hold, rollout, granted.granted_nano, *((name, None) for name in names))]
            events += [settle_event(hold, rollout, "posted", actual, *names)]
        clock.at += timedelta(minutes=draw.randint(1, 40))
    limits = {scope.name: scope.limit_nano for scope in scopes_of(WHO, "ann", START) if scope.limit_nano}
    assert set(refused) == {"org1", "key2", "user2"}  # each of the three limits was met: month, day, a user's day
    assert max(spent[windows("org:acme", day)[1]] for day in (START, clock.at)) <= limits["org:acme:2026-11"]
    async with pg_engine.begin() as connection:
        new = rows.Rows()
        for event in events:
            new.extend(rows.event_rows(event))
        await connection.run_sync(insert_rows, new)
    totals = (await store.books(0)).posted
    assert {name: total for name, total in totals.items() if total} == {name: n for name, n in spent.items() if n}
    rebuilt = RedisBudgets(redis_server.url, prefix=secrets.token_hex(4), deadline_s=5.0)
    await rebuilt.load({name: total for name, total in totals.items() if not is_past(name, clock.at)})
    for name in spent:
        kept = 0 if is_past(name, clock.at) else spent[name]
        assert (await rebuilt.balance(name)).posted_nano == kept
    assert await budgets.forget(lambda scope: is_past(scope, clock.at)) == sum(
        is_past(name, clock.at) for name in spent
    )
    for each in (budgets, rebuilt):
        await each.close()


async def test_a_credit_makes_room_at_once_and_after_every_rebuild(
    budgets: RedisBudgets, redis_server: RedisServer, pg_engine: AsyncEngine
) -> None:
    clock, store = HandClock(), PostgresStore(pg_engine)
    scopes = scopes_of(WHO, "ann", START)
    rollout = new_id()
    await budgets.hold(rollout, 400, 400, scopes, 60.0)
    await budgets.uncertain(rollout)
    names = [scope.name for scope in scopes]
    async with pg_engine.begin() as connection:
        for event in (hold_event(rollout, rollout, 400), settle_event(rollout, rollout, "uncertain", 400, *names)):
            await connection.run_sync(insert_rows, rows.event_rows(event))
    with pytest.raises(BudgetExceeded):  # ann's day is used up by a call that was never heard of again
        await budgets.hold(new_id(), 1, 1, scopes, 60.0)
    crediting = Credits(PostgresAdmin(pg_engine), budgets, clock)
    made = await crediting.give({"charge": rollout, "why": "the provider did not bill it"}, "ticket-7")
    again = await crediting.give({"charge": rollout, "why": "again"}, "ticket-7")
    assert (made["created"], made["counts"], again["created"], again["id"]) == (True, "now", False, made["id"])
    assert [(await budgets.balance(name)).posted_nano for name in names] == [0] * len(names)
    await budgets.hold(new_id(), 400, 400, scopes, 60.0)
    assert {name: total for name, total in (await store.books(0)).posted.items() if total} == {}
    await budgets.close()


async def test_an_uncertain_charge_is_given_back_by_one_call_and_only_once(
    budgets: RedisBudgets, redis_server: RedisServer, pg_engine: AsyncEngine
) -> None:
    clock, store, hold = HandClock(), PostgresStore(pg_engine), new_id()
    await budgets.hold(hold, 400, 400, scopes_of(WHO, "ann", START), 60.0)
    await budgets.uncertain(hold)
    names = [scope.name for scope in scopes_of(WHO, "ann", START)]
    async with pg_engine.begin() as connection:
        for event in (hold_event(hold, hold, 400), settle_event(hold, hold, "uncertain", 400, *names)):
            await connection.run_sync(insert_rows, rows.event_rows(event))
    crediting = Credits(PostgresAdmin(pg_engine), budgets, clock)
    (listed,) = map(describe_uncertain, await crediting.uncertain(10))
    assert (listed["charge"], listed["usd"], listed["left_usd"]) == (hold, "0.0000004", "0.0000004")
    first, again = await crediting.give_back(hold), await crediting.give_back(hold)
    assert (first["created"], again["created"], again["id"]) == (True, False, first["id"])
    assert describe_uncertain((await crediting.uncertain(10))[0])["left_usd"] == "0"
    assert {(await budgets.balance(name)).posted_nano for name in names} == {0}
    with pytest.raises(NotFound):
        await crediting.give_back("never")
    assert await store.posted_totals() == dict.fromkeys(names, 0)
    async with pg_engine.begin() as connection:
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": TOTALS_LOCK_KEY})
        assert await store.posted_totals() is None, "one gateway at a time sums the ledger"
    await budgets.close()
