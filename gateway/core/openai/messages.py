"""Checks the messages of a chat request down to the last content part, with OpenAI's paths and error codes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.openai import marks
from gateway.core.openai.parts import LINKS, check_link
from gateway.core.openai.shapes import (
    FLAG,
    FREE_TEXT,
    OBJECT,
    WRONG_TYPE,
    Properties,
    Reader,
    any_of,
    array,
    bad_value,
    mapping,
    missing_parameter,
    one_of,
    text,
)
from gateway.core.openai.vendor import CALL_FIELDS, MESSAGE_FIELDS, returned_state
from gateway.errors import BadRequest

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
PARTS = ("text", "refusal", "image_url", "input_audio", "file")
_PARTS_OF = {
    "user": ("text", "image_url", "input_audio", "file"),
    "assistant": ("text", "refusal"),
    "tool": ("text", "image_url", "file"),  # OpenAI's chat completions take text alone here
}
_CALLS_MAX = 128
_ID = text(512), "a string of at most 512 characters"
_NAME = text(64, r"[^\s<|\\/>]+"), "1 to 64 characters without spaces or any of < | \\ / >"
_CONTENT = any_of(text(2**31), array(0, 2**31)), "a string or a list of parts"
_ROLE = one_of(*ROLES), f"one of {', '.join(ROLES)}"
_ANY = (lambda value: None), "anything"
_REPLY_ONLY = ("annotations", "parsed")  # what replies and SDKs put into a message, and no vendor reads
_FUNCTION: Properties = {"name": (text(256), "a string"), "arguments": FREE_TEXT}
_PARSED: Properties = {**_FUNCTION, "parsed_arguments": _ANY}  # of the SDKs
_AUDIO: Properties = {"id": _ID, **{name: _ANY for name in ("data", "transcript", "expires_at")}}  # of a reply
_CUSTOM: Properties = {"name": (text(256), "a string"), "input": FREE_TEXT}
_CALL: Properties = {
    "id": _ID,
    "type": (one_of("function", "custom"), "function or custom"),
    "function": OBJECT,
    "custom": OBJECT,
    **{name: _ANY for name in (*CALL_FIELDS, "index")},
}
_COMMON: Properties = {"role": _ROLE, "content": _CONTENT, "name": _NAME, marks.FIELD: _ANY}
_ASSISTANT: Properties = {
    **_COMMON,
    "refusal": FREE_TEXT,
    "audio": OBJECT,
    "tool_calls": (array(1, _CALLS_MAX), f"a list of 1 to {_CALLS_MAX} tool calls"),
    "function_call": OBJECT,
    "reasoning_content": FREE_TEXT,  # not OpenAI's: other vendors' reasoning models expect it back
    "reasoning": FREE_TEXT,
    **{name: _ANY for name in (*MESSAGE_FIELDS, *_REPLY_ONLY)},
}
_PROPERTIES_OF: Mapping[str, Properties] = {
    "assistant": _ASSISTANT,
    "tool": {**_COMMON, "tool_call_id": _ID, "is_error": FLAG},  # Anthropic's; no worker gets it
    "function": {**_COMMON, "name": _NAME},
}
_BREAKPOINT: Properties = {
    "prompt_cache_breakpoint": (mapping, "an object"),
    "cache_control": OBJECT,  # Anthropic's name for it
}
_PART: Mapping[str, Properties] = {
    "text": {"type": FREE_TEXT, "text": FREE_TEXT, **_BREAKPOINT},
    "refusal": {"type": FREE_TEXT, "refusal": FREE_TEXT},
    "image_url": {"type": FREE_TEXT, "image_url": OBJECT, **_BREAKPOINT},
    "input_audio": {"type": FREE_TEXT, "input_audio": OBJECT, **_BREAKPOINT},
    "file": {"type": FREE_TEXT, "file": OBJECT, **_BREAKPOINT},
}
_MEDIA_HOLDERS: Mapping[str, Properties] = {
    "image_url": {
        "url": FREE_TEXT,
        "detail": (one_of("auto", "low", "high", "original"), "auto, low, high or original"),
    },
    "input_audio": {"data": FREE_TEXT, "format": (one_of("wav", "mp3"), "wav or mp3")},
    "file": {"file_data": FREE_TEXT, "filename": (text(512), "a string of at most 512 characters"), "file_id": _ID},
}
_REQUIRED_IN = {"image_url": ("url",), "input_audio": ("data", "format"), "file": ()}


def read_messages(raw: Sequence[Any], messages_max: int, reader: Reader) -> tuple[Mapping[str, Any], ...]:
    """Return the messages without unknown properties, ready to send to a worker. Raises BadRequest with the path of the
    first invalid value."""
    if not raw:
        raise BadRequest("[] is too short - 'messages'", param="messages", code="empty_array")
    if len(raw) > messages_max:
        problem = f"`messages` holds {len(raw)}; at most {messages_max} are accepted"
        raise BadRequest(problem, param="messages", code="array_above_max_length")
    messages = tuple(_message(message, f"messages[{at}]", reader) for at, message in enumerate(raw))
    _check_turns(messages)
    return messages


def _message(raw: Any, where: str, reader: Reader) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    role = raw.get("role")
    if role is None:
        raise missing_parameter(f"{where}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_value(f"{where}.role", _ROLE[1], "invalid_value")
    required = {"tool": ("content", "tool_call_id"), "function": ("name",), "assistant": ()}.get(role, ("content",))
    message = reader.object(raw, where, _PROPERTIES_OF.get(role, _COMMON), required)
    if marks.FIELD in message:
        message[marks.FIELD] = marks.read(message[marks.FIELD])
    if role == "assistant":
        _assistant(message, where, reader)
    content = message.get("content")
    if isinstance(content, list):
        kinds = _PARTS_OF.get(role, ("text",))
        reader.count_parts(len(content), f"{where}.content")
        message["content"] = [_part(part, f"{where}.content[{at}]", kinds, reader) for at, part in enumerate(content)]
    return message


def _assistant(message: dict[str, Any], where: str, reader: Reader) -> None:
    if "tool_calls" in message:
        calls = enumerate(message["tool_calls"])
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]", reader) for at, call in calls]
    if "function_call" in message:
        spot = f"{where}.function_call"
        message["function_call"] = reader.object(message["function_call"], spot, _FUNCTION, ("name", "arguments"))
    if "audio" in message:
        message["audio"] = {"id": reader.object(message["audio"], f"{where}.audio", _AUDIO, ("id",))["id"]}
    _state(message, MESSAGE_FIELDS, where, reader)
    for name in _REPLY_ONLY:
        message.pop(name, None)
    alternatives = ("content", "tool_calls", "function_call", "refusal", "audio")
    if all(message.get(name) is None for name in alternatives):
        raise missing_parameter(f"{where}.content")


def _call(raw: Any, where: str, reader: Reader) -> dict[str, Any]:
    call = reader.object(raw, where, _CALL, ("id", "type"))
    custom = call["type"] == "custom"
    kind, properties, input_name = ("custom", _CUSTOM, "input") if custom else ("function", _PARSED, "arguments")
    if call.get(kind) is None:
        raise missing_parameter(f"{where}.{kind}")
    details = reader.object(call[kind], f"{where}.{kind}", properties, ("name", input_name))
    details.pop("parsed_arguments", None)
    _state(call, CALL_FIELDS, where, reader)
    return {name: call[name] for name in ("id", "type", *CALL_FIELDS) if name in call} | {kind: details}


def _state(fields: dict[str, Any], names: Sequence[str], where: str, reader: Reader) -> None:
    """Replace the vendor's state in a message or call by what may be passed on of it."""
    state, unknown = returned_state(fields, names, where)
    for name in names:
        fields.pop(name, None)
    for name in unknown:
        reader.drop(f"{where}.{name}")
    fields.update(state)


