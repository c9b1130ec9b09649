"""LiteLLM's replies as plain JSON data, without the fields that LiteLLM adds to OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.adapters.upstream import client as upstream
from gateway.core.openai.tasks.replies import is_raw
from gateway.service.ports.request import WorkerCall

_BODY_FIELDS = (
    *("id", "object", "created", "model", "system_fingerprint", "service_tier", "usage", "provider", "citations"),
    *("search_results", "prompt_filter_results"),
)
_CHOICE_FIELDS = ("index", "finish_reason", "logprobs", "text", "content_filter_results", "native_finish_reason")
_MESSAGE_FIELDS = (
    *("role", "content", "refusal", "reasoning_content", "tool_calls", "function_call", "audio", "annotations"),
    *("thinking_blocks", "provider_specific_fields"),
)
_STATE = (  # what LiteLLM reads back of `provider_specific_fields`
    *("thought_signature", "thought_signatures", "compaction_blocks", "web_search_results", "tool_results"),
    "server_side_tool_invocations",
)
_SIGNED_ID = "__thought__"  # LiteLLM appends it and Gemini's signature to the id of a call


def plain_task(call: WorkerCall, response: Any) -> dict[str, Any]:
    """A response of LiteLLM's to a request that is no conversation, as JSON data or in bytes."""
    if call.endpoint == "speech":
        kind = response.response.headers.get("content-type", "")
        return upstream.raw_reply(call.endpoint, response.content, kind)
    if is_raw(call.endpoint, call.body):
        return upstream.raw_reply(call.endpoint, str(response.text).encode("utf-8", "replace"), "")
    data: dict[str, Any] = json.loads(response.model_dump_json(exclude_none=True))
    return data


def plain_data(response: Any) -> dict[str, Any]:
    """Convert a response or chunk of LiteLLM's to JSON data, without the fields that LiteLLM adds to OpenAI's."""
    data: dict[str, Any] = json.loads(response.model_dump_json(exclude_none=True))
    body = {name: data[name] for name in _BODY_FIELDS if name in data}
    if "data" in data:
        return body | {"data": data["data"]}
    if body.get("object") == "chat.completion.chunk" and body.get("usage"):
        return {**body, "choices": []}  # LiteLLM sends an empty choice with the usage
    return {**body, "choices": [_plain_choice(choice) for choice in data.get("choices") or ()]}


def _plain_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    plain = {"finish_reason": None, **{name: choice[name] for name in _CHOICE_FIELDS if name in choice}}
    for part in ("message", "delta"):
        if part in choice:
            fields = {name: value for name, value in choice[part].items() if name in _MESSAGE_FIELDS}
            if "tool_calls" in fields:
                fields["tool_calls"] = [_plain_call(call) for call in fields["tool_calls"] or ()]
            plain[part] = _with_plain_state(fields)
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its signature apart from its id. LiteLLM reads it in either place."""
    call_id, _, signature = (call.get("id") or "").partition(_SIGNED_ID)
    plain = _with_plain_state({**call, **({"id": call_id} if call_id else {})})
    if signature:
        plain["provider_specific_fields"] = {"thought_signature": signature}
    return plain


def _with_plain_state(fields: dict[str, Any]) -> dict[str, Any]:
    vendor_fields = fields.pop("provider_specific_fields", None)
    state = (
        {name: vendor_fields[name] for name in _STATE if vendor_fields.get(name)}
        if isinstance(vendor_fields, Mapping)
        else {}
    )
    return fields | ({"provider_specific_fields": state} if state else {})
