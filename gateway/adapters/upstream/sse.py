"""A bounded parser of server-sent events (WHATWG HTML §9.2). It reads what chat streams use: `event`, `data`,
comments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

DONE = "[DONE]"
T = TypeVar("T")


class SseError(ValueError):
    """The bytes are not an event stream: a line or event exceeds the bound, or is not UTF-8."""


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    """One event: its joined `data` lines and its name, which is `message` by default."""

    data: str
    name: str = "message"


@dataclass(slots=True)
class SseParser:
    """Turns bytes into events. It buffers at most one incomplete line and one incomplete event, each of at most
    `event_bytes_max` bytes."""

    event_bytes_max: int
    _line: bytearray = field(default_factory=bytearray)
    _data: list[str] = field(default_factory=list)
    _name: str = "message"
    _size: int = 0
    _cr: bool = (
        False  # whether the last chunk ended in \r: a \n that follows belongs to it, and is not a line of its own
    )

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that this chunk completes. Raises SseError."""
        return self.feed_to(None, chunk)

    def feed_to(self, read: Callable[[bytes], T] | None, chunk: bytes) -> list[SseEvent | T]:
        """`feed`. `read` is given the data of each event of one line that came in one piece: what it returns stands for
        the event, unless it raises ValueError or RecursionError."""
        events: list[Any] = []
        if not (self._line or self._data or self._cr or self._name != "message" or b"\r" in chunk):
            chunk = self._events(read, chunk, events)
        if self._cr:
            self._cr, chunk = not chunk, chunk.removeprefix(b"\n")
        self._cr = self._cr or chunk.endswith(b"\r")
        self._lines(chunk, events)
        return events

    def _events(self, read: Callable[[bytes], Any] | None, chunk: bytes, events: list[Any]) -> bytes:
        """Read the events that are complete; return the rest. Most are one line of data."""
        *blocks, rest = chunk.split(b"\n\n")
        bytes_max, add = self.event_bytes_max, events.append
        for block in blocks:
            if not block.startswith(b"data: ") or b"\n" in block or len(block) > bytes_max:
                self._lines(block + b"\n\n", events)
                continue
            if read is not None:
                try:
                    add(read(block[6:]))
                    continue
                except (ValueError, RecursionError):
                    pass
            add(SseEvent(_text(block[6:])))
        return rest

    def _lines(self, chunk: bytes, events: list[Any]) -> None:
        for piece in chunk.splitlines(keepends=True):  # bytes split only at \n, \r and \r\n
            self._line += piece
            if len(self._line) > self.event_bytes_max:
                raise SseError(f"a line is longer than {self.event_bytes_max} bytes")
            if piece.endswith((b"\n", b"\r")):
                line = bytes(self._line).rstrip(b"\r\n")
                self._line.clear()
                events += self._accept(line)

    def end(self) -> list[SseEvent]:
        """Return the event that the end of the stream completes: some servers omit the last blank line. Raises
        SseError."""
        return [*self.feed(b"\n"), *self.feed(b"\n")]

    def _accept(self, line: bytes) -> list[SseEvent]:
        if not line:
            return self._dispatch()
        name, _, value = _text(line).partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._size += len(line)
            if self._size > self.event_bytes_max:
                raise SseError(f"an event is longer than {self.event_bytes_max} bytes")
            self._data.append(value)
        elif name == "event":
            self._name = value
        return []

    def _dispatch(self) -> list[SseEvent]:
        events = [SseEvent("\n".join(self._data), self._name)] if self._data else []
        self._data, self._name, self._size = [], "message", 0
        return events


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise SseError("not UTF-8") from error
