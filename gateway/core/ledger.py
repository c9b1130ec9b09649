"""Two-phase money as a pure state machine: the model that `adapters/budgets.lua` is tested against.

    open ──post(actual)──▶ posted       charged what was really spent, even above the grant
      ├────void──────────▶ voided       charged nothing
      └────uncertain─────▶ uncertain    dispatched and never heard of again: charged in full

A hold is reserved in all of its scopes or in none, and the first way of settling it is the only one: later calls return
the first result. In every scope with a limit, a hold is granted only while posted + held + granted ≤ limit.
Amounts are nano-dollars, times are milliseconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.core.money import NANO_MAX, nano_to_usd
from gateway.errors import BudgetExceeded, Conflict, NotFound

Settled = Literal["posted", "voided", "uncertain"]
State = Literal["open", "posted", "voided", "uncertain"]
SCOPES_MAX = 16
SCOPE_CHARS_MAX = 1024
SETTLED_KEPT_S = 86_400

_HOW_TO_RAISE = {
    "request": "raise x-baton-max-cost-usd or lower max_tokens",
    "user": "an operator can raise this end user's budget; a lower max_tokens may also fit",
    "key": "an operator can issue a key with a larger --budget-usd; a lower max_tokens may also fit",
    "org": "an operator can raise the organisation's budget; a lower max_tokens may also fit",
}


@dataclass(frozen=True, slots=True)
class Scope:
    """Something with a budget (`core/scopes.py` names them). `limit_nano` None: counted, not limited."""

    name: str
    limit_nano: int | None


@dataclass(frozen=True, slots=True)
class Hold:
    """Money reserved in every scope at once. `granted_nano` lies between what was asked at least and at most."""

    id: str
    granted_nano: int
    scopes: tuple[Scope, ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """Nano-dollars of one scope: posted less what was credited, which may be below zero; and held by open holds."""

    posted_nano: int
    held_nano: int


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
        granted = amount_nano
        for scope in scopes:
            left = self.left(scope)
            if left < amount_min_nano:
                raise budget_exceeded(scope, left, amount_min_nano)
            granted = min(granted, left)
        self.restore(hold_id, granted, [scope.name for scope in scopes], lease_until_ms)
        return granted

    def restore(self, hold_id: str, granted_nano: int, scopes: Sequence[str], lease_until_ms: int) -> None:
        """Put back a hold granted before a rebuild, whatever the headroom is now. A known id is left alone."""
        if hold_id in self.holds:
            return
        self.holds[hold_id] = Entry(granted_nano, tuple(scopes), lease_until_ms)
        for name in scopes:
            self.held[name] = self.held.get(name, 0) + granted_nano

    def settle(self, hold_id: str, state: Settled, actual_nano: int = 0) -> int:
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
        """A hold that ended elsewhere at this charge: settled if it is open here, posted if it was never heard of,
        and left alone if it is settled already."""
        self.restore(hold_id, 0, scopes, 0)
        self.settle(hold_id, "posted", charged_nano)

    def correct(self, hold_id: str, charged_nano: int) -> bool:
        """Two have settled this hold, and in the book of record it is at this charge: the balances follow. False where
        they have it so already; an open or unknown hold is left alone."""
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
        """Open holds whose lease ran out, longest ago first."""
        ids = [(e.lease_until_ms, i) for i, e in self.holds.items() if e.state == "open" and e.lease_until_ms <= now_ms]
        return [hold_id for _, hold_id in sorted(ids)[:limit]]

    def credit(self, amount_nano: int, scopes: Sequence[str]) -> None:
        """Give money back to each of the scopes; below zero it is room beyond the limit."""
        check_nano(amount_nano)
        for name in scopes:
            self.posted[name] = max(-NANO_MAX, self.posted.get(name, 0) - amount_nano)

    def forget(self, scopes: Sequence[str]) -> int:
        """Drop the posted balances of scopes in which nothing is held; how many."""
        free = [name for name in scopes if name in self.posted and not self.held.get(name)]
        for name in free:
            del self.posted[name]
        return len(free)

    def balance(self, scope: str) -> Balance:
        return Balance(self.posted.get(scope, 0), self.held.get(scope, 0))

    def left(self, scope: Scope) -> int:
        """Headroom in nano-dollars; negative where a provider billed above its bound."""
        limit = NANO_MAX if scope.limit_nano is None else scope.limit_nano
        return min(NANO_MAX, limit - self.posted.get(scope.name, 0)) - self.held.get(scope.name, 0)


def check_nano(amount: int) -> int:
    """The amount, if it is an integer in [0, 2**53): Redis Lua computes in doubles. Raises ValueError."""
    if type(amount) is not int or not 0 <= amount <= NANO_MAX:
        raise ValueError(f"{amount!r} is not an amount of nano-dollars in 0..{NANO_MAX}")
    return amount


def check_total(amount: int) -> int:
    """The posted total of a scope, which credits may bring below zero. Raises ValueError beyond ±(2**53 - 1)."""
    check_nano(abs(amount) if type(amount) is int else amount)
    return amount


def check_hold(amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope]) -> None:
    """Raises ValueError when a hold's arguments are out of bounds."""
    if check_nano(amount_min_nano) > check_nano(amount_nano):
        raise ValueError("a hold asks for at least more than for at most")
    if not 1 <= len(scopes) <= SCOPES_MAX:
        raise ValueError(f"a hold needs 1 to {SCOPES_MAX} scopes, got {len(scopes)}")
    if len({scope.name for scope in scopes}) != len(scopes):
        raise ValueError("a hold names one scope twice")
    for scope in scopes:
        if not 1 <= len(scope.name) <= SCOPE_CHARS_MAX:
            raise ValueError(f"a scope's name has 1 to {SCOPE_CHARS_MAX} characters, got {len(scope.name)}")
        if scope.limit_nano is not None:
            check_nano(scope.limit_nano)


def budget_exceeded(scope: Scope, left_nano: int, needed_nano: int) -> BudgetExceeded:
    """The refusal, with what is left, what is needed and how to go on."""
    limit = NANO_MAX if scope.limit_nano is None else scope.limit_nano
    how = _HOW_TO_RAISE.get(scope.name.partition(":")[0], "an operator can raise it")
    return BudgetExceeded(
        f"The budget of `{scope.name}` has ${nano_to_usd(max(0, left_nano))} left of ${nano_to_usd(limit)} "
        f"and this request may need ${nano_to_usd(needed_nano)}: {how}.",
        scope=scope.name,
    )


def hold_closed(hold_id: str) -> Conflict:
    return Conflict(f"hold `{hold_id}` is settled already; use a new id", code="hold_closed")


def hold_unknown(hold_id: str) -> NotFound:
    return NotFound(f"no hold `{hold_id}`: never granted here, or settled more than a day ago", code="hold_not_found")
