"""The Budgets port, on the fake and on a real Redis: same promises, same results."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from gateway.adapters.redis.budgets import RedisBudgets
from gateway.core.money.amounts import NANO_MAX
from gateway.core.money.ledger import Balance, Hold, Scope
from gateway.errors import BudgetExceeded, Conflict, MoneyUnavailable, NotFound
from gateway.service.ports.money import Budgets, Settlement
from tests.fakes.budgets import FakeBudgets, FakeBudgetStore
from tests.redis_server import RedisServer

ORG, KEY = Scope("org:o", 100), Scope("key:k", 50)
LEASE_S = 60.0


class Shared:
    """One store and the gateways on it."""

    def __init__(self, make: Callable[[], FakeBudgets | RedisBudgets]) -> None:
        self.make = make
        self.made: list[FakeBudgets | RedisBudgets] = []

    def gateway(self) -> Budgets:
        self.made.append(self.make())
        return self.made[-1]

    async def flush(self) -> None:
        raise AssertionError("chosen by the fixture")

    async def close(self) -> None:
        for budgets in self.made:
            await budgets.close()


class SharedFake(Shared):
    def __init__(self) -> None:
        store = FakeBudgetStore()
        super().__init__(lambda: FakeBudgets(store))
        self.store = store

    async def flush(self) -> None:
        self.store.flush()


class SharedRedis(Shared):
    def __init__(self, url: str) -> None:
        self.prefix = secrets.token_hex(4)
        super().__init__(lambda: RedisBudgets(url, prefix=self.prefix, deadline_s=5.0))
        self.redis: Redis = Redis.from_url(url)

    async def flush(self) -> None:
        async for key in self.redis.scan_iter(match="{" + self.prefix + "}:*"):
            await self.redis.delete(key)

    async def close(self) -> None:
        await super().close()
        await self.redis.aclose()


@pytest.fixture(params=["fake", "redis"])
async def shared(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[Shared]:
    store = SharedFake() if request.param == "fake" else SharedRedis(redis_server.url)
    yield store
    await store.close()


@pytest.fixture
async def budgets(shared: Shared) -> Budgets:
    gateway = shared.gateway()
    await gateway.load({})
    return gateway


async def test_a_hold_reserves_in_every_scope_and_posting_frees_the_rest(budgets: Budgets) -> None:
    hold = await budgets.hold("a", 30, 30, [ORG, KEY], LEASE_S)
    assert (hold.id, hold.granted_nano, hold.scopes) == ("a", 30, (ORG, KEY))
    assert await budgets.balance("org:o") == await budgets.balance("key:k") == Balance(0, 30)
    assert await budgets.post("a", 7) == 7
    assert await budgets.balance("org:o") == await budgets.balance("key:k") == Balance(7, 0)


async def test_a_hold_that_one_scope_cannot_take_changes_none(budgets: Budgets) -> None:
    await budgets.hold("a", 40, 40, [KEY], LEASE_S)
    with pytest.raises(BudgetExceeded, match=r"`key:k` has \$0.00000001 left") as caught:
        await budgets.hold("b", 20, 20, [ORG, KEY], LEASE_S)
    assert caught.value.scope == "key:k"
    assert await budgets.balance("org:o") == Balance(0, 0)
    assert (await budgets.hold("b", 20, 5, [ORG, KEY], LEASE_S)).granted_nano == 10


async def test_the_same_id_again_returns_the_first_grant(budgets: Budgets) -> None:
    await budgets.hold("a", 30, 30, [ORG, KEY], LEASE_S)
    assert (await budgets.hold("a", 50, 50, [ORG, KEY], LEASE_S)).granted_nano == 30
    assert await budgets.balance("key:k") == Balance(0, 30)
    await budgets.void("a")
    with pytest.raises(Conflict):
        await budgets.hold("a", 30, 30, [ORG, KEY], LEASE_S)


async def test_the_first_settlement_is_the_only_one(budgets: Budgets) -> None:
    for hold_id in ("posted", "voided", "uncertain"):
        await budgets.hold(hold_id, 10, 10, [ORG], LEASE_S)
    first = (await budgets.post("posted", 4), await budgets.void("voided"), await budgets.uncertain("uncertain"))
    assert first == (4, 0, 10)
    for hold_id, charged in zip(("posted", "voided", "uncertain"), first, strict=True):
        assert await budgets.post(hold_id, 9) == charged
        assert await budgets.void(hold_id) == charged
        assert await budgets.uncertain(hold_id) == charged
    assert await budgets.balance("org:o") == Balance(14, 0)


async def test_a_bill_above_the_grant_is_charged_in_full(budgets: Budgets) -> None:
    await budgets.hold("a", 50, 50, [KEY], LEASE_S)
    assert await budgets.post("a", 80) == 80
    assert await budgets.balance("key:k") == Balance(80, 0)
    with pytest.raises(BudgetExceeded, match=r"has \$0 left"):
        await budgets.hold("b", 0, 0, [KEY], LEASE_S)


async def test_a_free_request_holds_and_settles_nothing(budgets: Budgets) -> None:
    for hold_id, settle in (("a", budgets.void), ("b", budgets.uncertain)):
        assert (await budgets.hold(hold_id, 0, 0, [Scope("key:k", 0)], LEASE_S)).granted_nano == 0
        assert await settle(hold_id) == 0
    assert await budgets.balance("key:k") == Balance(0, 0)


async def test_amounts_stay_exact_up_to_the_largest(budgets: Budgets) -> None:
    free = Scope("user:u\ud800\x00", None)
    assert (await budgets.hold("a", NANO_MAX, NANO_MAX - 1, [free], LEASE_S)).granted_nano == NANO_MAX
    assert await budgets.balance(free.name) == Balance(0, NANO_MAX)
    assert await budgets.post("a", NANO_MAX - 2) == NANO_MAX - 2
    assert (await budgets.hold("b", 5, 1, [free], LEASE_S)).granted_nano == 2
    assert await budgets.post("b", 5) == 5
    assert await budgets.balance(free.name) == Balance(NANO_MAX, 0)


@pytest.mark.parametrize("amount", [-1, NANO_MAX + 1])
async def test_amounts_out_of_range_are_refused(budgets: Budgets, amount: int) -> None:
    with pytest.raises(ValueError, match="not an amount"):
        await budgets.hold("a", amount, 0, [KEY], LEASE_S)
    with pytest.raises(ValueError, match="not an amount"):
        await budgets.post("a", amount)
    with pytest.raises(ValueError, match="not an amount"):
        await budgets.load({"key:k": 2 * amount * NANO_MAX})  # a total may be below zero: credits


async def test_an_unknown_hold_cannot_be_settled(budgets: Budgets) -> None:
    for settle in (budgets.void, budgets.uncertain):
        with pytest.raises(NotFound):
            await settle("never")
    with pytest.raises(NotFound):
        await budgets.post("never", 1)


async def test_leases_run_out_unless_renewed(budgets: Budgets) -> None:
    await budgets.hold("late", 1, 1, [ORG], 0)
    await budgets.hold("kept", 1, 1, [ORG], 0)
    await budgets.hold("long", 1, 1, [ORG], LEASE_S)
    await asyncio.sleep(0.005)  # leases count milliseconds
    assert list(await budgets.renew(["kept", "never"], LEASE_S)) == ["kept"]
    assert list(await budgets.expired(10)) == ["late"]
    assert list(await budgets.expired(0)) == []
    assert await budgets.uncertain("late") == 1
    assert list(await budgets.expired(10)) == []
    assert list(await budgets.renew(["late", "never"], LEASE_S)) == []


async def test_before_the_first_load_no_money_moves(shared: Shared) -> None:
    budgets = shared.gateway()
    assert budgets.epoch_lost
    assert not await budgets.ready()
    with pytest.raises(MoneyUnavailable, match="rebuilding"):
        await budgets.hold("a", 1, 1, [KEY], LEASE_S)
    await budgets.load({"key:k": 50})
    assert not budgets.epoch_lost
    assert await budgets.ready()
    with pytest.raises(BudgetExceeded):
        await budgets.hold("a", 1, 1, [KEY], LEASE_S)


async def test_doubted_balances_are_given_up_and_loaded_again(shared: Shared, budgets: Budgets) -> None:
    await budgets.hold("open", 20, 20, [KEY], LEASE_S)
    await budgets.doubt()
    with pytest.raises(MoneyUnavailable, match="rebuilding"):
        await budgets.balance("key:k")
    await budgets.load({"key:k": 10})
    assert await budgets.balance("key:k") == Balance(10, 20)


async def test_a_flushed_store_refuses_until_rebuilt_and_open_holds_come_back(shared: Shared, budgets: Budgets) -> None:
    await budgets.hold("spent", 10, 10, [KEY], LEASE_S)
    await budgets.post("spent", 10)
    await budgets.hold("open", 20, 20, [KEY], LEASE_S)
    await shared.flush()
    with pytest.raises(MoneyUnavailable, match="rebuilding"):
        await budgets.balance("key:k")
    assert budgets.epoch_lost
    await budgets.load({"key:k": 10}, ours=["spent"])
    assert await budgets.balance("key:k") == Balance(10, 20)
    assert await budgets.post("open", 15) == 15
    assert await budgets.balance("key:k") == Balance(25, 0)


async def test_loading_a_store_that_lost_nothing_changes_nothing(budgets: Budgets) -> None:
    await budgets.hold("spent", 10, 10, [KEY], LEASE_S)
    await budgets.post("spent", 10)
    await budgets.hold("open", 20, 20, [KEY], LEASE_S)
    await budgets.load({"key:k": 40})
    assert await budgets.balance("key:k") == Balance(10, 20)


async def test_a_rebuild_takes_totals_of_many_scopes(budgets: Budgets, shared: Shared) -> None:
    await shared.flush()
    await budgets.load({f"user:{n}": n for n in range(2500)})
    assert [(await budgets.balance(f"user:{n}")).posted_nano for n in (0, 999, 1000, 2499)] == [0, 999, 1000, 2499]


async def test_open_holds_of_a_dead_gateway_are_reserved_again_and_can_be_settled(shared: Shared) -> None:
    budgets = shared.gateway()
    dead = [Hold("h1", 30, (ORG, KEY)), Hold("h2", 40, (ORG,))]
    await budgets.load({"org:o": 5}, dead)
    assert (await budgets.balance("org:o"), await budgets.balance("key:k")) == (Balance(5, 70), Balance(0, 30))
    assert await budgets.uncertain("h1") == 30
    assert await budgets.void("h2") == 0
    await budgets.load({}, dead)
    assert (await budgets.balance("org:o"), await budgets.balance("key:k")) == (Balance(35, 0), Balance(30, 0))


async def test_the_heartbeat_keeps_a_process_s_own_holds_until_they_are_settled_or_their_time_is_over(
    shared: Shared, budgets: Budgets
) -> None:
    other = shared.gateway()
    await other.load({})
    await budgets.hold("mine", 1, 1, [ORG], LEASE_S)
    await budgets.hold("done", 1, 1, [ORG], LEASE_S)
    await other.hold("theirs", 1, 1, [ORG], LEASE_S)
    await budgets.post("done", 1)
    await budgets.renew(["mine", "theirs"], 0)  # as after a silence
    await asyncio.sleep(0.005)
    assert sorted(await budgets.expired(10)) == ["mine", "theirs"]
    await budgets.keep()
    assert list(await budgets.expired(10)) == ["theirs"]


async def test_a_lease_given_before_the_clock_was_set_back_is_cut(shared: Shared, budgets: Budgets) -> None:
    await budgets.hold("dead", 1, 1, [ORG], LEASE_S)
    await budgets.renew([], 0)  # no lease is longer than this one
    await asyncio.sleep(0.005)
    assert list(await budgets.expired(10)) == ["dead"]


async def test_settled_returns_the_end_of_each_hold(budgets: Budgets) -> None:
    for hold_id in ("open", "spent", "free"):
        await budgets.hold(hold_id, 9, 9, [ORG], LEASE_S)
    await budgets.post("spent", 4)
    await budgets.void("free")
    assert await budgets.settled(["open", "spent", "free", "never"]) == {"open": None, "spent": 4, "free": 0}


async def test_a_charge_from_elsewhere_counts_once_whatever_is_known_of_its_hold(budgets: Budgets) -> None:
    await budgets.hold("open", 30, 30, [ORG, KEY], LEASE_S)
    await budgets.hold("spent", 9, 9, [ORG], LEASE_S)
    await budgets.post("spent", 4)
    elsewhere = [Settlement(i, 7, ("org:o", "key:k")) for i in ("open", "spent", "never")]
    for _ in range(2):
        await budgets.count(elsewhere)
    assert (await budgets.balance("org:o"), await budgets.balance("key:k")) == (Balance(18, 0), Balance(14, 0))
    assert await budgets.post("open", 25) == 7


async def test_a_settlement_the_store_lost_is_put_back_by_who_made_it(shared: Shared, budgets: Budgets) -> None:
    """Its record may still be on its way to the ledger from which another gateway rebuilds."""
    other = shared.gateway()
    await other.load({})
    await budgets.hold("spent", 30, 30, [KEY], LEASE_S)
    await budgets.hold("missed", 10, 10, [KEY], LEASE_S)
    await budgets.post("spent", 20)
    await shared.flush()
    with pytest.raises(MoneyUnavailable):
        await budgets.post("missed", 5)
    assert not await budgets.join()  # there is nothing yet
    await other.load({}, [Hold("spent", 30, (KEY,))])  # a ledger that knows of neither charge
    assert await budgets.join()
    assert await budgets.balance("key:k") == Balance(25, 0)
    assert await budgets.join()
    assert await budgets.balance("key:k") == Balance(25, 0)


async def test_a_settlement_the_ledger_has_is_not_counted_again(shared: Shared, budgets: Budgets) -> None:
    other = shared.gateway()
    await other.load({})
    for hold_id in ("told", "ours"):
        await budgets.hold(hold_id, 10, 10, [KEY], LEASE_S)
        await budgets.post(hold_id, 5)
    assert sorted(budgets.unconfirmed()) == ["ours", "told"]
    await shared.flush()
    await other.load({"key:k": 10}, settled=[Settlement("told", 5, ("key:k",)), Settlement("ours", 5, ("key:k",))])
    assert await budgets.join()
    assert await budgets.balance("key:k") == Balance(10, 0)
    await shared.flush()
    await budgets.load({"key:k": 10}, ours=["told", "ours"])
    assert await budgets.balance("key:k") == Balance(10, 0)
    assert list(budgets.unconfirmed()) == []


async def test_balances_follow_the_ledger_where_two_have_settled_a_hold(budgets: Budgets) -> None:
    for hold_id in ("late", "early", "open"):
        await budgets.hold(hold_id, 10, 10, [KEY, ORG], LEASE_S)
    await budgets.uncertain("late")
    await budgets.post("early", 3)
    charges = {"late": 4, "early": 10, "open": 1, "never": 1}
    assert await budgets.correct(charges) == 2
    assert await budgets.balance("key:k") == await budgets.balance("org:o") == Balance(14, 10)
    assert await budgets.correct(charges) == 0
    assert await budgets.post("late", 9) == 4
    assert dict(await budgets.settled(["late", "early", "open"])) == {"late": 4, "early": 10, "open": None}


async def test_a_confirmed_settlement_is_not_put_back(shared: Shared, budgets: Budgets) -> None:
    await budgets.hold("a", 10, 10, [KEY], LEASE_S)
    await budgets.post("a", 5)
    budgets.confirm(["a", "never"])
    await shared.flush()
    await budgets.load({"key:k": 5})
    assert await budgets.balance("key:k") == Balance(5, 0)


async def test_after_a_rebuild_nobody_is_granted_until_others_had_time_to_put_theirs_back(
    shared: Shared, budgets: Budgets
) -> None:
    other = shared.gateway()
    await other.load({})
    await other.hold("theirs", 40, 40, [KEY], LEASE_S)
    await shared.flush()
    put_back_s = 2.0
    await budgets.load({}, put_back_s=put_back_s)
    with pytest.raises(MoneyUnavailable, match="put theirs back"):
        await budgets.hold("mine", 40, 40, [KEY], LEASE_S)
    assert await other.join()
    assert await other.post("theirs", 40) == 40  # to settle need not wait
    await asyncio.sleep(put_back_s + 0.01)
    with pytest.raises(BudgetExceeded):
        await budgets.hold("mine", 40, 40, [KEY], LEASE_S)


async def test_two_gateways_share_one_budget(shared: Shared, budgets: Budgets) -> None:
    other = shared.gateway()
    await other.load({"key:k": 49})  # joins: the first gateway's rebuild stands
    await budgets.hold("a", 30, 30, [KEY], LEASE_S)
    with pytest.raises(BudgetExceeded):
        await other.hold("b", 30, 30, [KEY], LEASE_S)
    assert await other.post("a", 1) == await budgets.post("a", 9) == 1
    assert await other.balance("key:k") == Balance(1, 0)


async def test_after_a_flush_the_second_gateway_joins_the_first_ones_rebuild(shared: Shared, budgets: Budgets) -> None:
    other = shared.gateway()
    await other.load({})
    await budgets.hold("mine", 10, 10, [KEY], LEASE_S)
    await other.hold("theirs", 20, 20, [KEY], LEASE_S)
    await shared.flush()
    await budgets.load({"key:k": 5})
    with pytest.raises(MoneyUnavailable):
        await other.hold("c", 1, 1, [KEY], LEASE_S)
    await other.load({"key:k": 40})
    assert await budgets.balance("key:k") == Balance(5, 30)
    assert await budgets.ready()


async def test_a_thousand_at_once_get_exactly_what_the_budget_affords(shared: Shared, budgets: Budgets) -> None:
    other = shared.gateway()
    await other.load({})
    scopes = [Scope("org:o", None), Scope("key:k", 137 * 1_000_003 + 5)]

    async def one(n: int) -> bool:
        try:
            await (budgets, other)[n % 2].hold(f"h{n}", 1_000_003, 1_000_003, scopes, LEASE_S)
        except BudgetExceeded:
            return False
        return True

    granted = await asyncio.gather(*(one(n) for n in range(1000)))
    assert sum(granted) == 137
    assert await budgets.balance("key:k") == await budgets.balance("org:o") == Balance(0, 137 * 1_000_003)


async def test_a_credit_gives_back_and_makes_room_beyond_the_limit(shared: Shared) -> None:
    budgets = shared.gateway()
    await budgets.load({"key:k": 50})
    with pytest.raises(BudgetExceeded):
        await budgets.hold("h", 10, 10, [KEY], LEASE_S)
    await budgets.credit(60, ["key:k", "org:o"], budgets.fence())
    assert [await budgets.balance(name) for name in ("key:k", "org:o")] == [Balance(-10, 0), Balance(-60, 0)]
    assert (await budgets.hold("h", 100, 60, [KEY], LEASE_S)).granted_nano == 60


async def test_a_credit_counts_once_however_a_rebuild_falls(shared: Shared) -> None:
    budgets, other = shared.gateway(), shared.gateway()
    await budgets.load({"key:k": 50})
    fence = budgets.fence()
    await shared.flush()
    await other.load({"key:k": 30})  # from a ledger that holds the credit already
    await budgets.load({"key:k": 30})
    with pytest.raises(MoneyUnavailable):
        await budgets.credit(20, ["key:k"], fence)
    assert await budgets.balance("key:k") == Balance(30, 0)


async def test_balances_of_the_past_are_forgotten_unless_money_is_held_there(shared: Shared) -> None:
    budgets = shared.gateway()
    await budgets.load({f"key:k:{n}": n for n in range(2_500)} | {"key:k": 7})
    await budgets.hold("h", 1, 1, [Scope("key:k:3", None)], LEASE_S)
    assert await budgets.forget(lambda name: name.startswith("key:k:")) == 2_499
    assert [(await budgets.balance(name)).posted_nano for name in ("key:k", "key:k:3", "key:k:4")] == [7, 3, 0]
