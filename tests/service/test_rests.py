"""How long a runner rests: longer while there is nothing to do, and not at all once it is woken."""

from __future__ import annotations

import asyncio

import pytest

from gateway.service.batches.rests import IDLE_TIMES, Rests


class Waits:
    """Time-outs that end at once and are written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        timeout = asyncio.timeout

        def shortened(seconds: float) -> asyncio.Timeout:
            self.seconds.append(seconds)
            return timeout(0)

        monkeypatch.setattr(asyncio, "timeout", shortened)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


async def test_an_idle_runner_rests_longer_and_longer_up_to_a_bound(waits: Waits) -> None:
    rests = Rests(1.0)
    for worked in (True, False, False, False, False, True):
        await rests.rest(worked=worked)
    assert waits.seconds == [1.0, 2.0, 4.0, IDLE_TIMES, IDLE_TIMES, 1.0]


async def test_what_is_woken_during_a_look_is_looked_at_at_once(waits: Waits) -> None:
    rests = Rests(1.0)
    for _ in range(3):
        await rests.rest(worked=False)
    rests.begin()
    rests.wake()  # by what was made after the look began
    assert rests.is_woken
    await rests.rest(worked=False)
    rests.begin()
    assert not rests.is_woken
    await rests.rest(worked=False)
    assert waits.seconds[-1] == 2.0  # anew from the shortest rest


async def test_a_wake_ends_a_rest() -> None:
    rests = Rests(60.0)
    resting = asyncio.create_task(rests.rest(worked=True))
    await asyncio.sleep(0)
    rests.wake()
    await asyncio.wait_for(resting, 5.0)
