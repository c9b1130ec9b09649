"""Replies of workers that are not quite OpenAI's are mended before anybody sees them, whole and in chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gateway.core.openai.finish import FINISH_REASONS
from gateway.core.openai.reply import ReplyBuilder
from gateway.core.openai.vendors.mend import CALLS_MAX, Mender

ORIGIN = "0123456789ab"


def whole(message: Mapping[str, Any], reason: Any = "stop", choices: int = 1) -> dict[str, Any]:
    body = {"choices": [{"index": 0, "message": message, "finish_reason": reason}]}
    choice: dict[str, Any] = Mender(ORIGIN, choices).body(body)["choices"][0]
    return choice


def joined(*deltas: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the mended pieces of calls, the message that they make)."""
    mender, built = Mender(ORIGIN), ReplyBuilder()
    pieces = []
    for delta in deltas:
        chunk = mender.chunk({"choices": [{"index": 0, "delta": delta}]})
        built.add(chunk["choices"])
        pieces += chunk["choices"][0]["delta"].get("tool_calls", [])
    return pieces, built.body()["choices"][0]["message"]


def call(name: str = "f", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **more}


def test_a_reply_in_openais_form_stays_as_it_is() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [call(id="call_1", type="function")]}
    assert whole(message, "tool_calls") == {"index": 0, "message": message, "finish_reason": "tool_calls"}
    delta = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **call(id="call_1", type="function")}]}
    chunk = {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    assert Mender(ORIGIN).chunk(chunk) == chunk


def test_a_call_gets_the_id_type_and_arguments_it_lacks() -> None:
    [mended] = whole({"tool_calls": [{"function": {"name": "f"}}]})["message"]["tool_calls"]
    assert mended["id"].startswith("call_")
    assert mended == {"id": mended["id"], "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("arguments", [{"a": [1, "é"]}, {}, [1]])
def test_arguments_that_are_no_text_become_json(arguments: Any) -> None:
    [mended] = whole({"tool_calls": [call(arguments=arguments, id="c")]})["message"]["tool_calls"]
    assert json.loads(mended["function"]["arguments"]) == arguments
    _, message = joined({"tool_calls": [{"index": 0, **call(arguments=arguments, id="c")}]})
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == arguments


@pytest.mark.parametrize("calls", [None, [], "f", [None, "f"], {}])
def test_what_is_no_list_of_calls_is_none(calls: Any) -> None:
    message = {"role": "assistant", "content": "x"}
    assert whole({**message, "tool_calls": calls})["message"] == message
    assert joined({**message, "tool_calls": calls}) == ([], message)


@pytest.mark.parametrize(
    ("reason", "mended"),
    [
        *((reason, reason) for reason in (*FINISH_REASONS, None)),
        *(("STOP", "stop"), ("end_turn", "stop"), ("eos", "stop"), ("something new", "stop"), ("", None), (7, "stop")),
        *(("MAX_TOKENS", "length"), ("tool_use", "tool_calls"), ("SAFETY", "content_filter")),
        ("refusal", "content_filter"),
    ],
)
def test_a_finish_reason_is_one_that_openai_defines(reason: Any, mended: str | None) -> None:
    assert whole({"content": "x"}, reason)["finish_reason"] == mended
    [choice] = Mender(ORIGIN).chunk({"choices": [{"delta": {}, "finish_reason": reason}]})["choices"]
    assert choice["finish_reason"] == mended


def test_no_more_choices_than_were_asked_for() -> None:
    choices = [{"index": at, "message": {"content": str(at)}, "delta": {"content": str(at)}} for at in range(4)]
    assert len(Mender(ORIGIN, 2).body({"choices": choices})["choices"]) == 2
    assert [one["index"] for one in Mender(ORIGIN, 2).chunk({"choices": choices})["choices"]] == [0, 1]


STREAMS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "in order": [
        {"tool_calls": [{"index": 0, **call("f", "", id="a", type="function")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, **call("g", "{}", id="b", type="function")}]},
    ],
    "without index": [
        {"tool_calls": [call("f", "{", id="a"), call("g", "{", id="b")]},
        {"tool_calls": [{"id": "a", "function": {"arguments": "}"}}]},
        {"tool_calls": [{"id": "b", "function": {"arguments": "}"}}]},
    ],
    "without index and later without id": [
        {"tool_calls": [call("f", "{", id="a")]},
        {"tool_calls": [{"function": {"arguments": "}"}}]},
        {"tool_calls": [call("g", "{", id="b")]},
        {"tool_calls": [{"function": {"arguments": "}"}}]},
    ],
    "without id": [
        {"tool_calls": [{"index": 0, **call("f", "{")}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"tool_calls": [{"index": 1, **call("g", "{}")}]},
    ],
    "without either": [{"tool_calls": [call("f", "{"), {"function": {"arguments": "}"}}, call("g", "{}")]}],
    "all at index 0": [
        {"tool_calls": [{"index": 0, **call("f", "{}", id="a")}]},
        {"tool_calls": [{"index": 0, **call("g", "{}", id="b")}]},
    ],
    "with the name in each piece": [
        {"tool_calls": [{"index": 0, **call("f", "{", id="a")}]},
        {"tool_calls": [{"index": 0, **call("f", "}", id="a")}]},
        {"tool_calls": [{"index": 1, **call("g", "", id="b")}]},
        {"tool_calls": [{"index": 1, **call("g", "{}", id="b")}]},
    ],
    "with another id in each piece": [
        {"tool_calls": [{"index": 0, **call("f", "", id="a")}]},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, **call("f", "}", id="d")}]},
        {"tool_calls": [{"index": 1, **call("g", "{}", id="b")}]},
    ],
    "with another id and without index": [
        {"tool_calls": [call("f", "{", id="a")]},
        {"tool_calls": [{"id": "c", "function": {"arguments": "}"}}]},
        {"tool_calls": [call("g", "{}", id="b")]},
    ],
    "with one id": [
        {"tool_calls": [{"index": 0, **call("f", "{", id="a")}]},
        {"tool_calls": [{"index": 1, **call("g", "{", id="a")}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"arguments": "}"}}]},
        {"tool_calls": [{"index": 1, "id": "a", "function": {"arguments": "}"}}]},
    ],
    "all at index 0 without id": [
        {"tool_calls": [{"index": 0, **call("f", "{")}, {"index": 0, "function": {"arguments": "}"}}]},
        {"tool_calls": [{"index": 0, **call("g", "{}")}]},
    ],
    "with the name in parts": [
        {"tool_calls": [{"index": 0, **call("", "", id="a")}]},
        {"tool_calls": [{"index": 0, **call("f", "")}]},
        {"tool_calls": [{"index": 0, **call("f", "{}")}]},
        {"tool_calls": [{"index": 1, **call("g", "{}", id="b")}]},
    ],
    "with empty names": [
        {"tool_calls": [{"index": 0, **call("f", "{", id="a")}]},
        {"tool_calls": [{"index": 0, "id": "", "function": {"name": "", "arguments": "}"}}]},
        {"tool_calls": [{"index": 1, **call("g", "{}", id="b")}]},
        {"tool_calls": [{"index": 1, "id": None, "function": {"name": None, "arguments": ""}}]},
    ],
    "from index 1": [
        {"tool_calls": [{"index": 1, **call("f", "{}", id="a")}]},
        {"tool_calls": [{"index": 3, **call("g", "{}", id="b")}]},
    ],
}


