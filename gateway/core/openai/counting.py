"""What of a call is counted in tokens where its worker reports none: its texts, and a bound for all else. Pure.

Counts err on the provider's side: what a chat template adds, sound and pictures count as a hold bounds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.core.money.amounts import TOKENS_PER_REQUEST, media_tokens_bound
from gateway.core.openai.usage import said_texts

TOKENS_PER_TURN = 6  # a message's marks and its role: five in the templates of Llama, Qwen and Gemma, four with OpenAI
TOKENS_PER_CHOICE = 1  # the end of the turn; of a stream cut short, the token that was under way
TOKENS_PER_TOOL_CALL = 16  # what stands around a name and its arguments
_TURN_TEXTS = ("content", "name", "tool_call_id", "refusal")
_ASIDE = ("tools", "functions", "tool_choice", "response_format", "suffix")


@dataclass(slots=True)
class Text:
    """Texts that a tokenizer counts, and tokens that are there beside them."""

    texts: list[str] = field(default_factory=list)
    tokens: int = 0

    def add(self, value: Any) -> None:
        """Take in a text, parts of content, tokens or lists of these; whatever else it is counts as its JSON."""
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


def asked(body: Mapping[str, Any]) -> Text:
    """What the prompt of a request body holds: messages, or the texts or tokens of the two other endpoints."""
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
    for name in _ASIDE:
        for item in _items(body.get(name)):
            text.add(item)
    return text


def answered(pieces: Iterable[Mapping[str, Any]]) -> Text:
    """What a worker said in messages: content, reasoning, refusals, and names and arguments of tools."""
    text = Text()
    for piece in pieces:
        texts, calls = said_texts(piece)
        text.texts += texts
        text.tokens += TOKENS_PER_CHOICE + TOKENS_PER_TOOL_CALL * calls
    return text


def _items(value: Any) -> Iterable[Any]:
    """A list of tools one by one, as objects that are counted by their JSON; anything else as it is."""
    return value if isinstance(value, list) else (value,)
