"""Items of the Responses API and the chat messages they stand for."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.openai.marks import without
from gateway.core.openai.responses.bodies import item_id
from gateway.core.openai.responses.items import (
    check_calls,
    no_such_item,
    parse_items,
    references,
    response_of,
    to_input_items,
    to_messages,
)
from gateway.core.openai.responses.request import chat_request, parse_responses_request
from gateway.core.openai.shapes import Reader
from gateway.errors import BadRequest

HEX = "0123456789abcdef" * 2
CALL = {"type": "function_call", "call_id": "call_1", "name": "sum", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
TEXT = st.text(min_size=1, max_size=20)


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": list(parts)}


def read(items: Any) -> list[dict[str, Any]]:
    return to_messages(parse_items(items, 100, Reader(1000)))[0]


def test_a_string_is_one_message_of_the_user() -> None:
    assert read("hi") == [{"role": "user", "content": "hi"}]


def test_parts_become_chat_parts_and_lone_text_a_string() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    file = {"type": "input_file", "file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}
    text = {"type": "input_text", "text": "see"}
    items = [{"role": "developer", "content": [text]}, {"role": "user", "content": [text, image, file]}]
    assert read(items) == [
        {"role": "developer", "content": "see"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}},
            ],
        },
    ]


def test_one_assistant_turn_is_one_message_whatever_the_order_of_its_items() -> None:
    text = said({"type": "output_text", "text": "let me "}, {"type": "output_text", "text": "see"})
    second = {**CALL, "call_id": "call_2"}
    for turn in ([text, CALL, second], [CALL, second, text]):
        (message,) = read(turn)
        assert message["content"] == "let me see"
        assert [call["id"] for call in message["tool_calls"]] == ["call_1", "call_2"]
        assert message["tool_calls"][0]["function"] == {"name": "sum", "arguments": '{"a":1}'}


def test_messages_may_be_plain_text() -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert read(items) == items


def test_a_reference_to_nothing_names_itself() -> None:
    error = no_such_item("msg_1", 3)
    assert (error.status, error.param) == (404, "input[3].id")
    assert "msg_1" in error.message


def test_calls_after_a_result_are_a_turn_of_their_own() -> None:
    later = [{**CALL, "call_id": "call_2"}, {**RESULT, "call_id": "call_2"}]
    roles = [message["role"] for message in read([CALL, RESULT, *later])]
    assert roles == ["assistant", "tool", "assistant", "tool"]


def test_a_refusal_and_reasoning() -> None:
    items = [{"type": "reasoning", "id": "rs_1", "summary": []}, said({"type": "refusal", "refusal": "no"})]
    assert read(items) == [{"role": "assistant", "content": None, "refusal": "no"}]


@pytest.mark.parametrize(
    ("items", "param", "code"),
    [
        (3, "input", "invalid_type"),
        ([1], "input[0]", "invalid_type"),
        ([{}], "input[0].type", "invalid_value"),
        ([{"type": ["message"]}], "input[0].type", "invalid_value"),
        ([{"type": "a_new_kind", "id": "x_1"}], "input[0].type", "invalid_value"),
        ([{"type": "custom_tool_call"}], "input[0].call_id", "missing_required_parameter"),
        ([{"role": "wizard", "content": "x"}], "input[0].role", "invalid_value"),
        ([{"role": "user"}], "input[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": 5}], "input[0].content", "invalid_type"),
        ([{"role": "user", "content": []}], "input[0].content", "empty_array"),
        ([{"role": "user", "content": "x", "status": "maybe"}], "input[0].status", "invalid_value"),
        ([{"role": "system", "content": [{"type": "input_image", "image_url": "data:"}]}],
         "input[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url",
         "missing_required_parameter"),
        ([{"role": "user", "content": "x", "api_key": "k"}], "input[0].api_key", "refused_field"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]", "invalid_type"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "input[0].content[0].type", "invalid_value"),
        ([said({"type": "input_text", "text": "x"})], "input[0].content[0].type", "invalid_value"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text",
         "missing_required_parameter"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], "input[0].content[0].file_id",
         "unsupported_value"),
        ([{"role": "user", "content": [{"type": "input_file", "file_url": "u"}]}], "input[0].content[0].file_url",
         "invalid_value"),
        ([{**CALL, "arguments": {}}], "input[0].arguments", "invalid_type"),
        ([{**CALL, "call_id": None}], "input[0].call_id", "missing_required_parameter"),
        ([CALL, {**RESULT, "output": None}], "input[1].output", "missing_required_parameter"),
        ([CALL, {**RESULT, "output": [{"type": "output_text", "text": "x"}]}], "input[1].output[0].type",
         "invalid_value"),
        ([CALL, {**RESULT, "output": [{"type": "input_image", "file_id": "f"}]}], "input[1].output[0].file_id",
         "unsupported_value"),
        ([{"type": "item_reference"}], "input[0].id", "missing_required_parameter"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(items: Any, param: str, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(items)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_too_many_items_are_refused() -> None:
    with pytest.raises(BadRequest, match="at most 2"):
        parse_items([{"role": "user", "content": "x"}] * 3, 2, Reader(1000))


def test_unknown_fields_of_an_item_are_dropped_and_reported() -> None:
    reader = Reader(1000)
    (item,) = parse_items([{"role": "user", "content": [{"type": "input_text", "text": "x", "bold": 1}]}], 9, reader)
    assert item["content"] == [{"type": "input_text", "text": "x"}]
    assert reader.dropped == ["input[0].content[0].bold"]


def test_each_message_knows_its_item() -> None:
    items = [{"type": "reasoning", "id": "rs_1"}, CALL, said({"type": "output_text", "text": "x"}), RESULT]
    messages, places = to_messages(parse_items(items, 9, Reader(1000)))
    assert [message["role"] for message in messages] == ["assistant", "tool"]
    assert places == [1, 3]


def test_a_cache_breakpoint_stays_on_its_part() -> None:
    part = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    (message,) = read([{"role": "user", "content": [part]}])
    assert message["content"] == [{**part, "type": "text"}]
    assert to_input_items([message], HEX)[0]["content"] == [part]


@pytest.mark.parametrize(
    ("items", "code"),
    [
        ([RESULT], "tool_call_not_found"),
        ([CALL, RESULT, RESULT], "tool_call_not_found"),
        ([CALL, {"role": "user", "content": "well?"}], "tool_output_not_found"),
    ],
)
def test_calls_and_results_belong_together(items: list[dict[str, Any]], code: str) -> None:
    check_calls(read([CALL, RESULT]))
    with pytest.raises(BadRequest) as refused:
        check_calls(read(items))
    assert refused.value.code == code


def test_an_items_id_names_its_response() -> None:
    assert response_of(item_id("fc", HEX, 7)) == f"resp_{HEX}"
    for stranger in ("msg_1", f"resp_{HEX}", f"msg_{HEX}", f"msg_{HEX}00000g", f"XX_{HEX}000000"):
        assert response_of(stranger) is None
    items = parse_items([{"id": "msg_1"}, {"role": "user", "content": "x"}], 9, Reader(1000))
    assert references(items) == {0: "msg_1"}


parts = st.one_of(
    TEXT.map(lambda t: {"type": "input_text", "text": t}),
    st.sampled_from(["low", "high", "auto"]).map(
        lambda d: {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": d}
    ),
    TEXT.map(lambda t: {"type": "input_file", "file_data": t, "filename": "a"}),
)
texts = st.lists(TEXT.map(lambda t: {"type": "input_text", "text": t}), min_size=1, max_size=3)
items = st.lists(
    st.one_of(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.just("user"),
            st.one_of(TEXT, st.lists(parts, min_size=1, max_size=3)),
        ),
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["system", "developer"]),
            st.one_of(TEXT, texts),
        ),
        TEXT.map(lambda t: said({"type": "output_text", "text": t})),
        TEXT.map(lambda t: said({"type": "refusal", "refusal": t})),
        st.builds(lambda name, text: {**CALL, "name": name, "arguments": text}, TEXT, st.text(max_size=9)),
        st.builds(lambda output: {**RESULT, "output": output}, st.one_of(st.text(max_size=9), texts)),
    ),
    max_size=8,
)


@given(items)
def test_messages_come_back_from_the_items_they_are_shown_as(given_items: list[dict[str, Any]]) -> None:
    messages = read(given_items)
    shown = to_input_items(messages, HEX)
    assert [without(message) for message in read(shown)] == [without(message) for message in messages]
    assert len({item["id"] for item in shown}) == len(shown)
    assert {response_of(item["id"]) for item in shown} <= {f"resp_{HEX}"}


@pytest.mark.parametrize(
    ("declared", "data", "code"),
    [
        ("text/x-python", b"print(1)", None),
        ("application/vnd.openxmlformats-officedocument.wordprocessingml.document", b"PK\x03\x04tides", None),
        ("application/pdf", b"%PDF-1.7", None),
        ("application/msword", b"\x89PNG\r\n\x1a\nx", "media_type"),
        ("application/zip", b"PK\x03\x04tides", "media_type"),
    ],
)
def test_files_of_the_types_that_openai_takes_are_taken(declared: str, data: bytes, code: str | None) -> None:
    link = f"data:{declared};base64,{base64.b64encode(data).decode()}"
    content = [{"type": "input_file", "file_data": link, "filename": "tides"}]
    body = {"model": "baton", "input": [{"role": "user", "content": content}]}
    request = parse_responses_request(body, items_max=9)
    if code is None:
        chat, _ = chat_request(request, request.items, (), messages_max=9)
        assert chat.messages[0]["content"][0]["file"]["file_data"] == link
        return
    with pytest.raises(BadRequest) as refused:
        chat_request(request, request.items, (), messages_max=9)
    assert refused.value.code == code
