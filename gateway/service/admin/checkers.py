"""Keeps in memory how often checkers err, for the prompts of planners and the page of workers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gateway.core.loop.replies.errors import CheckerErrors
from gateway.errors import BatonError
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.checkers")
EVERY_S = 300.0


class CheckedSteps(Protocol):
    """Reads what checkers said beside outcomes."""

    async def errors(self) -> Sequence[CheckerErrors]:
        """How often each checker errs, by name. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class CheckerFigures:
    """How often each checker errs, by name, as of `at`; None: nothing was read yet."""

    errors: tuple[CheckerErrors, ...] = ()
    at: datetime | None = None


class CheckerWatch:
    """Keeps how often checkers err. Whoever asks, the store is asked at most once in EVERY_S by one of these, failed
    readings included. `known`: the errors by worker name, as of the last reading; the same mapping at all times. Call
    `run` in a task."""

    def __init__(self, source: CheckedSteps, has_checkers: Callable[[], bool], clock: Clock) -> None:
        """`has_checkers`: whether any worker of the pool checks replies, without which no planner needs them."""
        self._source = source
        self._has_checkers = has_checkers
        self._clock = clock
        self._turn = asyncio.Lock()
        self._due_s = -math.inf  # by the monotonic clock
        self._at: datetime | None = None
        self.known: dict[str, CheckerErrors] = {}

    async def run(self) -> None:
        """Read for ever while the pool has checkers. No error ends it."""
        while True:
            if self._has_checkers():
                await self.recent()
            left_s = self._due_s - self._clock.monotonic_s()
            await asyncio.sleep(left_s if left_s > 0 else EVERY_S)

    async def recent(self) -> CheckerFigures:
        """The figures of the last reading; the store is asked again where EVERY_S have gone since it was. While it is
        away the earlier ones stand. Callers at one time wait for one reading."""
        async with self._turn:
            if self._clock.monotonic_s() >= self._due_s:
                self._due_s = self._clock.monotonic_s() + EVERY_S
                await self._read()
        return CheckerFigures(tuple(self.known.values()), self._at)

    async def _read(self) -> None:
        try:
            now = {one.checker: one for one in await self._source.errors()}
        except BatonError as error:
            log.info("errors of checkers cannot be read now: %s", error.message)
            return
        except Exception:  # boundary: figures are not worth a gateway
            log.exception("errors of checkers cannot be read")
            return
        self.known.clear()
        self.known.update(now)
        self._at = self._clock.now()
