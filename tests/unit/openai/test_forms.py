"""Which bodies with status 200 are errors, and how other bodies get the form that was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.openai.vendors.faults import status_of
from gateway.core.openai.vendors.forms import as_chunk, as_whole, fault_in
from gateway.errors import UpstreamProtocol

TEXT = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
FAULTS: list[tuple[dict[str, Any], int | None]] = [
    ({"error": {"message": "slow down", "code": 429}}, 429),
    ({"error": {"message": "slow down", "code": "429"}}, 429),
    ({"error": {"message": "no money", "type": "insufficient_quota", "code": None}}, 402),
    ({"error": "the model is loading"}, None),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, 529),
    ({"error": {"code": 8, "status": "RESOURCE_EXHAUSTED", "message": "quota"}}, 429),
    ({"object": "error", "message": "bad input", "type": "BadRequestError", "code": 400}, 400),
    ({"success": False, "errors": [{"code": 7009, "message": "no such model"}], "result": None}, None),
    ({"choices": None, "base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}}, 402),
    ({"code": 1302, "message": "too fast"}, 429),
    ({"detail": "Not authenticated"}, None),
    ({"detail": [{"loc": ["body"], "msg": "field required"}]}, None),
    ({"status": "error", "message": "no GPU"}, None),
    ({"choices": [{"index": 0, "error": {"code": 502, "message": "provider down"}, "finish_reason": "error"}]}, 502),
    ({"choices": [{"delta": {"content": ""}, "finish_reason": "error"}], "error": {"code": 503, "message": "x"}}, 503),
]
REPLIES: list[dict[str, Any]] = [
    {"choices": [TEXT]},
    {"choices": [TEXT], "error": None},
    {"choices": [TEXT], "base_resp": {"status_code": 0, "status_msg": ""}},
    {"choices": [{**TEXT, "error": {"code": 502, "message": "cut"}}]},  # it has an answer
    {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    {"id": "x", "object": "chat.completion.chunk", "choices": []},
    {"type": "ping"},
    {"object": "list", "data": []},
    {},
]


@pytest.mark.parametrize(("body", "status"), FAULTS)
def test_an_error_in_a_reply_is_told_with_its_status(body: dict[str, Any], status: int | None) -> None:
    fault = fault_in(body)
    assert fault is not None
    assert status_of(fault) == status


@pytest.mark.parametrize("body", REPLIES)
def test_a_reply_is_no_error(body: dict[str, Any]) -> None:
    assert fault_in(body) is None


def test_a_status_that_is_nested_too_deeply_is_unknown() -> None:
    error: Any = {"code": 429}
    for _ in range(20):
        error = {"error": [error]}
    assert status_of(error) is None


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"message": {"content": "x"}}, {"content": "x"}),
        ({"delta": {"content": "x"}}, {"content": "x"}),  # a stream's choice in a whole reply
        ({"finish_reason": "content_filter", "content_filter_results": {"hate": {}}}, {}),
        ({"message": None, "finish_reason": "stop"}, {}),
        ({"message": {"content": {"a": 1}}}, {"content": '{"a": 1}'}),
    ],
)
def test_a_choice_of_a_whole_reply_has_a_message(choice: dict[str, Any], message: dict[str, Any]) -> None:
    assert as_whole({"choices": [choice]})["choices"][0]["message"] == message


@pytest.mark.parametrize(
    ("choice", "delta"),
    [
        ({"delta": {"content": "x"}}, {"content": "x"}),
        ({"message": {"content": "x"}, "finish_reason": "stop"}, {"content": "x"}),  # the whole reply in one event
        ({"index": 0, "content_filter_offsets": {"start": 0}}, {}),
        ({"delta": None, "finish_reason": "stop"}, {}),
        ({"delta": {"content": [{"type": "text", "text": "a"}]}}, {"content": "a"}),
    ],
)
def test_a_choice_of_a_chunk_has_a_delta(choice: dict[str, Any], delta: dict[str, Any]) -> None:
    made = as_chunk({"choices": [choice]})["choices"][0]
    assert made["delta"] == delta
    assert "message" not in made


@pytest.mark.parametrize("choices", [None, [], 3, [{}], [None], [{"message": "x"}], ["x"]])
def test_what_has_no_message_is_no_reply(choices: Any) -> None:
    with pytest.raises(UpstreamProtocol):
        as_whole({"choices": choices})


@pytest.mark.parametrize("choices", [3, [{}], [None], [{"delta": "x"}], ["x"]])
def test_what_has_no_delta_is_no_chunk(choices: Any) -> None:
    with pytest.raises(UpstreamProtocol):
        as_chunk({"choices": choices})
    assert as_chunk({"choices": None}) == {"choices": None}
