"""Holds of requests under way: how large they are, how they grow, and how they wait for what others hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.access.keys import Principal
from gateway.core.loop.caps import Caps
from gateway.core.money.amounts import Usage
from gateway.core.money.ledger import Scope
from gateway.errors import BatonError, BudgetExceeded, BudgetHeld, MoneyUnavailable, UpstreamTimeout
from gateway.service.loop.spending.funds import Funds, Wish
from tests.fakes.budgets import FakeBudgets
from tests.fakes.workers import Says
from tests.kit import KEY, Kit, TestClock, ask, plan
from tests.waiting import BOUND_S

LEASE_S, USAGE = 60.0, Usage(10, 5)
SHORT: dict[str, Any] = {"max_tokens": 16}
PLAIN = Scope("key:k", 100)


def keyed(nano: int) -> Principal:
    return replace(KEY, budget_nano=nano)


async def cost_and_hold(kit: Kit, body: dict[str, Any]) -> tuple[int, int]:
    record = (await kit.serve(body)).record
    return record.cost_nano, record.hold_nano


async def test_a_hold_is_what_the_request_may_cost_and_not_what_its_worker_may_say() -> None:
    asked: list[tuple[dict[str, Any], int]] = [(SHORT, 16), ({"max_completion_tokens": 5}, 5), ({}, 64)]
    for fields, tokens in asked:
        kit = Kit(workers={"alpha": Says(usage=USAGE)})
        _, held = await cost_and_hold(kit, ask(model="alpha", **fields))
        assert 0 <= held - tokens * 2_000 < 200_000, fields  # the prompt by its bytes, and the output to the token


async def test_a_retry_draws_on_what_came_back_and_lets_the_hold_grow_for_what_did_not() -> None:
    kit = Kit(workers={"alpha": [UpstreamTimeout("no word"), Says("yes", usage=USAGE)]})
    running = await kit.serve(ask(model="alpha", **SHORT))
    record = running.record
    assert await kit.text(running) == "yes"
    first, *grown = [event.payload["amount_nano"] for event in kit.journal.of_kind("hold")]
    assert [first, *grown] == sorted([first, *grown])
    assert grown[-1:] == [record.hold_nano]
    assert record.cost_nano <= record.hold_nano < 2 * first
    assert await kit.open_nano() == 0


async def test_the_journal_has_the_grown_hold_before_the_call_that_needs_it() -> None:
    two = plan(("atlas", "one", []), ("birch", "two", []), ("grove", None, [0, 1]))
    kit = Kit((two,), {name: Says("x", usage=USAGE) for name in ("alpha", "beta", "gamma")})
    await kit.serve()
    secured, drawn = 0, 0
    for event in kit.journal.events:
        if event.kind == "hold":
            secured = max(secured, event.payload["amount_nano"])
        elif event.kind == "dispatch":
            drawn = max(drawn, event.payload["bound_nano"])
            assert secured >= drawn
    assert secured == kit.metrics.records[0].hold_nano


async def test_many_at_once_share_a_budget_that_is_worth_them() -> None:
    kit = Kit(workers={"alpha": Says("x", usage=USAGE, delay_s=0.02)})
    cost, held = await cost_and_hold(kit, ask(model="alpha", **SHORT))
    who = keyed(cost + 40 * held)
    ran = await asyncio.gather(*(kit.serve(ask(model="alpha", **SHORT), who) for _ in range(40)))
    assert [running.error for running in ran] == [None] * 40


@pytest.mark.parametrize("model", ["alpha", "baton/rule", "baton"])
async def test_a_budget_is_used_before_it_refuses_and_never_passed(model: str) -> None:
    """Requests wait for money that others hold; what is refused at the end is refused because it is spent."""
    kit = Kit(
        workers={n: Says("x", usage=USAGE, delay_s=0.01) for n in ("alpha", "beta", "gamma")}, held_wait_s=BOUND_S
    )
    cost, held = await cost_and_hold(kit, ask(model=model, **SHORT))
    spent = await kit.posted_nano()
    who = keyed(spent + 20 * cost + held)

    async def one() -> BatonError | None:
        try:
            return (await kit.serve(ask(model=model, **SHORT), who)).error
        except BatonError as error:
            return error

    errors = await asyncio.gather(*(one() for _ in range(60)))
    used = await kit.posted_nano() - spent
    assert 20 * cost <= used <= 20 * cost + held
    refused = {type(error) for error in errors if error is not None}
    assert refused == {BudgetExceeded} or model == "baton"  # which the rule answers when no plan is paid for
    assert await kit.open_nano() == 0


async def test_without_time_to_wait_held_money_is_a_refusal_that_says_to_come_again() -> None:
    kit = Kit(workers={"alpha": Says("x", usage=USAGE, delay_s=0.3)})
    body = ask(model="alpha", **SHORT)
    await kit.serve(body)  # from which on the worker's template is known
    cost, held = await cost_and_hold(kit, body)
    who = keyed(await kit.posted_nano() + cost + held)
    first = await kit.start(body, who)
    with pytest.raises(BudgetHeld) as refused:
        await kit.start(body, who)
    assert (refused.value.status, refused.value.headers["x-should-retry"]) == (429, "true")
    await first.result()
    assert await kit.text(await kit.serve(body, who)) == "x"  # the advice, followed


async def test_what_a_refusal_says_the_request_may_need_is_enough() -> None:
    kit = Kit(workers={"alpha": Says("x", usage=USAGE)})
    body = ask(model="alpha", **SHORT)
    await kit.start(body, keyed(10**9))
    await kit.completer.drain(BOUND_S)
    spent = await kit.posted_nano()
    with pytest.raises(BudgetExceeded) as refused:
        await kit.start(body, keyed(spent + 10))
    assert "max_tokens" not in refused.value.message
    assert await kit.text(await kit.serve(body, keyed(spent + refused.value.needed_nano))) == "x"


async def test_those_who_wait_are_served_in_the_order_in_which_they_came() -> None:
    budgets = FakeBudgets()
    await budgets.load({})
    funds, order = Funds(budgets, TestClock(), BOUND_S), list[str]()
    first = await funds.hold("first", Wish(90, 90, 10), [PLAIN], LEASE_S)

    async def one(name: str, nano: int) -> None:
        hold = await funds.hold(name, Wish(nano, nano, nano), [PLAIN], LEASE_S)
        order.append(name)
        await budgets.void(name)
        funds.freed(hold.scopes)

    waiting = []
    for name, nano in (("large", 80), ("small", 20), ("other", 30)):
        waiting.append(asyncio.create_task(one(name, nano)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert order == []  # although the small one would fit beside the first, once somebody waits
    await budgets.void("first")
    funds.freed(first.scopes)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*waiting)
    assert order == ["large", "small", "other"]


async def test_money_that_another_process_frees_is_seen() -> None:
    budgets = FakeBudgets()
    await budgets.load({})
    funds = Funds(budgets, TestClock(), BOUND_S)
    await budgets.hold("elsewhere", 95, 95, [PLAIN], LEASE_S)
    waiting = asyncio.create_task(funds.hold("here", Wish(50, 50, 50), [PLAIN], LEASE_S))
    await asyncio.sleep(0.02)
    await budgets.void("elsewhere")
    async with asyncio.timeout(BOUND_S):
        assert (await waiting).granted_nano == 50


async def test_at_the_end_of_its_time_a_hold_takes_what_is_there() -> None:
    budgets = FakeBudgets()
    await budgets.load({})
    funds = Funds(budgets, TestClock(), 0.05)
    await budgets.hold("long", 60, 60, [PLAIN], LEASE_S)
    assert (await funds.hold("less", Wish(80, 80, 10), [PLAIN], LEASE_S)).granted_nano == 40
    with pytest.raises(BudgetHeld):
        await funds.hold("nothing", Wish(80, 80, 10), [PLAIN], LEASE_S)
    assert budgets.exhausted == set()


async def test_where_the_rest_is_spent_a_hold_takes_what_is_left_at_once() -> None:
    budgets = FakeBudgets()
    await budgets.load({PLAIN.name: 70})
    funds = Funds(budgets, TestClock(), BOUND_S)
    assert (await funds.hold("less", Wish(80, 80, 10), [PLAIN], LEASE_S)).granted_nano == 30
    await budgets.post("less", 25)
    with pytest.raises(BudgetExceeded):
        await funds.hold("nothing", Wish(80, 80, 10), [PLAIN], LEASE_S)
    assert budgets.exhausted == {PLAIN.name}


async def test_one_that_grows_waits_before_those_that_begin() -> None:
    budgets = FakeBudgets()
    await budgets.load({})
    funds, order = Funds(budgets, TestClock(), BOUND_S), list[str]()
    mine = await funds.hold("mine", Wish(40, 40, 40), [PLAIN], LEASE_S)
    other = await funds.hold("other", Wish(60, 60, 60), [PLAIN], LEASE_S)

    async def begin() -> None:
        await funds.hold("begins", Wish(50, 50, 50), [PLAIN], LEASE_S)
        order.append("begins")

    async def grow() -> None:
        assert (await funds.grow(mine, 90)).granted_nano == 90
        order.append("grows")
        await budgets.void("mine")
        funds.freed(mine.scopes)

    begins = asyncio.create_task(begin())
    await asyncio.sleep(0.01)
    grows = asyncio.create_task(grow())
    await asyncio.sleep(0.01)
    await budgets.void("other")
    funds.freed(other.scopes)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(begins, grows)
    assert order == ["grows", "begins"]


async def test_a_client_that_leaves_the_line_leaves_nothing_held() -> None:
    kit = Kit(workers={"alpha": Says("x", usage=USAGE, delay_s=0.05)}, held_wait_s=BOUND_S)
    body = ask(model="alpha", **SHORT)
    _, held = await cost_and_hold(kit, body)
    who = keyed(await kit.posted_nano() + held)
    first = await kit.start(body, who)
    waits = asyncio.create_task(kit.start(body, who))
    await asyncio.sleep(0.02)
    waits.cancel()
    await first.result()
    await kit.completer.drain(BOUND_S)
    assert await kit.budgets.ready()
    assert await kit.open_nano() == 0


async def test_a_refusal_for_want_of_the_store_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(workers={"alpha": Says("x", usage=USAGE)})
    granted = kit.budgets.hold

    async def late(*asked: Any) -> Any:
        await granted(*asked)
        raise MoneyUnavailable("the answer came too late")

    await kit.serve(ask(model="alpha"))
    monkeypatch.setattr(kit.budgets, "hold", late)
    with pytest.raises(MoneyUnavailable):
        await kit.start(ask(model="alpha"))
    assert await kit.open_nano() > 0
    assert await kit.budgets.ready()  # as the gateway looks, twice a second
    assert await kit.open_nano() == 0


async def test_a_plan_that_the_budget_cannot_pay_ends_with_the_budget_named() -> None:
    two = plan(("atlas", "one", []), ("birch", None, [0]))
    kit = Kit((two,), {name: Says("x", usage=USAGE) for name in ("alpha", "beta")}, caps=Caps(wall_s=60.0))
    running = await kit.serve(who=keyed(14_000_000))
    assert running.record.cost_nano <= running.record.hold_nano <= 14_000_000
    assert running.error is None or isinstance(running.error, BudgetExceeded)
    assert await kit.open_nano() == 0


async def test_a_wild_report_is_cut_to_a_few_times_what_could_be_asked() -> None:
    kit = Kit(workers={"alpha": Says("x", usage=Usage(10**12, 10**12))})
    cost, held = await cost_and_hold(kit, ask(model="alpha"))
    (step,) = kit.metrics.records[0].steps
    assert cost == await kit.posted_nano() <= 4 * held
    assert (step.usage_estimated, step.attempts[0].counted_by) == (True, "clipped")


async def test_thinking_beside_max_tokens_is_charged_in_full() -> None:
    kit = Kit(workers={"alpha": Says("x", usage=Usage(10, 60))})
    cost, _ = await cost_and_hold(kit, ask(model="alpha", **SHORT))
    assert cost == 10 * 1_000 + 60 * 2_000 > 16 * 2_000
    assert kit.metrics.records[0].steps[0].attempts[0].counted_by is None


@pytest.mark.parametrize("fields", [{}, SHORT, {"temperature": 0.5, "stop": ["\n"]}])
async def test_a_plain_completion_asks_for_its_money_once(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(workers={"alpha": Says("x", usage=USAGE)})
    grown = []
    monkeypatch.setattr(kit.budgets, "grow", lambda *asked: grown.append(asked))
    await kit.serve(ask(model="alpha", **fields))
    assert grown == []


async def test_a_planner_that_overruns_is_bounded_by_its_draw_and_the_router_answers() -> None:
    """It writes on for 200,000 characters and is no plan; what it is charged leaves the answer its money."""
    kit = Kit(("no plan " * 25_000,), {"alpha": Says("answered", usage=USAGE), "beta": Says("answered", usage=USAGE)})
    running = await kit.serve(ask(**SHORT))
    planned = running.record.rounds[0]
    drawn = next(e.payload["bound_nano"] for e in kit.journal.of_kind("dispatch") if e.payload["worker"] == "conductor")
    assert await kit.text(running) in ("answered", "ok")
    assert running.record.fallback in ("conductor_unparseable", "conductor_not_json")
    assert 0 < planned.cost_nano <= drawn
    assert planned.completion_tokens <= 512  # as many as it was asked for


async def test_money_for_an_answer_and_not_for_a_plan_too_is_the_rules() -> None:
    kit = Kit(workers={name: Says("answered", usage=USAGE) for name in ("alpha", "beta", "gamma")})
    running = await kit.serve(ask(**SHORT), keyed(1_000_000))
    assert await kit.text(running) == "answered"
    assert (running.record.fallback, running.record.rounds[0].cost_nano) == ("conductor_cost", 0)
    assert running.record.cost_nano == 20_000


async def test_a_reply_that_a_budget_made_shorter_costs_no_more_than_was_left() -> None:
    kit = Kit(workers={"alpha": Says("x", usage=Usage(90, 64))})  # whatever it is asked for
    running = await kit.serve(ask(model="alpha"), keyed(150_000))
    (step,) = running.record.steps
    assert (step.lowered or {})["by"] == "cost"
    assert (step.attempts[0].counted_by, await kit.posted_nano() <= 150_000) == ("clipped", True)
