"""Holds that grow, and money that is held told from money that is spent; on the fake and on a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.money.ledger import Balance, Hold, Scope
from gateway.errors import BudgetExceeded, BudgetHeld, Conflict, NotFound
from gateway.service.ports.money import Budgets
from tests.contract.test_budgets import KEY, LEASE_S, ORG, Shared, budgets, shared

__all__ = ["budgets", "shared"]  # fixtures


async def test_a_hold_grows_in_all_of_its_scopes_as_far_as_each_has_room(budgets: Budgets) -> None:
    hold = await budgets.hold("a", 10, 10, [ORG, KEY], LEASE_S)
    assert (hold.granted_nano, hold.room_nano) == (10, 40)
    grown = await budgets.grow(hold, 35)
    assert (grown.granted_nano, grown.room_nano, grown.scopes) == (35, 15, (ORG, KEY))
    assert await budgets.balance("org:o") == await budgets.balance("key:k") == Balance(0, 35)
    assert (await budgets.grow(grown, 90)).granted_nano == 50  # all that the key has
    assert await budgets.post("a", 42) == 42
    assert await budgets.balance("org:o") == await budgets.balance("key:k") == Balance(42, 0)


async def test_growth_is_a_total_so_that_it_may_be_asked_for_twice(budgets: Budgets) -> None:
    hold = await budgets.hold("a", 10, 10, [KEY], LEASE_S)
    assert [(await budgets.grow(hold, total)).granted_nano for total in (20, 20, 15)] == [20, 20, 20]


async def test_many_that_grow_at_once_never_pass_the_budget(budgets: Budgets) -> None:
    holds = [await budgets.hold(f"h{n}", 1, 1, [ORG, KEY], LEASE_S) for n in range(20)]
    grown = await asyncio.gather(*(budgets.grow(hold, 4) for hold in holds))
    assert sum(hold.granted_nano for hold in grown) == 50
    assert await budgets.balance("key:k") == Balance(0, 50)


async def test_only_an_open_hold_grows(budgets: Budgets) -> None:
    hold = await budgets.hold("a", 10, 10, [KEY], LEASE_S)
    await budgets.void("a")
    with pytest.raises(Conflict):
        await budgets.grow(hold, 20)
    with pytest.raises(NotFound):
        await budgets.grow(Hold("never", 1, (KEY,)), 20)
    assert await budgets.balance("key:k") == Balance(0, 0)


async def test_a_grown_hold_comes_back_as_large_after_a_rebuild(shared: Shared) -> None:
    budgets, other = shared.gateway(), shared.gateway()
    await budgets.load({})
    await other.join()
    grown = await budgets.grow(await budgets.hold("a", 10, 10, [KEY], LEASE_S), 30)
    await shared.flush()
    await other.load({}, [Hold("a", 10, grown.scopes)])  # whose ledger does not know of the growth yet
    assert await other.balance("key:k") == Balance(0, 10)
    assert await budgets.join()
    assert await other.balance("key:k") == Balance(0, 30)
    assert await budgets.post("a", 25) == 25
    assert await other.balance("key:k") == Balance(25, 0)


async def test_a_refusal_says_whether_the_money_is_held_or_spent(budgets: Budgets) -> None:
    await budgets.hold("a", 40, 40, [KEY], LEASE_S)
    with pytest.raises(BudgetHeld, match=r"left of \$0.00000005, beside \$0.00000004 that is held") as held:
        await budgets.hold("b", 20, 20, [ORG, KEY], LEASE_S)
    assert held.value.headers == {"x-should-retry": "true", "retry-after": "2"}
    assert (held.value.code, held.value.type) == ("budget_held", "rate_limit_error")
    await budgets.post("a", 35)
    with pytest.raises(BudgetExceeded) as spent:
        await budgets.hold("b", 20, 20, [ORG, KEY], LEASE_S)
    assert not isinstance(spent.value, BudgetHeld)
    assert spent.value.headers == {"x-should-retry": "false"}
    await budgets.hold("c", 15, 15, [KEY], LEASE_S)  # what is left fits, as the refusal said


async def test_a_spent_scope_is_named_before_one_whose_money_is_held(budgets: Budgets) -> None:
    user = Scope("user:k:u", 10)
    await budgets.hold("a", 45, 45, [KEY], LEASE_S)
    await budgets.hold("b", 5, 5, [user], LEASE_S)
    await budgets.post("b", 5)
    with pytest.raises(BudgetExceeded) as refused:
        await budgets.hold("c", 8, 8, [KEY, user], LEASE_S)
    assert (refused.value.scope, type(refused.value)) == (user.name, BudgetExceeded)


async def test_a_forsaken_hold_is_void_whether_or_not_it_was_granted(budgets: Budgets) -> None:
    await budgets.hold("granted", 10, 10, [KEY], LEASE_S)
    for hold_id in ("granted", "on its way"):
        budgets.forsake(hold_id)
    assert await budgets.ready()
    assert await budgets.balance("key:k") == Balance(0, 0)
    with pytest.raises(Conflict):  # the call that comes late changes nothing
        await budgets.hold("on its way", 10, 10, [KEY], LEASE_S)
    assert await budgets.balance("key:k") == Balance(0, 0)
