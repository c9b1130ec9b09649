"""The form of a worker's reply: whole, or a chunk of a stream. Pure.

Vendors take one for the other, leave out the message of a reply that a filter stopped, and send an error with status
200. Here each reply gets the form that was asked for, and an error is told from a reply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from gateway.core.openai.vendor import REASONING
from gateway.errors import UpstreamProtocol

Part = Literal["message", "delta"]
_OTHER: Mapping[Part, Part] = {"message": "delta", "delta": "message"}
_FAILED = (("object", "error"), ("type", "error"), ("success", False), ("status", "error"))
_WORDS = ("message", "msg", "detail")


def fault_in(body: Mapping[str, Any]) -> Any:
    """What a body with status 200 says of an error: the error, or the body that is one; None for a reply."""
    if body.get("error"):
        return body["error"]
    base = body.get("base_resp")  # MiniMax's, beside each reply
    if isinstance(base, Mapping) and base.get("status_code"):
        return body
    choices = body.get("choices")
    if not choices:
        told = bool(body.get("errors")) or any(body.get(name) == value for name, value in _FAILED)
        return body if told or ("usage" not in body and _only_words(body)) else None
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping) and choice.get("error") and not _says(choice):  # OpenRouter's
            return choice["error"]
    return None


def _only_words(body: Mapping[str, Any]) -> bool:
    return "id" not in body and "type" not in body and any(isinstance(body.get(name), str | list) for name in _WORDS)


def _says(choice: Mapping[str, Any]) -> bool:
    parts = [choice.get(part) for part in _OTHER]
    return any(isinstance(part, Mapping) and (part.get("content") or part.get("tool_calls")) for part in parts)


def as_whole(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a whole reply, each choice with a message. Raises UpstreamProtocol for one without choices."""
    choices = body.get("choices")
    if not (isinstance(choices, list) and choices and all(_gets(choice, "message") for choice in choices)):
        raise UpstreamProtocol("the worker's reply has no choices with a message")
    return body


def as_chunk(body: dict[str, Any]) -> dict[str, Any]:
    """A chunk of a stream, each choice with a delta; a whole reply is one. Raises UpstreamProtocol."""
    choices = body.get("choices") or []
    if not (isinstance(choices, list) and all(_gets(choice, "delta") for choice in choices)):
        raise UpstreamProtocol("the worker's stream holds an invalid chunk")
    return body


def _gets(choice: Any, part: Part) -> bool:
    """Whether a choice has the part that the form wants, or gets it: a filter of Azure's leaves out the message of a
    reply that it stopped, another one sends chunks without a delta."""
    if not isinstance(choice, dict):
        return False
    value = choice.get(part)
    if value is None and isinstance(other := choice.pop(_OTHER[part], None), dict):
        value = choice[part] = other
    elif value is None and choice and (part == "delta" or choice.get("finish_reason")):
        value = choice[part] = {}
    if not isinstance(value, dict):
        return False
    if not isinstance(value.get("content"), str | None):
        choice[part] = with_text(value)
    return True


def with_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A message or delta whose content is text. Parts that think become `reasoning_content`."""
    content = fields.get("content")
    if content is None or isinstance(content, str):
        return dict(fields)
    if not isinstance(content, list) and not (isinstance(content, Mapping) and "type" in content):
        return {**fields, "content": json.dumps(content, ensure_ascii=False)}  # an object as its schema wants it
    raw = content if isinstance(content, list) else [content]
    parts = [{"text": part} if isinstance(part, str) else part for part in raw if isinstance(part, Mapping | str)]
    texts = [_part_text(part, "text") for part in parts if part.get("type") != "thinking"]
    thinking = "".join(_part_text(part, "thinking") for part in parts if part.get("type") == "thinking")
    reasoning = {"reasoning_content": thinking} if thinking and not has_state(fields, REASONING) else {}
    return {**fields, "content": "".join(texts) if texts else None, **reasoning}


def _part_text(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name)
    inner = [_part_text(one, "text") for one in as_list(value) if isinstance(one, Mapping)]
    return value if isinstance(value, str) else "".join(inner)


def has_state(fields: Mapping[str, Any], names: tuple[str, ...]) -> bool:
    """Whether one of these properties says something."""
    return any(fields.get(name) for name in names)


def as_list(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []
