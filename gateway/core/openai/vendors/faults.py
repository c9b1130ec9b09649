"""Errors of vendors: where the words stand, and what they are about. Pure.

OpenAI's `{"error": {"message", "type", "param", "code"}}` is one shape of several: the object may stand bare or in a
list, the words be a text, or be quoted whole inside another gateway's error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gateway.core.openai.vendors.overflow import is_overflow

DEPTH_MAX = 4  # of errors inside errors
TEXT_CHARS_MAX = 4000
WORDS = ("message", "msg", "detail", "error", "status_msg", "error_message", "reason")  # under which vendors say it
CODES = ("code", "type", "error_type", "status")  # of its kind, the most exact first
INSIDE = ("error", "errors", "detail", "base_resp", "fault")  # where an error's object stands


class VendorFault(NamedTuple):
    """An error as far as it can be read. `message` is empty where it says nothing."""

    message: str = ""
    param: str | None = None
    code: str | None = None
    is_overflow: bool = False  # the prompt is too long for the model


# The statuses that words stand for: OpenAI's types and codes, Anthropic's, Google's, and numbers of MiniMax and Zhipu.
_STATUSES: Mapping[int, tuple[str, ...]] = {
    400: ("invalid_request_error", "invalid_argument", "failed_precondition", "invalid_prompt", "bad_request", "2013"),
    401: ("authentication_error", "unauthenticated", "invalid_api_key", "unauthorized", "1004"),
    402: ("insufficient_quota", "insufficient_balance", "payment_required", "billing_error", "1008", "1113"),
    403: ("permission_error", "permission_denied", "forbidden"),
    404: ("not_found_error", "not_found", "model_not_found"),
    408: ("timeout", "request_timeout", "timeout_error", "deadline_exceeded"),
    413: ("request_too_large",),
    429: (
        *("rate_limit_error", "rate_limit_exceeded", "rate_limited", "too_many_requests", "resource_exhausted"),
        *("requests", "tokens", "1002", "1302", "1305"),
    ),
    500: ("server_error", "internal_error", "internal_server_error", "internal", "api_error"),
    503: ("unavailable", "service_unavailable", "overloaded"),
    529: ("overloaded_error", "engine_overloaded_error"),
}
_STATUS_OF = {word: status for status, words in _STATUSES.items() for word in words}
_STATUS_FIELDS = ("status_code", "code", "http_code", "status", "type")


def status_of(value: Any, depth: int = 0) -> int | None:
    """The HTTP status that an error names, as a number, a text or a word; None where it names none."""
    if isinstance(value, list) and value and depth < DEPTH_MAX:
        return status_of(value[0], depth + 1)
    if not isinstance(value, Mapping):
        return None
    for name in INSIDE if depth < DEPTH_MAX else ():
        if (status := status_of(value.get(name), depth + 1)) is not None:
            return status
    words = [str(value[name]).strip().lower().replace(" ", "_") for name in _STATUS_FIELDS if value.get(name)]
    numbers = [int(word) for word in words if len(word) == 3 and word.isdecimal() and 300 <= int(word) < 600]
    return next(iter(numbers), None) or next((_STATUS_OF[word] for word in words if word in _STATUS_OF), None)


def read_fault(body: bytes) -> VendorFault:
    """The error in the body of a reply. A body that is no JSON is taken as its words, unless it is a page."""
    with suppress(ValueError, RecursionError):
        return fault_of(json.loads(body))
    text = body[:TEXT_CHARS_MAX].decode("utf-8", "replace").strip()
    return VendorFault() if text.startswith("<") or not text.isprintable() else fault_of(text)


def fault_of(value: Any, depth: int = 0) -> VendorFault:
    """The error in a JSON value."""
    if isinstance(value, list) and value and depth < DEPTH_MAX:
        return fault_of(value[0], depth + 1)
    if isinstance(value, str):
        return VendorFault(value[:TEXT_CHARS_MAX], is_overflow=is_overflow(value[:TEXT_CHARS_MAX]))
    if not isinstance(value, Mapping):
        return VendorFault()
    inner = next((value[name] for name in INSIDE if isinstance(value.get(name), Mapping | list) and value[name]), None)
    if inner is not None and depth < DEPTH_MAX:
        fault = fault_of(inner, depth + 1)
        return fault if fault.message else _object(value)._replace(is_overflow=fault.is_overflow)
    quoted = _quoted(value, depth)
    return quoted if quoted is not None and quoted.message else _object(value)


def _object(value: Mapping[str, Any]) -> VendorFault:
    message = next((value[name] for name in WORDS if isinstance(value.get(name), str)), "")[:TEXT_CHARS_MAX]
    param, code = value.get("param"), value.get("code")
    return VendorFault(
        message,
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
        is_overflow(message, [value.get(name) for name in CODES]),
    )


def _quoted(value: Mapping[str, Any], depth: int) -> VendorFault | None:
    """The vendor's own error, which OpenRouter quotes as text in `metadata.raw`."""
    metadata = value.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, Mapping) else None
    if not isinstance(raw, str) or depth >= DEPTH_MAX:
        return None
    with suppress(ValueError, RecursionError):
        return fault_of(json.loads(raw), depth + 1)
    return fault_of(raw, depth + 1)
