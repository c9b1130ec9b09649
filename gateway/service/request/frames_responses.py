"""A running request as the typed server-sent events of the Responses API.

`response.created` waits for the first piece of the reply, or for the first idle moment: until then an error still has
its own status. The rollout's story is a comment before the last event, since clients stop reading there.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.openai.reply import json_bytes
from gateway.core.openai.responses.events import Events
from gateway.core.openai.responses.reply import Head
from gateway.core.openai.responses.request import Places
from gateway.service.request.frames import KEEP_ALIVE, OBFUSCATION_BYTES
from gateway.service.request.running import Running, reply_headers


class ResponseFrames:
    """`stream.Frames` of one response."""

    def __init__(self, running: Running, head: Head, places: Places) -> None:
        self.begun = False
        self._running = running
        self._places = places
        self._events = Events(head)

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """The events of a worker's chunk."""
        return [*self._open(), *map(self._padded, self._events.chunk(choices))]

    def idle(self) -> list[bytes]:
        """The first events, then comments."""
        return self._open() or [KEEP_ALIVE]

    def end(self) -> list[bytes]:
        """The last events, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            error = self._places.reworded(running.error).body()["error"]
            return [self._story(), *map(_frame, self._events.failed(error))]
        opening = self._open()
        last = self._events.completed(running.body or {}, running.record.finished_us // 1_000_000)
        return [*opening, *map(_frame, last[:-1]), self._story(), _frame(last[-1])]

    def _open(self) -> list[bytes]:
        if self.begun:
            return []
        self.begun = True
        return list(map(_frame, self._events.open()))

    def _padded(self, event: Mapping[str, Any]) -> bytes:
        """Deltas get random padding where that was asked for, so that their sizes tell nothing."""
        if not (self._running.chat.obfuscate and event["type"].endswith(".delta")):
            return _frame(event)
        padding = secrets.token_urlsafe(OBFUSCATION_BYTES)[: 1 + secrets.randbelow(OBFUSCATION_BYTES)]
        return _frame({**event, "obfuscation": padding})

    def _story(self) -> bytes:
        return f": baton {json.dumps(reply_headers(self._running.record))}\n\n".encode()


def _frame(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + json_bytes(event) + b"\n\n"
