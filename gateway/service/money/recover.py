"""Recovery, at boot and ever after: balances from the ledger, leases kept, a decision for every hold nobody settles.

A hold that was never dispatched is voided; one that was is charged in full and marked uncertain, because the worker may
have billed it (DESIGN §5). Never under-counted, never leaked.

Who lives is told by heartbeats: every gateway renews the leases of its own holds. A lease that ran out only raises a
doubt, as the budget store's clock may have been set; half a lease later by this process's own steady clock, and still
not renewed, the hold is decided. No clock of any host decides alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any

from gateway.core.log.events import Event
from gateway.core.money.ledger import SETTLED_KEPT_S, Hold, Scope
from gateway.core.money.scopes import is_past
from gateway.errors import BatonError, MoneyUnavailable
from gateway.service.ports.money import LEASE_S, Budgets, Settlement
from gateway.service.ports.request import Clock, Journal, Store

log = logging.getLogger("gateway.recover")
SWEPT_MAX = 1000
SETTLED_MAX = 20_000  # the latest settlements that a rebuild is told of, so that no gateway counts one again
WATCH_S = 0.5
PUT_BACK_S = 4 * WATCH_S  # after a rebuild: time for other gateways to see it and to put their own holds back
BEATS = 10  # heartbeats a lease
Sleep = Callable[[float], Awaitable[None]]


class Recovery:
    """`lease_s`: the budget store's; `sweep_s`: how often abandoned holds are looked for."""

    def __init__(
        self,
        budgets: Budgets,
        store: Store,
        journal: Journal,
        clock: Clock,
        *,
        sweep_s: float,
        lease_s: float = LEASE_S,
    ) -> None:
        self._budgets = budgets
        self._store = store
        self._journal = journal
        self._clock = clock
        self._lease_s = lease_s
        self._sweep_s = sweep_s
        self._beat_at_s = 0.0
        self._rebuilding: asyncio.Task[bool] | None = None
        self._judged: dict[str, int] = {}  # abandoned holds decided here, with their charge, not yet seen in the ledger
        self._doubted: dict[str, float] = {}  # hold → since when nobody keeps it, on the monotonic clock
        self.first = asyncio.Event()  # set once balances were there for the first time

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """For ever. Three loops, as the first must not wait for what the others wait for: PostgreSQL."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(WATCH_S, self.watch, sleep))
            group.create_task(self._every(WATCH_S, self.confirm, sleep))
            group.create_task(self._sweeping(sleep))

    async def watch(self) -> None:
        """Join balances as soon as there are any, have them rebuilt where there are none, and keep the leases."""
        if not await self._budgets.ready() and not await self._budgets.join():
            if self._rebuilding is None or self._rebuilding.done():
                self._rebuilding = asyncio.create_task(self._tried(self.rebuild), name="rebuild")
            self._beat_at_s = 0.0
            return
        self.first.set()
        if self._clock.monotonic_s() >= self._beat_at_s:
            await self._budgets.keep()
            self._beat_at_s = self._clock.monotonic_s() + self._lease_s / BEATS

    async def rebuild(self) -> None:
        """Join the balances that are there, or make them from the ledger once the journal of before is in it. Raises
        MoneyUnavailable, Unavailable."""
        if await self._budgets.join():
            return
        ours = list(self._budgets.unconfirmed())
        await self._rest_shipped()
        books = await self._store.books(SETTLED_MAX)
        others = self.first.is_set() or bool(books.open_holds)  # at a first start there is nobody to wait for
        holds = [_reserved(hold) for hold in books.open_holds]
        now = self._clock.now()
        posted = {scope: nano for scope, nano in books.posted.items() if not is_past(scope, now)}
        await self._budgets.load(posted, holds, books.settled, ours, PUT_BACK_S if others else 0)
        log.info("balances rebuilt from the ledger")

    async def confirm(self) -> None:
        """Have settlements forgotten that the ledger has, once the balances of now are seen to be younger and to hold
        the same charges."""
        ours, judged = self._budgets.unconfirmed(), dict(self._judged)
        if not ours and not judged:
            return
        await self._rest_shipped()
        if await self._budgets.ready():
            await self._agree({**ours, **judged})
            self._budgets.confirm(list(ours))
            for hold_id in judged:
                self._judged.pop(hold_id, None)

    async def _agree(self, charges: Mapping[str, int]) -> None:
        """A gateway that was held up for longer than a lease and the one that decided its hold have both settled it.
        The ledger took the first it was told, the balances perhaps the other; the ledger's counts."""
        counted = await self._budgets.settled(list(charges))
        doubtful = [hold_id for hold_id, charged in charges.items() if counted.get(hold_id) not in (None, charged)]
        known = {hold_id: await self._store.settled_nano(hold_id) for hold_id in doubtful}
        changed = await self._budgets.correct({hold_id: nano for hold_id, nano in known.items() if nano is not None})
        if changed:
            log.warning("%d holds were settled twice; the balances have what the ledger has", changed)

    async def sweep(self) -> int:
        """Decide the holds that nobody has kept for a lease and a half; returns how many."""
        over = await self._budgets.expired(SWEPT_MAX)
        unsettled = {str(hold["hold_id"]): hold for hold in await self._store.open_holds()}
        charges = await self._budgets.settled(list(unsettled))
        lost = [hold_id for hold_id in unsettled if charges.get(hold_id, 0) is not None]  # settled there, or unknown
        now_s = self._clock.monotonic_s()
        self._doubted = {hold_id: self._doubted.get(hold_id, now_s) for hold_id in (*over, *lost)}
        ripe = [hold_id for hold_id, since_s in self._doubted.items() if now_s - since_s >= self._lease_s / 2]
        if any(hold_id not in unsettled for hold_id in ripe):
            await self._rest_shipped()
        for hold_id in ripe:
            await self._decide(hold_id, unsettled.get(hold_id), charges.get(hold_id))
            del self._doubted[hold_id]
        return len(ripe)

    async def count_left(self) -> None:
        """What the journal still held when this gateway was started is in the ledger now; the budget store may have
        been rebuilt without it. Settlements are known there for a day."""
        await self._rest_shipped()
        since = self._clock.now() - timedelta(seconds=SETTLED_KEPT_S / 2)
        latest = await self._store.settled_latest(SETTLED_MAX, since)
        await self._budgets.count(latest)
        await self._budgets.correct({each.hold_id: each.charged_nano for each in latest})

    async def _sweeping(self, sleep: Sleep) -> None:
        await self.first.wait()
        while not await self._tried(self.count_left):
            await sleep(WATCH_S)
        await self._every(self._sweep_s, self.sweep, sleep)

    async def _every(self, seconds: float, do: Callable[[], Awaitable[object]], sleep: Sleep) -> None:
        while True:
            await self._tried(do)
            await sleep(seconds)

    async def _tried(self, do: Callable[[], Awaitable[object]]) -> bool:
        try:
            await do()
        except BatonError as error:
            log.warning("recovery waits: %s", error.message)
            return False
        except Exception:  # boundary: without recovery money leaks, so it outlives any surprise
            log.exception("recovery met an error nobody raised on purpose")
            return False
        return True

    async def _rest_shipped(self) -> None:
        try:
            await self._journal.shipped()
        except TimeoutError:
            raise MoneyUnavailable("the journal is not in the database yet; its holds cannot be judged") from None

    async def _decide(self, hold_id: str, hold: Mapping[str, Any] | None, charged: int | None) -> None:
        """`hold`: its row where the ledger has it open; `charged`: what the budget store has settled it at."""
        if hold is None:  # settled in the ledger while the budget store was away, or never written down
            charged = await self._store.settled_nano(hold_id)
            await (self._budgets.post(hold_id, charged) if charged else self._budgets.void(hold_id))
            return
        uncertain = charged is None and hold["dispatched"]
        charged = int(hold["amount_nano"]) if uncertain else charged or 0
        state = "uncertain" if uncertain else "posted" if charged else "voided"
        payload = {
            "hold_id": hold_id,
            "rollout_id": str(hold["rollout_id"]),
            "state": state,
            "charged_nano": charged,
            "scopes": hold["scopes"],
        }
        await self._journal.append(Event.new("settle", self._clock.now_us(), payload))
        self._judged[hold_id] = charged
        await self._budgets.count([Settlement(hold_id, charged, tuple(str(name) for name, _ in hold["scopes"]))])
        log.warning("hold %s was abandoned and is now %s", hold_id, state)


def _reserved(hold: Mapping[str, Any]) -> Hold:
    """A hold of the ledger as the budget store reserves it again."""
    scopes = tuple(Scope(str(name), limit) for name, limit in hold["scopes"])
    return Hold(str(hold["hold_id"]), int(hold["amount_nano"]), scopes)
