"""A request that goes on after its gateway died, at each of its saves: what is repeated, and what is charged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from gateway.core.access.keys import Principal
from gateway.core.log.events import uuid7
from gateway.core.loop.caps import Caps
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import Forbidden
from gateway.service.batches.background import BackgroundRunner
from gateway.service.loop.resume.checkpoints import UNCERTAIN, Checkpoints, is_repeatable
from gateway.service.money.unfinished import UnfinishedHolds
from gateway.service.ports.background import BackgroundRequest, Status
from gateway.service.ports.request import ConductorCall
from gateway.service.request.running import Running
from tests.fakes.background import FakeBackground
from tests.fakes.workers import Says
from tests.kit import KEY, Kit, TestClock, ask, plan, pool_file
from tests.waiting import BOUND_S, until

PLAN = plan(("atlas", "first", []), ("birch", "second", [0]), ("grove", None, [0, 1]))
WORKERS = {"alpha": Says("A"), "beta": Says("B"), "gamma": Says("done")}
HOUR_US = 3_600_000_000
CLOCK = TestClock()


class Dying(FakeBackground):
    """A store whose first runner dies at its `nth` save (from 0), before or after it: it waits for ever."""

    def __init__(self, nth: int, *, saved: bool) -> None:
        super().__init__()
        self.nth, self.saved, self.dead = nth, saved, asyncio.Event()

    async def save(
        self, response_id: str, runner: str, state: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]
    ) -> Status | None:
        dies = runner == "first" and self.saves == self.nth
        status = None if dies and not self.saved else await super().save(response_id, runner, state, records)
        if dies:
            self.dead.set()
            await asyncio.Event().wait()
        return status


async def queued(store: FakeBackground, expires_us: int = HOUR_US) -> str:
    now_us = CLOCK.now_us()
    response_id = "resp_" + uuid7(now_us // 1000).replace("-", "")
    await store.create(BackgroundRequest(response_id, KEY.public_id, {}, {}, "queued", now_us, now_us + expires_us), 9)
    return response_id


async def begun(kit: Kit, store: FakeBackground, runner: str, **body: Any) -> tuple[Running, Checkpoints]:
    """The request as this runner serves it. The lease of the one before is over at once."""
    [request] = await store.take(runner, 1, 0.0)
    checkpoints = Checkpoints(store, runner, request, CLOCK)
    return await kit.start(ask(**body), kept=checkpoints), checkpoints


async def owner_of(key_id: str) -> Principal:
    return KEY


@asynccontextmanager
async def died(kit: Kit, store: Dying, **body: Any) -> AsyncIterator[str]:
    """The id of a request whose first runner is dead, or has ended without dying."""
    response_id = await queued(store)
    starting = asyncio.create_task(begun(kit, store, "first", **body))
    dead = asyncio.create_task(store.dead.wait())
    await asyncio.wait({starting, dead}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        running, _ = starting.result()
        await asyncio.wait({dead, asyncio.create_task(running.finished.wait())}, return_when=asyncio.FIRST_COMPLETED)
    yield response_id
    starting.cancel()
    dead.cancel()


def calls_to_worker(kit: Kit) -> list[str]:
    return [call.worker.name for call in kit.workers.calls]


async def record_at_end(kit: Kit, running: Running) -> Any:
    """The rollout of a request that has ended; its money agrees everywhere."""
    await asyncio.wait_for(running.finished.wait(), BOUND_S)
    record = running.record
    parts = sum(one.cost_nano for one in record.rounds) + sum(one.cost_nano for one in record.steps)
    settled = [event.payload["charged_nano"] for event in kit.journal.of_kind("settle")]
    assert settled == [record.cost_nano] == [parts] == [await kit.posted_nano()]
    assert await kit.open_nano() == 0
    assert len({event.payload["hold_id"] for event in kit.journal.of_kind("hold")}) == 1
    assert record.hold_nano >= record.cost_nano
    return record


async def test_nothing_is_lost_without_a_crash() -> None:
    kit, store = Kit((PLAN,), WORKERS), FakeBackground()
    await queued(store)
    running, _ = await begun(kit, store, "first")
    record = await record_at_end(kit, running)
    assert await kit.text(running) == "done"
    plain = await Kit((PLAN,), WORKERS).serve()
    assert (record.cost_nano, len(record.steps)) == (plain.record.cost_nano, 3)
    assert store.saves == 1 + 2 * 4  # at the start; before and after a plan and three steps


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("nth", range(9))
async def test_another_gateway_goes_on_from_each_save(nth: int, saved: bool) -> None:
    kit = Kit((PLAN,), WORKERS)
    async with died(kit, store := Dying(nth, saved=saved)):
        assert store.dead.is_set()
        before = calls_to_worker(kit)
        plain = (await Kit((PLAN,), WORKERS).serve()).record
        running, _ = await begun(kit, store, "second")
        record = await record_at_end(kit, running)
    assert await kit.text(running) == "done"
    assert [step.worker for step in record.steps] == ["alpha", "beta", "gamma"]
    assert [step.status for step in record.steps] == ["done"] * 3
    # a call that had left, and whose reply was not saved, is made again; no other one is
    lost_reply = nth in (4, 6, 8) and not saved
    assert calls_to_worker(kit) == before + ["alpha", "beta", "gamma"][len(before) - lost_reply :]
    assert len(kit.conductor.calls) == 2 if nth == 2 and not saved else 1
    uncertain = [step for step in record.steps if any(one.error == UNCERTAIN for one in step.attempts)]
    maybe_left = saved if nth in (3, 5, 7) else lost_reply
    assert len(uncertain) == maybe_left
    if not uncertain and nth not in (1, 2):
        assert record.cost_nano == plain.cost_nano
    if uncertain:  # it is charged for both: the worst case of the first, the tokens of the second
        step = uncertain[0]
        plain_step = plain.steps[step.step]
        dispatched = [event.payload for event in kit.journal.of_kind("dispatch")]
        bound = next((one["bound_nano"] for one in dispatched if one["step_id"] == f"1.{step.step}"), step.cost_nano)
        assert step.cost_nano == bound + plain_step.cost_nano
        assert record.cost_nano == plain.cost_nano + bound


def tool(**more: Any) -> WorkerSpec:
    return WorkerSpec(name="mail", handle="heron", kind="tool", url="http://127.0.0.1:1/mail", price=Price(), **more)


async def test_a_step_that_may_have_had_side_effects_is_not_repeated() -> None:
    script = plan(("heron", "send it", []), ("grove", None, [0]))
    kit = Kit((script,), {**WORKERS, "mail": Says("sent")}, pools=pool_file(tool()))
    async with died(kit, store := Dying(4, saved=False)):
        assert calls_to_worker(kit) == ["mail"]
        running, _ = await begun(kit, store, "second")
        record = await record_at_end(kit, running)
    assert calls_to_worker(kit) == ["mail", "gamma"]
    assert [(step.status, step.error) for step in record.steps] == [("failed", UNCERTAIN), ("done", None)]
    assert await kit.text(running) == "done"


async def test_child_loops_go_on_too_and_are_logged_once() -> None:
    inner = plan(("atlas", "a", []), ("birch", None, [0]))
    outer = plan(("echo", "inside", []), ("grove", None, [0]))

    def script(call: ConductorCall) -> str:
        return inner if "inside" in str(call.messages) else outer

    full = Kit(script, WORKERS)
    costs = (await full.serve()).record.cost_nano
    for nth in range(2, 15):
        kit = Kit(script, WORKERS)
        async with died(kit, store := Dying(nth, saved=True)):
            if not store.dead.is_set():
                assert nth == 12
                break
            running, _ = await begun(kit, store, "second")
            record = await record_at_end(kit, running)
        children = [event for event in kit.journal.of_kind("rollout") if event.payload["parent_id"] is not None]
        assert [child.payload["id"] for child in children] == [record.steps[0].child_rollout_id]
        assert [step["worker"] for step in children[0].payload["steps"]] == ["alpha", "beta"]
        assert record.cost_nano >= costs


async def test_a_cancelled_one_makes_no_further_call_and_is_charged_for_the_others() -> None:
    kit = Kit((PLAN,), WORKERS)
    async with died(kit, store := Dying(5, saved=True)) as response_id:
        await store.cancel(KEY.public_id, response_id)
        running, _ = await begun(kit, store, "second")
        record = await record_at_end(kit, running)
        assert await store.end(response_id, "second", "done")
    assert calls_to_worker(kit) == ["alpha"]
    assert record.steps[0].status == "done"
    ended = await store.get(KEY.public_id, response_id)
    assert ended is not None
    assert ended.status == "cancelled"


class NoServer:
    """Serves nothing: the key of the request was revoked."""

    async def begin(self, who: Principal, request: BackgroundRequest, claim: Any) -> Any:
        raise Forbidden("the key was revoked", code="key_revoked")


@pytest.mark.parametrize(("nth", "saved"), [(1, True), (3, True), (6, True), (7, True)])
async def test_one_that_cannot_go_on_is_charged_what_was_spent_and_what_was_under_way(nth: int, saved: bool) -> None:
    kit = Kit((PLAN,), WORKERS)
    async with died(kit, store := Dying(nth, saved=saved)) as response_id:
        state = store.rows[response_id].request.state
        assert state is not None
        settle = UnfinishedHolds(kit.budgets, kit.journal, CLOCK).settle
        claim_of = partial(Checkpoints, clock=CLOCK)
        store.rows[response_id].lease_until_s = 0.0
        runner = BackgroundRunner(
            *(store, NoServer(), claim_of, owner_of, CLOCK, settle), most=1, lease_s=60.0, poll_s=0.01
        )
        task = asyncio.create_task(runner.run())

        async def has_ended() -> bool:
            request = await store.get(KEY.public_id, response_id)
            return request is not None and request.status == "failed"

        await until(has_ended)
        await runner.drain(1.0)
        await task
    charged = state["meter"]["spent"] + state["meter"]["drawn"]
    worst = sum(event.payload["bound_nano"] for event in kit.journal.of_kind("dispatch"))
    [settled] = kit.journal.of_kind("settle")
    assert settled.payload["charged_nano"] == charged == await kit.posted_nano()
    assert settled.payload["state"] == ("uncertain" if state["meter"]["drawn"] else "posted")
    assert await kit.open_nano() == 0
    assert charged < worst or nth == 1  # of all calls together, which recovery would charge


async def test_one_that_cannot_begin_costs_nothing() -> None:
    kit, store = Kit((PLAN,), WORKERS), FakeBackground()
    await UnfinishedHolds(kit.budgets, kit.journal, CLOCK).settle(store.rows[await queued(store)].request)
    assert kit.journal.of_kind("settle") == []


async def test_one_out_of_time_makes_no_further_call() -> None:
    kit, store = Kit((PLAN,), WORKERS, caps=Caps(wall_s=60.0)), FakeBackground()
    await queued(store, expires_us=-1)
    running, _ = await begun(kit, store, "first")
    record = await record_at_end(kit, running)
    assert (calls_to_worker(kit), record.status) == ([], "failed")
    assert running.error is not None
    assert running.error.code == "deadline_exceeded"


async def test_a_gateway_that_lost_its_claim_sends_and_settles_nothing() -> None:
    kit = Kit((PLAN,), {**WORKERS, "alpha": Says("A", delay_s=0.2)})
    store = FakeBackground()
    await queued(store)
    stale, checkpoints = await begun(kit, store, "first")
    await until(lambda: calls_to_worker(kit) == ["alpha"])
    running, _ = await begun(kit, store, "second")
    await asyncio.wait_for(stale.finished.wait(), BOUND_S)
    assert checkpoints.abandoned
    await record_at_end(kit, running)
    assert calls_to_worker(kit) == ["alpha", "alpha", "beta", "gamma"]


async def test_a_gateway_that_stops_gives_its_request_back() -> None:
    kit = Kit((PLAN,), {**WORKERS, "beta": [Says("B", delay_s=30.0), Says("B")]})
    store = FakeBackground()
    await queued(store)
    first, checkpoints = await begun(kit, store, "first")
    await until(lambda: calls_to_worker(kit) == ["alpha", "beta"])
    checkpoints.suspending = True
    first.cancel()
    await asyncio.wait_for(first.finished.wait(), BOUND_S)
    assert kit.journal.of_kind("settle") == []
    await store.release("first")
    running, _ = await begun(kit, store, "second")
    await record_at_end(kit, running)
    assert calls_to_worker(kit) == ["alpha", "beta", "beta", "gamma"]


async def test_workers_that_are_gone_end_it_by_name() -> None:
    kit = Kit((PLAN,), WORKERS)
    async with died(kit, store := Dying(5, saved=True)):
        kit.catalog.adopt(pool_file().model_copy(update={"pools": {"default": ("beta", "gamma", "vote", "self")}}))
        with pytest.raises(Exception, match="alpha left the pool"):
            await begun(kit, store, "second")


def test_only_what_the_pool_file_vouches_for_is_repeated() -> None:
    server = {"name": "desk", "handle": "heron", "kind": "mcp", "url": "http://127.0.0.1:1/mcp", "price": Price()}
    for tools, repeats in (
        ({"look": {"side_effects": False}, "set": {"idempotent": True}}, True),
        ({"look": {"side_effects": False}, "send": {}}, False),
    ):
        assert is_repeatable(WorkerSpec.model_validate({**server, "tools": tools})) is repeats
    assert is_repeatable(pool_file().worker("vote"))
    assert not is_repeatable(tool())
