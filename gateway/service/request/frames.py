"""A running request as server-sent events, in OpenAI's exact order.

The role comes first. Every choice has `finish_reason` and `logprobs`; the finish has its own chunk. Usage, if the
client wants it, is null on every chunk and comes once at the end with empty choices. `[DONE]` follows success only: an
error after the first byte is one `error` event. A comment keeps an idle connection alive.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from gateway.core.anthropic.events import MessageEvents
from gateway.core.anthropic.reply import MessageHead, error_body
from gateway.core.anthropic.request import MessageNames
from gateway.core.money.amounts import nano_to_usd
from gateway.core.openai.marks import without as without_marks
from gateway.core.openai.reply import DONE, TextChoice, choice_facts, chunk, json_bytes, sse, usage_json
from gateway.core.openai.responses.events import Events
from gateway.core.openai.responses.reply import Head
from gateway.core.openai.responses.request import ParamNames
from gateway.core.openai.texts import text_chunk
from gateway.core.openai.vendor import PROGRESS
from gateway.service.request.running import ProgressNote, Running

_TEXT = secrets.token_hex(16)  # stands for the text in a frame that others are made from
_TEXT_JSON = json.dumps(_TEXT).encode()
KEEP_ALIVE = b": baton is working\n\n"
OBFUSCATION_BYTES = 16


class Frames(Protocol):
    """The frames of one API for one request."""

    begun: bool  # whether a part of the reply has been sent: then an error can no longer have its own status

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """The frames of a worker's chunk."""
        ...

    def note(self, event: Mapping[str, Any]) -> list[bytes]:
        """The frames of a note about plans and steps."""
        ...

    def idle(self) -> list[bytes]:
        """The frames that keep an idle stream alive."""
        ...

    def end(self) -> list[bytes]:
        """The last frames, once the request is logged and settled; at least one."""
        ...


async def events(running: Running, keepalive_s: float, frames: Frames) -> AsyncIterator[bytes]:
    """Yield the body of the stream: the frames of all items that are there, in one piece. `keepalive_s` 0: no
    keep-alive comments."""
    while True:
        if not await running.ready(keepalive_s or None):
            for frame in frames.idle():
                yield frame
            continue
        made: list[bytes] = []
        while (item := running.take()) is not None:
            made += frames.note(item.event) if isinstance(item, ProgressNote) else frames.chunk(item)
        if made:
            yield b"".join(made)
        elif running.finished.is_set():
            break
    for frame in frames.end():
        yield frame


class Comments:
    """Notes as SSE comments: event parsers skip them, and a client that asked for notes reads them."""

    def note(self, event: Mapping[str, Any]) -> list[bytes]:
        """One comment."""
        return [f": baton {json.dumps(event)}\n\n".encode()]


def note_text(event: Mapping[str, Any]) -> str:
    """A note as a line for people; empty where it says nothing new to them."""
    step = f"step {event.get('step', 0) + 1} ({event.get('worker')})"
    match event["event"]:
        case "planned":
            why = f": {event['why']}" if event.get("why") else ""
            return f"plan {event['round']} by {event['by']}, {event['steps']} steps{why}"
        case "step_started":
            return f"{step} runs"
        case "step_ended" if event["status"] != "done":
            return f"{step} {event['status']}"
    return ""


