"""How many requests are worked on at once: fewer while turns of the loop are long, and the others in their order."""

from __future__ import annotations

import asyncio

import pytest

from gateway.api.edge import places
from gateway.api.edge.places import RUNNING_MIN, TURN_S, WorkSlots

MOST = 512


async def taken(slots: WorkSlots, n: int) -> None:
    for _ in range(n):
        await slots.take()


async def test_long_turns_let_fewer_in_and_short_ones_more_again() -> None:
    slots = WorkSlots(MOST)
    while slots.limit < MOST:
        slots.measure(TURN_S / 2)
    await taken(slots, 300)
    for _ in range(20):
        slots.measure(TURN_S * 5)
    cut = slots.limit
    assert RUNNING_MIN < cut < 300  # once: the cut has not come to bear while 300 run
    for _ in range(300):
        slots.measure(TURN_S * 5)
        if slots.running > slots.limit:
            slots.give()
    assert slots.limit == RUNNING_MIN
    for _ in range(60):
        slots.measure(TURN_S / 2)
    assert slots.limit == MOST


async def test_one_long_turn_alone_changes_nothing() -> None:
    slots = WorkSlots(MOST)
    for _ in range(100):
        slots.measure(TURN_S / 2)
    slots.measure(TURN_S * 2)
    assert slots.limit == MOST


async def test_a_rest_begins_anew() -> None:
    slots = WorkSlots(MOST)
    for _ in range(100):
        slots.measure(TURN_S / 2)
    await taken(slots, 1)  # the first after a rest
    assert slots.limit == RUNNING_MIN


async def test_waiters_get_slots_in_order_and_one_that_leaves_holds_none() -> None:
    slots, served = WorkSlots(RUNNING_MIN), list[int]()
    await taken(slots, RUNNING_MIN)

    async def one(number: int) -> None:
        await slots.take()
        served.append(number)

    waiting = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert served == []
    slots.give()
    await asyncio.sleep(0)
    waiting[0].cancel()  # its place has been given to it, and it has not run yet
    waiting[2].cancel()  # it has none
    await asyncio.gather(waiting[0], waiting[2], return_exceptions=True)
    await asyncio.sleep(0)
    slots.give()
    await asyncio.gather(waiting[1], waiting[3])
    assert served[-2:] == [1, 3]
    for _ in range(slots.running):
        slots.give()
    assert slots.running == 0


async def test_waiting_for_a_slot_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "WAIT_S_MAX", 0.01)
    slots = WorkSlots(1)
    await taken(slots, 2)
    assert slots.running == 2
    for _ in range(2):
        slots.give()
    await taken(slots, 1)
    assert slots.running == 1


async def test_turns_are_measured_while_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "TURN_EVERY_S", 0.001)
    slots = WorkSlots(MOST)
    await taken(slots, 1)
    while slots.limit < MOST:  # it grows by what is measured, and by nothing else
        await asyncio.sleep(0.001)
    slots.give()
    assert slots.turn_s > 0
