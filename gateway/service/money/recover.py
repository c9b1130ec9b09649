"""Recovery, at boot and all the time: rebuilds balances from the ledger, renews leases, and settles abandoned holds.

An abandoned hold that was never dispatched is voided. Of any other the calls that were dispatched are charged at their
worst case and marked uncertain, because the workers may have billed them. So no spending is under-counted, and no hold
leaks.

Heartbeats show which gateways are alive: every gateway renews the leases of its own holds. An expired lease only makes
a hold doubtful, because somebody may have set the budget store's clock. If the lease has not been renewed after another
half lease by this process's monotonic clock, the hold is abandoned. No host's clock decides alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

from tenacity import AsyncRetrying, retry_if_result, wait_fixed

from gateway.core.log.events import Event
from gateway.core.money.ledger import SETTLED_KEPT_S, Hold, Scope, is_past
from gateway.errors import BatonError, MoneyUnavailable
from gateway.service.ports.money import LEASE_S, Budgets, Settlement
from gateway.service.ports.request import Clock, Journal, Store

log = logging.getLogger("gateway.recover")
SWEPT_MAX = 1000
SETTLED_MAX = 20_000  # the latest settlements that a rebuild loads, so that no gateway counts one twice
WATCH_S = 0.5
PUT_BACK_S = 4 * WATCH_S  # after a rebuild, the time for other gateways to notice it and put back their holds
BEATS = 10  # heartbeats per lease
Sleep = Callable[[float], Awaitable[None]]


async def _none_kept() -> Collection[str]:
    return ()


class Recovery:
    """Runs recovery. `lease_s` is the lease of the budget store, in seconds; `sweep_s` the time between two sweeps for
    abandoned holds."""

    def __init__(
        self,
        budgets: Budgets,
        store: Store,
        journal: Journal,
        clock: Clock,
        *,
        sweep_s: float,
        lease_s: float = LEASE_S,
        kept: Callable[[], Awaitable[Collection[str]]] = _none_kept,
    ) -> None:
        """`kept`: the ids of holds that are never abandoned, because some gateway will go on with their requests."""
        self._budgets = budgets
        self._store = store
        self._journal = journal
        self._clock = clock
        self._lease_s = lease_s
        self._sweep_s = sweep_s
        self._kept = kept
        self._beat_at_s = 0.0
        self._rebuilding: asyncio.Task[bool] | None = None
        self._decided: dict[str, int] = {}  # abandoned hold → its charge, until the ledger has it
        self._doubted: dict[str, float] = {}  # hold → monotonic time of its first doubt
        self.first = asyncio.Event()  # set when balances exist for the first time

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Run for ever, in three loops: the first must not wait for PostgreSQL, as the others do."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(WATCH_S, self.watch, sleep))
            group.create_task(self._every(WATCH_S, self.confirm, sleep))
            group.create_task(self._sweep_for_ever(sleep))

    async def watch(self) -> None:
        """Join the balances if they exist, start a rebuild if they do not, and renew the leases."""
        if not await self._budgets.ready() and not await self._budgets.join():
            if self._rebuilding is None or self._rebuilding.done():
                self._rebuilding = asyncio.create_task(self._try(self.rebuild), name="rebuild")
            self._beat_at_s = 0.0
            return
        self.first.set()
        if self._clock.monotonic_s() >= self._beat_at_s:
            await self._budgets.keep()
            self._beat_at_s = self._clock.monotonic_s() + self._lease_s / BEATS

    async def rebuild(self) -> None:
        """Join existing balances, or rebuild them from the ledger once it has all of the journal. Raises
        MoneyUnavailable, Unavailable."""
        if await self._budgets.join():
            return
        ours = list(self._budgets.unconfirmed())
        await self._wait_until_shipped()
        books = await self._store.books(SETTLED_MAX)
        others = self.first.is_set() or bool(books.open_holds)  # at a first start there is no other gateway
        holds = [_hold(row) for row in books.open_holds]
        now = self._clock.now()
        posted = {scope: nano for scope, nano in books.posted.items() if not is_past(scope, now)}
        await self._budgets.load(posted, holds, books.settled, ours, PUT_BACK_S if others else 0)
        log.info("balances rebuilt from the ledger")

    async def confirm(self) -> None:
        """Drop this gateway's unconfirmed settlements once the ledger has them and the balances agree with it."""
        ours, decided = self._budgets.unconfirmed(), dict(self._decided)
        if not ours and not decided:
            return
        await self._wait_until_shipped()
        if await self._budgets.ready():
            await self._adopt_ledger({**ours, **decided})
            self._budgets.confirm(list(ours))
            for hold_id in decided:
                self._decided.pop(hold_id, None)

    async def _adopt_ledger(self, charges: Mapping[str, int]) -> None:
        """Where the balances have another charge than this gateway, adopt the ledger's charge.

        A hold is settled twice if its gateway stalls for longer than a lease and another gateway decides the hold. The
        ledger keeps the settlement that reached it first; the balances may have the other.
        """
        counted = await self._budgets.settled(list(charges))
        doubtful = [hold_id for hold_id, charged in charges.items() if counted.get(hold_id) not in (None, charged)]
        ledger = {hold_id: await self._store.settled_nano(hold_id) for hold_id in doubtful}
        corrected = await self._budgets.correct({hold_id: nano for hold_id, nano in ledger.items() if nano is not None})
        if corrected:
            log.warning("%d holds were settled twice; the balances now have the ledger's charges", corrected)

    async def sweep(self) -> int:
        """Settle the holds that no gateway has renewed for a lease and a half. Returns their number."""
        expired = await self._budgets.expired(SWEPT_MAX)
        unsettled = {str(hold["hold_id"]): hold for hold in await self._store.open_holds()}
        charges = await self._budgets.settled(list(unsettled))
        # The budget store has settled these, or does not know them, but the ledger has them open.
        lost = [hold_id for hold_id in unsettled if charges.get(hold_id, 0) is not None]
        now_s = self._clock.monotonic_s()
        kept = await self._kept() if expired or lost else ()
        doubtful = [hold_id for hold_id in (*expired, *lost) if hold_id.partition(":")[0] not in kept]
        self._doubted = {hold_id: self._doubted.get(hold_id, now_s) for hold_id in doubtful}
        abandoned = [hold_id for hold_id, since_s in self._doubted.items() if now_s - since_s >= self._lease_s / 2]
        if any(hold_id not in unsettled for hold_id in abandoned):
            await self._wait_until_shipped()
        for hold_id in abandoned:
            await self._decide(hold_id, unsettled.get(hold_id), charges.get(hold_id))
            del self._doubted[hold_id]
        return len(abandoned)

    async def count_left(self) -> None:
        """Count the settlements that were still in the journal when this gateway started: the budget store may have
        been rebuilt without them. It knows settlements for a day."""
        await self._wait_until_shipped()
        since = self._clock.now() - timedelta(seconds=SETTLED_KEPT_S / 2)
        latest = await self._store.settled_latest(SETTLED_MAX, since)
        await self._budgets.count(latest)
        await self._budgets.correct({settlement.hold_id: settlement.charged_nano for settlement in latest})

    async def _sweep_for_ever(self, sleep: Sleep) -> None:
        await self.first.wait()
        until_done = AsyncRetrying(retry=retry_if_result(lambda done: not done), wait=wait_fixed(WATCH_S), sleep=sleep)
        await until_done(self._try, self.count_left)
        await self._every(self._sweep_s, self.sweep, sleep)

    async def _every(self, pause_s: float, action: Callable[[], Awaitable[object]], sleep: Sleep) -> None:
        while True:
            await self._try(action)
            await sleep(pause_s)

    async def _try(self, action: Callable[[], Awaitable[object]]) -> bool:
        """Run an action and log its failure. Returns whether it succeeded."""
        try:
            await action()
        except BatonError as error:
            log.warning("recovery waits: %s", error.message)
            return False
        except Exception:  # boundary: without recovery money leaks, so it outlives any surprise
            log.exception("recovery met an unexpected error")
            return False
        return True

    async def _wait_until_shipped(self) -> None:
        """Wait until the ledger has all of the journal. Raises MoneyUnavailable."""
        try:
            await self._journal.shipped()
        except TimeoutError:
            raise MoneyUnavailable("the journal has not reached the database yet; no hold can be decided") from None

    async def _decide(self, hold_id: str, hold: Mapping[str, Any] | None, charged: int | None) -> None:
        """Settle an abandoned hold. `hold` is its row if the ledger has it open; `charged` is the charge at which the
        budget store has settled it, in nano-dollars, or None."""
        if hold is None:  # the ledger settled it while the budget store was away, or never had it
            charged = await self._store.settled_nano(hold_id)
            await (self._budgets.post(hold_id, charged) if charged else self._budgets.void(hold_id))
            return
        sent_nano = hold["dispatched_nano"]
        uncertain = charged is None and sent_nano is not None
        charged = min(int(hold["amount_nano"]), sent_nano) if uncertain else charged or 0
        state = "uncertain" if uncertain else "posted" if charged else "voided"
        payload = {
            "hold_id": hold_id,
            "rollout_id": hold["rollout_id"] and str(hold["rollout_id"]),
            "state": state,
            "charged_nano": charged,
            "scopes": hold["scopes"],
        }
        await self._journal.append(Event.new("settle", self._clock.now_us(), payload))
        self._decided[hold_id] = charged
        await self._budgets.count([Settlement(hold_id, charged, tuple(str(name) for name, _ in hold["scopes"]))])
        log.warning("hold %s was abandoned and is now %s", hold_id, state)


def _hold(row: Mapping[str, Any]) -> Hold:
    """The hold of a ledger row, for the budget store to reserve again."""
    scopes = tuple(Scope(str(name), limit) for name, limit in row["scopes"])
    return Hold(str(row["hold_id"]), int(row["amount_nano"]), scopes)
