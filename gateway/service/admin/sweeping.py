"""Forgetting what was kept for a time only, in small pieces, beside the traffic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from gateway.errors import BatonError

log = logging.getLogger("gateway.sweeping")
BATCH = 1000
Sweep = Callable[[int], Awaitable[int]]  # forgets up to so many; how many it were


async def sweeping(
    sweeps: Mapping[str, Sweep], every_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """For ever: every `every_s` seconds all that is due, of each kind. A store that is away is tried the next time."""
    while True:
        for what, sweep in sweeps.items():
            try:
                while await sweep(BATCH) == BATCH:
                    continue
            except BatonError as error:
                log.warning("%s are not swept now: %s", what, error.message)
        await sleep(every_s)
