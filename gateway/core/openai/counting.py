"""Collects what to count as tokens when a worker reports no usage: texts, and upper bounds for all else. Pure.

Counts err on the provider's side: the additions of a chat template, sound and images count with the bounds that a hold
uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.money.amounts import TOKENS_PER_REQUEST, media_tokens_bound
from gateway.core.openai.usage import generated_texts

TOKENS_PER_TURN = 6  # control tokens and role: five in the templates of Llama, Qwen and Gemma, four with OpenAI
TOKENS_PER_CHOICE = 1  # the end of the turn, or the last token of a stream that was cut
TOKENS_PER_TOOL_CALL = 16  # what surrounds a name and its arguments
_TURN_TEXTS = ("content", "name", "tool_call_id", "refusal")
_EXTRA_TEXTS = ("tools", "functions", "tool_choice", "response_format", "suffix")


@dataclass(slots=True)
class Text:
    """Texts for a tokenizer to count, and the number of tokens to add to its count."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0

    def add(self, value: Any) -> None:
        """Add a string, content parts, a token id, or a list of these. Any other value counts as its JSON."""
        if isinstance(value, str):
            self.texts.append(value)
        elif isinstance(value, int):
            self.tokens += 1
        elif isinstance(value, list):
            for item in value:
                self._add_part(item) if isinstance(item, Mapping) else self.add(item)
        elif value is not None:
            self.texts.append(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str))

    def _add_part(self, part: Mapping[str, Any]) -> None:
        if part.get("type") in ("text", "refusal"):
            self.add(part.get("text") or part.get("refusal"))
        else:
            self.tokens += media_tokens_bound(part)


def request_text(body: Mapping[str, Any]) -> Text:
    """The prompt of a request body: messages, or the texts or token ids of the completions and embeddings endpoints."""
    text = Text(tokens=TOKENS_PER_REQUEST if "messages" in body else 0)
    for message in body.get("messages") or ():
        text.tokens += TOKENS_PER_TURN
        for name in _TURN_TEXTS:
            text.add(message.get(name))
        for call in message.get("tool_calls") or ():
            text.tokens += TOKENS_PER_TOOL_CALL
            text.add(dict(call))
    for name in ("prompt", "input"):
        text.add(body.get(name))
    for name in _EXTRA_TEXTS:
        for item in _items(body.get(name)):
            text.add(item)
    return text


def reply_text(pieces: Iterable[Mapping[str, Any]]) -> Text:
    """What a worker generated in these messages: content, reasoning, refusals, tool names and arguments."""
    text = Text()
    for piece in pieces:
        texts, calls = generated_texts(piece)
        text.texts += texts
        text.tokens += TOKENS_PER_CHOICE + TOKENS_PER_TOOL_CALL * calls
    return text


def _items(value: Any) -> Iterable[Any]:
    """The items of a list of tools, each to be counted as JSON; any other value as its only item."""
    return value if isinstance(value, list) else (value,)
