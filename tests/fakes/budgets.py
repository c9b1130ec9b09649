"""The Budgets port in memory: the ledger model behind the same epochs. Passes the same contract suite as Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from gateway.core.ledger import Balance, Hold, Ledger, Scope
from gateway.errors import MoneyUnavailable
from gateway.service.ports import OPEN_LEASE_S


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class FakeBudgetStore:
    """What several gateways share: stands for one Redis. `flush` empties it, `away` makes it stop answering."""

    def __init__(self, now_ms: Callable[[], int] = monotonic_ms) -> None:
        self.now_ms = now_ms
        self.ledger = Ledger()
        self.epoch = 0
        self.epochs_opened = 0
        self.away = False

    def flush(self) -> None:
        self.ledger, self.epoch = Ledger(), 0

    def open(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.epochs_opened += 1
        self.epoch = self.epochs_opened


class FakeBudgets:
    """One gateway's view of the store."""

    def __init__(self, store: FakeBudgetStore | None = None) -> None:
        self.store = store or FakeBudgetStore()
        self._epoch = 0
        self._open: dict[str, tuple[Hold, int]] = {}

    @property
    def epoch_lost(self) -> bool:
        return self._epoch == 0

    async def hold(
        self, hold_id: str, amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope], lease_s: float
    ) -> Hold:
        lease_ms = round(lease_s * 1000)
        until_ms = self.store.now_ms() + lease_ms
        granted = self._ledger().hold(hold_id, amount_nano, amount_min_nano, scopes, until_ms)
        hold = Hold(hold_id, granted, tuple(scopes))
        self._open.setdefault(hold_id, (hold, lease_ms))
        return hold

    async def post(self, hold_id: str, actual_nano: int) -> int:
        charged = self._ledger().settle(hold_id, "posted", actual_nano)
        self._open.pop(hold_id, None)
        return charged

    async def void(self, hold_id: str) -> int:
        charged = self._ledger().settle(hold_id, "voided")
        self._open.pop(hold_id, None)
        return charged

    async def uncertain(self, hold_id: str) -> int:
        charged = self._ledger().settle(hold_id, "uncertain")
        self._open.pop(hold_id, None)
        return charged

    async def renew(self, hold_id: str, lease_s: float) -> bool:
        return self._ledger().renew(hold_id, self.store.now_ms() + round(lease_s * 1000))

    async def expired(self, limit: int) -> Sequence[str]:
        return self._ledger().expired(self.store.now_ms(), limit)

    async def balance(self, scope: str) -> Balance:
        return self._ledger().balance(scope)

    async def load(
        self, posted: Mapping[str, int], open_holds: Sequence[Hold] = (), lease_s: float = OPEN_LEASE_S
    ) -> None:
        if self.store.away:
            raise MoneyUnavailable("the budget store is away")
        rebuilt = Ledger(posted)
        if self.store.epoch == 0:
            self.store.open(rebuilt)
        self._epoch = self.store.epoch
        given = {hold.id: (hold, round(lease_s * 1000)) for hold in open_holds}
        for hold, lease_ms in (given | self._open).values():
            names = [scope.name for scope in hold.scopes]
            self.store.ledger.restore(hold.id, hold.granted_nano, names, self.store.now_ms() + lease_ms)

    async def ready(self) -> bool:
        try:
            self._ledger()
        except MoneyUnavailable:
            return False
        return True

    async def close(self) -> None:
        """Nothing to close; here because the real one has it."""

    def _ledger(self) -> Ledger:
        if self.store.away:
            raise MoneyUnavailable("the budget store is away")
        if self._epoch != self.store.epoch or self.store.epoch == 0:
            self._epoch = 0
            raise MoneyUnavailable("the budget store was emptied and is rebuilding from the ledger")
        return self.store.ledger
