"""Work on large values beside the event loop, which serves all other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

LARGE_BYTES = 1 << 18  # of a value: less takes a millisecond or two, as a thread's turn may
P = ParamSpec("P")
T = TypeVar("T")


async def beside(size_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` on a value of that size: from a thread if it is large, else computed at once."""
    if size_bytes < LARGE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
