"""Two-phase money as a pure state machine: the model that the budget store must match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.core.money.amounts import NANO_MAX
from gateway.core.money.ledger import (
    Balance,
    Scope,
    SettledState,
    State,
    budget_exceeded,
    check_hold,
    check_nano,
    check_total,
    hold_closed,
    hold_unknown,
)


@dataclass(slots=True)
class Entry:
    """One hold as the ledger keeps it. `over_nano` is what a provider billed above the grant."""

    granted_nano: int
    scopes: tuple[str, ...]
    lease_until_ms: int
    state: State = "open"
    charged_nano: int = 0
    over_nano: int = 0


class Ledger:
    """Posted and held nano-dollars by scope, and the holds that explain them."""

    def __init__(self, posted: Mapping[str, int] | None = None) -> None:
        self.posted: dict[str, int] = {name: check_total(amount) for name, amount in (posted or {}).items()}
        self.held: dict[str, int] = {}
        self.holds: dict[str, Entry] = {}

    def hold(
        self, hold_id: str, amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope], lease_until_ms: int
    ) -> int:
        """Grant min(amount, smallest headroom) if that is at least `amount_min_nano`; returns the grant.

        The same id again returns the first grant. Raises BudgetExceeded (first scope that cannot), Conflict when the
        hold is already settled, ValueError on amounts or scopes out of bounds.
        """
        check_hold(amount_nano, amount_min_nano, scopes)
        if (entry := self.holds.get(hold_id)) is not None:
            if entry.state != "open":
                raise hold_closed(hold_id)
            return entry.granted_nano
        short = [scope for scope in scopes if self.left(scope) < amount_min_nano]
        spent = [scope for scope in short if self.left(scope) + self.balance(scope.name).held_nano < amount_min_nano]
        for scope in (*spent, *short):
            held = self.balance(scope.name).held_nano
            raise budget_exceeded(scope, self.left(scope), amount_min_nano, held)
        granted = min(amount_nano, self.room(scopes))
        self.restore(hold_id, granted, [scope.name for scope in scopes], lease_until_ms)
        return granted

    def grow(self, hold_id: str, total_nano: int, scopes: Sequence[Scope]) -> int:
        """Let an open hold grow to this total, as far as each scope has room; returns what it has then. Raises NotFound
        for an id that was never held, Conflict for one that is settled."""
        check_nano(total_nano)
        entry = self.holds.get(hold_id)
        if entry is None:
            raise hold_unknown(hold_id)
        if entry.state != "open":
            raise hold_closed(hold_id)
        more = min(max(0, total_nano - entry.granted_nano), self.room(scopes))
        self._enlarge(entry, entry.granted_nano + more)
        return entry.granted_nano

    def restore(self, hold_id: str, granted_nano: int, scopes: Sequence[str], lease_until_ms: int) -> None:
        """Restore a hold granted before a rebuild, whatever the headroom is now. Ignore a settled id; an open hold has
        at least this much then."""
        if (entry := self.holds.get(hold_id)) is not None:
            if entry.state == "open":
                self._enlarge(entry, max(entry.granted_nano, granted_nano))
            return
        self.holds[hold_id] = Entry(granted_nano, tuple(scopes), lease_until_ms)
        for name in scopes:
            self.held[name] = self.held.get(name, 0) + granted_nano

    def settle(self, hold_id: str, state: SettledState, actual_nano: int = 0) -> int:
        """Close a hold; returns what was charged (then, or the first time). `actual_nano` counts for `posted` only.
        Raises NotFound for an id that was never held, or settled more than a day ago."""
        check_nano(actual_nano)
        entry = self.holds.get(hold_id)
        if entry is None:
            raise hold_unknown(hold_id)
        if entry.state == "open":
            charged = {"posted": actual_nano, "voided": 0, "uncertain": entry.granted_nano}[state]
            for name in entry.scopes:
                self.held[name] -= entry.granted_nano
                if charged:
                    self.posted[name] = min(NANO_MAX, self.posted.get(name, 0) + charged)
            entry.state, entry.charged_nano = state, charged
            entry.over_nano = max(0, charged - entry.granted_nano)
        return entry.charged_nano

    def count(self, hold_id: str, charged_nano: int, scopes: Sequence[str]) -> None:
        """Apply a settlement from elsewhere: settle an open hold at this charge, post an unknown one, ignore a
        settled one."""
        self.restore(hold_id, 0, scopes, 0)
        self.settle(hold_id, "posted", charged_nano)

    def correct(self, hold_id: str, charged_nano: int) -> bool:
        """Adopt the charge of the book of record for a hold that two gateways settled. Return False if the balances
        have that charge already, or if the hold is open or unknown."""
        check_nano(charged_nano)
        entry = self.holds.get(hold_id)
        if entry is None or entry.state == "open" or entry.charged_nano == charged_nano:
            return False
        for name in entry.scopes:
            posted = self.posted.get(name, 0) + charged_nano - entry.charged_nano
            self.posted[name] = max(-NANO_MAX, min(NANO_MAX, posted))
        entry.state, entry.charged_nano = "posted", charged_nano
        entry.over_nano = max(0, charged_nano - entry.granted_nano)
        return True

    def renew(self, hold_id: str, lease_until_ms: int) -> bool:
        """Move the lease; False when the hold is unknown or settled."""
        entry = self.holds.get(hold_id)
        if entry is None or entry.state != "open":
            return False
        entry.lease_until_ms = lease_until_ms
        return True

    def expired(self, now_ms: int, limit: int) -> list[str]:
        """Return open holds with an expired lease, the oldest expiry first."""
        ids = [(e.lease_until_ms, i) for i, e in self.holds.items() if e.state == "open" and e.lease_until_ms <= now_ms]
        return [hold_id for _, hold_id in sorted(ids)[:limit]]

    def credit(self, amount_nano: int, scopes: Sequence[str]) -> None:
        """Credit each scope; a balance below zero is headroom beyond the limit."""
        check_nano(amount_nano)
        for name in scopes:
            self.posted[name] = max(-NANO_MAX, self.posted.get(name, 0) - amount_nano)

    def forget(self, scopes: Sequence[str]) -> int:
        """Drop the posted balances of scopes without holds; return how many."""
        free = [name for name in scopes if name in self.posted and not self.held.get(name)]
        for name in free:
            del self.posted[name]
        return len(free)

    def balance(self, scope: str) -> Balance:
        return Balance(self.posted.get(scope, 0), self.held.get(scope, 0))

    def room(self, scopes: Sequence[Scope]) -> int:
        """What each of these scopes has left, in nano-dollars."""
        return max(0, min(self.left(scope) for scope in scopes))

    def _enlarge(self, entry: Entry, granted_nano: int) -> None:
        for name in entry.scopes:
            self.held[name] = self.held.get(name, 0) + granted_nano - entry.granted_nano
        entry.granted_nano = granted_nano

    def left(self, scope: Scope) -> int:
        """Headroom in nano-dollars; negative where a provider billed above its bound."""
        limit = NANO_MAX if scope.limit_nano is None else scope.limit_nano
        return min(NANO_MAX, limit - self.posted.get(scope.name, 0)) - self.held.get(scope.name, 0)
