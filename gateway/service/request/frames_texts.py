"""The frames of a text completion's stream (`/v1/completions`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.openai.reply import json_bytes, usage_json
from gateway.core.openai.texts import text_chunk
from gateway.service.request.frames import DONE, KEEP_ALIVE
from gateway.service.request.running import Running, reply_headers


class TextFrames:
    """As `stream.ChatFrames`: the chunks of the worker in the older shape, each as it comes."""

    def __init__(self, running: Running) -> None:
        self.begun = False
        self._running = running

    def idle(self) -> list[bytes]:
        """A comment."""
        return [KEEP_ALIVE]

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """One frame a chunk."""
        self.begun = True
        return [_data(self._chunk(choices))]

    def end(self) -> list[bytes]:
        """The last frames, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            return [_data(running.error.body())]
        story = f": baton {json.dumps(reply_headers(running.record))}\n\n".encode()
        if not running.chat.include_usage:
            return [story, DONE]
        return [_data(self._chunk([]) | {"usage": usage_json(running.usage)}), story, DONE]

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        record = self._running.record
        body = text_chunk(
            choices,
            completion_id=record.completion_id,
            created_s=record.created_us // 1_000_000,
            model=self._running.chat.model,
        )
        return body | ({"usage": None} if self._running.chat.include_usage else {})


def _data(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json_bytes(body) + b"\n\n"