class ChatFrames(Comments):
    """`Frames` of a chat completion: a worker's chunks in our shape, one choice index at a time."""

    def __init__(self, running: Running) -> None:
        self.begun = False
        self._running = running
        self._begun: set[int] = set()
        self._around: dict[int, tuple[bytes, bytes, Mapping[str, str]]] = {}  # the text of a choice: frame, facts
        self._answers = False  # whether a piece of a worker's reply was sent
        self._told: dict[str, Any] = {}  # lists and objects that the reply says of itself: each goes once

    def note(self, event: Mapping[str, Any]) -> list[bytes]:
        """A comment, or a delta of reasoning before the reply where the client wants that."""
        if self._running.progress != "reasoning":
            return super().note(event)
        text = note_text(event)
        if not text or self._answers:
            return []
        delta = {"reasoning_content": f"{PROGRESS}{text}\n"}
        return [*self._opening(0), self._frame([{"index": 0, "delta": delta, "logprobs": None}])]

    def idle(self) -> list[bytes]:
        """A comment."""
        return [KEEP_ALIVE]

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Frames for the choices of one worker chunk: role, delta and finish apart."""
        if len(choices) == 1 and (frame := self._text_frame(choices[0])) is not None:
            return [frame]
        frames: list[bytes] = []
        for choice in choices:
            index, facts = choice.get("index", 0), choice_facts(choice)
            raw = without_marks(choice.get("delta") or {})
            delta = {name: value for name, value in raw.items() if value is not None and name != "role"}
            self._answers = True
            frames += self._opening(index, "" if "content" in delta or not raw.keys() - {"role"} else None)
            logprobs, reason = choice.get("logprobs"), choice.get("finish_reason")
            if any(value not in ("", []) for value in delta.values()) or logprobs or (facts and not reason):
                frames.append(self._frame([{**facts, "index": index, "delta": delta, "logprobs": logprobs}]))
                facts = {}
            if reason:
                frames.append(self._frame([{**facts, "index": index, "delta": {}, "finish_reason": reason}]))
        return frames

    def _text_frame(self, choice: Mapping[str, Any]) -> bytes | None:
        """The frame of a piece of text in a choice that has begun: the frame before with another text. None for a
        choice with more in it."""
        if isinstance(choice, TextChoice):
            index, text = choice.index, choice.delta.content
        elif (piece := _piece_of_text(choice)) is not None:
            index, text = piece
        else:
            return None
        if not text or index not in self._begun or self._running.chat.obfuscate:
            return None
        if self._running.reply_facts and self._untold():
            return None
        around = self._around.get(index)
        if around is None or around[2] != self._running.reply_facts:
            whole = self._frame([{"index": index, "delta": {"content": _TEXT}}])
            before, _, after = whole.partition(_TEXT_JSON)
            around = self._around[index] = before, after, dict(self._running.reply_facts)
        self._answers = True
        return around[0] + json_bytes(text) + around[1]

    def end(self) -> list[bytes]:
        """The last frames, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            return [sse(running.error.body())]
        story = _story(running)
        if not running.chat.include_usage:
            return [story, DONE]
        last = self._chunk([])
        last["usage"] = usage_json(running.usage)
        return [sse(last | _cost(running)), story, DONE]

    def _opening(self, index: int, content: str | None = "") -> list[bytes]:
        """The first frame of a choice, which has its role. Its content is null where the reply begins with a call."""
        if index in self._begun:
            return []
        self._begun.add(index)
        return [self._frame([{"index": index, "delta": {"role": "assistant", "content": content, "refusal": None}}])]

    def _untold(self) -> dict[str, Any]:
        """The lists and objects that the reply says of itself and that did not go yet."""
        facts = self._running.reply_facts
        return {name: facts[name] for name in facts if _is_large(facts[name]) and self._told.get(name) != facts[name]}

    def _frame(self, choices: Sequence[Mapping[str, Any]]) -> bytes:
        self.begun = True
        return sse(self._chunk(choices))

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        record = self._running.record
        body = chunk(
            choices,
            completion_id=record.completion_id,
            created_s=record.created_us // 1_000_000,
            model=self._running.chat.model,
        )
        untold = self._untold()
        self._told |= untold
        body |= {name: value for name, value in self._running.reply_facts.items() if not _is_large(value)} | untold
        if self._running.chat.obfuscate:
            body["obfuscation"] = _padding()
        if self._running.chat.include_usage:
            body["usage"] = None
        return body


