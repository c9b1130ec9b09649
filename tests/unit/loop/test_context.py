"""What a step gets of the conversation, by its own choice."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.loop.compose import LEFT_OUT, selected, shortened, step_messages
from gateway.core.loop.contract import PlanLimits
from gateway.core.loop.plan import plan_schema, validate
from gateway.errors import PlanRefused

CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    CALL,
    {"role": "tool", "tool_call_id": "a", "content": "A"},
    {"role": "tool", "tool_call_id": "b", "content": "B"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
LIMITS = PlanLimits(("atlas", "birch"), 5, checkers=("birch",))


def places(context: Any, *, alone: bool = False) -> list[int]:
    return [TALK.index(dict(message)) for message in selected(TALK, context, alone=alone)]


def test_a_step_gets_what_it_names() -> None:
    assert places("all") == list(range(7))
    assert places("last") == [0, 6]
    assert places((1, 2)) == [0, 5, 6]
    assert places("none", alone=True) == []
    assert places((3,), alone=True) == [0, 4]
    assert places((3,)) == [0, 2, 3, 4]  # a result without its call would be refused
    assert places((99,)) == [0]


def test_the_last_turn_has_the_calls_that_follow_it() -> None:
    assert [m["role"] for m in selected(TALK[:5], "last", alone=False)] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]


def test_a_step_that_gets_nothing_is_told_so() -> None:
    first, task = step_messages([], "Count to ten.", [])
    assert first["content"] == f"<request>\n{LEFT_OUT}\n</request>"
    assert task["content"] == "Count to ten."


@pytest.mark.parametrize("context", ["some", [], [0], [-1], [1.5], [True], "none", {"last": 1}, [1] * 40])
def test_a_context_that_is_none_is_refused(context: Any) -> None:
    with pytest.raises(PlanRefused) as refused:
        validate({"steps": [{"worker": "atlas", "task": None, "see": [], "context": context}]}, LIMITS)
    assert refused.value.reason == "bad_context"


def test_a_plan_keeps_it() -> None:
    step = {"worker": "atlas", "task": "Count.", "see": [], "context": [2, 1, 2]}
    assert validate({"steps": [step]}, LIMITS).as_json()["steps"][0]["context"] == [1, 2]
    step["context"] = "all"
    assert "context" not in validate({"steps": [step]}, LIMITS).as_json()["steps"][0]


def test_planners_that_were_not_told_of_it_cannot_write_it() -> None:
    plain = PlanLimits(("atlas", "birch"), 5)
    with pytest.raises(PlanRefused, match="must be an object with"):
        validate({"steps": [{"worker": "atlas", "task": None, "see": [], "context": "last"}]}, plain)
    assert "context" not in str(plan_schema(plain, checks=True))
    assert "context" not in str(plan_schema(LIMITS))
    assert "context" in str(plan_schema(LIMITS, checks=True))


def test_two_turns_of_a_conversation_share_their_beginning() -> None:
    first = step_messages(TALK[:2], None, [])
    second = step_messages(TALK, None, [])
    assert str(second)[:-1].startswith(str(first)[:-1])


def test_old_outputs_of_tools_are_cut_first_then_old_turns() -> None:
    talk = [*TALK[:3], {**TALK[3], "content": "A" * 1000}, TALK[4], TALK[5], TALK[6]]
    some = shortened(talk, 100)
    assert some is not None
    assert some.cut == {"tool_outputs": 1, "messages": 0, "chars": 800}
    assert str(some.messages[3]["content"]).endswith("(cut: 800 characters of an old output)")
    assert some.dropped == ()
    most = shortened(talk, 10_000)
    assert most is not None
    assert [message["role"] for message in most.messages] == ["system", "user"]
    assert most.cut["messages"] == 5
    assert shortened(talk[-1:], 100) is None


def test_a_summary_stands_where_the_dropped_turns_were_and_whole_turns_go() -> None:
    short = shortened([*TALK[:4], {"role": "developer", "content": "Rule."}, *TALK[4:]], 1)
    assert short is not None
    with_it = short.with_summary({"role": "user", "content": "SUM"})
    assert [str(message["content"]) for message in with_it[:2]] == [TALK[0]["content"], "SUM"]
    assert TALK[-1] in with_it
    assert {"role": "developer", "content": "Rule."} in with_it
    called = [call["id"] for message in with_it for call in message.get("tool_calls") or ()]
    assert called == [message["tool_call_id"] for message in with_it if message["role"] == "tool"]
    assert len(short.messages) + len(short.dropped) == len(TALK) + 1
