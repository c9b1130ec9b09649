"""Who plans: a worker of the pool as the conductor, and `baton` while a pool is new."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.adapters.upstream.conductor.worker import Structured, WorkerConductor
from gateway.config import settings as config
from gateway.core.money.amounts import Usage
from gateway.core.policies.earning import Bar, Rewards
from gateway.errors import ConductorError, Unavailable, UpstreamError, UpstreamTimeout
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.routers import AutoPlanner, Earnings, Kind, RulePlanner
from gateway.service.loop.state import Planner
from gateway.service.ports.request import ConductorCall, ConductorChunk, ConductorEnd, Sampling
from gateway.service.request.catalog import Shares
from gateway.wiring.conductor import planning_of
from tests.fakes.workers import FakeWorkers, Says
from tests.kit import KEY, PRICE, Kit, ask, model_worker, plan
from tests.upstreams.server import Reply, Request, Server, event, event_stream

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


def rewards(planner: str, n: int, right: int, task_type: str | None = None, org: str = KEY.org) -> Rewards:
    return Rewards("default", task_type, planner, n, float(right), float(right), org)


def auto(kit: Kit, earnings: Container[Kind], trained: Container[str] = ()) -> tuple[AutoPlanner, Planner, Planner]:
    """`baton` of that kit; the rule and the conductor under it."""
    rule = RulePlanner(draws=False)
    learned = ConductorPlanner(kit.conductor, ConductorSettings("full", PRICE, 5.0))
    planner = AutoPlanner(rule, learned, earnings, trained)
    kit.catalog._planners["baton"] = (planner, rule)
    return planner, rule, learned


async def test_a_kind_of_work_is_the_rules_until_the_conductor_has_earned_it() -> None:
    judged: list[Rewards] = []
    away = False

    async def read() -> Sequence[Rewards]:
        if away:
            raise Unavailable("no database")
        return judged

    kit = Kit()
    earnings = Earnings(read, Bar(outcomes_min=40))
    auto(kit, earnings)

    async def planner(task_type: str | None = None) -> str:
        await earnings.look()
        body = ask() if task_type is None else ask(metadata={"task_type": task_type})
        return (await kit.serve(body)).record.policy_used

    assert await planner() == "rule"
    judged = [rewards("conductor", 39, 39), rewards("rule", 400, 200)]
    assert await planner() == "rule"  # too little is known
    judged = [rewards("conductor", 40, 39), rewards("rule", 400, 200)]
    assert await planner() == "conductor"
    assert await planner("maths") == "rule"  # another kind has earned nothing
    judged = [*judged, rewards("conductor", 400, 0, org="other"), rewards("rule", 400, 400, org="other")]
    assert await planner() == "conductor"  # whatever another organisation reports
    judged = [*judged, rewards("conductor", 40, 22, "maths"), rewards("rule", 400, 200, "maths")]
    assert await planner("maths") == "rule"  # 0.55 against 0.5: not surely better
    away = True
    with pytest.raises(Unavailable):
        await earnings.look()
    away = False
    assert (KEY.org, "default", None) in earnings  # the last reading stands
    judged = [rewards("conductor", 60, 31), rewards("rule", 400, 200)]
    assert await planner() == "conductor"  # in charge as long as its mean is no lower
    judged = [rewards("conductor", 60, 29), rewards("rule", 400, 200)]
    assert await planner() == "rule"
    assert await kit.open_nano() == 0


def test_a_trial_goes_to_the_planner_that_is_not_in_charge() -> None:
    planner, rule, learned = auto(Kit(), {("acme", "default", "maths")}, {"arena"})
    assert planner.choose("acme", "default", None, trial=False) is rule
    assert planner.choose("acme", "default", None, trial=True) is learned
    assert planner.choose("acme", "default", "maths", trial=False) is learned
    assert planner.choose("acme", "default", "maths", trial=True) is rule
    assert planner.choose("other", "default", "maths", trial=False) is rule  # which has not earned it
    assert planner.choose("acme", "arena", None, trial=True) is learned  # its weights were trained for this pool


async def test_no_request_that_may_not_train_is_a_trial() -> None:
    kit = Kit()
    kit.completer._admission._policies = replace(kit.completer._policies, shares=Shares(0.0, trial=1.0))
    auto(kit, ())
    assert (await kit.serve()).record.policy_used == "conductor"
    assert (await kit.serve(ask(metadata={"train": "false"}))).record.policy_used == "rule"


async def test_the_rule_under_auto_plans_once() -> None:
    kit = Kit(rounds=3)
    auto(kit, ())
    assert [one.planner for one in (await kit.serve()).record.rounds] == ["rule"]


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


async def test_the_params_of_the_pool_file_are_sent_with_a_plan() -> None:
    thinks = {"reasoning_effort": "low", "max_completion_tokens": 8192, "temperature": 1}
    spec = PLANNER.model_copy(update={"params": thinks})
    workers = FakeWorkers({"planner": Says("{}")})
    await decoded(WorkerConductor(workers, spec, "none"))
    sent = {**spec.params, **workers.calls[0].body}
    assert (sent["reasoning_effort"], sent["temperature"], sent["max_completion_tokens"]) == ("low", 1, 50)
    assert "max_tokens" not in sent
    bodies: list[dict[str, Any]] = []

    async def reply(request: Request) -> Reply:
        bodies.append(request.body)
        return event_stream(
            [event({"choices": [{"delta": {"content": "{}"}, "finish_reason": "stop"}]}), event("[DONE]")]
        )

    async with Server(reply) as server:
        more = {"params": {**thinks, "model": "other"}, "cannot": ("logprobs", "stream_options")}
        conductor = HttpConductor(f"{server.url}/v1", "m", structured="none", **more)  # type: ignore[arg-type]
        async for _ in conductor.decode(CALL):
            pass
        await conductor.close()
    (body,) = bodies
    assert (body["model"], body["reasoning_effort"], body["temperature"]) == ("m", "low", 1)
    assert body["max_completion_tokens"] == 50
    assert {"max_tokens", "logprobs", "stream_options"}.isdisjoint(body)


@pytest.mark.parametrize(
    ("given", "profile", "spec", "budget"),
    [
        ({}, "compact", None, (10.0, 512)),
        ({}, "guided", None, (60.0, 4096)),
        ({}, "guided", model_worker("p", "sage", output_tokens_max=900, timeout_s=20), (20.0, 900)),
        ({"plan_tokens_max": 77, "conductor_timeout_s": 3}, "guided", None, (3.0, 77)),
    ],
)
def test_each_planner_has_a_budget_of_tokens_and_time(given: Any, profile: Any, spec: Any, budget: Any) -> None:
    planning = planning_of(config.load(**given), profile, PRICE, spec=spec)
    assert (planning.timeout_s, planning.tokens_max) == budget
