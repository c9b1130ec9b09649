"""Helpers for tests of the spool: events, a watch that records, readers, and system calls that fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.adapters.journal import segments
from gateway.adapters.journal.segments import Position, segment_path
from gateway.adapters.journal.spool import Quiet, Spool
from gateway.core.log.events import Event, parse
from tests.records import event

MORE = {"records_max": 10_000, "bytes_max": 2**30}
START = Position(0, 0)


class Watch(Quiet):
    def __init__(self) -> None:
        self.damage: list[tuple[str, int]] = []
        self.groups: list[int] = []

    def damaged(self, what: str, path: str, bytes_: int) -> None:
        self.damage.append((what, bytes_))

    def appended(self, records: int, bytes_: int, seconds: float) -> None:
        self.groups.append(records)


def an_event(n: int = 0, kind: Any = "settle", pad: int = 0) -> Event:
    return event(kind, {"hold_id": f"h{n}", "pad": "x" * pad})


async def spool_with(directory: Path, events: list[Event]) -> Path:
    """A closed journal of one segment holding `events`; returns the segment."""
    spool = await Spool.open(directory)
    await asyncio.gather(*(spool.append(one) for one in events))
    await spool.close()
    (number,) = segments.numbers(directory)
    return segment_path(directory, number)


async def all_of(spool: Spool, position: Position = START) -> list[Event]:
    found: list[Event] = []
    while (batch := await spool.read(position, **MORE)).payloads:
        found += [parse(payload) for payload in batch.payloads]
        position = batch.position
    return found


def then(function: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """`function`, followed by `after` with the same positional arguments."""

    def both(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        after(*args)
        return result

    return both


def failing(code: int) -> Callable[..., Any]:
    """Return a system call that raises this error."""

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail
