"""Settles requests in the background that no gateway can go on with: their workers are gone, or their key is."""

from __future__ import annotations

from gateway.core.log.events import Event
from gateway.core.money.ledger import Hold, Scope
from gateway.errors import MoneyUnavailable, NotFound
from gateway.service.ports.background import BackgroundRequest
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock, Journal


class UnfinishedHolds:
    """Closes holds at what was saved of their requests."""

    def __init__(self, budgets: Budgets, journal: Journal, clock: Clock) -> None:
        self._budgets, self._journal, self._clock = budgets, journal, clock

    async def settle(self, request: BackgroundRequest) -> None:
        """Charge the calls that ended at their cost, and those that were under way at their worst case: recovery knows
        only the worst case of all of them. Call it under the claim of the request. Raises SpoolFull."""
        if request.state is None:
            return
        meter, saved = request.state["meter"], request.state["hold"]
        hold = Hold(request.rollout_id, saved["granted"], tuple(Scope(name, limit) for name, limit in saved["scopes"]))
        draw_nano = int(meter["drawn"])
        charged = min(hold.granted_nano, int(meter["spent"]) + draw_nano)
        if meter["calls"] or charged:  # else no call has left, and the ledger knows no hold
            payload = {
                "hold_id": hold.id,
                "rollout_id": hold.id,
                "state": "uncertain" if draw_nano else "posted" if charged else "voided",
                "charged_nano": charged,
                "scopes": [[scope.name, None] for scope in hold.scopes],
            }
            await self._journal.append(Event.new("settle", self._clock.now_us(), payload))
        try:
            await (self._budgets.post(hold.id, charged) if charged else self._budgets.void(hold.id))
        except (MoneyUnavailable, NotFound):  # the budget store is away or was rebuilt; the ledger has the settlement
            return
