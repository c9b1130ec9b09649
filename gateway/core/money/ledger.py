"""Two-phase money: what `adapters/redis/budgets.lua`, its callers and its model (tests/models/ledger.py) share. Pure.

    open ──post(actual)──▶ posted       charged the actual cost, even above the grant
      ├────void──────────▶ voided       charged nothing
      └────uncertain─────▶ uncertain    dispatched and never heard of again: charged in full

A hold is reserved in all of its scopes or in none. While it is open it may grow. It is settled once: later calls return
the result of the first. In every scope with a limit, a hold is granted, and grows, only if posted + held + granted ≤
limit. Amounts are nano-dollars, times are milliseconds of the caller's clock.

Scopes are organisation, key and end user, each over its life, the month and the day:

    org:acme                 the organisation's spending over its life
    key:YV9lJ8GAVdUR:2026-11 the key's spending in November 2026
    user:YV9lJ8GAVdUR:…      the spending of one end user of the key; `user:org.acme:…` of the organisation
    batch:batch_4f1d…        the spending of all lines of a batch
    session:YV9lJ8GAVdUR:…   the spending of one session of the key, `calls:…` its worker calls (`sessions.py`)

Months and days are in UTC, by the time when the money was reserved. The spending of organisations and keys is counted
in every window, with or without a limit, so that a limit set in the middle of a month applies to all of it. End users
are unlimited in number, so they are counted only where a limit exists. A client's name for an end user may be personal
data, so a scope contains only a digest of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal
from urllib.parse import quote

from gateway.core.access.keys import Allowance, Principal
from gateway.core.money.amounts import NANO_MAX, nano_to_usd
from gateway.core.money.sessions import session_is_past
from gateway.errors import BudgetExceeded, BudgetHeld, Conflict, NotFound

SettledState = Literal["posted", "voided", "uncertain"]
State = Literal["open", "posted", "voided", "uncertain"]
SCOPES_MAX = 16
SCOPE_CHARS_MAX = 1024
SETTLED_KEPT_S = 86_400

_FIXES = {
    "batch": "make a new batch of what is left, with a larger x-baton-max-cost-usd",
    "user": "an operator can raise this end user's budget",
    "key": "an operator can raise it (`baton keys update ID --budget-usd`)",
    "org": "an operator can raise the organisation's budget",
}
HELD_FIX = "requests under way hold the rest; send it again as they end"
WINDOWS = ("life", "month", "day")
USER_DIGEST_CHARS = 32
UNLIMITED = Allowance()
_WINDOW = re.compile(r":(\d{4}-\d{2}(?:-\d{2})?)$")


@dataclass(frozen=True, slots=True)
class Scope:
    """Something whose spending is counted (`core/money/scopes.py` makes the names). `limit_nano` None: no limit."""

    name: str
    limit_nano: int | None


@dataclass(frozen=True, slots=True)
class Hold:
    """Money that is reserved in all scopes at once. `granted_nano` lies between the least and the most that was asked
    for. `room_nano`: what each scope had left beside it then."""

    id: str
    granted_nano: int
    scopes: tuple[Scope, ...]
    room_nano: int = field(default=0, compare=False)


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


def budget_exceeded(scope: Scope, left_nano: int, needed_nano: int | None, held_nano: int = 0) -> BudgetExceeded:
    """The error for a hold that does not fit a scope: it states what is left, what is needed (None: the request's next
    call), what requests under way hold, and what to do. `BudgetHeld` where the money comes free as they end."""
    limit = nano_to_usd(NANO_MAX if scope.limit_nano is None else scope.limit_nano)
    left, wanted = max(0, left_nano), 1 if needed_nano is None else needed_nano
    held = held_nano > 0 and left_nano + held_nano >= wanted
    fix = HELD_FIX if held else _FIXES.get(scope.name.partition(":")[0], "an operator can raise it")
    beside = f", beside ${nano_to_usd(held_nano)} that is held" if held else ""
    what = f"{',' * held} and this request may need ${nano_to_usd(needed_nano or 0)}"
    what = what if needed_nano is not None else ", too little for the request's next call"
    return (BudgetHeld if held else BudgetExceeded)(
        f"The budget of `{scope.name}` has ${nano_to_usd(left)} left of ${limit}{beside}{what}: {fix}.",
        scope=scope.name,
        left_nano=left,
        needed_nano=needed_nano or 0,
    )


def hold_closed(hold_id: str) -> Conflict:
    """The error for an id whose hold has been settled."""
    return Conflict(f"hold `{hold_id}` is settled already; use a new id", code="hold_closed")


def hold_unknown(hold_id: str) -> NotFound:
    """The error for an id without a hold."""
    return NotFound(f"no hold `{hold_id}`: never granted here, or settled more than a day ago", code="hold_not_found")


@lru_cache(maxsize=4096)
def org_scope(name: str) -> str:
    """The life scope of an organisation. The name is quoted, so it cannot collide with another one's window."""
    return f"org:{quote(name, safe='')}"


