"""A bounded parser of server-sent events (WHATWG HTML §9.2). It reads what chat streams use: `event`, `data`,
comments. A byte-order mark before the first event and events without text are skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

DONE = "[DONE]"
BOM = b"\xef\xbb\xbf"
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
    _mark: bytes = BOM  # what is still to come of a byte-order mark; empty behind the first bytes

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that this chunk completes. Raises SseError."""
        return self.feed_to(None, chunk)

    def feed_to(self, read: Callable[[bytes], T] | None, chunk: bytes) -> list[SseEvent | T]:
        """`feed`. `read` is given the data of each event of one line that came in one piece: what it returns stands for
        the event, unless it raises ValueError or RecursionError."""
        events: list[Any] = []
        if self._mark and chunk:
            chunk = self._unmarked(chunk)
        if not (self._line or self._data or self._cr or self._name != "message" or b"\r" in chunk):
            chunk = self._events(read, chunk, events)
        if self._cr:
            self._cr, chunk = not chunk, chunk.removeprefix(b"\n")
        self._cr = self._cr or chunk.endswith(b"\r")
        self._lines(chunk, events)
        return events

    def _unmarked(self, chunk: bytes) -> bytes:
        """The chunk behind a byte-order mark, which may be cut anywhere. What only began as one is no field's name, so
        that it may go, too."""
        size = next(at for at in range(len(self._mark), -1, -1) if chunk.startswith(self._mark[:at]))
        self._mark = self._mark[size:] if size and size == len(chunk) else b""
        return chunk[size:]

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
            if text := _text(block[6:]).strip():  # some servers keep a stream alive by empty events
                add(SseEvent(text))
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
        text = "\n".join(self._data).strip()
        events = [SseEvent(text, self._name)] if text else []
        self._data, self._name, self._size = [], "message", 0
        return events


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise SseError("not UTF-8") from error
