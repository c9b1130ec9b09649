"""Turns chat chunks into the events of a streamed Message. Pure; it never raises, and ignores whatever does not have
OpenAI's form.

Anthropic's blocks follow one another: one ends before the next begins. So the first tool call is streamed as it comes,
and whatever a worker mixes into it (another call, or text) follows when the stream ends. A worker that speaks
Anthropic's own wire says where its blocks begin (`core/anthropic/inbound.py`); then each is streamed as it comes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.core.anthropic.native import BLOCKS, NATIVE_FINISH, NATIVE_USAGE
from gateway.core.anthropic.reply import MessageHead, call_start, empty_message, function_of, stop_of, usage_of
from gateway.core.anthropic.thinking import origin_of, thinking_blocks

Event = dict[str, Any]
CALLS_MAX = 128
_KINDS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class MessageEvents:
    """Makes the events of one Message. Call `open` first, then `chunk` for each chunk, then `completed` once."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._blocks = 0  # blocks that have begun
        self._open: str | None = None  # type of the block that has not ended
        self._calls: dict[int, list[Mapping[str, Any]]] = {}  # a call's index in the chunks → its pieces
        self._texts: list[str] = []  # text behind the first tool call
        self._streamed = -1  # index of the call that is streamed as it comes
        self._ordered = False  # whether the worker says where its blocks begin
        self._refusal = ""
        self._origin: str | None = None  # of the worker, where it hands out state
        self._last: dict[str, Any] = {}  # what the choice says of its end

    def open(self) -> list[Event]:
        """The first event of the stream."""
        return [{"type": "message_start", "message": empty_message(self._head)}]

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[Event]:
        """The events of one chunk. Only the choice with index 0 counts."""
        return [event for choice in choices if choice.get("index", 0) == 0 for event in self._choice(choice)]

    def completed(self, completion: Mapping[str, Any]) -> list[Event]:
        """The last events of a successful reply."""
        ending = stop_of(self._head, self._last, self._refusal, called=bool(self._calls))
        usage = usage_of(completion, self._last)
        if usage["service_tier"] == "standard":  # as the first event said
            del usage["service_tier"]
        return [
            *self._close(),
            *self._late(),
            {"type": "message_delta", "delta": ending, "usage": usage},
            {"type": "message_stop"},
        ]

    def ping(self) -> Event:
        """The event that keeps an idle stream alive."""
        return {"type": "ping"}

    # ------------------------------------------------------------ pieces

    def _choice(self, choice: Mapping[str, Any]) -> Iterator[Event]:
        delta = choice.get("delta")
        if isinstance(delta, Mapping):
            for block in delta.get(BLOCKS) or ():
                yield from self._native(block)
            yield from self._thinking(delta)
            for name in ("content", "refusal"):
                text = delta.get(name)
                if isinstance(text, str) and text:
                    self._refusal += text if name == "refusal" else ""
                    yield from self._text(text)
            calls = delta.get("tool_calls")
            for call in calls if isinstance(calls, list) else ():
                if isinstance(call, Mapping):
                    yield from self._call(call)
        self._last |= {
            name: choice[name]
            for name in ("finish_reason", "stop_reason", NATIVE_FINISH, NATIVE_USAGE)
            if choice.get(name)
        }

    def _native(self, block: Mapping[str, Any]) -> Iterator[Event]:
        """The events of what only Anthropic's wire has: a beginning, a citation, or a block of a hosted tool."""
        self._ordered = True
        kind = block.get("type")
        if kind == "citations_delta":
            yield self._delta(dict(block))
        elif kind == "text":
            yield from self._begin({"type": "text", "text": "", **block})
        elif kind in ("thinking", "redacted_thinking", "tool_use"):
            yield from self._close()
        else:
            given = block.get("input")
            yield from self._begin({**block, **({} if given is None else {"input": {}})})
            if given:
                text = json.dumps(given, ensure_ascii=False)
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            yield from self._close()

    def _thinking(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        self._origin = origin_of(delta) or self._origin
        for block in thinking_blocks(delta, self._head.display, self._origin) if self._in_order else ():
            yield from self._thought(block)

    def _thought(self, block: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a piece of thinking, or of a redacted block. A signature ends its block."""
        if block["type"] != "thinking":
            yield from self._begin(block)
            yield from self._close()
            return
        yield from self._piece("thinking", {"type": "thinking", "thinking": "", "signature": ""}, block["thinking"])
        if block["signature"]:
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
            yield from self._close()

    @property
    def _in_order(self) -> bool:
        """Whether what comes now may begin a block at once."""
        return self._ordered or not self._calls

    def _text(self, text: str) -> Iterator[Event]:
        if not self._in_order:
            self._texts.append(text)
        else:
            yield from self._piece("text", {"type": "text", "text": ""}, text)

    def _call(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        index = piece.get("index")
        index = index if isinstance(index, int) else len(self._calls)
        if index not in self._calls:
            if len(self._calls) >= CALLS_MAX:
                return
            self._calls[index] = []
            if len(self._calls) == 1 or self._ordered:
                self._streamed = index
                yield from self._begin(call_start(self._head, piece, len(self._calls) - 1))
        if index == self._streamed:
            yield from self._arguments(piece)
        else:
            self._calls[index].append(piece)

    def _arguments(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        text = function_of(piece).get("arguments")
        if isinstance(text, str) and text:
            yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _late(self) -> Iterator[Event]:
        """The events of every call but the first, and of the text behind it."""
        for number, pieces in enumerate(self._calls.values()):
            if pieces:
                yield from self._begin(call_start(self._head, pieces[0], number))
                for piece in pieces:
                    yield from self._arguments(piece)
                yield from self._close()
        if self._texts:
            yield from self._piece("text", {"type": "text", "text": ""}, "".join(self._texts))
            yield from self._close()

    # ------------------------------------------------------------ blocks

    def _piece(self, kind: str, empty: Mapping[str, Any], text: str) -> Iterator[Event]:
        """The events of a piece of a text or thinking block, which begins it where none is open."""
        if self._open != kind:
            yield from self._begin(empty)
        delta, name = _KINDS[kind]
        if text:
            yield self._delta({"type": delta, name: text})

    def _begin(self, block: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._blocks, "content_block": dict(block)}
        self._blocks += 1

    def _delta(self, delta: Mapping[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._blocks - 1}
