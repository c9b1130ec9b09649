"""Compares the balances with the ledger, all the time: what differs for good is shown, and the balances are rebuilt.

Neither side is ever quite still: a settlement is on its way from one to the other for less than the time between two
looks. So two looks are compared crosswise: the balances of the first may not be above the ledger of the second, nor the
ledger of the first above the balances of the second. A scope where that fails twice in a row drifts. A credit, which is
in the ledger first, fails it once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from gateway.core.money.ledger import is_past
from gateway.errors import BatonError
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.drift")
EVERY_S = 120.0  # a look reads the whole ledger
SCOPES_MAX = 20_000  # of one look, in the order of their names
NANO_PER_USD = 1_000_000_000
Nano = Mapping[str, int]
Sleep = Callable[[float], Awaitable[None]]


class LedgerTotals(Protocol):
    """Reads what the ledger has posted."""

    async def posted_totals(self) -> Nano | None:
        """Nano-dollars by scope; None while another gateway reads them. Raises Unavailable."""
        ...


class DriftMetrics(Protocol):
    """Takes the figure."""

    def figure(self, name: str, values: float | Mapping[str, float]) -> None:
        """Set a gauge."""
        ...


class DriftWatch:
    """Looks for ever. It has two looks in memory, and what differed in the last one."""

    def __init__(self, budgets: Budgets, totals: LedgerTotals, clock: Clock, metrics: DriftMetrics) -> None:
        self._budgets = budgets
        self._totals = totals
        self._clock = clock
        self._metrics = metrics
        self._last: tuple[Nano, Nano] | None = None
        self._doubtful: Nano = {}

    async def run(self, every_s: float = EVERY_S, sleep: Sleep = asyncio.sleep) -> None:
        """Look every `every_s` seconds."""
        while True:
            await sleep(every_s)
            try:
                await self.look()
            except BatonError as error:
                log.warning("the ledger is not compared with the balances now: %s", error.message)
                self._forget()
            except Exception:  # boundary: money is right or wrong without this task
                log.exception("comparing the ledger with the balances met an unexpected error")
                self._forget()

    async def look(self) -> Nano:
        """Compare once; return the nano-dollars by which scopes drift, above 0 where the balances have too much. Where
        one drifts the balances are given up, and recovery rebuilds them. Raises Unavailable, MoneyUnavailable."""
        totals = await self._totals.posted_totals()
        if totals is None:
            return {}
        now = self._clock.now()
        ledger = {scope: totals[scope] for scope in sorted(totals)[:SCOPES_MAX] if not is_past(scope, now)}
        balances = await self._budgets.balances(list(ledger))
        counted = {scope: balance.posted_nano for scope, balance in balances.items()}
        before, self._last = self._last, (ledger, counted)
        doubtful = {} if before is None else _crosswise(*before, ledger, counted)
        sure = {scope: nano for scope, nano in doubtful.items() if nano * self._doubtful.get(scope, 0) > 0}
        self._doubtful = doubtful
        self._metrics.figure("drift_usd", sum(map(abs, sure.values())) / NANO_PER_USD)
        if sure:
            worst = max(sure, key=lambda scope: abs(sure[scope]))
            log.error(
                "the balances of %d scopes differ from the ledger, %s by %d nano-dollars; they are rebuilt",
                *(len(sure), worst, sure[worst]),
            )
            await self._budgets.doubt()
            self._forget()
        return sure

    def _forget(self) -> None:
        self._last, self._doubtful = None, {}


def _crosswise(ledger_before: Nano, counted_before: Nano, ledger: Nano, counted: Nano) -> dict[str, int]:
    """What no settlement on its way explains, by scope."""
    differing = {}
    for scope in ledger_before.keys() & ledger.keys():
        over = counted_before.get(scope, 0) - ledger[scope]
        under = ledger_before[scope] - counted.get(scope, 0)
        if over > 0 or under > 0:
            differing[scope] = over if over > 0 else -under
    return differing
