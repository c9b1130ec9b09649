"""A background response over a whole gateway that is killed at each step of its plan, and goes on with another."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from sqlalchemy import text

from tests.faults.checker import Evidence, check
from tests.faults.client import Client
from tests.faults.site import INPUT_NANO, OUTPUT_NANO, Gateway, Site
from tests.faults.test_batches import rollout, sdk_of
from tests.faults.upstream import Bill, Upstream, chunk, usage
from tests.faults.witness import connected, look
from tests.upstreams.server import EVENTS, Reply, event
from tests.waiting import BOUND_S, until

STEPS = ("gather the facts", "check the facts")
CALLS = ("plan", *STEPS, "answer")
ENDED = ("completed", "failed", "cancelled", "incomplete")
BUDGET_NANO = 4_000_000_000
OUT_OF_TIME = "UPDATE background_requests SET expires_at = now()"
pytestmark = pytest.mark.timeout(300)


def call_of(body: dict[str, Any]) -> str:
    """Which call of the plan a worker's request is."""
    if "response_format" in body:
        return "plan"
    return next((step for step in STEPS if step in json.dumps(body["messages"][-1])), "answer")


def case_of(body: dict[str, Any]) -> str:
    """The response that a worker's request is for: its question and its tasks name it."""
    text = json.dumps(body)
    return next(case for case in map(case_named, range(len(CALLS))) if case in text)


def case_named(number: int) -> str:
    return f"case-{number}"


def plan_of(case: str) -> dict[str, Any]:
    return {
        "steps": [
            {"worker": "atlas", "task": f"{STEPS[0]} of {case}", "see": []},
            {"worker": "birch", "task": f"{STEPS[1]} of {case}", "see": [0]},
            {"worker": "atlas", "task": None, "see": [0, 1]},
        ]
    }


class Planned:
    """A worker that plans and answers one response for each call in `held`, or one if there is none. It does not answer
    the call that is held of a response before `gate` is set."""

    def __init__(self, *held: str) -> None:
        self.held = {case_named(number): call for number, call in enumerate(held)}
        self.cases = tuple(self.held) or (case_named(0),)
        self.reached = {case: asyncio.Event() for case in self.held}
        self.gate = asyncio.Event()

    async def __call__(self, upstream: Upstream, bill: Bill) -> Reply:
        case, call = case_of(bill.body), call_of(bill.body)
        if call == self.held.get(case) and not self.gate.is_set():
            self.reached[case].set()
            await self.gate.wait()
        bill.completion_tokens = 6
        return Reply(headers=EVENTS, pieces=_pieces(json.dumps(plan_of(case)) if call == "plan" else call, bill))


async def _pieces(text: str, bill: Bill) -> AsyncGenerator[bytes, None]:
    yield event(chunk({"content": text}))
    yield event(chunk({}, "stop")) + event({**chunk({}), "choices": [], "usage": usage(bill)}) + event("[DONE]")


async def ended(sdk: openai.AsyncOpenAI, response_id: str) -> Response:
    seen: list[Response] = []

    async def has_ended() -> bool:
        seen.append(await sdk.responses.retrieve(response_id))
        return seen[-1].status in ENDED

    await until(has_ended, 2 * BOUND_S)
    return seen[-1]


def calls_to_worker(here: Site, case: str = case_named(0)) -> Counter[str]:
    return Counter(call_of(bill.body) for bill in here.upstream.bills if case_of(bill.body) == case)


async def begun(here: Site, worker: Planned) -> tuple[Gateway, list[str]]:
    """A gateway that makes the worker's responses, whose held calls have reached the worker; and their ids."""
    here.settings |= {"BATON_BATCH_LEASE_S": "1"}
    here.upstream.behave = worker
    gateway = await here.gateway()
    await here.new_key(BUDGET_NANO)
    ids = []
    async with sdk_of(here, gateway) as sdk:
        for case in worker.cases:
            made = await sdk.responses.create(model="baton", input=f"What holds for {case}?", background=True)
            assert (made.status, made.background, made.output) == ("queued", True, [])
            ids.append(made.id)
        for case, response_id in zip(worker.held, ids, strict=False):
            await asyncio.wait_for(worker.reached[case].wait(), BOUND_S)
            assert (await sdk.responses.retrieve(response_id)).status == "in_progress"
    return gateway, ids


async def settled(here: Site, *response_ids: str) -> list[Any]:
    """The rollouts of the responses, once every invariant of money and log holds. Gateways that were killed are started
    again, for their journals are shipped then."""
    for dead in (one for one in here.gateways if not one.alive):
        dead.start()
        await dead.serving()

    async def all_shipped() -> bool:
        return len((await look(here)).of_kind("dispatched")) >= len(here.upstream.bills)

    await until(all_shipped, 2 * BOUND_S)
    evidence = await check(here, [Client(here)], limit_nano=BUDGET_NANO)
    return [await rollout_of(here, evidence, response_id) for response_id in response_ids]


async def rollout_of(here: Site, evidence: Evidence, response_id: str) -> Any:
    """The rollout of a response, which has one hold with one end."""
    living = next(one for one in here.gateways if one.alive)
    tree = await rollout(here, living, response_id.removeprefix("resp_"))
    own = [row for row in evidence.ledger if row["hold_id"] == tree["id"]]
    ends = [row for row in own if row["kind"] in ("posted", "uncertain", "voided")]
    assert any(row["kind"] == "hold" for row in own)  # a row for each size that it grew to
    assert len(ends) == 1
    assert ends[0]["amount_nano"] == tree["cost_nano"] == cost_of(tree)
    return tree


