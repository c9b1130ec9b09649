"""Why a reply ended: every vendor's words in OpenAI's, wherever a reply is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.adapters.upstream.conductor.stream import PlanStream
from gateway.core.openai.finish import FINISH_REASONS, INCOMPLETE, STOPS, finish_reason
from gateway.core.openai.responses.outbound import Chunks, to_completion
from gateway.core.openai.texts import as_chat, chunk_as_chat

BY_VENDOR: dict[str, dict[str, str | None]] = {
    "openai": {reason: reason for reason in FINISH_REASONS},
    "anthropic": {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "pause_turn": "stop",
        "max_tokens": "length",
        "model_context_window_exceeded": "length",
        "tool_use": "tool_calls",
        "refusal": "content_filter",
    },
    "gemini": {
        "STOP": "stop",
        "MAX_TOKENS": "length",
        "SAFETY": "content_filter",
        "RECITATION": "content_filter",
        "PROHIBITED_CONTENT": "content_filter",
        "IMAGE_SAFETY": "content_filter",
        "MALFORMED_FUNCTION_CALL": "stop",
        "FINISH_REASON_UNSPECIFIED": "stop",
        "FinishReason.MAX_TOKENS": "length",
        "content_filter: PROHIBITED_CONTENT": "content_filter",
    },
    "bedrock": {"guardrail_intervened": "content_filter", "content_filtered": "content_filter", "FINISH": "stop"},
    "cohere": {
        "COMPLETE": "stop",
        "MAX_TOKENS": "length",
        "TOOL_CALL": "tool_calls",
        "ERROR_TOXIC": "content_filter",
        "ERROR_LIMIT": "length",
        "ERROR": "length",
    },
    "mistral": {"model_length": "length", "error": "length"},
    "deepseek": {"insufficient_system_resource": "length"},
    "zhipu": {"sensitive": "content_filter", "network_error": "length"},
    "dashscope": {"null": None, "": None, "tool_calls": "tool_calls"},
    "vllm and sglang": {"abort": "length", "repetition": "length"},
    "text generation inference, together": {"eos_token": "stop", "eos": "stop"},
    "watsonx": {"not_finished": "length", "time_limit": "length", "token_limit": "length"},
    "somebody new": {"satisfied": "stop"},
}


@pytest.mark.parametrize(("vendor", "word"), [(vendor, word) for vendor, words in BY_VENDOR.items() for word in words])
def test_a_vendors_word_is_openais(vendor: str, word: str) -> None:
    assert finish_reason(word) == BY_VENDOR[vendor][word]


@pytest.mark.parametrize("word", [None, 7, ["stop"], {"reason": "stop"}, True])
def test_what_is_no_word_ends_a_reply_unless_it_is_missing(word: Any) -> None:
    assert finish_reason(word) == (None if word is None else "stop")


def test_what_goes_out_is_a_word_that_comes_in() -> None:
    for table in (STOPS, INCOMPLETE):
        for reason, word in table.items():
            assert finish_reason(word) == ("tool_calls" if reason == "function_call" else reason)


def test_a_text_completion_ends_in_openais_words() -> None:
    body = as_chat({"choices": [{"text": "4", "index": 0, "finish_reason": "eos"}]})
    assert body["choices"][0]["finish_reason"] == "stop"
    chunks = [chunk_as_chat({"choices": [{"text": "4", "finish_reason": word}]}) for word in (None, "MAX_TOKENS")]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


@pytest.mark.parametrize(
    ("incomplete", "reason"),
    [("max_output_tokens", "length"), ("max_tokens", "length"), ("content_filter", "content_filter"), ("nap", "stop")],
)
def test_an_incomplete_response_says_why(incomplete: str, reason: str) -> None:
    response = {"status": "incomplete", "incomplete_details": {"reason": incomplete}, "output": []}
    assert to_completion(response)["choices"][0]["finish_reason"] == reason
    last = Chunks().chunk({"type": "response.incomplete", "response": response})
    assert last["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(("word", "reason"), [("max_tokens", "length"), ("end_turn", "stop")])
def test_a_plan_that_was_cut_off_says_so_in_any_words(word: str, reason: str) -> None:
    plan = PlanStream("m", 1000)
    plan.take([json.dumps({"choices": [{"delta": {"content": "{}"}, "finish_reason": word}]})], is_end=True)
    plan.check()
    assert plan.end({"messages": [], "max_tokens": 10}).finish_reason == reason
