"""The loop over the shipped fakes: graphs, see gating, early start, child loops, caps, fallback, cancellation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.core.loop.caps import Caps, Meter
from gateway.core.money.amounts import Usage
from gateway.core.pool.workers import JUDGE_URL, WorkerSpec
from gateway.errors import (
    BatonError,
    BudgetExceeded,
    CapReached,
    ConductorError,
    DeadlineExceeded,
    NotFound,
    RateLimited,
    SpoolFull,
    Unavailable,
    UpstreamError,
    UpstreamProtocol,
    UpstreamRefused,
)
from gateway.service.ports.request import WorkerCall
from gateway.service.request import complete
from gateway.service.request.running import ProgressNote, reply_headers
from tests.fakes.workers import Says
from tests.kit import HANDLES, KEY, PRICE, Kit, ask, items_of, plan, pool_file
from tests.waiting import BOUND_S, until

CANARIES = {"alpha": "canary-one", "beta": "canary-two", "gamma": "canary-three"}


async def test_one_step_answers_and_leaves_no_hold_open() -> None:
    kit = Kit(workers={"alpha": Says("42", usage=Usage(100, 50))})
    running = await kit.serve()
    assert await kit.text(running) == "42"
    record = running.record
    assert (record.status, record.policy_used, record.policy_version) == ("done", "conductor", "conductor@1")
    assert record.steps[0].cost_nano == 100 * 1000 + 50 * 2000  # $1 and $2 a million
    assert await kit.posted_nano() == record.cost_nano > record.steps[0].cost_nano  # planning is paid for too
    assert await kit.open_nano() == 0


async def test_the_header_of_baton_says_how_far_the_next_rung_is_and_can_still_be_read() -> None:
    kit = Kit(standing=lambda pool, _org: f"outcomes=3/24 of {pool}"[:13])
    planned = (await kit.serve()).headers()["x-baton-policy"]
    assert planned == "conductor; outcomes=3/24 (conductor@1)"
    assert planned.partition(" (")[2].rstrip(")") == "conductor@1"
    assert (await kit.serve(ask(model="baton/rule"))).headers()["x-baton-policy"] == "rule"
    assert (await kit.serve(ask(model="alpha"))).headers()["x-baton-policy"] == "fixed:alpha"
    down = Kit((ConductorError("down", "x"),), standing=lambda pool, _org: "outcomes=3/24")
    assert (await down.serve()).headers()["x-baton-policy"] == "rule; outcomes=3/24"


async def test_two_steps_overlap_and_the_third_sees_both() -> None:
    script = plan(("atlas", None, []), ("birch", None, []), ("grove", "Choose the better one.", [0, 1]))
    slow = {name: Says(text, delay_s=0.1) for name, text in CANARIES.items()}
    kit = Kit((script,), slow)
    running = await kit.serve()
    first, second, third = running.record.steps
    assert first.started_us < second.finished_us
    assert second.started_us < first.finished_us
    assert third.started_us >= max(first.finished_us, second.finished_us)
    seen = json.dumps(third.messages)
    assert "canary-one" in seen
    assert "canary-two" in seen
    assert await kit.text(running) == "canary-three"


@pytest.mark.parametrize(("see", "visible"), [([], set()), ([0], {"one"}), ([1], {"two"}), ("all", {"one", "two"})])
async def test_a_step_sees_exactly_what_its_plan_says(see: list[int] | str, visible: set[str]) -> None:
    script = plan(("atlas", "first", []), ("birch", "second", []), ("grove", "third", see))
    kit = Kit((script,), {name: Says(text) for name, text in CANARIES.items()})
    running = await kit.serve()
    sent = json.dumps(kit.workers.calls[-1].body)
    assert {name for name in ("one", "two") if f"canary-{name}" in sent} == visible
    assert {handle for handle, _, _ in kit.workers.calls[-1].saw} == {
        {"one": "atlas", "two": "birch"}[v] for v in visible
    }
    assert running.record.steps[2].see == ([0, 1] if see == "all" else see)


async def test_a_step_with_a_task_of_its_own_sees_the_images_its_worker_takes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    question = [{"role": "user", "content": [{"type": "text", "text": "What does the sign say?"}, image]}]
    kit = Kit((plan(("atlas", "Read the sign.", []), ("birch", None, [0])),))
    await kit.serve(ask() | {"messages": question})
    (shown, task) = kit.workers.calls[0].body["messages"]
    assert (shown["content"][1:], task["content"]) == ([image], "Read the sign.")


@pytest.mark.parametrize(("same", "flag"), [("true", "agrees:0"), ("false", None)])
async def test_a_judge_decides_whether_two_essays_agree(same: str, flag: str | None) -> None:
    judge = WorkerSpec(
        name="judge", handle="umpire", kind="tool", url=JUDGE_URL, params={"model": "alpha"}, price=PRICE
    )
    essays = [f"{word} make a street worth walking along, and everybody knows it well." for word in ("Trees", "Birds")]
    said = {"judge": Says(f'{{"same": {same}, "by": "builtin:judge@1"}}')}
    said |= {name: Says(text) for name, text in zip(("alpha", "beta"), essays, strict=True)}
    first = plan(("atlas", None, []), ("birch", None, []), ("umpire", None, [0, 1]))
    kit = Kit(
        (
            first,
            plan(("grove", None, [])),
        ),
        said,
        rounds=2,
        pools=pool_file(judge),
    )
    running = await kit.serve()
    (line,) = [line for line in str(running.record.rounds[1].messages).split("\\n") if line.startswith("1 birch")]
    assert ("agreement:unknown" in line, "agrees:0" in line) == (False, flag is not None)


async def test_a_step_starts_while_the_plan_is_still_being_written() -> None:
    script = plan(("atlas", None, []), ("birch", "x" * 200, []))
    kit = Kit((script,), gap_s=0.005)
    running = await kit.serve()
    planned, first = running.record.rounds[0], running.record.steps[0]
    assert first.finished_us < planned.finished_us


async def test_only_the_last_step_gets_the_clients_parameters() -> None:
    kit = Kit((plan(("atlas", None, []), ("birch", None, [0])),))
    tools = [{"type": "function", "function": {"name": "f"}}]
    await kit.serve(ask(seed=7, tools=tools, max_completion_tokens=9))
    first, last = (dict(call.body) for call in kit.workers.calls)
    assert "seed" not in first
    assert "tools" not in first
    assert (last["seed"], last["max_completion_tokens"]) == (7, 9)


async def test_the_last_steps_stream_is_the_reply() -> None:
    kit = Kit((plan(("atlas", None, []), ("birch", None, [0])),), {"beta": Says("one two three", piece_delay_s=0.01)})
    running = await kit.start(ask(stream=True))
    pieces = [said async for said in items_of(running)]
    choices = [choice for said in pieces if not isinstance(said, ProgressNote) for choice in said]
    words = [choice["delta"].get("content") for choice in choices]
    assert "".join(filter(None, words)) == "one two three"
    assert running.record.steps[1].first_byte_us is not None
    assert await kit.text(running) == "one two three"


async def test_a_child_loop_runs_one_level_deeper_on_the_same_money() -> None:
    parent = plan(("echo", "Work out the first half.", []), ("atlas", None, [0]))
    child = plan(("birch", None, []))
    kit = Kit((parent, child), {"beta": Says("half")})
    running = await kit.serve()
    step = running.record.steps[0]
    assert step.child_rollout_id is not None
    child_log = next(e.payload for e in kit.journal.of_kind("rollout") if e.payload["id"] == step.child_rollout_id)
    assert (child_log["depth"], child_log["parent_id"], child_log["status"]) == (1, running.record.id, "done")
    assert "half" in json.dumps(running.record.steps[1].messages)
    assert running.record.cost_nano == await kit.posted_nano()


async def test_the_depth_cap_ends_child_loops_with_a_flag() -> None:
    kit = Kit((plan(("echo", None, [])),), caps=Caps(depth=1, wall_s=60.0))  # every loop asks for another
    running = await kit.serve()
    assert running.record.status == "done"
    children = [e.payload for e in kit.journal.of_kind("rollout") if e.payload["depth"]]
    assert [child["depth"] for child in children] == [1]
    assert children[0]["capped"] == "depth"
    assert children[0]["fallback"] == "conductor_depth_cap"
    assert await kit.open_nano() == 0


FIVE_LOOPS = plan(*(("echo", f"Part {n}.", []) for n in range(5)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "limits", [{"calls": 3}, {"calls": 1}, {"cost_nano": 30_000_000}, {"tokens": 60_000}, {"cost_nano": 60_000_000}]
)
async def test_a_plan_that_spends_all_it_may_on_loops_denies_no_answer(limits: dict[str, int], stream: bool) -> None:
    """As a text that was injected makes it: every loop asks for five more."""
    kit = Kit((FIVE_LOOPS,), dict.fromkeys(HANDLES, Says("fine")), caps=Caps(depth=2, wall_s=60.0, **limits))
    running = await kit.serve(ask(stream=stream))
    assert running.error is None
    assert await kit.text(running) == "fine"
    assert running.record.status == "done"
    assert running.record.capped
    assert await kit.open_nano() == 0
    assert running.record.cost_nano == await kit.posted_nano()
    assert running.record.cost_nano <= limits.get("cost_nano", 500_000_000)


async def test_what_is_kept_back_for_an_answer_is_free_again_once_no_loop_runs() -> None:
    meter = Meter(1_000, Caps(calls=2, tokens=800))
    with meter.kept_back():
        with meter.kept_back():
            assert (meter.left_nano, meter.left_tokens) == (750, 600)
        assert meter.left_nano == 750
        meter.count_call()
        with pytest.raises(CapReached):
            meter.count_call()
    assert (meter.left_nano, meter.left_tokens) == (1_000, 800)
    meter.count_call()


async def test_rounds_show_a_digest_and_an_empty_plan_ships() -> None:
    kit = Kit((plan(("atlas", None, [])), '{"steps":[]}'), {"alpha": Says("Answer: 42")}, rounds=3)
    running = await kit.serve(ask(stream=True))
    assert await kit.text(running) == "Answer: 42"
    assert [planned.round for planned in running.record.rounds] == [1, 2]
    assert "0 atlas = 42" in kit.conductor.calls[1].messages[-1]["content"]


async def test_a_later_round_may_see_earlier_steps_by_their_number() -> None:
    kit = Kit((plan(("atlas", None, [])), plan(("birch", None, [0]))), {"alpha": Says("draft")}, rounds=2)
    running = await kit.serve()
    assert [(step.round, step.step, step.see) for step in running.record.steps] == [(1, 0, []), (2, 1, [0])]
    assert "draft" in json.dumps(running.record.steps[1].messages)


# ---------------------------------------------------------------- the conductor fails


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (ConductorError("down", "x"), "down"),
        (ConductorError("slow", "x"), "slow"),
        ("certainly! here is a plan", "not_json"),
        (plan(("nobody", None, [])), "unknown_worker"),
        (plan(("atlas", None, [0])), "forward_see"),
        (plan(*[("atlas", None, [])] * 6), "too_many_steps"),
        ('{"steps":[]}', "no_steps"),
        ('{"steps":[' + " " * 70_000, "not_json"),  # cut at the plan's token bound
    ],
)
async def test_whatever_the_conductor_does_a_router_answers(line: str | ConductorError, reason: str) -> None:
    kit = Kit((line,))
    running = await kit.serve()
    assert running.record.status == "done"
    assert running.record.policy_used == "rule"
    assert running.record.fallback == f"conductor_{reason}"
    assert await kit.open_nano() == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("line", [ConductorError("down", "x"), ConductorError("slow", "x"), "no plan, sorry"])
async def test_a_planner_that_fails_costs_one_answer_whatever_rounds_are_left(
    line: str | ConductorError, stream: bool
) -> None:
    kit = Kit((line,), {name: Says(text) for name, text in CANARIES.items()}, rounds=3)
    running = await kit.serve(ask(stream=stream))
    assert [call.worker.name for call in kit.workers.calls] == [running.record.steps[0].worker]
    assert await kit.text(running) == CANARIES[running.record.steps[0].worker]
    assert [(each.planner, each.refusal is None) for each in running.record.rounds] == [
        ("conductor", False),
        ("rule", True),
    ]
    assert (running.record.status, running.record.policy_used) == ("done", "rule")
    assert await kit.open_nano() == 0


async def test_a_router_that_replaces_the_planner_streams_although_rounds_are_left() -> None:
    kit = Kit((ConductorError("down", "x"),), dict.fromkeys(CANARIES, Says("one two", piece_delay_s=0.02)), rounds=3)
    running = await kit.start(ask(stream=True))
    first = await anext(item async for item in items_of(running))
    assert not running.finished.is_set()
    assert first
    await running.finished.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("line", [ConductorError("down", "x"), "no plan, sorry"])
async def test_a_planner_that_fails_in_a_later_round_ships_the_answer_that_is_there(
    line: str | ConductorError, stream: bool
) -> None:
    kit = Kit((plan(("atlas", None, [])), line), {"alpha": Says("the first reply")}, rounds=3)
    running = await kit.start(ask(stream=stream))
    items = [item async for item in items_of(running)]
    await running.finished.wait()
    assert await kit.text(running) == "the first reply"
    assert [call.worker.name for call in kit.workers.calls] == ["alpha"]
    assert len(kit.conductor.calls) == 2
    assert (running.record.policy_used, running.record.fallback) == (
        "conductor",
        f"conductor_{'not_json' if isinstance(line, str) else 'down'}",
    )
    assert bool(items) == stream


async def test_an_earlier_reply_that_says_nothing_is_not_shipped_for_want_of_a_planner() -> None:
    down = ConductorError("down", "x")
    kit = Kit((plan(("atlas", None, [])), down), {"alpha": Says(""), "beta": Says("b"), "gamma": Says("g")}, rounds=3)
    running = await kit.serve()
    assert len(kit.workers.calls) == 2
    assert [each.planner for each in running.record.rounds] == ["conductor", "conductor", "rule"]


async def test_a_planner_that_fails_in_a_child_loop_costs_that_loop_one_answer() -> None:
    parent = plan(("echo", "Work out the first half.", []), ("atlas", None, [0]))
    down = ConductorError("down", "x")
    kit = Kit((parent, down), rounds=3)
    await kit.serve()
    assert [call.worker.name for call in kit.workers.calls][1:] == ["alpha"]
    child = next(e.payload for e in kit.journal.of_kind("rollout") if e.payload["depth"])
    assert [each["planner"] for each in child["rounds"]] == ["conductor", "rule"]
    assert len(kit.workers.calls) == 2
    assert len(kit.conductor.calls) == 3  # the parent's, the child's, the parent's second round, which fails too


async def test_a_conductor_that_hangs_is_cut_and_the_router_plans() -> None:
    kit = Kit(gap_s=1.0, timeout_s=0.05)
    running = await kit.serve()
    assert running.record.fallback == "conductor_slow"
    assert kit.conductor.cancelled == 1


async def test_steps_started_early_are_cancelled_when_the_plan_turns_out_bad() -> None:
    script = plan(("atlas", None, []), ("birch", None, []), ("nobody", None, []))
    kit = Kit((script,), {"alpha": Says(delay_s=60)}, gap_s=0.003)
    running = await asyncio.wait_for(kit.serve(), BOUND_S)
    assert "alpha" in kit.workers.cancelled
    assert running.record.steps[0].status == "cancelled"
    assert running.record.steps[0].cost_nano > 0  # nobody can say what the worker will bill: in full
    assert running.record.status == "done"
    assert await kit.open_nano() == 0


# ---------------------------------------------------------------- workers fail


async def test_a_failed_last_step_is_answered_by_another_worker() -> None:
    kit = Kit(workers={"alpha": UpstreamError("boom", upstream_status=500)})
    running = await kit.serve()
    assert running.record.status == "done"
    assert running.record.steps[-1].worker != "alpha"
    assert running.record.fallback == "worker_failed"


async def test_when_every_worker_fails_the_earlier_answer_is_given_and_flagged() -> None:
    boom = UpstreamError("boom", upstream_status=500)
    script = plan(("atlas", None, []), ("birch", None, [0]))
    kit = Kit((script,), {"alpha": [Says("early"), boom], "beta": boom, "gamma": boom})
    running = await kit.serve()
    assert await kit.text(running) == "early"
    assert running.record.capped == "worker"


async def test_a_pass_through_reports_its_workers_error() -> None:
    kit = Kit(workers={"alpha": UpstreamRefused("temperature is too hot", upstream_status=400, param="temperature")})
    running = await kit.serve(ask(model="alpha"))
    assert isinstance(running.error, UpstreamRefused)
    assert running.error.param == "temperature"
    assert running.record.status == "failed"
    assert await kit.posted_nano() == await kit.open_nano() == 0


async def test_a_stream_that_dies_midway_is_an_error_and_is_billed_for_what_came() -> None:
    kit = Kit(workers={"alpha": Says("one two three four", dies_after=3)})
    running = await kit.serve(ask(model="alpha", stream=True))
    assert isinstance(running.error, UpstreamProtocol)
    step = running.record.steps[0]
    assert step.usage_estimated
    assert 0 < step.cost_nano < 64 * 2000 + 1000 * 200
    assert await kit.open_nano() == 0


async def test_retries_draw_on_the_same_hold_and_errors_with_a_status_cost_nothing() -> None:
    busy = UpstreamError("busy", retryable=True, upstream_status=503)
    kit = Kit(workers={"alpha": [busy, Says("ok", usage=Usage(10, 5))]})
    running = await kit.serve(ask(model="alpha"))
    step = running.record.steps[0]
    assert [attempt.error for attempt in step.attempts] == ["upstream_error", None]
    assert running.record.cost_nano == 10 * 1000 + 5 * 2000
    assert len(kit.journal.of_kind("dispatch")) == 2


# ---------------------------------------------------------------- caps


async def test_the_call_cap_ends_with_the_best_answer_so_far() -> None:
    script = plan(("atlas", None, []), ("birch", None, [0]), ("grove", None, [1]))
    kit = Kit((script,), {"beta": Says("second")}, caps=Caps(calls=2, wall_s=60.0))
    running = await kit.serve()
    assert await kit.text(running) == "second"
    assert running.record.capped == "calls"


async def test_the_cost_cap_lowers_what_is_asked_of_a_worker() -> None:
    kit = Kit(workers={"alpha": Says("ok", usage=Usage(10, 5))})
    wanted = {"cost_nano": 200_000}
    running = await kit.serve(ask(model="alpha"), caps=wanted)
    assert 16 <= kit.workers.calls[0].body["max_tokens"] < 64
    assert running.record.cost_nano <= 200_000


async def test_a_cost_cap_too_low_for_any_answer_is_refused_before_anything_is_spent() -> None:
    kit = Kit()
    with pytest.raises(CapReached, match="any answer could cost"):
        await kit.serve(ask(model="alpha"), caps={"cost_nano": 1000})
    assert kit.workers.calls == []


async def test_the_deadline_ends_a_request_with_the_best_answer_so_far() -> None:
    script = plan(("atlas", None, []), ("birch", None, [0]))
    kit = Kit((script,), {"alpha": Says("first"), "beta": Says(delay_s=60)})
    running = await asyncio.wait_for(kit.serve(caps={"wall_s": 2.0}), BOUND_S)
    assert await kit.text(running) == "first"
    assert running.record.capped == "wall_s"


async def test_the_deadline_without_an_answer_is_a_504() -> None:
    kit = Kit(workers={"alpha": Says(delay_s=60)})
    running = await asyncio.wait_for(kit.serve(ask(model="alpha"), caps={"wall_s": 0.1}), BOUND_S)
    assert isinstance(running.error, DeadlineExceeded)
    assert await kit.open_nano() == 0


async def test_parallel_steps_keep_to_their_cap() -> None:
    script = plan(*[("atlas", None, [])] * 4, ("birch", None, "all"))
    kit = Kit((script,), {"alpha": Says(delay_s=0.02)}, caps=Caps(parallel=2, wall_s=60.0))
    await kit.serve()
    assert kit.workers.in_flight_peak == 2


async def test_the_token_cap_holds() -> None:
    kit = Kit(caps=Caps(tokens=50, wall_s=60.0))
    running = await kit.serve(ask(model="alpha"))
    assert isinstance(running.error, CapReached)
    assert running.error.cap == "tokens"


# ---------------------------------------------------------------- the client leaves; admission


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_whole_tree(stream: bool) -> None:
    script = plan(("atlas", None, []), ("birch", None, []), ("echo", None, []))
    child = plan(("grove", None, []))
    hang = Says(delay_s=60)
    kit = Kit((script, child), {"alpha": hang, "beta": hang, "gamma": hang})
    running = await kit.start(ask(stream=stream))
    await until(lambda: kit.workers.in_flight == 3)
    running.cancel()
    await asyncio.wait_for(running.finished.wait(), BOUND_S)
    assert sorted(kit.workers.cancelled) == ["alpha", "beta", "gamma"]
    assert running.record.status == "aborted"
    assert await kit.open_nano() == 0
    assert await kit.posted_nano() == running.record.cost_nano > 0
    assert {e.payload["status"] for e in kit.journal.of_kind("rollout")} == {"aborted"}


async def test_a_budget_affords_exactly_what_it_affords() -> None:
    kit = Kit(workers={"alpha": Says("ok", usage=Usage(100, 64), delay_s=0.01)})
    poor = replace(KEY, budget_nano=1_000_000)
    results = await asyncio.gather(*(kit.serve(ask(model="alpha"), poor) for _ in range(20)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, BudgetExceeded)]
    assert refused
    assert await kit.posted_nano() <= 1_000_000
    assert await kit.open_nano() == 0


async def test_concurrency_is_given_back_even_when_the_hold_is_refused() -> None:
    kit = Kit()
    one = replace(KEY, concurrency=1, budget_nano=1)
    for _ in range(3):
        with pytest.raises(BudgetExceeded):
            await kit.serve(who=one)


async def test_the_hold_is_for_one_answer_and_grows_with_each_round() -> None:
    held = []
    for rounds in (1, 3):
        caps = Caps(rounds=rounds, depth=0, cost_nano=10**12, wall_s=60.0)
        kit = Kit((plan(("atlas", None, [])),) * rounds, rounds=1, caps=caps)
        running = await kit.serve(rounds=3)
        assert len(running.record.rounds) == rounds
        assert running.record.cost_nano <= running.record.hold_nano
        held.append(running.record.hold_nano)
    assert held[0] <= held[1] < 2 * held[0]  # what one round leaves pays for the next


async def test_rpm_is_refused_with_a_true_retry_after() -> None:
    kit = Kit()
    slow = replace(KEY, rpm=1)
    await kit.serve(who=slow)
    with pytest.raises(RateLimited) as refused:
        await kit.serve(who=slow)
    assert 0 < refused.value.retry_after_s <= 60


async def test_a_worker_the_key_may_not_use_does_not_exist() -> None:
    kit = Kit((plan(("birch", None, [])),))
    narrow = replace(KEY, workers=("alpha",))
    for model in ("beta", "baton/fixed:beta", "gpt-9"):
        with pytest.raises(NotFound) as missing:
            await kit.serve(ask(model=model), narrow)
        assert missing.value.code == "model_not_found"
    running = await kit.serve(who=narrow)  # a conductor that names it is refused, and the rule plans
    assert running.record.fallback == "conductor_unknown_worker"
    assert {call.worker.name for call in kit.workers.calls} == {"alpha"}


@pytest.mark.parametrize("model", ["baton", "alpha"])
async def test_a_full_journal_refuses_before_anything_is_spent(model: str) -> None:
    kit = Kit()
    kit.journal.full = True
    running = await kit.serve(ask(model=model))
    assert isinstance(running.error, SpoolFull)
    assert kit.workers.calls == []
    assert kit.conductor.calls == []  # planning costs here, so it too waits for the record of the hold
    assert await kit.open_nano() == 0
    assert await kit.posted_nano() == 0  # a call whose record could not be written has not left


async def test_a_reply_that_cannot_be_logged_is_not_given() -> None:
    def fill(call: WorkerCall) -> Says:
        kit.journal.full = True
        return Says("unlogged")

    kit = Kit(workers={"alpha": fill})
    running = await kit.serve(ask(model="alpha"))
    assert isinstance(running.error, SpoolFull)
    assert running.body is None
    assert await kit.open_nano() == 0


async def test_a_reply_does_not_wait_for_limits_that_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(key_id: str, request_id: str, *_: object) -> None:
        raise Unavailable("Redis is away", code="rate_limits_unavailable")

    kit = Kit()
    monkeypatch.setattr(kit.limits, "release", away)
    monkeypatch.setattr(kit.limits, "withdraw", away)
    limited = replace(KEY, concurrency=5, organisation=replace(KEY.organisation, rpm=9))
    running = await asyncio.wait_for(kit.serve(ask(model="alpha"), limited), BOUND_S / 6)
    assert running.error is None
    assert await kit.open_nano() == 0
    with pytest.raises(BudgetExceeded):  # and not that the limits are away
        await kit.serve(who=replace(limited, budget_nano=1))


async def test_nobody_waits_for_a_request_whose_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    kit = Kit()
    monkeypatch.setattr(complete, "reply_of", broken)
    running = await asyncio.wait_for(kit.serve(ask(model="alpha")), BOUND_S / 6)
    assert isinstance(running.error, BatonError)
    assert (running.error.status, running.body) == (500, None)
    assert [str(bug) for bug in kit.metrics.bugs] == ["a bug"]


async def test_draining_waits_then_cuts() -> None:
    kit = Kit(workers={"alpha": Says(delay_s=60)})
    running = await kit.start(ask(model="alpha"))
    assert await kit.completer.drain(0.2) == 1
    assert running.record.status == "aborted"
    assert kit.completer.in_flight == 0


async def test_a_provider_key_that_leaks_into_a_reply_never_reaches_the_journal() -> None:
    kit = Kit(workers={"alpha": Says("the key is provider-secret-value, keep it")})
    running = await kit.serve(ask(model="alpha"))
    assert "provider-secret-value" in await kit.text(running)  # what the worker says is the worker's
    assert "provider-secret-value" not in json.dumps([event.payload for event in kit.journal.events])


async def test_a_metadata_key_leaves_no_text_in_the_log() -> None:
    kit = Kit(workers={"alpha": Says("canary reply")})
    await kit.serve(ask("canary question"), replace(KEY, log_mode="metadata"))
    logged = json.dumps([event.payload for event in kit.journal.events])
    assert "canary" not in logged
    assert '"prompt_tokens"' in logged


async def test_overhead_is_the_time_nobody_else_was_waited_for() -> None:
    script = plan(("atlas", None, []), ("birch", None, []), ("grove", None, "all"))
    kit = Kit((script,), {name: Says("x", delay_s=0.1) for name in CANARIES}, gap_s=0.002)
    running = await kit.serve()
    wall_ms = (running.record.finished_us - running.record.created_us) / 1000
    assert wall_ms > 200
    assert 0 <= running.record.overhead_ms < wall_ms - 200


async def test_a_workers_own_error_code_gets_into_no_header_and_no_label() -> None:
    strange = UpstreamRefused("no", upstream_status=400, code="Ω" * 99)
    kit = Kit(workers={"alpha": strange})
    running = await kit.serve()
    assert running.record.fallback == "worker_refused"
    assert all(value.isascii() for value in reply_headers(running.record).values())


async def test_a_pool_whose_every_worker_has_failed_says_so() -> None:
    boom = UpstreamError("boom", upstream_status=500)
    kit = Kit((ConductorError("down", "x"),), {"alpha": boom, "beta": boom, "gamma": boom})
    running = await kit.serve()
    assert isinstance(running.error, UpstreamError)
    assert running.record.status == "failed"
    assert await kit.open_nano() == 0


@pytest.mark.parametrize("model", ["alpha", "baton/fixed:alpha", "baton/rule"])
async def test_a_router_is_asked_once_whatever_rounds_the_client_wants(model: str) -> None:
    kit = Kit(rounds=3)
    running = await kit.serve(ask(model=model), rounds=3)
    assert len(running.record.steps) == 1