@pytest.mark.parametrize("name", STREAMS)
def test_streamed_calls_have_their_index_and_one_id_each(name: str) -> None:
    pieces, message = joined(*STREAMS[name])
    calls = message["tool_calls"]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in calls] == [("f", "{}"), ("g", "{}")]
    assert len({one["id"] for one in calls}) == 2
    assert all(one["id"] for one in calls)
    firsts = [next(piece for piece in pieces if piece["index"] == at) for at in (0, 1)]
    assert [(first["type"], first["id"]) for first in firsts] == [("function", one["id"]) for one in calls]
    assert sum("id" in piece for piece in pieces) == 2


def test_a_custom_call_keeps_its_name_and_input() -> None:
    first = {"index": 0, "id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin"}}
    _, message = joined({"tool_calls": [first]}, {"tool_calls": [{"index": 0, "custom": {"input": " Patch"}}]})
    assert message["tool_calls"] == [
        {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin Patch"}}
    ]
    [mended] = whole({"tool_calls": [{"id": "c", "custom": {"name": "x", "input": "y"}}]})["message"]["tool_calls"]
    assert mended == {"id": "c", "type": "custom", "custom": {"name": "x", "input": "y"}}


def test_too_many_calls_are_cut() -> None:
    deltas = [{"tool_calls": [{"index": at, **call(id=f"c{at}")}]} for at in range(CALLS_MAX + 3)]
    assert len(joined(*deltas)[1]["tool_calls"]) == CALLS_MAX
    calls = [call(id=f"c{at}") for at in range(CALLS_MAX + 3)]
    assert len(whole({"tool_calls": calls})["message"]["tool_calls"]) == CALLS_MAX


@pytest.mark.parametrize("foreign", ["functions.f:0", "x" * 41, "a b", "é"])
def test_an_id_that_other_vendors_refuse_is_replaced(foreign: str) -> None:
    [mended] = whole({"tool_calls": [call(id=foreign)]})["message"]["tool_calls"]
    assert len(mended["id"]) == 32
    assert mended["extra_content"] == {"baton": {"origin": ORIGIN, "id": foreign}}
    pieces, message = joined(
        {"tool_calls": [{"index": 0, **call(id=foreign, arguments="{")}]},
        {"tool_calls": [{"index": 0, "id": foreign, "function": {"arguments": "}"}}]},
    )
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"
    assert message["tool_calls"][0]["extra_content"] == mended["extra_content"]
    assert [("extra_content" in piece, "id" in piece) for piece in pieces] == [(True, True), (False, False)]


def test_a_streams_state_is_marked_once() -> None:
    """Clients join the texts of all pieces, so a mark that came twice would not be one."""
    signed = {"extra_content": {"google": {"thought_signature": "s"}}}
    mender = Mender(ORIGIN)
    deltas: list[dict[str, Any]] = [
        {"reasoning_details": [{"type": "reasoning.text", "text": "a", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "b", "index": 0}]},
        {"tool_calls": [{"index": 0, **call(id="c")}]},
        {"tool_calls": [{"index": 0, **signed}]},
        {"tool_calls": [{"index": 0, **signed}]},
    ]
    sent = [mender.chunk({"choices": [{"delta": delta}]})["choices"][0]["delta"] for delta in deltas]
    assert ["baton" in str(delta.get("extra_content")) for delta in sent] == [True, False, False, False, False]
    assert ["baton" in str(delta.get("tool_calls")) for delta in sent] == [False, False, True, False, False]
    built = ReplyBuilder()
    for delta in sent:
        built.add([{"delta": delta}])
    message = built.body()["choices"][0]["message"]
    assert message["reasoning_details"] == [{"type": "reasoning.text", "text": "ab", "index": 0}]
    assert message["tool_calls"][0]["extra_content"]["google"] == {"thought_signature": "s"}


@pytest.mark.parametrize(
    ("content", "mended"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], {"content": "ab"}),
        ([{"type": "output_text", "text": "a"}], {"content": "a"}),
        (
            [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}],
            {"content": "a", "reasoning_content": "hm"},
        ),
        ([{"type": "thinking", "thinking": "hm"}], {"content": None, "reasoning_content": "hm"}),
        ([], {"content": None}),
        (["a", None, "b"], {"content": "ab"}),
        ({"type": "text", "text": "a"}, {"content": "a"}),
        ({"text": "a", "n": [1]}, {"content": '{"text": "a", "n": [1]}'}),
        (3, {"content": "3"}),
    ],
)
def test_content_in_parts_becomes_text(content: Any, mended: dict[str, Any]) -> None:
    assert whole({"role": "assistant", "content": content})["message"] == {"role": "assistant", **mended}
    [choice] = Mender(ORIGIN).chunk({"choices": [{"delta": {"content": content}}]})["choices"]
    assert choice["delta"] == mended


