"""A hold's own journal record goes with the first thing written under it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.core.log.events import Event
from gateway.errors import SpoolFull
from gateway.service.loop.spending.funds import HoldRecord
from tests.records import event

HOLD = event("hold", {"hold_id": "h", "amount_nano": 1, "scopes": []})
CALLS = [event("dispatch", {"hold_id": "h", "step_id": str(number)}) for number in range(3)]
SETTLE = event("settle", {"hold_id": "h"})


class SlowJournal:
    """Remembers what came in one append; `let_go` ends those under way. `full`: the next append finds no room."""

    def __init__(self) -> None:
        self.appends: list[Sequence[Event]] = []
        self.full = False
        self.let_go = asyncio.Event()

    async def append(self, *events: Event) -> None:
        if self.full:
            self.full = False
            raise SpoolFull("no room")
        self.appends.append(events)
        await self.let_go.wait()

    async def shipped(self) -> None:
        """Nothing is behind it."""


async def test_it_is_written_with_the_first_call_in_one_append() -> None:
    journal = SlowJournal()
    journal.let_go.set()
    record = HoldRecord(journal, HOLD)
    await record.append(CALLS[0])
    await record.append(CALLS[1])
    await record.close([SETTLE])
    assert journal.appends == [(HOLD, CALLS[0]), (CALLS[1],), (SETTLE,)]


async def test_a_hold_under_which_nothing_left_is_written_with_its_end() -> None:
    journal = SlowJournal()
    journal.let_go.set()
    await HoldRecord(journal, HOLD).close([SETTLE])
    assert journal.appends == [(HOLD, SETTLE)]


async def test_calls_that_leave_at_the_same_time_all_wait_for_it() -> None:
    journal = SlowJournal()
    record = HoldRecord(journal, HOLD)
    calls = [asyncio.create_task(record.append(call)) for call in CALLS]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert journal.appends == [(HOLD, CALLS[0]), (CALLS[1],), (CALLS[2],)]
    assert not any(call.done() for call in calls)
    journal.let_go.set()
    await asyncio.gather(*calls)


async def test_a_call_that_is_cancelled_takes_neither_back() -> None:
    journal = SlowJournal()
    record = HoldRecord(journal, HOLD)
    first = asyncio.create_task(record.append(CALLS[0]))
    await asyncio.sleep(0)
    first.cancel()
    journal.let_go.set()
    await record.append(CALLS[1])
    assert first.cancelled()
    assert journal.appends == [(HOLD, CALLS[0]), (CALLS[1],)]


@pytest.mark.parametrize("rest", [[], [event("rollout", {"id": "h"})]])
async def test_no_call_leaves_under_a_hold_that_found_no_room_and_the_journal_has_no_end_without_a_hold(
    rest: list[Event],
) -> None:
    journal = SlowJournal()
    journal.full = True
    journal.let_go.set()
    record = HoldRecord(journal, HOLD)
    for call in CALLS[:2]:
        with pytest.raises(SpoolFull):
            await record.append(call)
    await record.close([SETTLE], *rest)
    assert journal.appends == [tuple(rest)][: len(rest)]


async def test_the_end_of_a_hold_that_is_being_written_waits_for_it() -> None:
    journal = SlowJournal()
    record = HoldRecord(journal, HOLD)
    call = asyncio.create_task(record.append(CALLS[0]))
    await asyncio.sleep(0)
    call.cancel()
    closing = asyncio.create_task(record.close([SETTLE]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert journal.appends == [(HOLD, CALLS[0])]
    journal.let_go.set()
    await closing
    assert journal.appends == [(HOLD, CALLS[0]), (SETTLE,)]
