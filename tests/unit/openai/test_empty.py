"""Which replies say nothing, and which of those are a failure."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.money.amounts import Usage
from gateway.core.openai.vendors.empty import EmptyReply, check_stream, check_whole, speaks
from gateway.core.openai.vendors.usage import usage_body
from gateway.errors import UpstreamProtocol

ASKED = {"messages": [{"role": "user", "content": "hi"}]}
SILENT: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, {"content": None, "tool_calls": []}, {}]


@pytest.mark.parametrize("message", SILENT)
@pytest.mark.parametrize("reason", ["stop", None, "", "eos", "END_TURN", "error", "network_error"])
def test_nothing_said_and_nothing_thought_is_a_failure(message: dict[str, Any], reason: Any) -> None:
    reply = {"choices": [{"message": message, "finish_reason": reason}]}
    with pytest.raises(EmptyReply) as caught:
        check_whole("w", reply, Usage(9, 0), ASKED)
    assert caught.value.retryable
    assert (caught.value.code, caught.value.usage) == ("empty_reply", Usage(9, 0))


@pytest.mark.parametrize(
    ("choice", "usage", "request_body"),
    [
        ({"message": {"content": "x"}, "finish_reason": "stop"}, Usage(9, 0), ASKED),
        ({"message": {"refusal": "no"}, "finish_reason": "stop"}, Usage(9, 0), ASKED),
        ({"message": {"reasoning_content": "hm"}, "finish_reason": "stop"}, Usage(9, 0), ASKED),
        ({"message": {"tool_calls": [{"id": "a"}]}, "finish_reason": "stop"}, Usage(9, 0), ASKED),
        ({"message": {"content": ""}, "finish_reason": "length"}, Usage(9, 0), ASKED),
        ({"message": {}, "finish_reason": "content_filter"}, Usage(9, 0), ASKED),
        ({"message": {"content": ""}, "finish_reason": "stop"}, Usage(9, 40), ASKED),  # it thought
        ({"message": {"content": ""}, "finish_reason": "stop"}, Usage(9, 0), {**ASKED, "stop": ["x"]}),
        *(
            ({"message": {"content": ""}, "finish_reason": "stop"}, Usage(9, 0), {"messages": [{"role": role}]})
            for role in ("tool", "function", "assistant")
        ),
    ],
)
def test_a_reply_that_may_be_empty_is_one(choice: dict[str, Any], usage: Usage, request_body: dict[str, Any]) -> None:
    check_whole("w", {"choices": [choice]}, usage, request_body)


def test_one_choice_that_says_something_is_enough() -> None:
    choices = [{"message": {}, "finish_reason": "stop"}, {"message": {"content": "x"}, "finish_reason": "stop"}]
    check_whole("w", {"choices": choices}, Usage(9, 0), ASKED)


def test_a_stream_is_judged_by_its_usage() -> None:
    role: dict[str, Any] = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    end: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    silent: list[dict[str, Any]] = [role, end, {"choices": []}]
    assert not any(speaks(chunk) for chunk in silent)
    assert speaks({"choices": [{"delta": {}, "finish_reason": "length"}]})
    assert speaks({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    check_stream("w", [role, end, {"choices": [], "usage": usage_body(Usage(9, 3))}], ASKED)
    with pytest.raises(EmptyReply):
        check_stream("w", [role, end, {"choices": [], "usage": usage_body(Usage(9, 0))}], ASKED)
    with pytest.raises(UpstreamProtocol, match="stream was empty"):
        check_stream("w", [], ASKED)
