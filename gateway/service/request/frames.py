"""A running request as server-sent events, in OpenAI's exact order.

Role first; `finish_reason` and `logprobs` on every choice; a finish in a chunk of its own; usage, if asked for, null on
every chunk and then once with empty choices; `[DONE]` only after success. An error after the first byte is one `error`
event and no `[DONE]`. While nothing else comes, a comment keeps the connection alive.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from gateway.core.openai.reply import chunk, json_bytes, usage_json
from gateway.service.request.running import Progress, Running, Said, reply_headers

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": baton is working\n\n"
OBFUSCATION_BYTES = 16


class Frames(Protocol):
    """How an API says in frames what happens to a request."""

    begun: bool  # whether anything of the reply has been said: an error cannot have its own status any more

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Of a worker's chunk."""
        ...

    def idle(self) -> list[bytes]:
        """While nothing else comes."""
        ...

    def end(self) -> list[bytes]:
        """Once the request is logged and settled; never nothing."""
        ...


async def events(running: Running, keepalive_s: float, frames: Frames) -> AsyncIterator[bytes]:
    """The body of the stream. `keepalive_s` 0: no comments."""
    source = running.chunks()
    pending: asyncio.Task[Said | None] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(source))
            done, _ = await asyncio.wait({pending}, timeout=keepalive_s or None)
            if not done:
                for frame in frames.idle():
                    yield frame
                continue
            said, pending = pending.result(), None
            if said is None:
                break
            for frame in [_news(said)] if isinstance(said, Progress) else frames.chunk(said):
                yield frame
    finally:
        if pending is not None:
            pending.cancel()
    for frame in frames.end():
        yield frame


async def _next(source: AsyncIterator[Said]) -> Said | None:
    return await anext(source, None)


def _news(progress: Progress) -> bytes:
    """A comment: parsers of events skip it, whoever asked for it reads it."""
    return f": baton {json.dumps(progress.event)}\n\n".encode()


class ChatFrames:
    """Turns worker chunks into ours, one choice index at a time."""

    def __init__(self, running: Running) -> None:
        self.begun = False
        self._running = running
        self._begun: set[int] = set()

    def idle(self) -> list[bytes]:
        """A comment."""
        return [KEEP_ALIVE]

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """Frames for the choices of one worker chunk: role, delta and finish apart."""
        frames: list[bytes] = []
        for choice in choices:
            index = choice.get("index", 0)
            delta = {name: value for name, value in (choice.get("delta") or {}).items() if value is not None}
            delta.pop("role", None)
            if index not in self._begun:
                self._begun.add(index)
                opening = {"role": "assistant", "content": "", "refusal": None}
                frames.append(self._frame([{"index": index, "delta": opening}]))
            if any(value not in ("", []) for value in delta.values()) or choice.get("logprobs"):
                frames.append(self._frame([{"index": index, "delta": delta, "logprobs": choice.get("logprobs")}]))
            if choice.get("finish_reason"):
                frames.append(self._frame([{"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}]))
        return frames

    def end(self) -> list[bytes]:
        """The last frames, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            return [_data(running.error.body())]
        story = f": baton {json.dumps(reply_headers(running.record))}\n\n".encode()
        if not running.chat.include_usage:
            return [story, DONE]
        last = self._chunk([])
        last["usage"] = usage_json(running.usage)
        return [_data(last), story, DONE]

    def _frame(self, choices: Sequence[Mapping[str, Any]]) -> bytes:
        self.begun = True
        return _data(self._chunk(choices))

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        record = self._running.record
        body = chunk(
            choices,
            completion_id=record.completion_id,
            created_s=record.created_us // 1_000_000,
            model=self._running.chat.model,
        )
        body |= self._running.said
        if self._running.chat.obfuscate:
            body["obfuscation"] = secrets.token_urlsafe(OBFUSCATION_BYTES)[: 1 + secrets.randbelow(OBFUSCATION_BYTES)]
        if self._running.chat.include_usage:
            body["usage"] = None
        return body


def _data(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json_bytes(body) + b"\n\n"
