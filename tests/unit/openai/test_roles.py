"""Conversations as strict chat templates take them: each rule alone, and all of them on any conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.openai.vendors.roles import ANY, Template, for_template

Turn = dict[str, Any]
STRICT = Template(*[False] * 7)


def turn(role: str, content: Any, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


CALL = turn(
    "assistant", None, tool_calls=[{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
)
RESULT = turn("tool", "42", tool_call_id="a")


def test_what_takes_anything_gets_it_as_it_is() -> None:
    turns = [turn("developer", "x"), turn("user", "", name="n"), turn("system", "y"), turn("user", "z")]
    assert for_template(turns, ANY) == turns


def test_a_developers_message_is_a_systems() -> None:
    assert for_template([turn("developer", "be brief"), turn("user", "x")], Template(developer=False)) == [
        turn("system", "be brief"),
        turn("user", "x"),
    ]


FIRST = Template(developer=False, late_system=False)


@pytest.mark.parametrize(
    ("turns", "made"),
    [
        ([turn("system", "a"), turn("user", "b")], [turn("system", "a"), turn("user", "b")]),
        (
            [turn("system", "a"), turn("developer", "b"), turn("user", "c")],
            [turn("system", "a\n\nb"), turn("user", "c")],
        ),
        (
            [turn("user", "a"), turn("assistant", "b"), turn("system", "c"), turn("user", "d")],
            [turn("user", "a"), turn("assistant", "b"), turn("user", "<system>\nc\n</system>\n\nd")],
        ),
        (
            [turn("user", "a"), turn("system", "b")],
            [turn("user", "a\n\n<system>\nb\n</system>")],
        ),
        (
            [turn("user", "a"), CALL, RESULT, turn("system", "b")],
            [turn("user", "a"), CALL, RESULT, turn("user", "<system>\nb\n</system>")],
        ),
        (
            [turn("user", "a"), turn("assistant", "b"), turn("system", "c"), turn("user", [{"type": "image_url"}])],
            [
                *(turn("user", "a"), turn("assistant", "b")),
                turn("user", [{"type": "text", "text": "<system>\nc\n</system>"}, {"type": "image_url"}]),
            ],
        ),
        ([turn("user", "a"), turn("user", "b")], [turn("user", "a"), turn("user", "b")]),
    ],
)
def test_a_system_message_stands_first_alone_and_a_later_one_keeps_its_place(
    turns: Sequence[Turn], made: Sequence[Turn]
) -> None:
    assert for_template(turns, FIRST) == made


def test_without_a_systems_role_its_text_begins_the_users() -> None:
    template = Template(system=False)
    assert for_template([turn("system", "a"), turn("user", "b")], template) == [turn("user", "a\n\nb")]
    assert for_template([turn("system", "a")], template) == [turn("user", "a")]


ALTERNATING = Template(repeated_roles=False)


@pytest.mark.parametrize(
    ("turns", "made"),
    [
        ([turn("user", "a"), turn("user", "b")], [turn("user", "a\n\nb")]),
        ([turn("assistant", "a"), turn("user", "b")], [turn("user", "…"), turn("assistant", "a"), turn("user", "b")]),
        (
            [turn("user", "a"), turn("assistant", "b"), turn("assistant", "c"), turn("user", "d")],
            [turn("user", "a"), turn("assistant", "b\n\nc"), turn("user", "d")],
        ),
        (
            [turn("user", "a"), CALL, RESULT, turn("user", "b")],
            [turn("user", "a"), CALL, RESULT, turn("assistant", "…"), turn("user", "b")],
        ),
        (
            [turn("user", "a"), CALL, RESULT, turn("assistant", "b")],
            [turn("user", "a"), CALL, RESULT, turn("assistant", "b")],
        ),
        ([turn("system", "s"), turn("user", "a")], [turn("system", "s"), turn("user", "a")]),
    ],
)
def test_user_and_assistant_take_turns(turns: Sequence[Turn], made: Sequence[Turn]) -> None:
    assert for_template(turns, ALTERNATING) == made


def test_a_name_goes_into_the_users_text() -> None:
    turns = [turn("user", "hi", name="ada"), turn("assistant", "yes", name="bot"), {**RESULT, "name": "f"}]
    assert for_template(turns, Template(name=False)) == [
        *(turn("user", "ada: hi"), turn("assistant", "yes")),
        {**RESULT, "name": "f"},  # of a tool: a template may need it
    ]


def test_an_empty_text_is_said_to_be_empty_or_left_out() -> None:
    turns = [turn("system", ""), turn("user", " "), turn("assistant", ""), {**CALL, "content": ""}, turn("tool", "")]
    turns.append(turn("user", [{"type": "text", "text": ""}, {"type": "image_url"}]))
    assert for_template(turns, Template(empty_content=False)) == [
        *(turn("user", "(empty)"), CALL, turn("tool", "(empty)"), turn("user", [{"type": "image_url"}])),
    ]


def test_calls_and_results_are_text_for_a_template_without_tools() -> None:
    assert for_template([turn("user", "a"), CALL, RESULT], Template(tools=False)) == [
        *(turn("user", "a"), turn("assistant", "[f] {}"), turn("user", "[result] 42")),
    ]


CONTENTS = st.one_of(
    st.sampled_from(["", " ", "x", "one two"]), st.just([{"type": "text", "text": "part"}, {"type": "image_url"}])
)
TURNS = st.lists(
    st.builds(turn, st.sampled_from(["system", "developer", "user", "assistant"]), CONTENTS)
    | st.just([CALL, RESULT]).map(list)
)


@given(TURNS)
def test_the_strictest_template_takes_any_conversation(made: list[Any]) -> None:
    turns = [one for each in made for one in (each if isinstance(each, list) else [each])]
    before = [dict(one) for one in turns]
    strict = for_template(turns, STRICT)
    assert turns == before
    roles = [one["role"] for one in strict]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
    assert all(one["content"] for one in strict)
    assert str(strict).count("one two") == str(turns).count("one two")
