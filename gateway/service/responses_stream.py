"""A running request as the typed server-sent events of the Responses API.

`response.created` waits for the first piece of the reply, or for the first idle moment: until then an error still has
its own status. The rollout's story is a comment before the last event, since clients stop reading there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.core.responses_events import Events
from gateway.core.responses_reply import Head
from gateway.service.running import Running, reply_headers
from gateway.service.stream import KEEP_ALIVE


class ResponseFrames:
    """`stream.Frames` of one response."""

    def __init__(self, running: Running, head: Head) -> None:
        self.begun = False
        self._running = running
        self._events = Events(head)

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> list[bytes]:
        """The events of a worker's chunk."""
        return [*self._open(), *_frames(self._events.chunk(choices))]

    def idle(self) -> list[bytes]:
        """The first events, then comments."""
        return self._open() or [KEEP_ALIVE]

    def end(self) -> list[bytes]:
        """The last events, once the request is logged and settled."""
        running = self._running
        if running.error is not None:
            return [
                *(self._story() if self.begun else ()),
                *_frames(self._events.failed(running.error.body()["error"])),
            ]
        last = _frames(self._events.completed(running.body or {}, running.record.finished_us // 1_000_000))
        return [*self._open(), *last[:-1], *self._story(), last[-1]]

    def _open(self) -> list[bytes]:
        if self.begun:
            return []
        self.begun = True
        return _frames(self._events.open())

    def _story(self) -> list[bytes]:
        return [f": baton {json.dumps(reply_headers(self._running.record))}\n\n".encode()]


def _frames(events: Iterable[Mapping[str, Any]]) -> list[bytes]:
    return [
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(
            "utf-8", "replace"
        )
        for event in events
    ]
