"""Sessions: make, show, list, change and kill them, and let requests run in them.

Every gateway reads a session when a request enters it, so a change counts from the next request on. A kill also ends
the requests under way: in this gateway at once, in others within WATCH_S, since each watches the sessions of its own
requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.core.access.audit import Act
from gateway.core.loop.caps import Caps
from gateway.core.money.amounts import nano_to_usd
from gateway.core.money.ledger import Balance
from gateway.core.money.sessions import (
    LIMITS,
    STATES,
    Session,
    SessionRequest,
    checked_id,
    read_limits,
    session_killed,
    with_changes,
)
from gateway.core.openai.shapes import check_names
from gateway.errors import BadRequest, BatonError, MoneyUnavailable, NotFound
from gateway.service.admin import limits
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock
from gateway.service.ports.sessions import Place, SessionStore

log = logging.getLogger("gateway.sessions")
WATCH_S = 0.25
KEPT_DAYS = 90  # after its first use a session is deleted, and its id may be used anew
MICROS_DIGITS_MAX = 17
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Stop = Callable[[BatonError], None]  # ends a request with an error, or its best answer so far
Sleep = Callable[[float], Awaitable[None]]


class Sessions:
    """The use case behind `x-baton-session`, `/v1/sessions`, `baton sessions` and the admin API."""

    def __init__(self, store: SessionStore, budgets: Budgets, clock: Clock) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock
        self._running: dict[Place, set[Stop]] = {}

    # ---------------------------------------------------------------- requests

    async def enter(self, key_id: str, request: SessionRequest) -> Session:
        """The session of a request, which is made where it is new. Raises Forbidden for one that is frozen or killed,
        BudgetExceeded for one that has ended, Conflict for limits that are not its own, Unavailable."""
        now = self._clock.now()
        session, new = await self._store.enter(key_id, request.id, request.limits, now)
        if not new:
            session.check_same(request.limits)
        session.check_open(now)
        return session

    def narrow(self, caps: Caps, session: Session | None) -> Caps:
        """The caps of a request, whose time ends with its session's."""
        return caps if session is None else replace(caps, wall_s=min(caps.wall_s, session.left_s(self._clock.now())))

    def add(self, session: Session, stop: Stop) -> None:
        """Call `stop` when the session is killed, until `remove`."""
        self._running.setdefault((session.key_id, session.id), set()).add(stop)

    def remove(self, session: Session, stop: Stop) -> None:
        """Forget a request of the session."""
        place = (session.key_id, session.id)
        self._running.get(place, set()).discard(stop)
        if not self._running.get(place, True):
            del self._running[place]

    async def left(self, session: Session) -> dict[str, str]:
        """What is left of its limits, as headers of a reply; nothing where the balances are away."""
        try:
            sessions = await self._with_balances([session])
        except MoneyUnavailable:
            return {}
        left = {name: sessions[0][name]["left"] for name in LIMITS}
        return {f"x-baton-session-left-{name}": str(value) for name, value in left.items() if value is not None}

    async def run(self, sleep: Sleep = asyncio.sleep) -> None:
        """Watch for ever whether a session of a request under way was killed elsewhere."""
        while True:
            try:
                await self.watch()
            except BatonError as error:
                log.warning("sessions cannot be watched: %s", error.message)
            except Exception:  # boundary: a kill must work after any surprise
                log.exception("watching sessions met an unexpected error")
            await sleep(WATCH_S)

    async def watch(self) -> None:
        """Stop the requests of sessions that were killed. Raises Unavailable."""
        if self._running:
            for place, state in (await self._store.states(list(self._running))).items():
                if state == "killed":
                    self._stop(place)

    def _stop(self, place: Place) -> None:
        for stop in list(self._running.get(place, ())):
            stop(session_killed(place[1]))

    # ---------------------------------------------------------------- the API

    async def create(self, key_id: str, fields: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Make a session: `id` and limits. Return it, and whether it is new: one with the same limits may exist. Raises
        BadRequest, Conflict, Unavailable."""
        check_names(fields, {"id", *LIMITS})
        if "id" not in fields:
            raise limits.bad("id", "give the id of the session")
        session_id, session_limits = checked_id(fields["id"], "id"), read_limits(fields)
        session, new = await self._store.enter(key_id, session_id, session_limits, self._clock.now())
        if not new:
            session.check_same(session_limits)
        return (await self._with_balances([session]))[0], new

    async def show(self, key_id: str, session_id: str) -> dict[str, Any]:
        """One session with what it spent, holds and has left. Raises NotFound, also for another key's."""
        return (await self._with_balances([_require(await self._store.find(key_id, session_id), session_id)]))[0]

    async def list(self, key_id: str | None, limit: int, before: str | None) -> dict[str, Any]:
        """A page of sessions, newest first: of one key, or of all. `before`: the `next` of the page before. Raises
        BadRequest."""
        page = await self._store.page(key_id, limit, None if before is None else _place(before))
        following = _cursor(page[-1]) if len(page) == limit else None
        return {"object": "list", "data": await self._with_balances(page), "next": following}

    async def change(self, key_id: str, session_id: str, fields: Mapping[str, Any], act: Act) -> dict[str, Any]:
        """Set limits (null lifts one) or the `state`: open, frozen or killed. Killing ends the requests under way and
        is for good. Raises BadRequest, NotFound, Conflict for a killed session, Unavailable."""
        check_names(fields, {"state", *LIMITS})
        if "state" in fields and fields["state"] not in STATES:
            raise limits.bad("state", f"give one of {', '.join(STATES)}")
        session = _require(await self._store.find(key_id, session_id), session_id)
        changes: dict[str, Any] = {name: fields[name] for name in ("state",) if name in fields}
        if any(name in fields for name in LIMITS):
            changes["limits"] = with_changes(session.limits, fields)
        what = {"open": "session.opened", "frozen": "session.frozen", "killed": "session.killed"}
        action = what.get(str(fields.get("state")), "session.changed")
        changed = _require(await self._store.change(key_id, session_id, changes, act, action), session_id)
        if changed.state == "killed":
            self._stop((key_id, session_id))
        return (await self._with_balances([changed]))[0]

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` sessions of long ago; return how many. Raises Unavailable."""
        return await self._store.sweep(self._clock.now() - timedelta(days=KEPT_DAYS), limit)

    async def _with_balances(self, page: Sequence[Session]) -> Sequence[dict[str, Any]]:
        scopes = [scope for session in page for scope in (session.money_scope, session.calls_scope)]
        balances = await self._budgets.balances(scopes) if scopes else {}
        now = self._clock.now()
        return [
            describe(session, balances[session.money_scope], balances[session.calls_scope], now) for session in page
        ]


def describe(session: Session, money: Balance, calls: Balance, now: datetime) -> dict[str, Any]:
    """A session as JSON: of each limit what it allows, what was spent, what is held by requests under way, and what is
    left; null where there is no limit."""
    lasts, passed = session.ends_at - session.started_at, now - session.started_at
    minutes = {"limit": session.limits.minutes, "spent": min(lasts, passed) // timedelta(minutes=1)}
    ended = session.state != "killed" and session.left_s(now) <= 0
    return {
        "object": "session",
        "id": session.id,
        "key": session.key_id,
        "state": "ended" if ended else session.state,
        "started_at": session.started_at.astimezone(UTC).isoformat(),
        "ends_at": session.ends_at.astimezone(UTC).isoformat(),
        "usd": {name: _usd(value) for name, value in _used(session.limits.nano, money).items()},
        "calls": _used(session.limits.calls, calls),
        "minutes": minutes | {"left": max(0, -(-int(session.left_s(now)) // 60))},
    }


def _used(limit: int | None, balance: Balance) -> dict[str, int | None]:
    left = None if limit is None else max(0, limit - balance.posted_nano - balance.held_nano)
    return {"limit": limit, "spent": balance.posted_nano, "held": balance.held_nano, "left": left}


def _usd(nano: int | None) -> str | None:
    return None if nano is None else nano_to_usd(nano)


def _require(session: Session | None, session_id: str) -> Session:
    if session is None:
        raise NotFound(
            f"No session `{session_id[:128]}` of this key; `GET /v1/sessions` lists them.",
            param="id",
            code="session_not_found",
        )
    return session


def _cursor(session: Session) -> str:
    return f"{(session.started_at - EPOCH) // timedelta(microseconds=1)}-{session.id}"


def _place(cursor: str) -> tuple[datetime, str]:
    micros, _, session_id = cursor.partition("-")
    if not (micros.isascii() and micros.isdigit() and len(micros) <= MICROS_DIGITS_MAX and session_id):
        raise BadRequest("`before` must be the `next` of another page", param="before")
    return EPOCH + timedelta(microseconds=int(micros)), session_id
