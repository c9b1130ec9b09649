"""A prompt that is too long for its model is known as such in each vendor's words, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.adapters.upstream.client import event_error, status_error
from gateway.core.openai.vendors.faults import VendorFault, fault_of, read_fault
from gateway.core.openai.vendors.overflow import CODE, FIELDS, STATUSES, is_overflow
from gateway.errors import UpstreamRefused

TOO_LONG = {
    "openai": "This model's maximum context length is 9000 tokens. However, your messages resulted in 9100 tokens.",
    "openai-responses": "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "openai-limit": "Input tokens exceed the configured limit of 9000 tokens. Your messages resulted in 9100 tokens.",
    "anthropic": "prompt is too long: 9100 tokens > 9000 maximum",
    "anthropic-reply": "input length and `max_tokens` exceed context limit: 8900 + 200 > 9000, decrease input length",
    "gemini": "The input token count (9100) exceeds the maximum number of tokens allowed (9000).",
    "vertex": "Unable to submit request because the input token count is 9100 but model only supports up to 9000.",
    "bedrock": "Input is too long for requested model.",
    "bedrock-titan": "Too many input tokens. Max input tokens: 9000, request input token count: 9100",
    "mistral": "Prompt contains 9100 tokens and 0 draft tokens, too large for model with 9000 maximum context length",
    "cohere": "too many tokens: total number of tokens in the prompt cannot exceed 9000 - received 9100.",
    "cohere-size": "too many tokens: size limit exceeded by 100 tokens. Try using shorter or fewer inputs",
    "deepseek": "This model's maximum context length is 9000 tokens. However, you requested 9100 tokens (9100 in it",
    "kimi": "Invalid request: Your request exceeded model token limit: 9000 (requested: 9100)",
    "kimi-input": "Input token length too long",
    "dashscope": "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 9000]",
    "dashscope-chat": "Total message token length exceed model limit (9000 tokens)",
    "groq": "Please reduce the length of the messages or completion.",
    "together": "The input (9100 tokens) is longer than the model's context length (9000 tokens).",
    "tgi": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 9000. Given: 9100 `inputs` tokens",
    "tei": "Input validation error: `inputs` must have less than 512 tokens. Given: 600",
    "fireworks": "The prompt is too long: 9100, model maximum context length: 9000",
    "vllm": "The decoder prompt (length 9100) is longer than the maximum model length of 9000.",
    "vllm-input": "Input length (9100) exceeds model's maximum context length (9000).",
    "xai": "This model's maximum prompt length is 9000 but the request contains 9100 tokens.",
    "sglang": "Requested token count exceeds the model's maximum context length of 9000 tokens.",
    "sglang-input": "Input length (9100 tokens) exceeds the maximum allowed length (9000 tokens).",
    "llama.cpp": "request (9100 tokens) exceeds the available context size (9000 tokens), try increasing it",
    "llama-cpp-python": "Requested tokens (9100) exceed context window of 9000",
    "lm-studio": "The number of tokens to keep from the initial prompt is greater than the context length.",
    "ollama": "prompt too long; exceeded max context length by 100 tokens",
    "ollama-embed": "the input length exceeds the context length",
    "openrouter": "This endpoint's maximum context length is 9000 tokens. However, you requested about 9100 tokens.",
    "copilot": "prompt token count of 9100 exceeds the limit of 9000",
    "minimax": "invalid params, context window exceeds limit (2013)",
    "z.ai": "Prompt exceeds max length",
    "watsonx": "the number of input tokens 9100 cannot exceed the total tokens limit 9000 for this model",
    "deepinfra": "Requested input length 9100 exceeds maximum input length 9000",
    "litellm": "litellm.ContextWindowExceededError: the vendor said no",
}
ELSE = {
    "reply": "max_tokens is too large: 5000. This model supports at most 4096 completion tokens, you asked 5000",
    "reply-anthropic": "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens for it",
    "reply-dashscope": "Range of max_tokens should be [1, 8192]",
    "reply-gemini": "max_output_tokens must be in the supported range from 1 to 8193",
    "minute": "Request too large on tokens per minute (TPM): Limit 6000, Requested 7000, please reduce it",
    "minute-context": "Too many input tokens per minute: the context window of your plan exceeds its limit",
    "day": "Too many tokens per day, please wait before trying again.",
    "wait": "Too many tokens, please wait before trying again.",
    "money": "This request requires more credits. The prompt tokens exceed what you can afford: 900 > 100",
    "name": "Invalid 'tools[0].function.name': string too long. Expected a string with maximum length 64.",
    "array": "Invalid 'stop': array too long. Expected an array with maximum length 4.",
    "field": "Unknown parameter: 'context_length'.",
    "value": "Invalid value for `context_window`: must be an integer",
    "picture": "messages.0.content.1.image.source.base64: image exceeds 5 MB maximum",
    "sound": "The audio input is too long: at most 30 minutes",
    "schema": "Invalid schema for response_format 'x': schema exceeds the maximum nesting depth of 5",
    "tool": "tool description exceeds the maximum input length of 1024 characters",
    "bytes": "Total message size 2500000 exceeds limit 2097152",
    "thinking": "`max_tokens` must be greater than `thinking.budget_tokens`",
}


@pytest.mark.parametrize("vendor", TOO_LONG)
def test_each_vendors_words_for_a_long_prompt_are_known(vendor: str) -> None:
    assert is_overflow(TOO_LONG[vendor])


@pytest.mark.parametrize("what", ELSE)
def test_other_refusals_with_like_words_are_left_alone(what: str) -> None:
    assert not is_overflow(ELSE[what])
    refused = status_error(400, {}, json.dumps({"error": {"message": ELSE[what], "code": None}}).encode(), None)
    assert refused.code == "upstream_refused"


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_counts_whatever_the_words_are(name: str) -> None:
    assert is_overflow("no", [None, 400, name.upper()])
    assert fault_of({"error": {"message": "no", "type": name, "code": 400}}).is_overflow


SHAPES: dict[str, Any] = {
    "openai": {"error": {"message": TOO_LONG["openai"], "type": "invalid_request_error", "param": None, "code": None}},
    "deepseek": {"error": {"message": TOO_LONG["deepseek"], "code": "invalid_request_error", "param": None}},
    "anthropic": {"type": "error", "error": {"type": "invalid_request_error", "message": TOO_LONG["anthropic"]}},
    "gemini": [{"error": {"code": 400, "message": TOO_LONG["gemini"], "status": "INVALID_ARGUMENT"}}],
    "mistral": {"object": "error", "message": TOO_LONG["mistral"], "type": "invalid_request_prompt", "code": "3051"},
    "cohere": {"id": "1", "message": TOO_LONG["cohere"]},
    "bedrock": {"message": TOO_LONG["bedrock"]},
    "dashscope": {"code": "InvalidParameter", "message": TOO_LONG["dashscope"], "request_id": "1"},
    "tgi": {"error": TOO_LONG["tgi"], "error_type": "validation"},
    "fastapi": {"detail": [{"type": "value_error", "msg": TOO_LONG["vllm-input"]}]},
    "fastapi-text": {"detail": TOO_LONG["vllm-input"]},
    "minimax": {"base_resp": {"status_code": 2013, "status_msg": TOO_LONG["minimax"]}},
    "openrouter": {
        "error": {
            "message": "Provider returned error",
            "code": 400,
            "metadata": {"raw": json.dumps({"error": {"message": TOO_LONG["groq"]}}), "provider_name": "A"},
        }
    },
}


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_long_prompt_has_openais_code_whatever_the_shape_and_status(shape: str, status: int) -> None:
    error = status_error(status, {}, json.dumps(SHAPES[shape]).encode(), None)
    assert isinstance(error, UpstreamRefused)
    assert (error.code, error.param, error.retryable, error.upstream_status) == (CODE, "messages", False, status)
    assert any(error.message == words for words in TOO_LONG.values())


def test_a_long_prompt_is_known_in_plain_text_and_in_a_stream() -> None:
    assert status_error(413, {}, TOO_LONG["bedrock"].encode(), None).code == CODE
    for payload in ({"message": TOO_LONG["sglang"], "type": "server_error"}, TOO_LONG["sglang"]):
        error = event_error(payload, None)
        assert (error.code, error.message) == (CODE, TOO_LONG["sglang"])
    assert not event_error({"message": TOO_LONG["sglang"]}, None).retryable


@pytest.mark.parametrize("status", [401, 403, 404, 408, 429, 502, 503])
def test_other_statuses_keep_their_meaning(status: int) -> None:
    assert status_error(status, {}, json.dumps({"error": {"message": TOO_LONG["openai"]}}).encode(), None).code != CODE


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"", VendorFault()),
        (b"<html><body>Bad Gateway</body></html>", VendorFault()),
        (b"[]", VendorFault()),
        (b"null", VendorFault()),
        (b'{"error": {}}', VendorFault()),
        (b"no such model", VendorFault("no such model")),
        (b'{"error": {"message": "no", "param": "seed", "code": "bad"}}', VendorFault("no", "seed", "bad")),
        (b'{"errors": [{"message": "no", "code": 3}]}', VendorFault("no")),
        (b'{"error": {"message": "Provider returned error", "metadata": {"raw": "no"}}}', VendorFault("no")),
        (b"[" * 100_000, VendorFault("[" * 4000)),
    ],
)
def test_an_error_is_read_from_any_body(body: bytes, fault: VendorFault) -> None:
    assert read_fault(body) == fault