@pytest.mark.parametrize("cuts", [1, 3, 1000])
def test_a_function_that_stands_for_a_custom_tool_is_called_as_one(cuts: int) -> None:
    text = '*** Begin "Patch"\n\u00e9 \\ +x'
    arguments = json.dumps({"input": text})
    customs = frozenset({"apply_patch"})
    reply = {"choices": [{"message": {"tool_calls": [call("apply_patch", arguments, id="c"), call("f", id="d")]}}]}
    expected = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": text}}
    calls = Mender(ORIGIN, 1, customs).body(reply)["choices"][0]["message"]["tool_calls"]
    assert [calls[0], calls[1]["type"]] == [expected, "function"]
    mender, built = Mender(ORIGIN, 1, customs), ReplyBuilder()
    deltas: list[dict[str, Any]] = [{"index": 0, **call("apply_patch", "", id="c", type="function")}]
    deltas += [
        {"index": 0, "function": {"arguments": arguments[at : at + cuts]}} for at in range(0, len(arguments), cuts)
    ]
    deltas += [{"index": 1, **call("f", "{}", id="d", type="function")}]
    for delta in deltas:
        built.add(mender.chunk({"choices": [{"delta": {"tool_calls": [delta]}}]})["choices"])
    built.add(mender.chunk({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})["choices"])
    calls = built.body()["choices"][0]["message"]["tool_calls"]
    assert calls == [expected, {"id": "d", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_a_custom_call_that_is_cut_keeps_what_came() -> None:
    mender, built = Mender(ORIGIN, 1, frozenset({"x"})), ReplyBuilder()
    first = {"index": 0, **call("x", '{"input": "ab', id="c")}
    built.add(mender.chunk({"choices": [{"delta": {"tool_calls": [first]}}]})["choices"])
    built.add(mender.chunk({"choices": [{"delta": {}, "finish_reason": "length"}]})["choices"])
    assert built.body()["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == '{"input": "ab'


def test_two_calls_of_one_tool_under_one_index_stay_two() -> None:
    piece = {"index": 0, **call("f", '{"q": "a"}')}
    _, message = joined({"tool_calls": [piece]}, {"tool_calls": [{"index": 0, **call("f", '{"q": "b"}')}]})
    calls = message["tool_calls"]
    assert [one["function"]["arguments"] for one in calls] == ['{"q": "a"}', '{"q": "b"}']
    assert calls[0]["id"] != calls[1]["id"]


@pytest.mark.parametrize("arguments", ["", None])
def test_a_call_without_arguments_has_an_object_of_none(arguments: Any) -> None:
    [mended] = whole({"tool_calls": [call(arguments=arguments, id="c")]})["message"]["tool_calls"]
    assert mended["function"]["arguments"] == "{}"
    mender, built = Mender(ORIGIN), ReplyBuilder()
    for choice in (
        {"delta": {"tool_calls": [{"index": 0, **call("f", arguments, id="c")}]}},
        {"delta": {"tool_calls": [{"index": 1, **call("g", '{"a": 1}', id="d")}]}},
        {"delta": {}, "finish_reason": "tool_calls"},
    ):
        built.add(mender.chunk({"choices": [choice]})["choices"])
    calls = built.body()["choices"][0]["message"]["tool_calls"]
    assert [one["function"]["arguments"] for one in calls] == ["{}", '{"a": 1}']


def test_equal_ids_become_two() -> None:
    calls = whole({"tool_calls": [call(id="a"), call(id="a"), call(id="functions.f:0"), call(id="functions.f:0")]})
    ids = [one["id"] for one in calls["message"]["tool_calls"]]
    assert ids[0] == "a"
    assert len(set(ids)) == 4


FORCED = {"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}


@pytest.mark.parametrize(
    ("fields", "params", "reason", "mended"),
    [
        ({"tool_calls": [call(id="c")]}, {"tools": []}, "stop", "tool_calls"),
        ({"tool_calls": [call(id="c")]}, {"tools": []}, "end_turn", "tool_calls"),
        ({"tool_calls": [call(id="c")]}, {"tools": []}, "length", "length"),
        ({"tool_calls": [call(id="c")]}, FORCED, "stop", "stop"),  # as OpenAI ends a call that was asked for by name
        ({"tool_calls": [call(id="c")]}, FORCED, "tool_calls", "tool_calls"),
        ({"content": "x"}, {"tools": []}, "stop", "stop"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, {"functions": []}, "stop", "function_call"),
        ({"function_call": {"name": "f", "arguments": "{}"}}, {"tools": []}, "function_call", "tool_calls"),
    ],
)
def test_a_reply_with_calls_does_not_just_stop(
    fields: dict[str, Any], params: dict[str, Any], reason: str, mended: str
) -> None:
    body = {"choices": [{"message": {"role": "assistant", "content": None, **fields}, "finish_reason": reason}]}
    assert Mender(ORIGIN, params=params).body(body)["choices"][0]["finish_reason"] == mended
    mender = Mender(ORIGIN, params=params)
    mender.chunk({"choices": [{"delta": fields}]})
    last = mender.chunk({"choices": [{"delta": {}, "finish_reason": reason}]})
    if "function_call" not in fields or "tools" in params:
        assert last["choices"][0]["finish_reason"] == mended


def test_a_call_in_the_older_form_is_a_tools_where_tools_were_sent() -> None:
    message = {"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    body = {"choices": [{"message": message, "finish_reason": "function_call"}]}
    [mended] = Mender(ORIGIN, params={"tools": []}).body(body)["choices"][0]["message"]["tool_calls"]
    assert mended["function"] == message["function_call"]
    mender, built = Mender(ORIGIN, params={"tools": []}), ReplyBuilder()
    for piece in ({"name": "f", "arguments": ""}, {"arguments": '{"a":'}, {"arguments": " 1}"}):
        built.add(mender.chunk({"choices": [{"delta": {"function_call": piece}}]})["choices"])
    [streamed] = built.body()["choices"][0]["message"]["tool_calls"]
    assert streamed["function"] == message["function_call"]
    assert Mender(ORIGIN).body(body)["choices"][0]["message"]["function_call"] == message["function_call"]
