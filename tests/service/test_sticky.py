"""Turns that go back to the worker that asked: over the whole request path, with the shipped fakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.core.access.keys import Principal
from gateway.errors import UpstreamError, UpstreamTimeout
from gateway.service.ports.turns import LastTurn
from gateway.service.request.running import ProgressNote, Running
from policy.dataset.select import PLANNERS
from tests.fakes.workers import Says
from tests.kit import KEY, Kit, ask, items_of, plan

TO_BETA = plan(("birch", None, []))
TO_ALPHA = plan(("atlas", None, []))
CALL = {"id": "call_Xy1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKING = Says(None, tool_calls=[CALL], finish_reason="tool_calls")
SUNNY = {"role": "tool", "tool_call_id": "call_Xy1", "content": "sunny"}


async def said(running: Running) -> dict[str, Any]:
    message: dict[str, Any] = (await running.result())["choices"][0]["message"]
    return message


async def next_turn(kit: Kit, first: Running, *more: dict[str, Any], who: Principal = KEY, **asked: Any) -> Running:
    """The conversation so far, the reply to it, and what comes after."""
    messages = [*first.chat.messages, await said(first), *more]
    return await kit.serve({"model": first.chat.model, "messages": messages, "tools": TOOLS}, who, **asked)


def workers_of(running: Running) -> list[str]:
    return [step.worker for step in running.record.steps]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_results_go_back_to_the_worker_that_asked_without_planning(stream: bool) -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("sunny in Rome")]})
    first = await kit.serve(ask(tools=TOOLS, stream=stream))
    second = await next_turn(kit, first, SUNNY)
    assert (await said(second))["content"] == "sunny in Rome"
    assert workers_of(second) == ["beta"]
    assert len(kit.conductor.calls) == 1
    assert second.record.policy_used == "sticky"
    assert [planned.planner for planned in second.record.rounds] == ["sticky"]
    assert second.record.policy_version is None
    sent = kit.workers.calls[-1].body
    assert sent["messages"][-1] == SUNNY
    assert sent["tools"] == TOOLS
    assert await kit.open_nano() == 0


async def test_a_shortened_conversation_still_finds_who_made_the_call() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("ok")]})
    first = await kit.serve(ask(tools=TOOLS))
    messages = [{"role": "assistant", "tool_calls": (await said(first))["tool_calls"]}, SUNNY]
    second = await kit.serve({"model": "baton", "messages": messages, "tools": TOOLS})
    assert workers_of(second) == ["beta"]
    assert second.record.policy_used == "sticky"


async def test_a_conversation_that_goes_on_goes_back_too_turn_after_turn() -> None:
    kit = Kit((TO_BETA, TO_ALPHA))
    running = await kit.serve()
    for _ in range(3):
        running = await next_turn(kit, running, {"role": "user", "content": "And then?"})
        assert workers_of(running) == ["beta"]
    assert len(kit.conductor.calls) == 1


async def test_another_question_another_model_name_and_another_key_are_planned() -> None:
    kit = Kit((TO_BETA, TO_ALPHA))
    first = await kit.serve()
    more = {"role": "user", "content": "And then?"}
    await kit.serve(ask("Something else entirely?"))
    assert len(kit.conductor.calls) == 2
    other = await next_turn(kit, first, more, who=replace(KEY, public_id="keyBBBBBBBBB"))
    assert (workers_of(other), other.record.policy_used) == (["alpha"], "conductor")
    messages = [*first.chat.messages, await said(first), more]
    ruled = await kit.serve({"model": "baton/rule", "messages": messages})
    assert ruled.record.policy_used == "rule"


async def test_a_turn_can_ask_to_be_planned() -> None:
    kit = Kit((TO_BETA, TO_ALPHA))
    first = await kit.serve()
    second = await next_turn(kit, first, {"role": "user", "content": "And then?"}, sticky=False)
    assert (workers_of(second), second.record.policy_used) == (["alpha"], "conductor")


async def test_without_a_window_only_tool_results_go_back() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), sticky_s=0.0)
    first = await kit.serve()
    second = await next_turn(kit, first, {"role": "user", "content": "And then?"})
    assert second.record.policy_used == "conductor"
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("ok")]}, sticky_s=0.0)
    asked = await kit.serve(ask(tools=TOOLS))
    assert (await next_turn(kit, asked, SUNNY)).record.policy_used == "sticky"


async def test_a_worker_that_fails_is_planned_around() -> None:
    kit = Kit(
        (TO_BETA, TO_ALPHA), {"beta": [ASKING, UpstreamTimeout("late")], "alpha": Says("instead")}, attempts_max=1
    )
    first = await kit.serve(ask(tools=TOOLS))
    second = await next_turn(kit, first, SUNNY)
    assert (await said(second))["content"] == "instead"
    assert workers_of(second) == ["beta", "alpha"]
    assert [planned.planner for planned in second.record.rounds] == ["sticky", "conductor"]
    assert second.record.fallback == "worker_timeout"
    assert second.record.policy_used == "conductor"
    assert await kit.open_nano() == 0
    third = await next_turn(kit, second, {"role": "user", "content": "And then?"})
    assert workers_of(third) == ["alpha"]  # whoever answered last


async def test_a_worker_that_dies_in_the_middle_of_its_stream_is_an_error_not_two_answers() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": [Says("one"), Says("two three four", dies_after=2)]}, attempts_max=1)
    first = await kit.serve()
    messages = [*first.chat.messages, await said(first), {"role": "user", "content": "And then?"}]
    second = await kit.serve({"model": "baton", "messages": messages, "stream": True})
    assert isinstance(second.error, UpstreamError)
    assert len(kit.conductor.calls) == 1


async def test_a_worker_that_the_key_may_not_use_any_more_is_planned_around() -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": ASKING})
    first = await kit.serve(ask(tools=TOOLS))
    second = await next_turn(kit, first, SUNNY, who=replace(KEY, workers=("alpha", "gamma")))
    assert workers_of(second) == ["alpha"]
    assert second.record.fallback is None


async def test_a_lookup_that_is_away_is_counted_and_fails_nothing() -> None:
    kit = Kit((TO_BETA, TO_ALPHA))
    first = await kit.serve()
    kit.conversations.away = True
    second = await next_turn(kit, first, {"role": "user", "content": "And then?"})
    assert second.error is None
    assert second.record.policy_used == "conductor"
    assert kit.metrics.degradations == ["sticky", "sticky"]  # looking and remembering


async def test_a_first_turn_and_a_worker_by_name_look_up_no_conversation() -> None:
    kit = Kit((TO_BETA,))
    first = await kit.serve()
    direct = await kit.serve(ask(model="alpha"))
    again = await next_turn(kit, direct, {"role": "user", "content": "And then?"})
    assert (workers_of(again), kit.conversations.asked) == (["alpha"], 0)
    assert (direct.record.answered_by, direct.record.marks) == (None, {})
    assert first.record.answered_by == "beta"


async def test_a_reply_by_vote_has_no_worker_to_return_to() -> None:
    script = plan(("atlas", None, []), ("birch", None, []), ("tally", None, "all"))
    kit = Kit((script, TO_ALPHA))
    first = await kit.serve()
    assert first.record.answered_by is None
    second = await next_turn(kit, first, {"role": "user", "content": "And then?"})
    assert second.record.policy_used == "conductor"


async def test_a_reply_from_a_child_loop_belongs_to_the_worker_inside_it() -> None:
    kit = Kit((plan(("echo", None, [])), TO_BETA, TO_ALPHA), {"beta": [ASKING, Says("ok")]})
    first = await kit.serve(ask(tools=TOOLS))
    assert first.record.answered_by == "beta"
    second = await next_turn(kit, first, SUNNY)
    assert workers_of(second) == ["beta"]


async def test_the_journal_holds_what_a_lost_redis_had() -> None:
    kit = Kit((TO_BETA,), {"beta": ASKING})
    first = await kit.serve(ask(tools=TOOLS))
    rows = kit.store.rows.continuations
    assert {row["mark"] for row in rows} == {mark for _, mark in kit.conversations.known}
    assert {(row["key_id"], row["worker"], row["rollout_id"]) for row in rows} == {
        (KEY.public_id, "beta", first.record.id)
    }
    finished_at = kit.store.rows.rollouts[0]["finished_at"]
    assert {(row["until"] - finished_at).total_seconds() for row in rows} == {3600.0}


@pytest.mark.parametrize("log_mode", ["full", "redacted", "metadata"])
async def test_marks_are_no_text_and_stay_in_every_log_mode(log_mode: str) -> None:
    kit = Kit((TO_BETA,))
    await kit.serve(who=replace(KEY, log_mode=log_mode))
    assert len(kit.store.rows.continuations) == 1


async def test_training_never_takes_a_sticky_turn_for_a_planned_one() -> None:
    kit = Kit((TO_BETA, TO_ALPHA))
    first = await kit.serve()
    await next_turn(kit, first, {"role": "user", "content": "And then?"})
    planners = [row["planner"] for row in kit.store.rows.rounds]
    assert planners == ["conductor", "sticky"]
    assert [name for name in planners if name in PLANNERS] == ["conductor"]


# ---------------------------------------------------------------- plans and tool calls


async def test_only_the_last_step_can_call_tools() -> None:
    script = plan(("atlas", "Draft.", []), ("birch", None, [0]))
    kit = Kit((script,), {"alpha": Says("draft"), "beta": ASKING})
    running = await kit.serve(ask(tools=TOOLS, tool_choice="required"))
    first, last = kit.workers.calls
    assert ("tools" in first.body, "tool_choice" in first.body) == (False, False)
    assert (last.body["tools"], last.body["tool_choice"]) == (TOOLS, "required")
    assert (await said(running))["tool_calls"] == [CALL]
    assert (await running.result())["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_call_ends_the_plan_and_reaches_the_client_though_rounds_are_left(stream: bool) -> None:
    kit = Kit((TO_BETA, TO_ALPHA), {"beta": ASKING, "alpha": Says("never asked")}, rounds=3)
    running = await kit.serve(ask(tools=TOOLS, stream=stream))
    assert (await said(running))["tool_calls"] == [CALL]
    assert workers_of(running) == ["beta"]
    assert len(kit.conductor.calls) == 1


async def test_a_streamed_tool_call_keeps_its_deltas_and_indices() -> None:
    second = {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    kit = Kit((TO_BETA,), {"beta": Says(None, tool_calls=[CALL, second], finish_reason="tool_calls")})
    running = await kit.start(ask(tools=TOOLS, stream=True))
    seen: dict[int, dict[str, str]] = {}
    async for choices in items_of(running):
        assert not isinstance(choices, ProgressNote)
        for delta in (piece for choice in choices for piece in choice.get("delta", {}).get("tool_calls") or ()):
            whole = seen.setdefault(delta["index"], {"id": "", "arguments": ""})
            whole["id"] += delta.get("id") or ""
            whole["arguments"] += delta["function"].get("arguments") or ""
    assert seen == {
        0: {"id": "call_Xy1", "arguments": '{"city":"Rome"}'},
        1: {"id": "call_2", "arguments": '{"city":"Oslo"}'},
    }
    assert (await said(running))["tool_calls"] == [CALL, second]


async def test_a_later_round_that_fails_ships_nothing_else_over_a_tool_call() -> None:
    kit = Kit((TO_BETA, "nonsense"), {"beta": ASKING}, rounds=2)
    running = await kit.serve(ask(tools=TOOLS))
    assert (await said(running))["tool_calls"] == [CALL]
    assert running.record.fallback is None


async def test_a_worker_that_has_left_the_pool_is_planned_around() -> None:
    kit = Kit((TO_BETA, TO_ALPHA))
    first = await kit.serve()
    for place in kit.conversations.known:
        kit.conversations.known[place] = (LastTurn("gone"), kit.conversations.known[place][1])
    second = await next_turn(kit, first, {"role": "user", "content": "And then?"})
    assert workers_of(second) == ["alpha"]
