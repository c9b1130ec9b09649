"""Which scopes a request's money is counted in: organisation, key and end user, each in all, by month and by day. Pure.

    org:acme                 all that the organisation ever spent
    key:YV9lJ8GAVdUR:2026-11 what the key spent in November 2026
    user:YV9lJ8GAVdUR:…      what one end user of the key spent; `user:org.acme:…` of the organisation

Months and days are UTC's, and those in which the money was reserved. Organisations and keys are counted in every
window, limited or not, so that a limit set in the middle of a month holds for the whole of it; end users, of whom
there is no end, only where something limits them. What a client calls an end user may be an address: a scope carries
a digest of it.
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
    """The scope of an organisation in all; whatever its name, it cannot be taken for another's window."""
    return f"org:{quote(name, safe='')}"


def key_scope(public_id: str) -> str:
    """The scope of a key in all."""
    return f"key:{public_id}"


def user_scope(owner: str, end_user: str | None) -> str:
    """The scope of one end user in all; `owner` as `key_scope` or `org_scope` give it. Who is not named is one user."""
    whose = owner.removeprefix("key:") if owner.startswith("key:") else owner.replace("org:", "org.", 1)
    digest = hashlib.sha256(f"{owner}\0{end_user or ''}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"user:{whose}:{digest[:USER_DIGEST_CHARS]}"


def windows(scope: str, now: datetime) -> tuple[str, str, str]:
    """The scope in all, in the month and on the day of `now`."""
    day = now.astimezone(UTC).date().isoformat()
    return scope, f"{scope}:{day[:7]}", f"{scope}:{day}"


def scopes_of(who: Principal, end_user: str | None, now: datetime) -> tuple[Scope, ...]:
    """Every scope that a request of `who` draws on, at most twelve, with its limit."""
    org, key = org_scope(who.org), key_scope(who.public_id)
    found = [*_limited(org, who.organisation.allowance, now), *_limited(key, who.allowance, now)]
    for owner, each in ((org, who.organisation.per_user), (key, who.per_user)):
        user = _limited(user_scope(owner, end_user), each, now)
        found += [scope for scope in user if scope.limit_nano is not None]
    return tuple(found)


def is_past(scope: str, now: datetime) -> bool:
    """Whether it is the scope of a month or day that was over a day ago: nothing will ask for it again."""
    match = _WINDOW.search(scope)
    if match is None:
        return False
    utc = now.astimezone(UTC)
    return match[1] < f"{utc:%Y-%m-%d}"[: len(match[1])] and not _is_yesterday(match[1], utc)


def _is_yesterday(window: str, now: datetime) -> bool:
    yesterday = datetime.fromtimestamp(now.timestamp() - 86_400, UTC)
    return window == f"{yesterday:%Y-%m-%d}"[: len(window)]


def _limited(scope: str, allowance: Allowance, now: datetime) -> list[Scope]:
    limits = (allowance.life_nano, allowance.month_nano, allowance.day_nano)
    return [Scope(name, limit) for name, limit in zip(windows(scope, now), limits, strict=True)]