def cost_of(tree: Mapping[str, Any]) -> int:
    """The nano-dollars of the parts of a rollout."""
    return sum(part["cost_nano"] for part in (*tree["rounds"], *tree["steps"]))


@pytest.mark.long
@pytest.mark.parametrize("heir", ["itself", "another"])
async def test_another_gateway_goes_on_from_each_step(here: Site, heir: str) -> None:
    """Four responses at a time, each with another of its calls under way, when their gateway is killed."""
    worker = Planned(*CALLS)
    gateway, ids = await begun(here, worker)
    living = gateway if heir == "itself" else await here.gateway()
    await gateway.kill()
    worker.gate.set()
    if living is gateway:
        gateway.start()
        await gateway.serving()
    async with sdk_of(here, living) as sdk:
        for response_id in ids:
            done = await ended(sdk, response_id)
            assert (done.status, done.output_text, done.error) == ("completed", "answer", None)
    rollouts = await settled(here, *ids)
    for (case, held), tree in zip(worker.held.items(), rollouts, strict=True):
        assert calls_to_worker(here, case) == Counter([*CALLS, held])  # the call that was under way, and no other one
        sent = [row for row in tree["ledger"] if row["kind"] == "dispatched"]
        sent = [row for row in sent if row["detail"]["step_id"] == step_id(held)]
        assert [row["detail"]["attempt"] for row in sent] == [1, 2]
        billed = [one for one in here.upstream.bills if one.ended == "done" and case_of(one.body) == case]
        once = sum(one.nano(INPUT_NANO, OUTPUT_NANO) for one in billed)
        assert (len(billed), tree["cost_nano"]) == (len(CALLS), once + sent[0]["amount_nano"])


def step_id(call: str) -> str:
    return "plan.1" if call == "plan" else f"1.{CALLS.index(call) - 1}"


async def test_a_response_in_the_background_is_read_back_streamed_and_deleted(here: Site) -> None:
    gateway, [response_id] = await begun(here, Planned())
    async with sdk_of(here, gateway) as sdk:
        done = await ended(sdk, response_id)
        assert done.output_text == "answer"
        stream = await sdk.responses.retrieve(response_id, stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        assert events[-1].response == done
        rest = await sdk.responses.retrieve(response_id, stream=True, starting_after=3)
        assert [event async for event in rest] == events[4:]
        live = await sdk.responses.create(model="baton", input="And again, case-0?", background=True, stream=True)
        kinds = [event.type async for event in live]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        follow = await sdk.responses.create(model="baton", input="So?", previous_response_id=response_id)
        assert follow.output_text == "answer"
        await sdk.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(response_id)
    assert calls_to_worker(here)["plan"] == 2  # the turn that follows goes back to its worker


async def test_a_cancelled_response_makes_no_further_call(here: Site) -> None:
    worker = Planned(STEPS[1])
    gateway, [response_id] = await begun(here, worker)
    async with sdk_of(here, gateway) as sdk:
        assert (await sdk.responses.cancel(response_id)).status == "cancelled"
        await until(lambda: no_longer_open(here, gateway))
        assert (await sdk.responses.retrieve(response_id)).status == "cancelled"
        assert (await sdk.responses.cancel(response_id)).status == "cancelled"
        worker.gate.set()
    [tree] = await settled(here, response_id)
    assert tree["status"] == "aborted"
    assert calls_to_worker(here) == Counter(CALLS[:3])


async def no_longer_open(here: Site, gateway: Gateway) -> bool:
    return await here.metric(gateway, "baton_background") == 0


@pytest.mark.long
async def test_a_cancelled_response_of_a_dead_gateway_ends_too(here: Site) -> None:
    worker = Planned(STEPS[1])
    gateway, [response_id] = await begun(here, worker)
    heir = await here.gateway()
    async with sdk_of(here, heir) as sdk:
        await gateway.kill()
        assert (await sdk.responses.cancel(response_id)).status == "cancelled"
        worker.gate.set()
        await settled(here, response_id)
        assert (await sdk.responses.retrieve(response_id)).status == "cancelled"
    assert calls_to_worker(here) == Counter(CALLS[:3])


@pytest.mark.long
async def test_one_out_of_time_ends_without_a_further_call(here: Site) -> None:
    worker = Planned(STEPS[0])
    gateway, [response_id] = await begun(here, worker)
    await gateway.kill()
    async with connected(here) as connection, connection.begin():
        await connection.execute(text(OUT_OF_TIME))
    worker.gate.set()
    gateway.start()
    await gateway.serving()
    async with sdk_of(here, gateway) as sdk:
        assert (await ended(sdk, response_id)).status == "failed"
    assert calls_to_worker(here) == Counter(CALLS[:2])
    await settled(here, response_id)


@pytest.mark.long
async def test_a_gateway_that_stops_hands_its_responses_over(here: Site) -> None:
    here.settings |= {"BATON_DRAIN_S": "0.5"}
    worker = Planned(STEPS[1])
    gateway, [response_id] = await begun(here, worker)
    heir = await here.gateway()
    await gateway.stop()
    worker.gate.set()
    async with sdk_of(here, heir) as sdk:
        done = await ended(sdk, response_id)
        assert (done.status, done.output_text) == ("completed", "answer")
    assert calls_to_worker(here) == Counter(CALLS) + Counter([STEPS[1]])
    await settled(here, response_id)
