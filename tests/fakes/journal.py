"""`Journal` in memory: keeps events in order, hands each to a store when there is one."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.log.events import Event, canonical, parse
from gateway.errors import SpoolFull


class FakeJournal:
    """`events`: what was appended. `full` makes the next appends raise SpoolFull. `sink` gets each event at once."""

    def __init__(self, sink: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.full = False
        self._sink = sink

    async def append(self, *events: Event) -> None:
        if self.full:
            raise SpoolFull("the journal is full")
        for event in events:
            kept = parse(canonical(event))  # as the real one: later changes to the payload do not reach the log
            self.events.append(kept)
            if self._sink is not None:
                self._sink(kept)

    async def shipped(self) -> None:
        """Return at once: every event is in its sink already."""

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]
