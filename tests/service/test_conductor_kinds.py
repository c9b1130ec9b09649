"""Who plans: a worker of the pool as the conductor, and `baton` while a pool is new."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.adapters.upstream.conductor_worker import Structured, WorkerConductor
from gateway.core.loop.experience import RuleWeights
from gateway.core.money.amounts import Usage
from gateway.errors import ConductorError, Unavailable, UpstreamError, UpstreamTimeout
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.routers import AutoPlanner, RulePlanner
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd, Sampling
from tests.fakes.workers import FakeWorkers, Says
from tests.kit import PRICE, Kit, model_worker, plan

PLANNER = model_worker("planner", "sage")
CALL = ConductorCall([{"role": "user", "content": "plan this"}], {"type": "object"}, Sampling(tokens_max=50), 2.0)


async def decoded(conductor: WorkerConductor, call: ConductorCall = CALL) -> tuple[str, ConductorEnd]:
    text, end = "", None
    async for item in conductor.decode(call):
        if isinstance(item, ConductorChunk):
            text += item.text
        else:
            end = item
    assert end is not None
    return text, end


async def test_a_workers_words_are_the_plan_and_its_usage_is_planned_with() -> None:
    workers = FakeWorkers({"planner": Says(plan(("atlas", None, [])), usage=Usage(120, 14))})
    text, end = await decoded(WorkerConductor(workers, PLANNER, "none"))
    assert text == plan(("atlas", None, []))
    assert (end.model, end.usage) == ("planner", Usage(120, 14))
    body = workers.calls[0].body
    assert (body["max_tokens"], body["temperature"]) == (50, 0.0)
    assert "response_format" not in body


@pytest.mark.parametrize(("structured", "kind"), [("json_schema", "json_schema"), ("json_object", "json_object")])
async def test_the_schema_is_asked_for_as_the_server_takes_it(structured: Structured, kind: str) -> None:
    workers = FakeWorkers({"planner": Says("{}")})
    await decoded(WorkerConductor(workers, PLANNER, structured))
    sent: dict[str, Any] = workers.calls[0].body["response_format"]
    assert sent["type"] == kind
    assert ("json_schema" in sent) == (kind == "json_schema")


@pytest.mark.parametrize(
    ("fault", "reason", "billable"),
    [
        (UpstreamTimeout("late"), "slow", True),
        (UpstreamError("boom", upstream_status=500), "down", False),
        (UpstreamError("refused", dispatched=False), "down", False),
        (UpstreamError("hung up"), "down", True),
        (Says("one two three", dies_after=3), "down", True),
        (Says("never", delay_s=5), "slow", True),
    ],
)
async def test_whatever_is_wrong_with_the_worker_is_a_conductor_error(fault: Any, reason: str, billable: bool) -> None:
    conductor = WorkerConductor(FakeWorkers({"planner": fault}), PLANNER, "none")
    with pytest.raises(ConductorError) as failed:
        await decoded(conductor, replace(CALL, timeout_s=0.05))
    assert (failed.value.reason, failed.value.billable) == (reason, billable)
    assert await conductor.ready()


async def test_a_pool_is_the_rules_until_enough_of_it_was_judged() -> None:
    judged, away = 3, False

    async def count(pool: str) -> int:
        if away:
            raise Unavailable("no database")
        return judged

    kit = Kit()
    rule = RulePlanner(RuleWeights())
    learned = ConductorPlanner(kit.conductor, ConductorSettings("full", PRICE, 5.0))
    kit.catalog._planners["baton"] = (AutoPlanner(rule, learned, count, outcomes_min=4), rule)
    assert (await kit.serve()).record.policy_used == "rule"
    judged = 4
    away = True
    assert (await kit.serve()).record.policy_used == "rule"  # nobody can say: the rule needs nothing
    away = False
    assert (await kit.serve()).record.policy_used == "conductor"
    judged = 0
    assert (await kit.serve()).record.policy_used == "conductor"  # trusted once, trusted since
    assert await kit.open_nano() == 0


async def test_a_conductor_that_was_never_reached_costs_nothing() -> None:
    kit = Kit()
    kit.conductor.down = True
    record = (await kit.serve()).record
    assert record.fallback == "conductor_down"
    assert record.rounds[0].cost_nano == 0
    assert await kit.posted_nano() == record.steps[0].cost_nano


async def test_a_conductor_that_broke_off_is_paid_for() -> None:
    kit = Kit((ConductorError("down", "hung up"),))
    record = (await kit.serve()).record
    assert record.rounds[0].cost_nano > 0
