"""Sessions: budgets of a run that spans many requests of one key, in dollars, worker calls and minutes. Pure.

A client names a session in `x-baton-session`. Its limits are set at its first use, or before by the API. Dollars and
calls are two scopes of the ledger (`core/money/ledger.py`), reserved before a request runs: `session:…` counts
nano-dollars, `calls:…` counts worker calls. Minutes run from then on; no request of a session outlives them.

A session ends after its minutes, at the latest after SESSION_DAYS, so that its balances need not be kept for ever. The
day of its first use is part of the names of its scopes and says when they are past.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from gateway.core.money.amounts import NANO_MAX, nano_to_usd, usd_to_nano
from gateway.errors import BadRequest, BudgetExceeded, BudgetHeld, Conflict, Forbidden

SESSION_HEADER = "x-baton-session"
SESSION_DAYS = 31
MINUTES_MAX = SESSION_DAYS * 24 * 60
CALLS_MAX = 1_000_000_000
DIGEST_CHARS = 32
LIMIT_HEADERS = {
    "x-baton-session-usd": "usd",
    "x-baton-session-calls": "calls",
    "x-baton-session-minutes": "minutes",
}
SESSION_HEADERS = (SESSION_HEADER, *LIMIT_HEADERS)
LIMITS = tuple(LIMIT_HEADERS.values())
SessionState = Literal["open", "frozen", "killed"]
STATES = ("open", "frozen", "killed")
FIX = "To go on, {}."
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_PAST = re.compile(r"(?:session|calls):[^:]+:(\d{8}):")


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The most that a session may use. None: not limited, but for the minutes, which are then MINUTES_MAX."""

    nano: int | None = None
    calls: int | None = None
    minutes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """As fields of the API: dollars as exact text."""
        return {
            "usd": None if self.nano is None else nano_to_usd(self.nano),
            "calls": self.calls,
            "minutes": self.minutes,
        }


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a request says of its session: the id, and limits for its first use."""

    id: str
    limits: SessionLimits = SessionLimits()


@dataclass(frozen=True, slots=True)
class Session:
    """One session of a key as stored. `first`: the limits of its first use, which later requests may repeat."""

    key_id: str
    id: str
    started_at: datetime
    limits: SessionLimits = SessionLimits()
    first: SessionLimits = SessionLimits()
    state: SessionState = "open"

    @property
    def ends_at(self) -> datetime:
        """When its minutes are over."""
        return self.started_at + timedelta(minutes=MINUTES_MAX if self.limits.minutes is None else self.limits.minutes)

    @property
    def money_scope(self) -> str:
        """The scope of its nano-dollars."""
        return self._scope("session")

    @property
    def calls_scope(self) -> str:
        """The scope of its worker calls, an amount of 1 each."""
        return self._scope("calls")

    def left_s(self, now: datetime) -> float:
        """Seconds until it ends; 0 or less once it has ended."""
        return (self.ends_at - now).total_seconds()

    def check_open(self, now: datetime) -> None:
        """Raises Forbidden unless a request may run in it now."""
        if self.state == "killed":
            raise session_killed(self.id)
        if self.state == "frozen":
            raise Forbidden(
                f"Session `{self.id}` is frozen: an operator can thaw it (`baton sessions thaw`).",
                param=SESSION_HEADER,
                code="session_frozen",
            )
        if self.left_s(now) <= 0:
            raise self.ended()

    def ended(self) -> BudgetExceeded:
        """The error of a request after its minutes."""
        at = f"{self.ends_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        fix = "an operator can raise its minutes (`baton sessions raise`), or send a new id"
        message = f"Session `{self.id}` has 0 minutes left: it ended at {at}. {FIX.format(fix)}"
        return BudgetExceeded(message, scope=self.money_scope, param=SESSION_HEADER)

    def check_same(self, limits: SessionLimits) -> None:
        """Raises Conflict, which names the header, for a limit that is neither the session's nor that of its first
        use."""
        request, now, first = limits.as_json(), self.limits.as_json(), self.first.as_json()
        for header, name in LIMIT_HEADERS.items():
            if request[name] is not None and request[name] not in (now[name], first[name]):
                limit = "no limit" if now[name] is None else f"a limit of {now[name]}"
                raise Conflict(
                    f"Session `{self.id}` exists with {limit} on {name}: leave `{header}` out, or send a new id; an "
                    "operator can change it (`baton sessions raise`).",
                    param=header,
                    code="session_limits_differ",
                )

    def _scope(self, prefix: str) -> str:
        started = self.started_at.astimezone(UTC)
        digest = hashlib.sha256(f"{self.key_id}\0{self.id}\0{started.isoformat()}".encode()).hexdigest()
        return f"{prefix}:{self.key_id}:{started:%Y%m%d}:{digest[:DIGEST_CHARS]}"


def session_killed(session_id: str) -> Forbidden:
    """The error of a request whose session was killed, before it or under it."""
    return Forbidden(
        f"Session `{session_id}` was killed: send a new id to go on.", param=SESSION_HEADER, code="session_killed"
    )


def session_spent(
    session: Session, scope: str, left: int, needed: int | None = None, *, held: bool = False
) -> BudgetExceeded:
    """The error of a request that a session has too little left for. `scope`: its money's or its calls'; `left` and
    `needed` in the scope's unit; `needed` None: the request's next call. `held`: its other requests hold the rest."""
    left = max(0, left)
    of_calls = scope == session.calls_scope
    raised = (
        f"an operator can raise its {'calls' if of_calls else 'dollars'} (`baton sessions raise`), or send a new id"
    )
    fix = "send it again once the session's other requests end, which hold the rest" if held else raised
    have = f"${nano_to_usd(left)} left of ${nano_to_usd(session.limits.nano or 0)}"
    have = f"{left} of {session.limits.calls} calls left" if of_calls else have
    what = "the request's next call needs more" if needed is None else f"this request may need {_shown(scope, needed)}"
    return (BudgetHeld if held else BudgetExceeded)(
        f"Session `{session.id}` has {have}, and {what}. {FIX.format(fix)}",
        scope=scope,
        left_nano=left,
        needed_nano=needed or 0,
        param=SESSION_HEADER,
    )


def _shown(scope: str, amount: int) -> str:
    return str(amount) if scope.startswith("calls:") else f"${nano_to_usd(amount)}"


def session_from_headers(headers: Mapping[str, str]) -> SessionRequest | None:
    """The session that a request names. Raises BadRequest, which names the header."""
    limits = {name: headers[header] for header, name in LIMIT_HEADERS.items() if header in headers}
    session_id = headers.get(SESSION_HEADER)
    if session_id is None:
        if limits:
            header = next(header for header, name in LIMIT_HEADERS.items() if name in limits)
            raise BadRequest(f"`{header}` needs `{SESSION_HEADER}`: the id of the session", param=header)
        return None
    values: dict[str, Any] = {}
    for name, text in limits.items():
        values[name] = text if name == "usd" else _integer(text)
    fields = {name: header for header, name in LIMIT_HEADERS.items()}
    return SessionRequest(checked_id(session_id, SESSION_HEADER), read_limits(values, fields))


def checked_id(session_id: Any, field: str) -> str:
    """The id of a session. Raises BadRequest, which names the field."""
    if not isinstance(session_id, str) or not _ID.fullmatch(session_id):
        raise BadRequest(
            f"`{field}` must have 1 to 128 letters, digits, `.`, `_`, `:` or `-`, a letter or digit first",
            param=field,
            code="bad_session",
        )
    return session_id


def read_limits(values: Mapping[str, Any], fields: Mapping[str, str] | None = None) -> SessionLimits:
    """Limits from those of LIMITS that are given; None: no limit. `fields`: what to call each in an error. Raises
    BadRequest."""
    names = fields or {name: name for name in LIMITS}
    nano = None if values.get("usd") is None else _nano(values["usd"], names["usd"])
    calls = _count(values.get("calls"), CALLS_MAX, names["calls"])
    return SessionLimits(nano, calls, _count(values.get("minutes"), MINUTES_MAX, names["minutes"]))


def with_changes(limits: SessionLimits, values: Mapping[str, Any]) -> SessionLimits:
    """The limits with those of `values` instead. Raises BadRequest."""
    changed, names = read_limits(values), {"usd": "nano", "calls": "calls", "minutes": "minutes"}
    return replace(limits, **{names[name]: getattr(changed, names[name]) for name in LIMITS if name in values})


def session_is_past(scope: str, now: datetime) -> bool:
    """Whether a scope is one of a session that has ended for good, so that nothing will use it again."""
    match = _PAST.match(scope)
    if match is None:
        return False
    started = date(int(match[1][:4]), int(match[1][4:6]), int(match[1][6:]))
    return now.astimezone(UTC).date() > started + timedelta(days=SESSION_DAYS + 2)


def _nano(usd: Any, field: str) -> int:
    try:
        if isinstance(usd, bool) or not isinstance(usd, str | int | float):
            raise ValueError("not a number")
        nano = usd_to_nano(str(usd))
    except ValueError:
        nano = 0
    if not 0 < nano <= NANO_MAX:
        raise BadRequest(f"`{field}`: send dollars above 0, such as 2 or 0.50", param=field)
    return nano


def _count(value: Any, most: int, field: str) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise BadRequest(f"`{field}` must be a whole number from 1 to {most:,}", param=field)
    return value


def _integer(text: str) -> Any:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text
