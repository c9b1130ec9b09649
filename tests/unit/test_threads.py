"""Large values are worked on in threads, small ones at once."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from gateway.threads import LARGE_BYTES, beside


@pytest.mark.parametrize(("size", "apart"), [(0, False), (LARGE_BYTES - 1, False), (LARGE_BYTES, True)])
async def test_only_large_values_go_to_a_thread(size: int, apart: bool) -> None:
    thread = await beside(size, threading.current_thread)
    assert (thread is not threading.current_thread()) is apart


async def test_the_loop_serves_others_meanwhile() -> None:
    begun, end = threading.Event(), threading.Event()

    def work(value: int, *, more: int) -> int:
        begun.set()
        assert end.wait(10)
        return value + more

    working = asyncio.create_task(beside(LARGE_BYTES, work, 1, more=2))
    while not begun.is_set():
        await asyncio.sleep(0)
    assert not working.done()
    end.set()
    assert await working == 3


async def test_errors_and_context_pass() -> None:
    name: ContextVar[str] = ContextVar("name")
    name.set("mine")
    assert await beside(LARGE_BYTES, name.get) == "mine"
    with pytest.raises(ZeroDivisionError):
        await beside(LARGE_BYTES, lambda: 1 // 0)