def _part(raw: Any, where: str, kinds: tuple[str, ...], reader: Reader) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise bad_value(where, "an object", WRONG_TYPE)
    kind = raw.get("type")
    if kind is None:
        raise missing_parameter(f"{where}.type")
    if not isinstance(kind, str) or kind not in kinds:
        raise bad_value(f"{where}.type", " or ".join(kinds), "invalid_value")
    part = reader.object(raw, where, _PART[kind], (kind,))
    if kind in LINKS:
        part[kind] = _media_holder(part[kind], f"{where}.{kind}", kind, reader)
    return part


def _media_holder(raw: Any, where: str, kind: str, reader: Reader) -> dict[str, Any]:
    holder = reader.object(raw, where, _MEDIA_HOLDERS[kind], _REQUIRED_IN[kind])
    if "file_id" in holder:
        problem = f"`{where}.file_id`: uploaded files are for batches; send `file_data`"
        raise BadRequest(problem, param=f"{where}.file_id", code="unsupported_parameter")
    media, _, name = LINKS[kind]
    if name not in holder:
        raise missing_parameter(f"{where}.{name}")
    check_link(media, holder[name], f"{where}.{name}", reader.media_bytes_max)
    return holder


def _check_turns(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadRequest unless the tool messages after each assistant message answer all of its calls and only
    those."""
    open_calls: set[str] = set()
    calls_at = -1  # index of the assistant message that made the open calls
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                rule = "messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
                raise BadRequest(f"Invalid parameter: {rule}", param=f"messages[{at}].role", code="invalid_value")
            open_calls.discard(message["tool_call_id"])
            continue
        _check_none_open(open_calls, calls_at)
        open_calls, calls_at = {call["id"] for call in message.get("tool_calls") or ()}, at
    _check_none_open(open_calls, calls_at)


def _check_none_open(open_calls: set[str], at: int) -> None:
    if open_calls:
        raise BadRequest(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            f"'tool_call_id'. Without a response: {', '.join(sorted(open_calls))[:256]}",
            param=f"messages[{at}].tool_calls",
            code="invalid_value",
        )
