"""`Journal`: what holds for the fake and for the spool on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.adapters.journal import segments
from gateway.adapters.journal.spool import Spool, SpoolLimits
from gateway.core.log.events import Event, parse
from gateway.errors import SpoolFull
from gateway.service.ports.request import Journal
from tests.fakes.journal import FakeJournal
from tests.records import event, hold_event


@dataclass(slots=True)
class World:
    journal: Journal
    written: Callable[[], Sequence[Event]]
    fill: Callable[[], None]


@pytest.fixture(params=["fake", "spool"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    if request.param == "fake":
        fake = FakeJournal()
        yield World(fake, lambda: fake.events, lambda: setattr(fake, "full", True))
        return
    spool = await Spool.open(tmp_path, SpoolLimits(shipped_timeout_s=0.1))

    def written() -> list[Event]:
        """What a process finds that opens the files after this one was killed: read without asking the spool."""
        found: list[Event] = []
        for number in segments.numbers(tmp_path):
            path = segments.segment_path(tmp_path, number)
            chunk = segments.read(path, 0, path.stat().st_size, records_max=10_000, bytes_max=2**30)
            found += [parse(payload) for payload in chunk.payloads]
        return found

    yield World(spool, written, lambda: setattr(spool, "limits", SpoolLimits(total_bytes=0, reserve_bytes=0)))
    await spool.close()


def _events(n: int) -> list[Event]:
    return [event("settle", {"hold_id": f"h{i}", "text": "é\ud800\x00 ∑"}) for i in range(n)]


async def test_an_event_is_written_when_append_returns(world: World) -> None:
    for one in _events(3):
        await world.journal.append(one)
        assert world.written()[-1] == one


async def test_events_are_written_in_the_order_of_appends(world: World) -> None:
    events = _events(200)
    await asyncio.gather(*(world.journal.append(one) for one in events))
    assert list(world.written()) == events


async def test_events_of_one_append_stay_together_and_in_order(world: World) -> None:
    events = _events(9)
    await asyncio.gather(*(world.journal.append(*events[at : at + 3]) for at in (0, 3, 6)))
    assert list(world.written()) == events


async def test_a_full_journal_writes_none_of_the_events(world: World) -> None:
    world.fill()
    with pytest.raises(SpoolFull):
        await world.journal.append(hold_event("h", "r", 1), *_events(2))
    assert list(world.written()) == []


async def test_a_later_change_of_the_payload_does_not_reach_the_log(world: World) -> None:
    payload = {"hold_id": "before"}
    await world.journal.append(event("settle", payload))
    payload["hold_id"] = "after"
    assert world.written()[0].payload == {"hold_id": "before"}


async def test_a_full_journal_refuses_and_keeps_what_it_has(world: World) -> None:
    first = event("settle", {"hold_id": "h"})
    await world.journal.append(first)
    world.fill()
    with pytest.raises(SpoolFull):
        await world.journal.append(hold_event("h2", "r", 1))
    assert list(world.written()) == [first]


async def test_with_nothing_appended_all_is_shipped(world: World) -> None:
    await world.journal.shipped()
