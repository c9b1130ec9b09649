"""Alerts out: what happened is written to an outbox, and the outbox is sent to a webhook, at least once, in order.

Each source is read again and again, and the outbox takes each subject once. So a gateway that is killed forgets nothing
but flags of drift that it counted in memory, and several gateways tell each thing once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

from gateway.core.log.alerts import Alert, DueAlert, Receipt, is_over, pause_s
from gateway.core.money.amounts import nano_to_usd
from gateway.core.money.ledger import Balance, Scope, window_of
from gateway.core.pool.drift import Drift
from gateway.errors import BatonError
from gateway.service.admin.figures import BudgetOwners, BudgetPages
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.alerts")
COLLECT_S = 15.0
SEND_S = 1.0
THRESHOLDS = (50, 80, 100)  # percent of a limit
NEAR_SHARE = 80  # percent that must be spent before a refusal counts as the end of a budget
LEASE_S = 60.0  # longer than one attempt takes


class Outbox(Protocol):
    """Alerts that are stored until they are sent. Every call raises Unavailable."""

    async def store(self, batch: Sequence[Alert], now: datetime) -> int: ...
    async def collect(self, kinds: Collection[str], now: datetime) -> int: ...
    async def lend(self, lease_s: float) -> DueAlert | None: ...
    async def end(self, delivery: DueAlert, state: str, note: str) -> None: ...
    async def later(self, delivery: DueAlert, note: str, pause_s: float) -> None: ...
    async def waiting(self) -> int: ...


class Receiver(Protocol):
    """Where alerts go."""

    @property
    def host(self) -> str: ...

    async def send(self, delivery: DueAlert, now: datetime) -> Receipt: ...


class AlertMetrics(Protocol):
    """Counts attempts."""

    def alert_sent(self, kind: str, result: str) -> None:
        """Count an attempt: sent, refused, failed, or given_up."""
        ...

    def figure(self, name: str, values: float) -> None:
        """Set a gauge: `alerts_waiting`, the number of alerts that wait."""
        ...


class AlertSources:
    """Writes alerts to the outbox. `flags`: of drift, in this process, which adds to them. `exhausted`: the budgets for
    which it refused a request; it adds to them, and those that were stored are removed. `alone`: whether this process
    tells what any process could, too."""

    def __init__(
        self,
        outbox: Outbox,
        kinds: Collection[str],
        owners: BudgetOwners,
        budgets: Budgets,
        clock: Clock,
        *,
        flags: Collection[tuple[Drift, datetime]],
        exhausted: set[str],
        alone: bool,
    ) -> None:
        self._outbox = outbox
        self._kinds = kinds
        self._pages = BudgetPages(owners)
        self._budgets = budgets
        self._clock = clock
        self._flags = flags
        self._exhausted = exhausted
        self._alone = alone

    async def run(self, every_s: float = COLLECT_S) -> None:
        """Collect for ever. No error ends it."""
        while True:
            for collect in (self.drift, self.events, self.budgets):
                try:
                    await collect()
                except BatonError as error:
                    log.warning("alerts cannot be collected now: %s", error.message)
                except Exception:  # boundary: alerts are not worth a gateway
                    log.exception("alerts cannot be collected")
            await asyncio.sleep(every_s)

    async def drift(self) -> None:
        """Store the flags of drift."""
        if "drift" in self._kinds:
            batch = [drift_alert(flag, at) for flag, at in self._flags]
            await self._outbox.store(batch, self._clock.now())

    async def events(self) -> None:
        """Store roll-backs, results of jobs, quarantines and uncertain charges."""
        if self._alone:
            await self._outbox.collect(self._kinds, self._clock.now())

    async def budgets(self) -> None:
        """Store the thresholds that budgets of keys and organisations have passed: of those that refused a request, and
        of the next page of all."""
        exhausted = set(self._exhausted)
        if "budget" not in self._kinds or not (self._alone or exhausted):
            return
        now, batch = self._clock.now(), list[Alert]()
        scopes = list(await self._pages.by_name(exhausted, now)) if exhausted else []
        page = await self._pages.next(now) if self._alone else None
        if page is not None:
            scopes += [one for one in page.scopes if one.name not in exhausted]
        balances = await self._budgets.balances([scope.name for scope in scopes])
        for scope in scopes:
            batch += budget_alerts(scope, balances[scope.name], scope.name in exhausted, now)
        await self._outbox.store(batch, now)
        self._exhausted.difference_update(exhausted)
        if page is not None:
            self._pages.turn(page)


class AlertSender:
    """Sends what the outbox holds, one after the other."""

    def __init__(self, outbox: Outbox, receiver: Receiver, clock: Clock, metrics: AlertMetrics) -> None:
        self._outbox = outbox
        self._receiver = receiver
        self._clock = clock
        self._metrics = metrics

    async def run(self, every_s: float = SEND_S) -> None:
        """Send for ever. No error ends it."""
        while True:
            try:
                while await self.send_next():
                    pass
                self._metrics.figure("alerts_waiting", await self._outbox.waiting())
            except BatonError as error:
                log.warning("alerts cannot be sent now: %s", error.message)
            except Exception:  # boundary: alerts are not worth a gateway
                log.exception("alerts cannot be sent")
            await asyncio.sleep(every_s)

    async def send_next(self, lease_s: float = LEASE_S) -> bool:
        """Send the oldest alert, if it is due. Return whether it got through or was given up. Raises Unavailable."""
        delivery = await self._outbox.lend(lease_s)
        if delivery is None:
            return False
        receipt = await self._receiver.send(delivery, self._clock.now())
        self._metrics.alert_sent(delivery.kind, receipt.fate)
        if receipt.fate == "sent":
            await self._outbox.end(delivery, "sent", receipt.line)
            return True
        over = is_over(delivery, receipt.fate, self._clock.now())
        line = "alert %s (%s) did not get through to %s: %s; %s"
        next_ = "given up" if over else f"next attempt in {pause_s(delivery.attempts):.0f} s"
        log.warning(line, delivery.id, delivery.kind, self._receiver.host, receipt.line, next_)
        if over:
            self._metrics.alert_sent(delivery.kind, "given_up")
            await self._outbox.end(delivery, "given_up", receipt.line)
        else:
            await self._outbox.later(delivery, receipt.line, pause_s(delivery.attempts))
        return over


def budget_alerts(scope: Scope, balance: Balance, refused: bool, now: datetime) -> Iterator[Alert]:
    """The thresholds that a budget has passed. `refused`: a request was refused for it, so less is left than a request
    needs: from NEAR_SHARE on that is its end. A limit that is changed is told anew."""
    limit, spent = scope.limit_nano or 0, balance.posted_nano
    ended = refused and 100 * spent >= NEAR_SHARE * limit
    for percent in THRESHOLDS:
        if 100 * spent >= percent * limit or ended:
            data = {
                "scope": scope.name,
                "window": window_of(scope.name),
                "percent": percent,
                "spent_usd": nano_to_usd(spent),
                "limit_usd": nano_to_usd(limit),
            }
            at = now + timedelta(microseconds=percent)  # the lower threshold goes first
            yield Alert("budget", f"budget:{scope.name}:{limit}:{percent}", at, data, window_of(scope.name) == "life")


def drift_alert(flag: Drift, at: datetime) -> Alert:
    """A worker that has become worse, told once a month."""
    data = {
        "worker": flag.worker,
        "version": flag.version,
        "task_type": flag.task_type or None,
        "signal": flag.signal,
        "usual": round(flag.usual, 4),
        "now": round(flag.now, 4),
        "results": flag.results,
    }
    subject = (flag.worker, flag.version, flag.task_type, flag.signal, f"{at.astimezone(UTC):%Y-%m}")
    return Alert("drift", f"drift:{json.dumps(subject)}", at, data)
