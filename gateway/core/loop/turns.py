"""How a later turn of a conversation is known again: marks, made with a reply, wanted in the next request. Pure.

Two kinds. The mark of the *conversation* stands for every message up to and with the reply, and for the model name that
was asked: a client that sends all of that back, and more after it, continues. The mark of a *tool call* stands for one
call that the reply made (id, function, arguments): a client that shortened the conversation still brings its result.

A mark is an HMAC under a secret of the gateway and holds the key's id, so it says nothing about any text and never
meets another key's. What clients change on the way (absent against null, order and white space in arguments) does not
change a mark.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MARK_CHARS = 32
CHOICES_MAX = 8  # of one reply that are marked
CALLS_MAX = 16  # tool calls of one message that are marked
Message = Mapping[str, Any]


class Marker:
    """Makes the marks of one key's conversations. `secret`: of every gateway that shares the store."""

    def __init__(self, secret: bytes, key_id: str) -> None:
        self._secret = secret
        self._key_id = key_id

    def given(
        self, conversation: Sequence[Message], model: str, replies: Iterable[Message]
    ) -> tuple[list[str], list[str]]:
        """(marks of the conversation, one a reply; marks of tool calls) of messages that were just given."""
        whole, calls = [], []
        for message in list(replies)[:CHOICES_MAX]:
            whole.append(self._whole([*conversation, message], model))
            calls += self._calls(message)
        return whole, calls

    def wanted(self, conversation: Sequence[Message], model: str) -> tuple[list[str], bool]:
        """The marks by which the last turn may be known, the surest first, and whether it brings tool results. None
        for a conversation in which nobody has answered yet, and for one that ends with an answer."""
        last = next((i for i in range(len(conversation) - 1, -1, -1) if _role(conversation[i]) == "assistant"), None)
        if last is None or last == len(conversation) - 1:
            return [], False
        results = {m.get("tool_call_id") for m in conversation[last + 1 :] if _role(m) == "tool"}
        answered = conversation[last]
        marks = [self._whole(conversation[: last + 1], model)]
        if results:
            marks += self._calls(answered)
        brings = bool(results) or any(_role(m) == "function" for m in conversation[last + 1 :])
        return marks, brings

    def _whole(self, messages: Sequence[Message], model: str) -> str:
        return self._mark("turn", [model, *map(_plain, messages)])

    def _calls(self, message: Message) -> list[str]:
        return [self._mark("call", call) for call in _calls(message)[:CALLS_MAX] if call[0]]

    def _mark(self, kind: str, value: Any) -> str:
        text = json.dumps([self._key_id, kind, value], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hmac.new(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:MARK_CHARS]


def asks(body: Mapping[str, Any]) -> bool:
    """Whether a reply asks its client to do something: a tool call, or the older function call, in any choice."""
    messages = [choice.get("message") or {} for choice in body.get("choices") or () if isinstance(choice, Mapping)]
    return any(message.get("tool_calls") or message.get("function_call") for message in messages)


def _role(message: Message) -> str:
    return str(message.get("role"))


def _plain(message: Message) -> list[Any]:
    """What a message says, without how its client writes it."""
    role = {"system": "developer", "function": "tool"}.get(_role(message), _role(message))
    function = message.get("function_call")
    calls = _calls(message) + ([_call({"function": function})] if isinstance(function, Mapping) else [])
    return [role, _content(message.get("content")), message.get("refusal") or "", calls, message.get("tool_call_id")]


def _content(content: Any) -> Any:
    """Text as text, whether it came as a string, as parts, or not at all; other parts as they are."""
    if not isinstance(content, list):
        return content or ""
    parts = [part.get("text", "") if part.get("type") == "text" else part for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _calls(message: Message) -> list[list[Any]]:
    calls = message.get("tool_calls")
    return [_call(call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call.get("custom")
    function = function if isinstance(function, Mapping) else {}
    said = function.get("arguments", function.get("input"))
    return [call.get("id") or "", function.get("name") or "", _arguments(said)]


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text
