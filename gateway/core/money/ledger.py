"""Two-phase money: what `adapters/redis/budgets.lua`, its callers and its model (tests/models/ledger.py) share.

    open ──post(actual)──▶ posted       charged the actual cost, even above the grant
      ├────void──────────▶ voided       charged nothing
      └────uncertain─────▶ uncertain    dispatched and never heard of again: charged in full

A hold is reserved in all of its scopes or in none. It is settled once: later calls return the result of the first. In
every scope with a limit, a hold is granted only if posted + held + granted ≤ limit. Amounts are nano-dollars, times are
milliseconds of the caller's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.core.money.amounts import NANO_MAX, nano_to_usd
from gateway.errors import BudgetExceeded, Conflict, NotFound

SettledState = Literal["posted", "voided", "uncertain"]
State = Literal["open", "posted", "voided", "uncertain"]
SCOPES_MAX = 16
SCOPE_CHARS_MAX = 1024
SETTLED_KEPT_S = 86_400

_FIXES = {
    "request": "raise x-baton-max-cost-usd or lower max_tokens",
    "user": "an operator can raise this end user's budget; a lower max_tokens may also fit",
    "key": "an operator can issue a key with a larger --budget-usd; a lower max_tokens may also fit",
    "org": "an operator can raise the organisation's budget; a lower max_tokens may also fit",
}


@dataclass(frozen=True, slots=True)
class Scope:
    """Something whose spending is counted (`core/money/scopes.py` makes the names). `limit_nano` None: no limit."""

    name: str
    limit_nano: int | None


@dataclass(frozen=True, slots=True)
class Hold:
    """Money that is reserved in all scopes at once. `granted_nano` lies between the least and the most that was asked
    for."""

    id: str
    granted_nano: int
    scopes: tuple[Scope, ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """The nano-dollars of one scope: posted minus credited, which may be negative; and reserved by open holds."""

    posted_nano: int
    held_nano: int


def check_nano(amount: int) -> int:
    """Return the amount if it is an integer in [0, 2**53), as Redis Lua computes in doubles. Raises ValueError."""
    if type(amount) is not int or not 0 <= amount <= NANO_MAX:
        raise ValueError(f"{amount!r} is not an amount of nano-dollars in 0..{NANO_MAX}")
    return amount


def check_total(amount: int) -> int:
    """Return the posted total of a scope, which credits may make negative. Raises ValueError beyond ±(2**53 - 1)."""
    check_nano(abs(amount) if type(amount) is int else amount)
    return amount


def check_hold(amount_nano: int, amount_min_nano: int, scopes: Sequence[Scope]) -> None:
    """Raises ValueError if the arguments of a hold are out of bounds."""
    if check_nano(amount_min_nano) > check_nano(amount_nano):
        raise ValueError("the least amount of a hold is larger than its most")
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
    """The error for a hold that does not fit a scope: it states what is left, what is needed, and what to do."""
    limit = NANO_MAX if scope.limit_nano is None else scope.limit_nano
    fix = _FIXES.get(scope.name.partition(":")[0], "an operator can raise it")
    return BudgetExceeded(
        f"The budget of `{scope.name}` has ${nano_to_usd(max(0, left_nano))} left of ${nano_to_usd(limit)} "
        f"and this request may need ${nano_to_usd(needed_nano)}: {fix}.",
        scope=scope.name,
    )


def hold_closed(hold_id: str) -> Conflict:
    """The error for an id whose hold has been settled."""
    return Conflict(f"hold `{hold_id}` is settled already; use a new id", code="hold_closed")


def hold_unknown(hold_id: str) -> NotFound:
    """The error for an id without a hold."""
    return NotFound(f"no hold `{hold_id}`: never granted here, or settled more than a day ago", code="hold_not_found")