class TextFrames(Comments):
    """`Frames` of a text completion: the worker's chunks in the older shape, each as it comes."""

    def __init__(self, running: Running) -> None:
        self.begun = False
        self._running = running

    def idle(self) -> list[bytes]:
        """A comment."""
        return [KEEP_ALIVE]

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """One frame a chunk."""
        self.begun = True
        return [sse(self._chunk(choices))]

    def end(self) -> list[bytes]:
        """The last frames, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            return [sse(running.error.body())]
        story = _story(running)
        if not running.chat.include_usage:
            return [story, DONE]
        return [sse(self._chunk([]) | {"usage": usage_json(running.usage)} | _cost(running)), story, DONE]

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        record = self._running.record
        body = text_chunk(
            choices,
            completion_id=record.completion_id,
            created_s=record.created_us // 1_000_000,
            model=self._running.chat.model,
        )
        return body | ({"usage": None} if self._running.chat.include_usage else {})


class ResponseFrames(Comments):
    """`Frames` of a response: the typed events of the Responses API.

    `response.created` waits for the first piece of the reply, or for the first idle moment: until then an error still
    has its own status. The rollout's story is a comment before the last event, because clients stop reading there.
    """

    def __init__(self, running: Running, head: Head, names: ParamNames) -> None:
        self.begun = False
        self._running = running
        self._names = names
        self._events = Events(head)

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """The events of a worker's chunk."""
        return [*self._open(), *map(self._padded, self._events.chunk(choices))]

    def note(self, event: Mapping[str, Any]) -> list[bytes]:
        """A comment, or events of a reasoning summary before the reply where the client wants that."""
        if self._running.progress != "reasoning":
            return super().note(event)
        text = note_text(event)
        return [*self._open(), *map(event_frame, self._events.note(text))] if text else []

    def idle(self) -> list[bytes]:
        """The first events, then comments."""
        return self._open() or [KEEP_ALIVE]

    def end(self) -> list[bytes]:
        """The last events, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            error = self._names.reword(running.error).body()["error"]
            return [_story(running), *map(event_frame, self._events.failed(error))]
        opening = self._open()
        last = self._events.completed(running.body or {}, running.record.finished_us // 1_000_000)
        last[-1]["response"] |= _cost(running)
        return [*opening, *map(event_frame, last[:-1]), _story(running), event_frame(last[-1])]

    def _open(self) -> list[bytes]:
        if self.begun:
            return []
        self.begun = True
        return list(map(event_frame, self._events.open()))

    def _padded(self, event: Mapping[str, Any]) -> bytes:
        """Deltas get random padding where that was asked for, so that their sizes tell nothing."""
        if not (self._running.chat.obfuscate and event["type"].endswith(".delta")):
            return event_frame(event)
        return event_frame({**event, "obfuscation": _padding()})


class MessageFrames(Comments):
    """`Frames` of a Message: the events of Anthropic's Messages API, with its own `ping` for an idle stream."""

    def __init__(self, running: Running, head: MessageHead, names: MessageNames) -> None:
        self.begun = False
        self._running = running
        self._names = names
        self._events = MessageEvents(head)

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """The events of a worker's chunk."""
        return [*self._open(), *map(event_frame, self._events.chunk(choices))]

    def idle(self) -> list[bytes]:
        """The first event, then pings."""
        return self._open() or [event_frame(self._events.ping())]

    def end(self) -> list[bytes]:
        """The last events, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            return [_story(running), event_frame(error_body(self._names.reword(running.error)))]
        opening = self._open()
        last = self._events.completed(running.body or {})
        return [*opening, *map(event_frame, last[:-1]), _story(running), event_frame(last[-1])]

    def _open(self) -> list[bytes]:
        if self.begun:
            return []
        self.begun = True
        return list(map(event_frame, self._events.open()))


def _is_large(value: Any) -> bool:
    return isinstance(value, list | dict)


def _piece_of_text(choice: Mapping[str, Any]) -> tuple[int, str] | None:
    """(index, text) of a choice with a piece of text in it and no more; None for any other."""
    delta = choice.get("delta")
    if not delta or len(delta) != 1 or choice.get("logprobs") or choice.get("finish_reason"):
        return None
    text = delta.get("content")
    return (choice.get("index", 0), text) if isinstance(text, str) and text else None


def _cost(running: Running) -> dict[str, Any]:
    """What the request cost, as a property of the last chunk beside `usage`: dollars as exact text. OpenAI's schema has
    no such property, so it is there where the client wants to be told of progress."""
    if running.progress == "off":
        return {}
    return {"baton": {"rollout_id": running.record.id, "cost_usd": nano_to_usd(running.record.cost_nano)}}


def _story(running: Running) -> bytes:
    """What became of the request, as a comment: the headers of a reply that does not stream."""
    return f": baton {json.dumps(running.headers())}\n\n".encode()


def _padding() -> str:
    """1 to OBFUSCATION_BYTES random characters, so that the sizes of deltas tell nothing."""
    return secrets.token_urlsafe(OBFUSCATION_BYTES)[: 1 + secrets.randbelow(OBFUSCATION_BYTES)]


def event_frame(event: Mapping[str, Any]) -> bytes:
    return sse(event, event["type"])
