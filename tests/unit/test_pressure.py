"""How many requests are worked on at once: fewer while turns of the loop are long, and the others in their order."""

from __future__ import annotations

import asyncio

import pytest

from gateway.api.edge import pressure
from gateway.api.edge.pressure import LEAST, TURN_S, Places

MOST = 512


async def taken(places: Places, n: int) -> None:
    for _ in range(n):
        await places.take()


async def test_long_turns_let_fewer_in_and_short_ones_more_again() -> None:
    places = Places(MOST)
    while places.limit < MOST:
        places.turned(TURN_S / 2)
    await taken(places, 300)
    for _ in range(20):
        places.turned(TURN_S * 5)
    cut = places.limit
    assert LEAST < cut < 300  # once: the cut has not come to bear while 300 run
    for _ in range(300):
        places.turned(TURN_S * 5)
        if places.running > places.limit:
            places.give()
    assert places.limit == LEAST
    for _ in range(60):
        places.turned(TURN_S / 2)
    assert places.limit == MOST


async def test_one_long_turn_alone_changes_nothing() -> None:
    places = Places(MOST)
    for _ in range(100):
        places.turned(TURN_S / 2)
    places.turned(TURN_S * 2)
    assert places.limit == MOST


async def test_a_rest_begins_anew() -> None:
    places = Places(MOST)
    for _ in range(100):
        places.turned(TURN_S / 2)
    await taken(places, 1)  # the first after a rest
    assert places.limit == LEAST


async def test_whoever_has_no_place_waits_in_order_and_a_leaver_keeps_none() -> None:
    places, served = Places(LEAST), list[int]()
    await taken(places, LEAST)

    async def one(number: int) -> None:
        await places.take()
        served.append(number)

    waiting = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert served == []
    places.give()
    await asyncio.sleep(0)
    waiting[0].cancel()  # its place has been given to it, and it has not run yet
    waiting[2].cancel()  # it has none
    await asyncio.gather(waiting[0], waiting[2], return_exceptions=True)
    await asyncio.sleep(0)
    places.give()
    await asyncio.gather(waiting[1], waiting[3])
    assert served[-2:] == [1, 3]
    for _ in range(places.running):
        places.give()
    assert places.running == 0


async def test_nobody_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "WAIT_S_MAX", 0.01)
    places = Places(1)
    await taken(places, 2)
    assert places.running == 2
    for _ in range(2):
        places.give()
    await taken(places, 1)
    assert places.running == 1


async def test_turns_are_measured_while_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "EVERY_S", 0.001)
    places = Places(MOST)
    await taken(places, 1)
    while places.limit < MOST:  # it grows by what is measured, and by nothing else
        await asyncio.sleep(0.001)
    places.give()
    assert places.turn_s > 0
