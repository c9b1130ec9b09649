"""Server-sent events, read with bounds (WHATWG HTML §9.2). Only what chat streams use: `event`, `data`, comments."""

from __future__ import annotations

from dataclasses import dataclass, field

DONE = "[DONE]"


class SseError(ValueError):
    """Bytes that are no event stream: a line over the bound, or not UTF-8."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event: the joined `data` lines, and the event's name (`message` unless given)."""

    data: str
    name: str = "message"


@dataclass(slots=True)
class SseParser:
    """Bytes in, events out. Holds at most one unfinished line and one unfinished event, each ≤ `event_bytes_max`."""

    event_bytes_max: int
    _line: bytearray = field(default_factory=bytearray)
    _data: list[str] = field(default_factory=list)
    _name: str = "message"
    _size: int = 0
    _cr: bool = False  # the last chunk ended in \r: a \n that comes next belongs to it, and is no line of its own

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that this chunk completes. Raises SseError."""
        events: list[SseEvent] = []
        if self._cr:
            self._cr, chunk = not chunk, chunk.removeprefix(b"\n")
        self._cr = self._cr or chunk.endswith(b"\r")
        for piece in chunk.splitlines(keepends=True):  # bytes split on \n, \r and \r\n alone
            self._line += piece
            if len(self._line) > self.event_bytes_max:
                raise SseError(f"a line is longer than {self.event_bytes_max} bytes")
            if piece.endswith((b"\n", b"\r")):
                line = bytes(self._line).rstrip(b"\r\n")
                self._line.clear()
                events += self._accept(line)
        return events

    def end(self) -> list[SseEvent]:
        """The event that the end of the stream completes: servers are known to leave out the last blank line."""
        return [*self.feed(b"\n"), *self.feed(b"\n")]

    def _accept(self, line: bytes) -> list[SseEvent]:
        if not line:
            return self._dispatch()
        try:
            name, _, value = line.decode().partition(":")
        except UnicodeDecodeError as error:
            raise SseError("not UTF-8") from error
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
