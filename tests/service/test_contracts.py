"""Contracts and verify steps through a whole gateway over the fakes: repaired, handed over, missed, escalated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest

from gateway.core.log.rollout import as_payload
from gateway.core.loop.caps import Caps
from gateway.core.loop.plan import limits_from_json, plan_schema, schema_hash
from gateway.core.loop.prompt import Profile, prompt_hash, render, schema_of
from gateway.core.loop.replies.errors import CheckerErrors, Share, errors_from_counts
from gateway.core.loop.shown import PromptInput, ShownWorker
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import NotFound, UpstreamError, UpstreamOverloaded
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.routers import RulePlanner
from gateway.service.ports.request import WorkerCall
from tests.fakes.workers import Says, Scripted
from tests.kit import PRICE, Kit, ask, items_of, pool_file

CHECK = WorkerSpec.model_validate(
    {"name": "check", "handle": "probe", "kind": "tool", "url": "http://127.0.0.1:1/check", "tags": ["check"],
     "price": {"call_usd": "0.001"}}
)  # fmt: skip
PYTHON = WorkerSpec.model_validate(
    {"name": "python", "handle": "cobra", "kind": "tool", "url": "builtin:python", "price": {"call_usd": "0"}}
)
PROMPT = PromptInput(
    ({"role": "user", "content": "2+2?"},),
    (ShownWorker("atlas", "sums", (), 1, 8_192, 1.0),),
    steps_max=3,
    depth_left=0,
)
DIGITS = {"regex": "^[0-9]+$"}
CHAIN = "baton/checked:alpha>beta>gamma@check"


def a_step(worker: str, **more: Any) -> dict[str, Any]:
    return {"worker": worker, "task": None, "see": [], **more}


def verify(index: int, **edges: Any) -> dict[str, Any]:
    return {"worker": "probe", "task": None, "see": [index - 1], "kind": "verify", **edges}


def a_plan(*steps: dict[str, Any]) -> str:
    return json.dumps({"steps": list(steps)})


def a_kit(
    script: Sequence[str],
    workers: Mapping[str, Scripted | Sequence[Scripted]],
    extra: Sequence[WorkerSpec] = (),
    **more: Any,
) -> Kit:
    pools: PoolFile = pool_file(CHECK, *extra)
    return Kit(tuple(script), workers, pools=pools, **more)


def verdicts(record: Any) -> list[tuple[int, str, bool | None]]:
    return [
        (step.step, one.verdict["by"], one.verdict["accept"])
        for step in record.steps
        for one in step.attempts
        if one.verdict is not None
    ]


def calls_of(kit: Kit) -> list[str]:
    return [call.worker.name for call in kit.workers.calls]


# ---------------------------------------------------------------- contracts


async def test_a_reply_that_misses_its_contract_is_repaired_by_its_worker() -> None:
    kit = a_kit([a_plan(a_step("atlas", expect=DIGITS))], {"alpha": [Says("about 42"), Says("42")]})
    running = await kit.serve()
    assert await kit.text(running) == "42"
    told = kit.workers.calls[1].body["messages"]
    assert told[-2] == {"role": "assistant", "content": "about 42"}
    assert "it does not match the pattern ^[0-9]+$" in told[-1]["content"]
    assert verdicts(running.record) == [(0, "contract", False), (0, "contract", True)]
    assert await kit.posted_nano() == running.record.cost_nano
    assert await kit.open_nano() == 0


async def test_another_worker_answers_where_the_repair_misses_too() -> None:
    workers = {"alpha": Says("no idea"), "beta": Says("41"), "gamma": Says("42")}
    kit = a_kit([a_plan(a_step("atlas", expect=DIGITS))], workers)
    running = await kit.serve()
    assert calls_of(kit)[:2] == ["alpha", "alpha"]
    step = running.record.steps[0]
    assert (step.worker, len(step.attempts), step.attempts[0].worker) == ("gamma", 3, "alpha")
    assert await kit.text(running) == "42"
    assert running.record.cost_nano == await kit.posted_nano()


async def test_the_next_round_learns_of_a_contract_that_nobody_kept() -> None:
    plans = [a_plan(a_step("atlas", expect=DIGITS)), a_plan(a_step("birch"))]
    kit = a_kit(plans, {"alpha": Says("no"), "gamma": Says("no"), "beta": Says("fine")}, rounds=2)
    running = await kit.serve()
    assert await kit.text(running) == "fine"
    assert "(missed)" in kit.conductor.calls[1].messages[-1]["content"]
    assert running.record.steps[0].error == "contract_missed"
    assert running.record.capped is None


async def test_in_the_last_round_what_missed_the_planners_contract_is_better_than_nothing() -> None:
    kit = a_kit([a_plan(a_step("atlas", expect=DIGITS))], {name: Says("words") for name in ("alpha", "beta", "gamma")})
    running = await kit.serve()
    assert await kit.text(running) == "words"
    assert running.record.capped == "contract"
    assert len(kit.workers.calls) == 3


async def test_a_stream_is_held_back_until_its_contract_is_kept() -> None:
    kit = a_kit([a_plan(a_step("atlas", expect=DIGITS))], {"alpha": [Says("wrong words"), Says("42")]})
    running = await kit.start(ask(stream=True), progress=True)
    text = json.dumps([str(item) async for item in items_of(running)])
    assert "wrong" not in text
    assert "step_checked" in text
    assert await kit.text(running) == "42"


async def test_a_later_step_never_sees_a_reply_that_misses() -> None:
    script = a_plan(a_step("atlas", task="Count.", expect=DIGITS), a_step("birch", see=[0]))
    kit = a_kit([script], {"alpha": [Says("CANARY"), Says("42")]})
    await kit.serve()
    assert "CANARY" not in json.dumps(kit.workers.calls[-1].body)
    assert "42" in json.dumps(kit.workers.calls[-1].body)


async def test_tests_of_a_contract_run_in_the_pools_python() -> None:
    done = json.dumps({"exit_status": 1, "stdout": "", "files": {}, "error": "AssertionError: sum"})
    fine = json.dumps({"exit_status": 0, "stdout": "", "files": {}, "error": ""})
    script = a_plan(a_step("atlas", expect={"tests": ["assert add(1, 2) == 3"]}))
    workers = {"alpha": [Says("```python\nBAD\n```"), Says("```python\nGOOD\n```")], "python": [Says(done), Says(fine)]}
    kit = a_kit([script], workers, [PYTHON])
    running = await kit.serve()
    assert calls_of(kit) == ["alpha", "python", "alpha", "python"]
    assert "assert add(1, 2) == 3" in kit.workers.calls[1].body["messages"][-1]["content"]
    assert "AssertionError: sum" in kit.workers.calls[2].body["messages"][-1]["content"]
    assert "GOOD" in await kit.text(running)
    assert [one.worker for one in running.record.steps[0].attempts] == [None, "python", None, "python"]


async def test_a_first_reply_that_a_judge_accepts_is_no_repair() -> None:
    script = a_plan(a_step("atlas", expect={"judge": "probe"}))
    kit = a_kit([script, a_plan()], {"alpha": Says("42"), "check": Says('{"accept": true}')}, rounds=2)
    running = await kit.serve()
    assert verdicts(running.record) == [(0, "contract", True), (0, "contract", True)]
    shown = kit.conductor.calls[1].messages[-1]["content"]
    assert "kept" in shown
    assert "repaired" not in shown


async def test_a_judge_that_is_down_lets_a_reply_pass_unchecked() -> None:
    script = a_plan(a_step("atlas", expect={"judge": "probe"}))
    kit = a_kit([script, a_plan()], {"alpha": Says("42"), "check": UpstreamError("down")}, rounds=2)
    running = await kit.serve()
    assert await kit.text(running) == "42"
    assert verdicts(running.record)[-1] == (0, "contract", None)
    assert "unchecked" in kit.conductor.calls[1].messages[-1]["content"]


async def test_a_plan_without_contracts_is_logged_and_sent_as_before() -> None:
    bare, offered = Kit((a_plan(a_step("atlas")),)), a_kit([a_plan(a_step("atlas"))], {})
    for kit in (bare, offered):
        await kit.serve()
    first, second = bare.workers.calls[0].body, offered.workers.calls[0].body
    assert first == second
    payload = as_payload((await offered.serve()).record)
    assert not {"verdict", "worker"} & set(payload["steps"][0]["attempts"][0])
    assert payload["rounds"][0]["plan"] == {"steps": [{"worker": "atlas", "task": None, "see": []}]}
    assert bare.conductor.calls[0].schema["properties"]["steps"]["items"] is False


async def test_at_a_cap_a_repair_ends_with_what_there_is() -> None:
    kit = a_kit([a_plan(a_step("atlas", expect=DIGITS))], {"alpha": Says("words")}, caps=Caps(calls=1, wall_s=60.0))
    running = await kit.serve()
    assert await kit.text(running) == "words"
    assert running.record.capped == "calls"


# ---------------------------------------------------------------- verify


PLANNED = a_plan(a_step("atlas"), verify(1, accept="ship", escalate=2), a_step("grove"))


async def test_an_accepted_reply_ships_and_the_rest_of_the_plan_does_not_run() -> None:
    kit = a_kit([PLANNED], {"alpha": Says("cheap"), "check": Says("valid")}, rounds=3)
    running = await kit.serve()
    assert await kit.text(running) == "cheap"
    assert calls_of(kit) == ["alpha", "check"]
    assert [step.status for step in running.record.steps] == ["done", "done", "skipped"]
    assert len(kit.conductor.calls) == 1
    assert kit.workers.calls[1].saw == [("atlas", "", "cheap")]


async def test_a_rejected_reply_escalates() -> None:
    kit = a_kit([PLANNED], {"alpha": Says("cheap"), "check": Says("not valid"), "gamma": Says("dear")})
    running = await kit.serve(ask(stream=True))
    assert await kit.text(running) == "dear"
    assert verdicts(running.record) == [(1, "verify", False)]
    assert "cheap" not in json.dumps(kit.workers.calls[-1].body)


async def test_both_edges_may_lead_to_steps() -> None:
    script = a_plan(
        a_step("atlas", task="Draft."), verify(1, accept=2, escalate=3), a_step("birch", see=[0]), a_step("grove")
    )
    for word, answer in (("valid", "polished"), ("not valid", "dear")):
        workers = {"alpha": Says("d"), "beta": Says("polished"), "gamma": Says("dear"), "check": Says(word)}
        kit = a_kit([script], workers)
        assert await kit.text(await kit.serve()) == answer
        assert len(kit.workers.calls) == 3


async def test_the_next_round_plans_where_the_escalation_is_a_plan() -> None:
    plans = [a_plan(a_step("atlas"), verify(1, accept="ship", escalate="plan")), a_plan(a_step("birch"))]
    kit = a_kit(plans, {"alpha": Says("cheap"), "check": Says("not valid"), "beta": Says("better")}, rounds=2)
    running = await kit.serve()
    assert await kit.text(running) == "better"
    assert "(rejected)" in kit.conductor.calls[1].messages[-1]["content"]


@pytest.mark.parametrize("answer", [UpstreamError("down"), Says("who knows")])
async def test_a_checker_that_is_down_or_says_nothing_escalates(answer: Scripted) -> None:
    kit = a_kit([], {"alpha": Says("cheap"), "check": answer, "beta": Says("b"), "gamma": Says("dear")})
    running = await kit.serve(ask(model="baton/checked:alpha>gamma@check"))
    assert await kit.text(running) == "dear"
    assert verdicts(running.record) == [(1, "verify", None)]
    assert running.record.cost_nano == await kit.posted_nano()


async def test_a_candidate_that_fails_needs_no_checker() -> None:
    kit = a_kit(
        [], {"alpha": UpstreamOverloaded("busy", retryable=False), "beta": Says("second"), "check": Says("valid")}
    )
    running = await kit.serve(ask(model=CHAIN))
    assert await kit.text(running) == "second"
    assert calls_of(kit) == ["alpha", "beta", "check"]


async def test_a_model_checks_under_the_gateways_own_task() -> None:
    judge = WorkerSpec.model_validate(
        {**pool_file().worker("alpha").model_dump(), "name": "judge", "handle": "judge", "tags": ["check"]}
    )
    said = '{"accept": false, "why": "off by one"}'
    kit = a_kit([], {"alpha": Says("41"), "judge": Says(said), "gamma": Says("42")}, [judge])
    running = await kit.serve(ask(model="baton/checked:alpha>gamma@judge"))
    assert await kit.text(running) == "42"
    assert "41" in json.dumps(kit.workers.calls[1].body)
    assert running.record.steps[1].task is not None


async def test_calls_of_the_clients_own_tools_ship_unchecked() -> None:
    tool_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    kit = a_kit([], {"alpha": Says(None, [tool_call], "tool_calls")})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    running = await kit.serve(ask(model=CHAIN, tools=tools))
    assert calls_of(kit) == ["alpha"]
    assert running.record.reply is not None
    assert running.record.reply["choices"][0]["finish_reason"] == "tool_calls"


# ---------------------------------------------------------------- the policy


async def test_the_chain_goes_on_until_the_checker_accepts() -> None:
    kit = a_kit([], {"alpha": Says("a"), "beta": Says("b"), "check": [Says("not valid"), Says("valid")]})
    running = await kit.serve(ask(model=CHAIN))
    assert await kit.text(running) == "b"
    assert calls_of(kit) == ["alpha", "check", "beta", "check"]
    assert running.record.policy_used == "checked:alpha>beta>gamma@check"
    assert kit.conductor.calls == []


async def test_the_hold_is_the_worst_path() -> None:
    seen: list[int] = []
    kit = a_kit([], {"check": Says("not valid")})

    def spend(call: WorkerCall) -> Says:
        seen.append(1)
        return Says("words " * 10)

    kit.workers._scripts |= {name: [spend] for name in ("alpha", "beta", "gamma")}
    running = await kit.serve(ask(model=CHAIN))
    chain, planned = running.record.hold_nano, (await a_kit([PLANNED], {}).serve()).record.hold_nano
    assert len(seen) == 3
    assert running.record.cost_nano <= chain < planned


async def test_a_cap_on_steps_leaves_out_the_middle() -> None:
    for steps, wanted in ((3, ["alpha", "check", "gamma"]), (1, ["gamma"])):
        kit = a_kit([], {"check": Says("not valid")}, caps=Caps(steps=steps, wall_s=60.0))
        await kit.serve(ask(model=CHAIN))
        assert calls_of(kit) == wanted


async def test_a_cap_on_cost_ships_the_candidate() -> None:
    kit = a_kit([], {"check": Says("not valid"), "alpha": Says("cheap")}, caps=Caps(calls=2, wall_s=60.0))
    running = await kit.serve(ask(model=CHAIN))
    assert await kit.text(running) == "cheap"
    assert running.record.capped == "calls"


@pytest.mark.parametrize(
    "name",
    ["alpha@check", "alpha>beta", "alpha>alpha@check", "alpha>nobody@check", "alpha>beta@nobody", "alpha>vote@check"],
)
async def test_a_chain_that_is_none_does_not_exist(name: str) -> None:
    with pytest.raises(NotFound):
        await a_kit([], {}).serve(ask(model=f"baton/checked:{name}"))


# ---------------------------------------------------------------- the prompt


async def test_a_prompted_planner_is_told_of_checks_where_the_pool_has_a_checker() -> None:
    plain = Kit((a_plan(a_step("atlas")),), {}, profile="guided")
    offered = a_kit([a_plan(a_step("atlas", expect={"min_chars": 1}))], {}, [PYTHON], profile="guided")
    before, after = [(await kit.serve()).record.rounds[0] for kit in (plain, offered)]
    assert (before.prompt_version, after.prompt_version) == ("guided-1", "checked-1")
    assert before.prompt_hash == prompt_hash("guided") != after.prompt_hash == prompt_hash("checked")
    assert '"kind": "verify"' not in before.messages[0]["content"]
    assert '"kind": "verify"' in after.messages[0]["content"]
    assert "Checkers among them: " in after.messages[1]["content"]
    assert "one of them runs tests" in after.messages[1]["content"]
    assert "anyOf" in offered.conductor.calls[0].schema["properties"]["steps"]["prefixItems"][0]
    assert after.refusal is None
    assert after.allowed is not None
    assert after.schema_hash == schema_hash(plan_schema(limits_from_json(after.allowed), why=True, checks=True))


@pytest.mark.parametrize("profile", get_args(Profile))
async def test_trained_weights_are_shown_the_prompt_that_they_know_and_no_other(profile: Profile) -> None:
    for pick in (None, Pick("conductor@7", profile)):
        kit = a_kit([a_plan(a_step("atlas"))], {}, [PYTHON])
        settings = ConductorSettings(profile if pick is None else "full", PRICE, 5.0, trained=pick is None)
        kit.catalog._planners["baton"] = (ConductorPlanner(kit.conductor, settings), RulePlanner(draws=False))
        kit.completer._admission._pick = partial(lambda pick, _: pick, pick)
        planned = (await kit.serve()).record.rounds[0]
        assert planned.allowed is not None
        assert planned.allowed["checkers"]
        assert (planned.prompt_version, planned.prompt_hash) == (f"{profile}-1", prompt_hash(profile))
        assert planned.schema_hash == schema_hash(schema_of(profile, limits_from_json(planned.allowed)))
        text = json.dumps(planned.messages) + json.dumps(kit.conductor.calls[0].schema)
        assert ("escalate" in text) == (profile == "checked")


async def test_a_prompted_planner_reads_how_often_checkers_err_where_it_is_known() -> None:
    probe = CheckerErrors("check", Share(3, 20), Share(0, 4), Share(3, 40))
    assert errors_from_counts("check", probe.counts()) == probe
    for errors, line in (
        ({"check": probe}, "- probe, so far: accepted 3 of 20 wrong replies (5 to 36 %)."),
        ({"check": CheckerErrors("check", accepted_wrong=Share(2, 12))}, "- probe, so far: 2 of 12 replies that it "),
        ({"check": CheckerErrors("check", Share(1, 9))}, None),
        ({"alpha": probe}, None),  # which this pool does not tag as a checker
    ):
        kit = a_kit([a_plan(a_step("atlas"))], {}, [PYTHON], profile="guided", errors=errors)
        record = (await kit.serve()).record
        prompt = kit.conductor.calls[0].messages[1]["content"]
        named = {"probe": errors["check"].counts()} if "check" in errors else {}
        assert {name: one for name, one in (record.rounds[0].shown or {})["errors"].items() if name == "probe"} == named
        assert ("so far:" in prompt) is (line is not None)
        assert line is None or line in prompt
    for profile in get_args(Profile):
        shown = replace(PROMPT, workers=(replace(PROMPT.workers[0], errors=probe),), checkers=("atlas",))
        without = replace(shown, workers=PROMPT.workers)
        assert (render(profile, shown) == render(profile, without)) is (profile != "checked")


async def test_a_candidate_starts_while_its_plan_is_written_only_as_a_candidate() -> None:
    kit = a_kit([PLANNED], {"alpha": Says("cheap"), "check": Says("valid")}, profile="guided", gap_s=0.002)
    running = await kit.serve(ask(max_completion_tokens=33))
    assert await kit.text(running) == "cheap"
    assert kit.workers.calls[0].body["max_completion_tokens"] == 33
