"""How many requests are worked on at once: fewer while turns of the loop are long, and the others in their order."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from gateway.api.edge import places
from gateway.api.edge.places import HEADROOM, QUEUE_MIN, RUNNING_MIN, TURN_S, RequestPlaces, WorkSlots
from tests.waiting import until

MOST = 512


async def taken(slots: WorkSlots, n: int) -> None:
    for _ in range(n):
        await slots.take()


async def grown(slots: WorkSlots, running: int) -> None:
    """Fill slots, turns being short, until so many requests run."""
    while slots.running < running:
        slots.measure(TURN_S / 2)
        await taken(slots, min(slots.limit, running) - slots.running)


async def test_long_turns_let_fewer_in_and_short_ones_more_again() -> None:
    slots = WorkSlots(MOST)
    await grown(slots, 300)
    for _ in range(20):
        slots.measure(TURN_S * 5)
    cut = slots.limit
    assert RUNNING_MIN < cut < 300  # once: the cut has not come to bear while 300 run
    for _ in range(300):
        slots.measure(TURN_S * 5)
        if slots.running > slots.limit:
            slots.give()
    assert slots.limit == RUNNING_MIN
    await grown(slots, MOST)
    assert slots.limit == MOST


async def test_the_limit_does_not_grow_far_beyond_what_runs() -> None:
    slots = WorkSlots(MOST)
    await taken(slots, RUNNING_MIN)
    for _ in range(100):
        slots.measure(TURN_S / 2)
    assert HEADROOM * RUNNING_MIN <= slots.limit < HEADROOM * 1.2 * RUNNING_MIN


async def test_one_long_turn_alone_changes_nothing() -> None:
    slots = WorkSlots(MOST)
    await grown(slots, MOST)
    for _ in range(100):
        slots.measure(TURN_S / 2)
    slots.measure(TURN_S * 2)
    assert slots.limit == MOST


async def test_after_a_cut_the_limit_grows_with_care_beyond_it() -> None:
    slots = WorkSlots(MOST)
    await grown(slots, 200)
    while slots.turn_s <= TURN_S:
        slots.measure(TURN_S * 3)
    cut = slots.limit
    slots.running = cut  # those over the limit have ended
    while slots.turn_s > TURN_S:
        slots.measure(0.0)
    limits = [slots.limit]
    while slots.limit < 2 * RUNNING_MIN + cut:
        slots.measure(0.0)
        limits.append(slots.limit)
    steps = [after / before for before, after in pairwise(limits)]
    assert all(step < 1.05 for step, before in zip(steps, limits, strict=False) if before >= cut)


async def test_a_turn_that_a_timer_falls_into_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between long turns there are many short ones, and what waits meets the long ones."""
    monkeypatch.setattr(places, "TURN_EVERY_S", 0.005)
    slots, measured = WorkSlots(MOST), list[float]()
    monkeypatch.setattr(slots, "measure", measured.append)
    await taken(slots, 1)
    await until(lambda: len(measured) > 2)
    measured.clear()
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass
    await until(lambda: len(measured) > 0)
    slots.give()
    assert measured[0] > 0.015  # at least three times the processor time since the timer began, and at most the delay


async def test_requests_that_only_wait_all_run() -> None:
    slots, end = WorkSlots(MOST), asyncio.Event()

    async def one() -> None:
        await slots.take()
        await end.wait()
        slots.give()

    waiting = [asyncio.create_task(one()) for _ in range(MOST)]
    await until(lambda: slots.running == MOST)
    end.set()
    await asyncio.gather(*waiting)
    assert slots.running == 0


@pytest.mark.parametrize("works", [True, False])
async def test_a_turn_counts_as_long_by_its_work_and_not_by_what_others_do(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    monkeypatch.setattr(places, "TURN_EVERY_S", 0.001)
    slots, loop = WorkSlots(MOST), asyncio.get_running_loop()
    measured, measure = list[float](), slots.measure

    def measuring(turn_s: float) -> None:
        measured.append(turn_s)
        measure(turn_s)

    monkeypatch.setattr(slots, "measure", measuring)

    def block() -> None:
        """A turn of 50 ms, in which this thread works, or another process does."""
        end_s = time.thread_time() + 0.05
        while works and time.thread_time() < end_s:
            pass
        if not works:
            time.sleep(0.05)
        if slots.running:
            loop.call_soon(block)

    await taken(slots, RUNNING_MIN)
    block()
    await until(lambda: len(measured) > 5)
    assert (slots.turn_s > TURN_S) == works
    for _ in range(RUNNING_MIN):
        slots.give()


async def test_a_queue_that_moves_too_slowly_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "BEHIND_S", 0.0)
    all_places = RequestPlaces(MOST, int)
    await taken(all_places.slots, RUNNING_MIN)
    waiting = [asyncio.create_task(all_places.slots.take()) for _ in range(QUEUE_MIN)]
    await asyncio.sleep(0)
    assert not all_places.full(spends=False)
    assert all_places.full(spends=True)
    all_places.slots.give()
    await waiting[0]
    assert not all_places.full(spends=True)  # so few may wait as long as it takes
    for one in waiting[1:]:
        one.cancel()


async def test_a_rest_begins_anew() -> None:
    slots = WorkSlots(MOST)
    slots.limit = MOST
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
    monkeypatch.setattr(places, "WAIT_S_MAX", 0.01)  # noticed by the next measurement
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
    while slots.limit < HEADROOM * RUNNING_MIN:  # it grows by what is measured, and by nothing else
        await asyncio.sleep(0.001)
    slots.give()
    assert slots.turn_s > 0
