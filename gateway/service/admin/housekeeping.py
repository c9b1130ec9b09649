"""Housekeeping beside the traffic: the audit is anchored, balances of the past are forgotten, texts end in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from gateway.core.access.audit import Act
from gateway.core.money.scopes import is_past
from gateway.errors import BatonError
from gateway.service.admin.audit import Auditor
from gateway.service.admin.keys import ITSELF
from gateway.service.ports.admin import RetentionStore, SweepReport
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.housekeeping")
ANCHOR_S = 10.0


class Retention:
    """Deletes what is older than its key, else its organisation, else `days` says; None: kept for ever."""

    def __init__(self, store: RetentionStore, clock: Clock, days: int | None) -> None:
        self._store = store
        self._clock = clock
        self._days = days

    async def run(self, act: Act = ITSELF, *, dry: bool = False) -> SweepReport:
        """One sweep, to its end. Raises Unavailable."""
        return await self._store.sweep(self._clock.now(), self._days, act, dry=dry)


class Housekeeping:
    """`every_s`: between two sweeps."""

    def __init__(
        self, auditor: Auditor, retention: Retention, budgets: Budgets, clock: Clock, *, every_s: float
    ) -> None:
        self._auditor = auditor
        self._retention = retention
        self._budgets = budgets
        self._clock = clock
        self._every_s = every_s

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """For ever, whatever is away meanwhile."""
        due_s = 0.0
        while True:
            await sleep(ANCHOR_S)  # first, as at a start the balances are not there yet
            await self._try("anchor", self._auditor.anchor())
            if self._clock.monotonic_s() >= due_s:
                swept = await self._try("retention", self._sweep())
                forgot = await self._try("balances", self._forget())
                due_s = self._clock.monotonic_s() + (self._every_s if swept and forgot else 0)

    async def _sweep(self) -> None:
        swept = await self._retention.run()
        if swept.total:
            months = ", ".join(one.month for one in swept.months) or "none"
            log.info("deleted %d rows whose time was over; whole months: %s", swept.total, months)

    async def _forget(self) -> None:
        now = self._clock.now()
        await self._budgets.forget(lambda scope: is_past(scope, now))

    async def _try(self, what: str, work: Awaitable[None]) -> bool:
        try:
            await work
        except (BatonError, OSError) as error:
            log.warning("housekeeping waits (%s): %s", what, error)
            return False
        return True


def describe_swept(swept: SweepReport, *, dry: bool) -> Mapping[str, Any]:
    """A sweep as people and scripts see it."""
    months = [asdict(one) for one in swept.months]
    counts = {"rollouts": dict(swept.rollouts), "shadows": swept.shadows, "dead_letters": swept.dead_letters}
    return {"deleted": not dry, "total": swept.total, "months": months, "held": list(swept.held), **counts}
