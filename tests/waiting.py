"""How tests wait: for events, never for clocks.

A bound here only ends a test that hangs. It is far above what a busy machine needs, so nothing passes or fails by it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.errors import BatonError

BOUND_S = 60.0
PAUSE_S = 0.01
PACES = (1, 4, 16)
PATIENT = {
    "BATON_REDIS_TIMEOUT_S": "5",
    "BATON_CONDUCTOR_PATIENCE_S_MIN": "60",
    "BATON_LAME_DUCK_S": "0",
}  # for gateways that must not fail a request when the machine stalls, and end at once
FAILURES = (AssertionError, pytest.fail.Exception, BatonError, TimeoutError)


async def until(condition: Callable[[], Any], bound_s: float = BOUND_S) -> Any:
    """Wait until `condition`, a function or a coroutine function, gives a true value, and return that value.

    Raises AssertionError with the last value after `bound_s`.
    """
    end_s = time.monotonic() + bound_s
    while not (value := await _value(condition)):
        assert time.monotonic() < end_s, f"not true within {bound_s} s: {inspect.getsource(condition).strip()}: {value}"
        await asyncio.sleep(PAUSE_S)
    return value


async def _value(condition: Callable[[], Any]) -> Any:
    value = condition()
    return await value if inspect.isawaitable(value) else value


def wait_until(condition: Callable[[], Any], bound_s: float = BOUND_S) -> Any:
    """`until` for a test without an event loop."""
    end_s = time.monotonic() + bound_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"not true within {bound_s} s: {inspect.getsource(condition).strip()}: {value}"
        time.sleep(PAUSE_S)
    return value


async def at_some_pace(story: Callable[[int], Awaitable[None]]) -> None:
    """Run a story in which time has to pass. Its argument is the factor by which to stretch its times.

    If the story fails at one pace it runs again at the next, slower one. A fault in the code fails at every pace.
    """
    for pace in PACES[:-1]:
        try:
            await story(pace)
        except FAILURES:
            continue
        return
    await story(PACES[-1])
