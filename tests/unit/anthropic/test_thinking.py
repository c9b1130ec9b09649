"""Thinking that leaves with a signature of its origin and comes back to it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.anthropic.thinking import origin_of, thinking_blocks, with_thinking
from gateway.core.openai.vendor import mark

ORIGIN, OTHER = "0123456789ab", "ba9876543210"
SIGNED = {"type": "thinking", "thinking": "hm", "signature": "sig\nnature"}
REDACTED = {"type": "redacted_thinking", "data": "secret"}
UNSIGNED = {"type": "thinking", "thinking": "loud", "signature": ""}


def handed_out(origin: str | None) -> list[dict[str, Any]]:
    return thinking_blocks({"thinking_blocks": [SIGNED, REDACTED]}, "shown", origin)


def test_blocks_come_back_to_the_origin_that_signed_them() -> None:
    blocks = handed_out(ORIGIN)
    assert blocks[0]["signature"] == f"btn.{ORIGIN}.sig\nnature"
    assert blocks[1] == {"type": "redacted_thinking", "data": f"btn.{ORIGIN}.secret"}
    message = with_thinking({"role": "assistant", "content": "yes"}, [*blocks, UNSIGNED])
    assert message["thinking_blocks"] == [SIGNED, REDACTED]
    assert message["extra_content"] == mark({}, ORIGIN)
    assert message["reasoning_content"] == "loud"
    assert origin_of(message) == ORIGIN


@pytest.mark.parametrize("blocks", [handed_out(None), [*handed_out(ORIGIN), *handed_out(OTHER)]])
def test_blocks_of_no_origin_or_of_two_stay_unmarked(blocks: list[dict[str, Any]]) -> None:
    message = with_thinking({"role": "assistant", "content": "yes"}, blocks)
    assert message == {"role": "assistant", "content": "yes", "thinking_blocks": blocks}


def test_a_turn_whose_state_the_gateway_keeps_needs_no_blocks() -> None:
    call = {"id": "call_btn" + "a" * 24, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert with_thinking(turn, handed_out(ORIGIN)) == turn


@pytest.mark.parametrize("fields", [{}, {"extra_content": 7}, {"extra_content": {"baton": 7}}])
def test_what_has_no_marker_has_no_origin(fields: dict[str, Any]) -> None:
    assert origin_of(fields) is None
