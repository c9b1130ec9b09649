"""The journal's thread: order, errors, and its end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.adapters.journal.disk import DiskThread


def broken() -> None:
    raise OSError("no disk")


async def test_functions_run_in_order_in_one_thread_of_its_own() -> None:
    disk, seen = DiskThread("disk"), list[tuple[int, str]]()
    calls = [disk.call(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(50)]
    await asyncio.gather(*calls)
    disk.close()
    assert seen == [(n, "disk") for n in range(50)]


async def test_what_a_function_raises_reaches_its_caller_and_stops_nothing() -> None:
    disk = DiskThread("disk")
    first, second = disk.call(broken), disk.call(lambda: 7)
    with pytest.raises(OSError, match="no disk"):
        await first
    assert await second == 7
    disk.close()


async def test_close_runs_what_was_given_and_may_come_twice() -> None:
    disk, ran = DiskThread("disk"), list[int]()
    cancelled = disk.call(ran.append, 1)
    cancelled.cancel()
    disk.close()
    disk.close()
    await asyncio.sleep(0)
    assert ran == [1]


def test_a_function_may_end_after_its_event_loop() -> None:
    go, ended = threading.Event(), threading.Event()
    disks = list[DiskThread]()

    def slow() -> None:
        go.wait(60)
        ended.set()

    async def give() -> None:
        disks.append(DiskThread("disk"))
        disks[0].call(slow)

    asyncio.run(give())
    go.set()
    disks[0].close()
    assert ended.is_set()
