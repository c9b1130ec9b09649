"""The Budgets port in memory: the ledger model behind the same epochs. Passes the same contract suite as Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gateway.core.money.ledger import Balance, Hold, Scope, SettledState, check_nano
from gateway.errors import MoneyUnavailable
from gateway.service.ports.money import LEASE_S, Settlement
from tests.models.ledger import Entry, Ledger


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class FakeBudgetStore:
    """The state that gateways share, as in one Redis. `flush` empties it; `away` makes it stop answering."""

    def __init__(self, now_ms: Callable[[], int] = monotonic_ms) -> None:
        self.now_ms = now_ms
        self.ledger = Ledger()
        self.epoch = 0
        self.epochs_opened = 0
        self.wait_until_ms = 0
        self.away = False

    def flush(self) -> None:
        self.ledger, self.epoch = Ledger(), 0

    def open(self, ledger: Ledger, wait_ms: int = 0) -> None:
        self.ledger, self.wait_until_ms = ledger, self.now_ms() + wait_ms
        self.epochs_opened += 1
        self.epoch = self.epochs_opened


class FakeBudgets:
    """One gateway's view of the store."""

    def __init__(self, store: FakeBudgetStore | None = None) -> None:
        self.store = store or FakeBudgetStore()
        self.exhausted: set[str] = set()
        self._epoch = 0
        self._refused: str | None = None
        self._open: dict[str, Hold] = {}
        self._settled: dict[str, Settlement] = {}
        self._late: dict[str, Settlement] = {}

    @property
    def epoch_lost(self) -> bool:
        return self._epoch == 0

    async def server(self) -> str:
        self._reached()
        return str(id(self.store))

    async def doubt(self) -> None:
        self._reached()
        self.store.flush()

    def refuse(self, why: str | None) -> None:
        self._refused = why

    async def hold(
        self, hold_id: str, amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope], lease_s: float
    ) -> Hold:
        lease_ms = round(lease_s * 1000)
        until_ms = self.store.now_ms() + lease_ms
        if self._refused is not None:
            raise MoneyUnavailable(self._refused)
        ledger = self._ledger()
        if self.store.now_ms() < self.store.wait_until_ms:
            raise MoneyUnavailable("other gateways still put theirs back")
        granted = ledger.hold(hold_id, amount_nano, amount_min_nano, scopes, until_ms)
        hold = Hold(hold_id, granted, tuple(scopes), ledger.room(scopes))
        self._open.setdefault(hold_id, hold)
        return hold

    async def grow(self, hold: Hold, total_nano: int) -> Hold:
        ledger = self._ledger()
        waits = self.store.now_ms() < self.store.wait_until_ms
        granted = ledger.grow(hold.id, 0 if waits else total_nano, hold.scopes)
        grown = replace(hold, granted_nano=granted, room_nano=0 if waits else ledger.room(hold.scopes))
        if hold.id in self._open:
            self._open[hold.id] = grown
        return grown

    def forsake(self, hold_id: str) -> None:
        self._late[hold_id] = Settlement(hold_id, 0, ())

    async def post(self, hold_id: str, actual_nano: int) -> int:
        return self._settle(hold_id, "posted", check_nano(actual_nano))

    async def void(self, hold_id: str) -> int:
        return self._settle(hold_id, "voided")

    async def uncertain(self, hold_id: str) -> int:
        return self._settle(hold_id, "uncertain")

    async def renew(self, hold_ids: Sequence[str], lease_s: float) -> Sequence[str]:
        until_ms = self.store.now_ms() + round(lease_s * 1000)
        for entry in self._ledger().holds.values():
            entry.lease_until_ms = min(entry.lease_until_ms, until_ms)
        return [hold_id for hold_id in hold_ids if self._ledger().renew(hold_id, until_ms)]

    async def keep(self) -> None:
        await self.renew(list(self._open), LEASE_S)

    async def expired(self, limit: int) -> Sequence[str]:
        return self._ledger().expired(self.store.now_ms(), limit)

    async def balance(self, scope: str) -> Balance:
        return self._ledger().balance(scope)

    async def balances(self, scopes: Sequence[str]) -> Mapping[str, Balance]:
        return {scope: self._ledger().balance(scope) for scope in scopes}

    def fence(self) -> str:
        return str(self._epoch)

    async def credit(self, amount_nano: int, scopes: Sequence[str], fence: str) -> None:
        ledger = self._ledger()
        if fence != str(self._epoch):
            raise MoneyUnavailable("the balances were rebuilt")
        ledger.credit(amount_nano, scopes)

    async def forget(self, past: Callable[[str], bool]) -> int:
        ledger = self._ledger()
        return ledger.forget([name for name in ledger.posted if past(name)])

    async def settled(self, hold_ids: Sequence[str]) -> Mapping[str, int | None]:
        holds = self._ledger().holds
        known = [hold_id for hold_id in hold_ids if hold_id in holds]
        return {i: None if holds[i].state == "open" else holds[i].charged_nano for i in known}

    async def count(self, settlements: Sequence[Settlement]) -> None:
        for each in settlements:
            self._ledger().count(each.hold_id, each.charged_nano, each.scopes)

    async def correct(self, charges: Mapping[str, int]) -> int:
        return sum(self._ledger().correct(hold_id, charged) for hold_id, charged in charges.items())

    async def join(self) -> bool:
        self._reached()
        if self.store.epoch == 0:
            return False
        self._epoch = self.store.epoch
        await self.count([*self._late.values(), *self._settled.values()])
        self._late.clear()
        self._restore(self._open.values())
        return True

    async def load(
        self,
        posted: Mapping[str, int],
        open_holds: Sequence[Hold] = (),
        settled: Sequence[Settlement] = (),
        ours: Sequence[str] = (),
        put_back_s: float = 0,
    ) -> None:
        rebuilt = Ledger(posted)
        self._reached()
        if self.store.epoch == 0:
            self.store.open(rebuilt, round(put_back_s * 1000))
            for each in settled:
                rebuilt.holds[each.hold_id] = Entry(each.charged_nano, (), 0, "posted", each.charged_nano)
            self._restore(open_holds)
            self.confirm(ours)
        await self.join()

    def unconfirmed(self) -> Mapping[str, int]:
        return {hold_id: settled.charged_nano for hold_id, settled in self._settled.items()}

    def confirm(self, hold_ids: Sequence[str]) -> None:
        for hold_id in hold_ids:
            self._settled.pop(hold_id, None)

    async def ready(self) -> bool:
        try:
            self._ledger()
        except MoneyUnavailable:
            return False
        await self.count(list(self._late.values()))
        self._late.clear()
        return True

    async def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def _settle(self, hold_id: str, state: SettledState, actual_nano: int = 0) -> int:
        hold = self._open.pop(hold_id, None)
        if hold is not None:
            charge = {"posted": actual_nano, "voided": 0, "uncertain": hold.granted_nano}[state]
            self._settled[hold_id] = Settlement(hold_id, charge, tuple(scope.name for scope in hold.scopes))
        try:
            return self._ledger().settle(hold_id, state, actual_nano)
        except MoneyUnavailable:
            if hold is not None:
                self._late[hold_id] = self._settled[hold_id]
            raise

    def _restore(self, holds: Iterable[Hold]) -> None:
        until_ms = self.store.now_ms() + round(LEASE_S * 1000)
        for hold in list(holds):
            self.store.ledger.restore(hold.id, hold.granted_nano, [scope.name for scope in hold.scopes], until_ms)

    def _reached(self) -> None:
        if self.store.away:
            raise MoneyUnavailable("the budget store is away")

    def _ledger(self) -> Ledger:
        self._reached()
        if self._epoch != self.store.epoch or self.store.epoch == 0:
            self._epoch = 0
            raise MoneyUnavailable("the budget store was emptied and is rebuilding from the ledger")
        return self.store.ledger
