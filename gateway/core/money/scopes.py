"""The scopes in which a request's money is counted: organisation, key and end user, each over its life, the month and
the day. Pure.

    org:acme                 the organisation's spending over its life
    key:YV9lJ8GAVdUR:2026-11 the key's spending in November 2026
    user:YV9lJ8GAVdUR:…      the spending of one end user of the key; `user:org.acme:…` of the organisation

Months and days are in UTC, by the time when the money was reserved. The spending of organisations and keys is counted
in every window, with or without a limit, so that a limit set in the middle of a month applies to all of it. End users
are unlimited in number, so they are counted only where a limit exists. A client's name for an end user may be personal
data, so a scope contains only a digest of it.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from urllib.parse import quote

from gateway.core.access.keys import Allowance, Principal
from gateway.core.money.ledger import Scope

WINDOWS = ("life", "month", "day")
USER_DIGEST_CHARS = 32
_WINDOW = re.compile(r":(\d{4}-\d{2}(?:-\d{2})?)$")


def org_scope(name: str) -> str:
    """The life scope of an organisation. The name is quoted, so it cannot collide with another one's window."""
    return f"org:{quote(name, safe='')}"


def key_scope(public_id: str) -> str:
    """The life scope of a key."""
    return f"key:{public_id}"


def user_scope(owner: str, end_user: str | None) -> str:
    """The life scope of one end user. `owner` is a result of `key_scope` or `org_scope`. All requests without an end
    user count as one user."""
    prefix = owner.removeprefix("key:") if owner.startswith("key:") else owner.replace("org:", "org.", 1)
    digest = hashlib.sha256(f"{owner}\0{end_user or ''}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"user:{prefix}:{digest[:USER_DIGEST_CHARS]}"


def windows(scope: str, now: datetime) -> tuple[str, str, str]:
    """A life scope with its windows for the month and the day of `now`."""
    day = now.astimezone(UTC).date().isoformat()
    return scope, f"{scope}:{day[:7]}", f"{scope}:{day}"


def scopes_of(who: Principal, end_user: str | None, now: datetime) -> tuple[Scope, ...]:
    """Every scope that a request of `who` is charged to, with its limit; at most twelve."""
    org, key = org_scope(who.org), key_scope(who.public_id)
    scopes = [
        *_windows_with_limits(org, who.organisation.allowance, now),
        *_windows_with_limits(key, who.allowance, now),
    ]
    for owner, allowance in ((org, who.organisation.per_user), (key, who.per_user)):
        user_windows = _windows_with_limits(user_scope(owner, end_user), allowance, now)
        scopes += [scope for scope in user_windows if scope.limit_nano is not None]
    return tuple(scopes)


def is_past(scope: str, now: datetime) -> bool:
    """Whether a scope is a window that ended more than a day ago, so that nothing will use it again."""
    match = _WINDOW.search(scope)
    if match is None:
        return False
    utc = now.astimezone(UTC)
    return match[1] < f"{utc:%Y-%m-%d}"[: len(match[1])] and not _is_yesterday(match[1], utc)


def _is_yesterday(window: str, now: datetime) -> bool:
    yesterday = datetime.fromtimestamp(now.timestamp() - 86_400, UTC)
    return window == f"{yesterday:%Y-%m-%d}"[: len(window)]


def _windows_with_limits(scope: str, allowance: Allowance, now: datetime) -> list[Scope]:
    limits = (allowance.life_nano, allowance.month_nano, allowance.day_nano)
    return [Scope(name, limit) for name, limit in zip(windows(scope, now), limits, strict=True)]