def key_scope(public_id: str) -> str:
    """The life scope of a key."""
    return f"key:{public_id}"


def key_of(scope: str) -> str | None:
    """The key that a scope, or one of its windows, is the budget of; None: it is no key's."""
    kind, _, rest = scope.partition(":")
    return rest.partition(":")[0] if kind == "key" else None


def user_scope(owner: str, end_user: str | None) -> str:
    """The life scope of one end user. `owner` is a result of `key_scope` or `org_scope`. All requests without an end
    user count as one user."""
    prefix = owner.removeprefix("key:") if owner.startswith("key:") else owner.replace("org:", "org.", 1)
    digest = hashlib.sha256(f"{owner}\0{end_user or ''}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"user:{prefix}:{digest[:USER_DIGEST_CHARS]}"


def windows(scope: str, now: datetime) -> tuple[str, str, str]:
    """A life scope with its windows for the month and the day of `now`."""
    return _windows(scope, _day(now))


def _day(now: datetime) -> str:
    return now.astimezone(UTC).date().isoformat()


def _windows(scope: str, day: str) -> tuple[str, str, str]:
    return scope, f"{scope}:{day[:7]}", f"{scope}:{day}"


def window_of(scope: str) -> str:
    """Which of WINDOWS a scope counts in."""
    match = _WINDOW.search(scope)
    return WINDOWS[0 if match is None else match[1].count("-")]


def scopes_of(who: Principal, end_user: str | None, now: datetime) -> tuple[Scope, ...]:
    """Every scope that a request of `who` is charged to, with its limit; at most twelve."""
    org, key, day = org_scope(who.org), key_scope(who.public_id), _day(now)
    scopes = [
        *_windows_with_limits(org, who.organisation.allowance, day),
        *_windows_with_limits(key, who.allowance, day),
    ]
    for owner, allowance in ((org, who.organisation.per_user), (key, who.per_user)):
        if allowance != UNLIMITED:
            user_windows = _windows_with_limits(user_scope(owner, end_user), allowance, day)
            scopes += [scope for scope in user_windows if scope.limit_nano is not None]
    return tuple(scopes)


def is_past(scope: str, now: datetime) -> bool:
    """Whether a scope is a window or a session that ended more than a day ago, so that nothing will use it again."""
    match = _WINDOW.search(scope)
    if match is None:
        return session_is_past(scope, now)
    utc = now.astimezone(UTC)
    return match[1] < f"{utc:%Y-%m-%d}"[: len(match[1])] and not _is_yesterday(match[1], utc)


def _is_yesterday(window: str, now: datetime) -> bool:
    yesterday = datetime.fromtimestamp(now.timestamp() - 86_400, UTC)
    return window == f"{yesterday:%Y-%m-%d}"[: len(window)]


@lru_cache(maxsize=4096)
def _windows_with_limits(scope: str, allowance: Allowance, day: str) -> tuple[Scope, ...]:
    limits = (allowance.life_nano, allowance.month_nano, allowance.day_nano)
    return tuple(Scope(name, limit) for name, limit in zip(_windows(scope, day), limits, strict=True))
