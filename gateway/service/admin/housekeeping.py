"""Housekeeping beside the traffic: anchor the audit, delete texts and replies whose time is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from gateway.core.access.audit import Act
from gateway.core.money.ledger import is_past
from gateway.errors import BatonError
from gateway.service.admin.audit import Auditor
from gateway.service.admin.keys import ITSELF
from gateway.service.ports.admin import RetentionStore, SweepReport
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.housekeeping")
sweep_log = logging.getLogger("gateway.sweeping")
ANCHOR_S = 10.0
BATCH = 1000
Sleep = Callable[[float], Awaitable[None]]
Sweep = Callable[[int], Awaitable[int]]  # deletes up to so many expired entries and returns how many


class Retention:
    """Deletes rollouts older than their key's days, else their organisation's, else `days`; None: never."""

    def __init__(self, store: RetentionStore, clock: Clock, days: int | None) -> None:
        self._store = store
        self._clock = clock
        self._days = days

    async def run(self, act: Act = ITSELF, *, dry: bool = False) -> SweepReport:
        """Sweep once, to the end. `dry`: only count. Raises Unavailable."""
        return await self._store.sweep(self._clock.now(), self._days, act, dry=dry)


class Housekeeping:
    """`every_s`: seconds between two sweeps of the retention."""

    def __init__(
        self, auditor: Auditor, retention: Retention, budgets: Budgets, clock: Clock, *, every_s: float
    ) -> None:
        self._auditor = auditor
        self._retention = retention
        self._budgets = budgets
        self._clock = clock
        self._every_s = every_s

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Run for ever; work that fails because a store is away is tried again."""
        due_s = 0.0
        while True:
            await sleep(ANCHOR_S)  # first, because the balances are not loaded yet at a start
            await self._try("anchor", self._auditor.anchor())
            if self._clock.monotonic_s() >= due_s:
                is_swept = await self._try("retention", self._sweep())
                is_dropped = await self._try("balances", self._drop_balances())
                due_s = self._clock.monotonic_s() + (self._every_s if is_swept and is_dropped else 0)

    async def _sweep(self) -> None:
        report = await self._retention.run()
        if report.total:
            months = ", ".join(month.month for month in report.months) or "none"
            log.info("deleted %d rows whose time was over; whole months: %s", report.total, months)

    async def _drop_balances(self) -> None:
        """Drop the balances of past budget windows."""
        now = self._clock.now()
        await self._budgets.forget(lambda scope: is_past(scope, now))

    async def _try(self, what: str, work: Awaitable[None]) -> bool:
        """Do the work; return whether it succeeded, and log why not."""
        try:
            await work
        except (BatonError, OSError) as error:
            log.warning("housekeeping waits (%s): %s", what, error)
            return False
        return True


async def run_sweeps(sweeps: Mapping[str, Sweep], every_s: float) -> None:
    """Run every sweep each `every_s` seconds, for ever, in batches until nothing is left. `sweeps`: by the name of what
    they delete, for the log. A sweep whose store is away is tried again the next time."""
    while True:
        for what, sweep in sweeps.items():
            try:
                while await sweep(BATCH) == BATCH:
                    continue
            except BatonError as error:
                sweep_log.warning("%s are not swept now: %s", what, error.message)
        await asyncio.sleep(every_s)


def describe_sweep(report: SweepReport, *, dry: bool) -> Mapping[str, Any]:
    """A sweep as JSON for people and scripts."""
    months = [asdict(month) for month in report.months]
    counts = {"rollouts": dict(report.rollouts), "shadows": report.shadows, "dead_letters": report.dead_letters}
    return {"deleted": not dry, "total": report.total, "months": months, "held": list(report.held), **counts}
