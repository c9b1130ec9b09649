"""Marks, by which Baton recognises the next turn of a conversation. Pure.

There are three kinds. The mark of a *conversation* stands for every message up to and including the reply, and for the
model name of the request: a client that sends all of that back, with more after it, continues the conversation. The
mark of a *tool call* stands for one call of the reply (id, function, arguments): a client that shortened the
conversation still sends the result of the call. The mark of a *question* stands for one user message: the next turn
finds the message again for which the conversation was planned last.

A mark is an HMAC under a secret of the gateway over the text and the key's id. So it reveals nothing about any text,
and never equals the mark of another key. Differences that clients introduce (absent or null, order and white space in
arguments) do not change a mark.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MARK_CHARS = 32
CHOICES_MAX = 8  # choices of one reply that get a mark
CALLS_MAX = 16  # tool calls of one message that get a mark
QUESTIONS_MAX = 64  # user messages, from the end, among which the one that was planned for is looked for
Message = Mapping[str, Any]


class Marker:
    """Makes the marks of one key's conversations. All gateways that share a store need the same `secret`."""

    def __init__(self, secret: bytes, key_id: str) -> None:
        self._secret = secret
        self._key_id = key_id

    def mark_replies(
        self, conversation: Sequence[Message], model: str, replies: Iterable[Message]
    ) -> tuple[list[str], list[str]]:
        """(conversation marks, one for each reply; marks of the tool calls) for replies to a conversation."""
        turn_marks, call_marks = [], []
        for message in list(replies)[:CHOICES_MAX]:
            turn_marks.append(self._turn_mark([*conversation, message], model))
            call_marks += self._call_marks(message)
        return turn_marks, call_marks

    def marks_of_last_turn(self, conversation: Sequence[Message], model: str) -> tuple[list[str], bool]:
        """(marks that the previous reply of a conversation may have, the most reliable first; whether the client sends
        tool results). There are no marks if the conversation has no reply yet, or ends with one."""
        last = next((i for i in range(len(conversation) - 1, -1, -1) if _role(conversation[i]) == "assistant"), None)
        if last is None or last == len(conversation) - 1:
            return [], False
        results = {m.get("tool_call_id") for m in conversation[last + 1 :] if _role(m) == "tool"}
        reply = conversation[last]
        marks = [self._turn_mark(conversation[: last + 1], model)]
        if results:
            marks += self._call_marks(reply)
        has_results = bool(results) or any(_role(m) == "function" for m in conversation[last + 1 :])
        return marks, has_results

    def mark_question(self, conversation: Sequence[Message]) -> str | None:
        """The mark of the last user message; None where there is none."""
        question = next((message for message in reversed(conversation) if _role(message) == "user"), None)
        return None if question is None else self._question_mark(question)

    def find_question(self, conversation: Sequence[Message], mark: str) -> Message | None:
        """The latest user message with this mark; None where the client no longer sends it."""
        questions = [message for message in conversation if _role(message) == "user"][-QUESTIONS_MAX:]
        return next((message for message in reversed(questions) if self._question_mark(message) == mark), None)

    def _question_mark(self, message: Message) -> str:
        return self._mark("question", normal_form(message))

    def _turn_mark(self, messages: Sequence[Message], model: str) -> str:
        return self._mark("turn", [model, *map(normal_form, messages)])

    def _call_marks(self, message: Message) -> list[str]:
        return [self._mark("call", call) for call in _calls(message)[:CALLS_MAX] if call[0]]

    def _mark(self, kind: str, value: Any) -> str:
        text = json.dumps([self._key_id, kind, value], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hmac.new(self._secret, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:MARK_CHARS]


def asks_client(body: Mapping[str, Any]) -> bool:
    """Whether any choice of a reply asks the client to act: by a tool call, or by the older function call."""
    messages = [choice.get("message") or {} for choice in body.get("choices") or () if isinstance(choice, Mapping)]
    return any(message.get("tool_calls") or message.get("function_call") for message in messages)


def _role(message: Message) -> str:
    return str(message.get("role"))


def normal_form(message: Message) -> list[Any]:
    """A message in normal form: equal for messages that mean the same."""
    role = {"system": "developer", "function": "tool"}.get(_role(message), _role(message))
    function = message.get("function_call")
    calls = _calls(message) + ([_call({"function": function})] if isinstance(function, Mapping) else [])
    return [role, _content(message.get("content")), message.get("refusal") or "", calls, message.get("tool_call_id")]


def _content(content: Any) -> Any:
    """Content as one string if it is all text, whether it came as a string, as parts or not at all; else its parts."""
    if not isinstance(content, list):
        return content or ""
    parts: list[Any] = [part.get("text", "") if part.get("type") == "text" else _uncached(part) for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _uncached(part: Message) -> Message:
    """The part without the end of a cached prefix, which clients move on from turn to turn."""
    return {name: value for name, value in part.items() if name not in ("cache_control", "prompt_cache_breakpoint")}


def _calls(message: Message) -> list[list[Any]]:
    calls = message.get("tool_calls")
    return [_call(call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function") or call.get("custom")
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments", function.get("input"))
    return [call.get("id") or "", function.get("name") or "", _arguments(arguments)]


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text
