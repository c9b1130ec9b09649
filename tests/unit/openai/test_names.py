"""Names of tools that a worker does not take are told to it in another form, and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.openai.vendors.mend import Mender
from gateway.core.openai.vendors.names import told_name, told_names, with_told_names

LONG = "mcp__" + "server_" * 12 + "search"
OTHER = LONG + "_again"


def tool(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


@given(st.text(min_size=1, max_size=200), st.sampled_from([64, 128]))
def test_a_told_name_is_one_that_vendors_take_and_stays_the_same(name: str, chars_max: int) -> None:
    told = told_name(name, chars_max)
    assert 0 < len(told) <= chars_max
    assert told.isascii()
    assert told.replace("-", "").replace("_", "").isalnum() or set(told) <= {"-", "_"}
    assert told_name(told, chars_max) == told


def test_names_that_a_worker_takes_stay() -> None:
    body = {"tools": [tool("f"), tool(LONG)], "messages": [{"role": "user", "content": "x"}]}
    assert told_names(body, 128) == {}
    assert list(told_names(body, 64).values()) == [LONG]


def test_two_long_names_with_one_beginning_stay_two() -> None:
    told = told_names({"tools": [tool(LONG), tool(OTHER)], "messages": []})
    assert len(told) == 2
    assert set(told.values()) == {LONG, OTHER}


def test_a_name_is_told_wherever_it_stands() -> None:
    call = {"id": "a", "type": "function", "function": {"name": LONG, "arguments": "{}"}}
    foreign = {"id": "b", "type": "function", "function": {"name": "functions.f:0", "arguments": "{}"}}
    body: dict[str, Any] = {
        "tools": [tool(LONG), tool(OTHER, "custom"), tool("f")],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool(LONG), tool("f")]}},
        "messages": [
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": None, "tool_calls": [call, foreign]},
            {"role": "tool", "tool_call_id": "a", "name": LONG, "content": LONG},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
        ],
    }
    told = told_names(body)
    sent = with_told_names(body, told)
    names = [one[one["type"]]["name"] for one in (*sent["tools"], *sent["messages"][1]["tool_calls"])]
    assert [told.get(name, name) for name in names] == [LONG, OTHER, "f", LONG, "functions.f:0"]
    assert all(len(name) <= 64 for name in names)
    assert sent["tool_choice"]["allowed_tools"]["tools"] == [sent["tools"][0], tool("f")]
    assert sent["messages"][0] == body["messages"][0]
    assert sent["messages"][2]["name"] == names[0]
    assert sent["messages"][2]["content"] == LONG
    assert body["tools"][0] == tool(LONG)


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": LONG}}, "auto", None])
def test_a_choice_of_one_tool_is_told_too(choice: Any) -> None:
    body = {"tools": [tool(LONG)], "tool_choice": choice, "messages": []}
    told = told_names(body)
    sent = with_told_names(body, told)
    expected = choice if not isinstance(choice, dict) else tool(next(iter(told)))
    assert sent["tool_choice"] == expected


def test_functions_of_the_older_form_are_told_too() -> None:
    messages = [{"role": "assistant", "function_call": {"name": LONG, "arguments": "{}"}}]
    body = {"functions": [{"name": LONG}], "function_call": {"name": LONG}, "messages": messages}
    told = told_names(body)
    sent = with_told_names(body, told)
    short = next(iter(told))
    assert (sent["functions"], sent["function_call"]) == ([{"name": short}], {"name": short})
    assert sent["messages"][0]["function_call"]["name"] == short


def test_calls_come_back_under_the_tools_own_names() -> None:
    told = told_names({"tools": [tool(LONG)], "messages": []})
    short = next(iter(told))
    call = {"id": "a", "type": "function", "function": {"name": short, "arguments": "{}"}}
    reply = {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    whole = Mender("0" * 12, 1, frozenset(), told).body(reply)
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == LONG
    mender = Mender("0" * 12, 1, frozenset(), told)
    pieces = [{"index": 0, **call}, {"index": 0, "function": {"name": short, "arguments": ""}}]
    made = [mender.chunk({"choices": [{"delta": {"tool_calls": [piece]}}]}) for piece in pieces]
    calls = [chunk["choices"][0]["delta"]["tool_calls"][0]["function"] for chunk in made]
    assert [one.get("name") for one in calls] == [LONG, None]
    custom = Mender("0" * 12, 1, frozenset({LONG}), told).body(reply)["choices"][0]["message"]["tool_calls"][0]
    assert (custom["type"], custom["custom"]["name"]) == ("custom", LONG)
