"""Prompts of checkers, repairs and loops of tools fit their worker's context as those of steps do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.log.rollout import as_payload
from gateway.core.loop.compose import RESULT_HEAD, quoted_result, shortened_turns
from gateway.core.pool.workers import WorkerSpec
from gateway.service.ports.request import WorkerCall
from tests.fakes.workers import Says
from tests.kit import Kit, model_worker, pool_file
from tests.service.test_summaries import RULES, SUMMARY, TALK, WINDOW, FourCharacters
from tests.service.test_tools import BOX, Boxes, a_plan, a_step, asks_tools, wants

LONG = "word " * 1_400
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}


def a_kit(step: dict[str, Any], workers: dict[str, Any], *, tags: Sequence[str] = (), **more: Any) -> Kit:
    """A pool with `narrow`, whose context TALK and a long reply together overflow."""
    narrow = model_worker("narrow", "nook", context_tokens=WINDOW)
    narrow = WorkerSpec.model_validate(narrow.model_dump(exclude_none=True) | {"tags": list(tags)})
    spare = model_worker("sum", "sage", context_tokens=32_000, output_tokens_max=1024)
    said = {"sum": Says(SUMMARY), **workers}
    given = {"pools": pool_file(narrow, spare, BOX), "tokens": FourCharacters(), "toolboxes": Boxes(), **more}
    return Kit((a_plan(step),), said, **given)


def calls_of(kit: Kit, worker: str = "narrow") -> list[WorkerCall]:
    return [call for call in kit.workers.calls if call.worker.name == worker]


def tokens_of(call: WorkerCall) -> int:
    return len(json.dumps(call.body["messages"])) // 4


def cuts_of(running: Any) -> list[dict[str, Any]]:
    return [one["cut"] for one in as_payload(running.record)["steps"][0]["attempts"] if "cut" in one]


@pytest.mark.parametrize("summarised", [True, False])
async def test_a_judge_that_a_contract_asks_gets_what_it_has_room_for(summarised: bool) -> None:
    step = a_step("atlas", expect={"judge": "nook"})
    said = {"alpha": Says(LONG + "the end"), "narrow": Says('{"accept": true, "why": "fine"}')}
    kit = a_kit(step, said, tags=["check"], **({"summaries": RULES} if summarised else {}))
    running = await kit.serve({"model": "baton", "messages": TALK})
    (call,) = calls_of(kit)
    text = json.dumps(call.body["messages"])
    assert tokens_of(call) < WINDOW * 7 // 8
    assert "new question" in text
    assert "the end" in text
    assert "old question 0" not in text
    assert (SUMMARY in text) == summarised
    verdicts = [one.verdict for one in running.record.steps[0].attempts if one.verdict]
    assert [one["accept"] for one in verdicts] == [True, True]
    assert [cut["chars"] > 4_000 for cut in cuts_of(running)] == [True]
    assert await kit.posted_nano() == running.record.cost_nano
    assert await kit.open_nano() == 0


async def test_a_reply_that_missed_its_contract_is_repaired_where_both_do_not_fit() -> None:
    kit = a_kit(a_step("nook", expect={"regex": "^fixed$"}), {"narrow": [Says(LONG), Says("fixed")]}, tags=["check"])
    running = await kit.serve({"model": "baton", "messages": TALK})
    assert await kit.text(running) == "fixed"
    first, second = calls_of(kit)
    text = json.dumps(second.body["messages"])
    assert "old question 0" in json.dumps(first.body["messages"])
    assert "old question 0" not in text
    assert tokens_of(second) < WINDOW * 7 // 8
    assert "new question" in text
    assert second.body["messages"][-1]["content"].startswith("That is not what was asked for")
    assert len(cuts_of(running)) == 1  # the first prompt was whole


async def test_a_reply_of_another_shape_is_asked_for_again_where_both_do_not_fit() -> None:
    kit = a_kit(a_step("nook"), {"narrow": [Says(LONG), Says('{"a": 1}')]})
    running = await kit.serve({"model": "baton", "messages": TALK, "response_format": FORMAT})
    assert await kit.text(running) == '{"a": 1}'
    _, second = calls_of(kit)
    assert tokens_of(second) < WINDOW * 7 // 8
    assert "new question" in json.dumps(second.body["messages"])
    assert second.body["response_format"] == FORMAT
    assert cuts_of(running)[-1]["messages"]


async def test_a_long_reply_to_be_repaired_is_cut_in_its_middle_where_nothing_else_can_be() -> None:
    talk = [{"role": "user", "content": "detail " * 1_300}]
    reply = f"begin {LONG} end"
    kit = a_kit(a_step("nook", expect={"regex": "^fixed$"}), {"narrow": [Says(reply), Says("fixed")]}, tags=["check"])
    running = await kit.serve({"model": "baton", "messages": talk})
    assert await kit.text(running) == "fixed"
    old = calls_of(kit)[1].body["messages"][1]["content"]
    assert old.startswith("begin word")
    assert old.endswith("word  end")
    assert "(cut: " in old
    assert tokens_of(calls_of(kit)[1]) < WINDOW * 7 // 8


async def test_a_loop_of_tools_keeps_within_the_context_the_latest_output_longest() -> None:
    outputs = [Says(f"output {number} " + "x" * 6_000 + f" end {number}") for number in range(5)]
    asks = [asks_tools(wants("badger_look", number, text=str(number))) for number in range(5)]
    said = {"narrow": [*asks, Says("it is 42")], "files": outputs}
    kit = a_kit(a_step("nook", tools=["badger"]), said, profile="guided")
    running = await kit.serve({"model": "baton", "messages": TALK[:1] + TALK[-1:]})
    assert await kit.text(running) == "it is 42"
    calls = calls_of(kit)
    assert len(calls) == 6
    assert all(tokens_of(call) < WINDOW for call in calls)
    for number, call in enumerate(calls[1:]):
        results = [one["content"] for one in call.body["messages"] if one["role"] == "tool"]
        assert len(results) == number + 1
        assert all(one.startswith(RESULT_HEAD) and one.endswith("\n</output>") for one in results)
        assert f"end {number}" in results[-1]
        assert all(f"output {at} " in one for at, one in enumerate(results))
    assert "(cut: " in json.dumps(calls[-1].body["messages"])
    assert cuts_of(running)[-1]["tool_outputs"] > 1


async def test_one_output_that_fills_the_context_alone_is_cut_in_its_middle() -> None:
    asks = [asks_tools(wants("badger_look", text="a")), Says("it is 42")]
    said = {"narrow": asks, "files": Says(f"begin {'x' * 40_000} end")}
    kit = a_kit(a_step("nook", tools=["badger"]), said, profile="guided")
    running = await kit.serve({"model": "baton", "messages": TALK})
    assert await kit.text(running) == "it is 42"
    second = calls_of(kit)[1]
    result = second.body["messages"][-1]["content"]
    assert tokens_of(second) < WINDOW
    assert result.startswith(f"{RESULT_HEAD}\n<output>\nbegin x")
    assert result.endswith("x end\n</output>")
    assert "new question" in json.dumps(second.body["messages"])


def test_what_is_cut_of_turns_behind_a_prompt() -> None:
    def tool(text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "a", "content": quoted_result(text)}

    calls: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    turns = [calls, tool("a" * 3_000), calls, tool("b" * 3_000), {"role": "user", "content": "u" * 3_000}]
    old, cut = shortened_turns(turns, 500, latest=False)
    assert cut == {"tool_outputs": 1, "messages": 0, "chars": cut["chars"]}
    assert cut["chars"] > 2_000
    assert [one == before for one, before in zip(old, turns, strict=True)] == [True, False, True, True, True]
    rest, cut = shortened_turns(turns, 2_000, latest=True)
    assert [len(str(one["content"])) < 2_300 for one in (rest[1], rest[3])] == [True, True]
    assert rest[4] == turns[4]
    assert cut["chars"] >= 2_000
    short = [calls, tool("short")]
    assert shortened_turns(short, 10_000, latest=True) == (short, {"tool_outputs": 0, "messages": 0, "chars": 0})
    assert shortened_turns([], 10, latest=False)[0] == []
