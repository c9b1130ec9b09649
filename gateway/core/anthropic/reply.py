"""Converts a chat completion to Anthropic's Message object, and an error to its error object. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.core.anthropic.native import BLOCKS, NATIVE_FINISH, NATIVE_USAGE, filled
from gateway.core.anthropic.thinking import Display, origin_of, thinking_blocks
from gateway.core.openai.finish import STOPS
from gateway.errors import BadRequest, BatonError

OWN_STOPS = ("pause_turn", "model_context_window_exceeded", "compaction")  # that chat has no word for
KEY_HEADER = "x-api-key"
VERSION_HEADER, BETA_HEADER = "anthropic-version", "anthropic-beta"
OVERLOADED = 529
BILLING = 402
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    BILLING: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class MessageHead:
    """The facts of a request that its reply repeats. `display`: what becomes of the worker's thinking. `stops`: the
    request's stop sequences. `input_tokens`: an estimate of its tokens, for the first event of a stream."""

    id: str
    model: str
    display: Display
    stops: tuple[str, ...] = ()
    input_tokens: int = 0

    @property
    def hex(self) -> str:
        """The id without its prefix."""
        return self.id.removeprefix("msg_")


def empty_message(head: MessageHead) -> dict[str, Any]:
    """The Message of a request that is still being served."""
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": {"input_tokens": head.input_tokens, "output_tokens": 0, "service_tier": "standard"},
    }


def finished_message(head: MessageHead, completion: Mapping[str, Any]) -> dict[str, Any]:
    """The Message of a chat completion."""
    choice = _choice(completion)
    message = choice.get("message")
    message = message if isinstance(message, Mapping) else {}
    thoughts = thinking_blocks(message, head.display, origin_of(message))
    calls = [call_block(head, call, at) for at, call in enumerate(calls_of(message))]
    if order := message.get(BLOCKS):
        content = list(filled(order, thoughts, calls))
    else:
        content = [*thoughts, *_texts(message), *calls]
    ending = stop_of(head, choice, message.get("refusal"), called=bool(calls_of(message)))
    return empty_message(head) | {"content": content, **ending, "usage": usage_of(completion, choice)}


def stop_of(head: MessageHead, choice: Mapping[str, Any], refusal: Any, *, called: bool) -> dict[str, Any]:
    """`stop_reason`, `stop_sequence` and `stop_details` of a choice. `called`: whether it holds a tool call."""
    if isinstance(refusal, str) and refusal:
        details = {"type": "refusal", "category": None, "explanation": refusal}
        return {"stop_reason": "refusal", "stop_sequence": None, "stop_details": details}
    finish, sequence = choice.get("finish_reason"), choice.get("stop_reason")
    if isinstance(sequence, str) and sequence in head.stops:  # vLLM and Anthropic say which sequence it was
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence, "stop_details": None}
    reason = STOPS.get(finish if isinstance(finish, str) else "", "end_turn")
    if (native := choice.get(NATIVE_FINISH)) in OWN_STOPS:
        reason = str(native)
    reason = "tool_use" if called and reason == "end_turn" else reason
    details = {"type": "refusal", "category": None, "explanation": None}
    return {"stop_reason": reason, "stop_sequence": None, "stop_details": details if reason == "refusal" else None}


def usage_of(completion: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """The usage of a completion: cached tokens are counted apart from `input_tokens`. A detail that the completion
    does not have is absent. `choice`: of the reply, with what its worker says besides tokens."""
    usage = completion.get("usage") or {}
    read = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    written = (usage.get("prompt_tokens_details") or {}).get("cache_write_tokens")
    hour = (usage.get("prompt_tokens_details") or {}).get("cache_write_1h_tokens")
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    prompt = usage.get("prompt_tokens") or 0
    counts: dict[str, Any] = {
        "input_tokens": max(0, prompt - (read or 0) - (written or 0)),
        "cache_creation_input_tokens": written,
        "cache_creation": None if hour is None else _writes(written or hour, hour),
        "cache_read_input_tokens": read,
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": None if thought is None else {"thinking_tokens": thought},
        "service_tier": "priority" if completion.get("service_tier") == "priority" else "standard",
    }
    return {name: value for name, value in counts.items() if value is not None} | dict(choice.get(NATIVE_USAGE) or {})


def _writes(written: int, hour: int) -> dict[str, int]:
    return {"ephemeral_5m_input_tokens": written - hour, "ephemeral_1h_input_tokens": hour}


def calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tool calls of a chat message that have the form of one."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def call_block(head: MessageHead, call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The `tool_use` block of a tool call, the `number`th of its message."""
    function = function_of(call)
    text = function.get("arguments")
    return call_start(head, call, number) | {"input": input_of(text if isinstance(text, str) else "")}


def call_start(head: MessageHead, call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The `tool_use` block without its input. A call without an id gets one."""
    name, call_id = function_of(call).get("name"), call.get("id")
    call_id = call_id if isinstance(call_id, str) and call_id else f"toolu_{head.hex}{number}"
    return {"type": "tool_use", "id": call_id, "name": name if isinstance(name, str) else "", "input": {}}


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool call; empty if it has none."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def input_of(text: str) -> dict[str, Any]:
    """Arguments as an object. Text that is none is put under `arguments`, where the client's own check of the input
    finds it and tells the model."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _texts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    texts = [message.get(name) for name in ("content", "refusal")]
    return [{"type": "text", "text": text} for text in texts if isinstance(text, str) and text]


def _choice(completion: Mapping[str, Any]) -> Mapping[str, Any]:
    choices: Sequence[Any] = completion.get("choices") or [{}]
    return choices[0] if isinstance(choices[0], Mapping) else {}


# ---------------------------------------------------------------- errors


def error_status(error: BatonError) -> int:
    """The HTTP status of an error on Anthropic's wire: 402 for spent money, 529 where OpenAI's wire has 503."""
    if error.type == "insufficient_quota":
        return BILLING
    return OVERLOADED if error.status == 503 else error.status


def error_body(error: BatonError, request_id: str | None = None) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = ERRORS.get(error_status(error), "api_error" if error.status >= 500 else "invalid_request_error")
    request = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {"type": kind, "message": error.message}, **request}


def model_info(name: str, created_s: int, described: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's object `model`. `described`: what the workers behind the name take, as `Catalog.describe` has it."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": described["context_tokens"] or None,
        "max_tokens": described["output_tokens_max"] or None,
    }


def page_of(
    names: Sequence[str], limit: int, *, after: str | None = None, before: str | None = None
) -> tuple[Sequence[str], bool]:
    """At most `limit` names behind `after` or ahead of `before`, and whether there are more on that side. Raises
    BadRequest for a cursor that is none of the names."""
    for field, cursor in (("after_id", after), ("before_id", before)):
        if cursor is not None and cursor not in names:
            raise BadRequest(f"`{field}`: there is no model '{cursor[:64]}'", param=field, code="invalid_value")
    if before is not None:
        earlier = names[: names.index(before)]
        return earlier[-limit:], len(earlier) > limit
    later = names if after is None else names[names.index(after) + 1 :]
    return later[:limit], len(later) > limit
