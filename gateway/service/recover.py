"""Recovery, at boot and ever after: balances from the ledger, and a decision for every hold nobody will settle.

A hold that was never dispatched is voided; one that was is charged in full and marked uncertain, because the worker may
have billed it (DESIGN §5). Never under-counted, never leaked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

from gateway.core.events import Event
from gateway.core.ids import uuid7
from gateway.errors import BatonError, MoneyUnavailable, NotFound
from gateway.service.ports import Budgets, Clock, Hold, Journal, Scope, Store

log = logging.getLogger("gateway.recover")
SWEPT_MAX = 1000
WATCH_S = 0.5


class Recovery:
    """`lease_s` is the longest a hold may stay open; `sweep_s` how often abandoned ones are looked for."""

    def __init__(
        self, budgets: Budgets, store: Store, journal: Journal, clock: Clock, *, lease_s: float, sweep_s: float
    ) -> None:
        self._budgets = budgets
        self._store = store
        self._journal = journal
        self._clock = clock
        self._lease_s = lease_s
        self._sweep_s = sweep_s
        self.first = asyncio.Event()  # set once balances were there for the first time

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """For ever: rebuild as soon as the budget store has lost its balances, sweep what was abandoned."""
        sweep_at_s = 0.0
        while True:
            try:
                if not await self._budgets.ready():
                    await self.rebuild()
                self.first.set()
                if self._clock.monotonic_s() >= sweep_at_s:
                    await self.sweep()
                    sweep_at_s = self._clock.monotonic_s() + self._sweep_s
            except BatonError as error:
                log.warning("recovery waits: %s", error.message)
            await sleep(WATCH_S)

    async def rebuild(self) -> None:
        """Balances from the ledger, once the journal of before is in it. Raises MoneyUnavailable, Unavailable."""
        await self._rest_shipped()
        totals, holds = await self._store.posted_totals(), await self._store.open_holds()
        await self._budgets.load(totals, [_reserved(hold) for hold in holds], self._lease_s)
        log.info("balances rebuilt from the ledger")

    async def sweep(self) -> int:
        """Settle holds whose lease is over; returns how many."""
        latest = self._clock.now() - timedelta(seconds=self._lease_s)
        abandoned = [hold for hold in await self._store.open_holds() if hold["at"] <= latest][:SWEPT_MAX]
        for hold in abandoned:
            await self._settle(hold, "uncertain" if hold["dispatched"] else "voided")
        return len(abandoned) + await self._sweep_budgets({str(hold["hold_id"]) for hold in abandoned})

    async def _sweep_budgets(self, done: set[str]) -> int:
        """Holds open in the budget store alone: settled in the ledger while it was away, or never written down."""
        left = [hold_id for hold_id in await self._budgets.expired(SWEPT_MAX) if hold_id not in done]
        if left:
            await self._rest_shipped()
        for hold_id in left:
            charged = await self._store.settled_nano(hold_id)
            await (self._budgets.post(hold_id, charged) if charged else self._budgets.void(hold_id))
        return len(left)

    async def _rest_shipped(self) -> None:
        try:
            await self._journal.shipped()
        except TimeoutError:
            raise MoneyUnavailable("the journal is not in the database yet; its holds cannot be judged") from None

    async def _settle(self, hold: Mapping[str, Any], state: Literal["uncertain", "voided"]) -> None:
        now = self._clock.now()
        now_us = int(now.timestamp() * 1_000_000)
        charged = hold["amount_nano"] if state == "uncertain" else 0
        payload = {
            "hold_id": str(hold["hold_id"]),
            "rollout_id": str(hold["rollout_id"]),
            "state": state,
            "charged_nano": charged,
            "scopes": hold["scopes"],
        }
        await self._journal.append(Event(uuid7(now_us // 1000), "settle", now_us, payload))
        try:
            settle = self._budgets.uncertain if state == "uncertain" else self._budgets.void
            await settle(str(hold["hold_id"]))
        except NotFound:  # a store rebuilt meanwhile does not know it: the ledger does, and that is the truth
            log.info("hold %s was settled in the ledger only", hold["hold_id"])
        log.warning("hold %s was abandoned and is now %s", hold["hold_id"], state)


def _reserved(hold: Mapping[str, Any]) -> Hold:
    """A hold of the ledger as the budget store reserves it again."""
    scopes = tuple(Scope(str(name), limit) for name, limit in hold["scopes"])
    return Hold(str(hold["hold_id"]), int(hold["amount_nano"]), scopes)
