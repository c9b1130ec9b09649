"""The port DriftStore: identities of workers, facts, quarantines, and the questions of probes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, insert, or_, select, true, tuple_, update
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.admin_tables import worker_facts, worker_identities, worker_quarantines
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables import experience, rollouts, steps
from gateway.core.access.audit import Act
from gateway.core.log.events import uuid7
from gateway.core.loop.evidence.credit import RIGHT_MIN
from gateway.core.pool.drift import Drift
from gateway.core.pool.identity import IDENTITIES_MAX, Identity
from gateway.core.pool.release import ReleaseTest
from gateway.service.ports.drift import KnownQuestion, Quarantine

LOCK_KEY = 0x6472696674  # "drift": one gateway at a time changes identities and quarantines
LIST_MAX = 1_000
KEPT = timedelta(days=90)
REFERENCED = ("exact", "numeric", "choice")  # graders whose reference is what a right reply says

_f, _i, _q = worker_facts.c, worker_identities.c, worker_quarantines.c


class PostgresDrift:
    """Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    # ------------------------------------------------------------ identities and facts

    async def meet(self, seen: Sequence[Identity], at: datetime) -> Sequence[Identity]:
        if not seen:
            return []
        changes = []
        async with transaction(self._engine) as connection:
            await _lock(connection)
            for one in (Identity(*(str(clean(part)) for part in each)) for each in seen):
                if await _is_new(connection, one, at):
                    changes.append(one)
                    data = {"model": one.model, "fingerprint": one.fingerprint}
                    await _note(connection, one.worker, one.version, "identity", at, data)
        return changes

    async def identities(self, workers: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        listed = select(worker_identities).where(_i.worker.in_(list(workers))).order_by(_i.first_at.desc())
        async with transaction(self._engine) as connection:
            return [_shown(row) for row in (await connection.execute(listed.limit(LIST_MAX))).mappings()]

    async def flagged(self, flag: Drift, at: datetime) -> None:
        month = f"{at.astimezone(UTC):%Y-%m}"
        subject = json.dumps(["flagged", flag.worker, flag.version, flag.task_type, flag.signal, month])
        rates = {"usual": round(flag.usual, 4), "now": round(flag.now, 4), "results": flag.results}
        data = {"task_type": flag.task_type or None, "signal": flag.signal, **rates}
        async with transaction(self._engine) as connection:
            await _note(connection, flag.worker, flag.version, "flagged", at, data, str(clean(subject)))

    async def facts(self, limit: int) -> Sequence[Mapping[str, Any]]:
        columns = (_f.at, _f.worker, _f.version, _f.what, _f.data)
        listed = select(*columns).order_by(_f.at.desc(), _f.id.desc()).limit(min(limit, LIST_MAX))
        async with transaction(self._engine) as connection:
            return [_shown(row) for row in (await connection.execute(listed)).mappings()]

    # ------------------------------------------------------------ quarantines

    async def put(self, worker: str, version: str, test: ReleaseTest | None, at: datetime, act: Act) -> bool:
        tests = [] if test is None else [test]
        async with transaction(self._engine) as connection:
            await _lock(connection)
            standing = await _standing(connection, worker, version)
            if standing is not None:
                known = {(one.task_type, one.signal) for one in standing.tests}
                fresh = [one for one in tests if (one.task_type, one.signal) not in known]
                if fresh:
                    await _set(connection, standing.id, tests=_stored([*standing.tests, *fresh]))
                return False
            if tests and await _ended_since(connection, worker, version, at):
                return False  # the flag is older than the release
            values = {"worker": worker, "version": version, "at": at, "by": act.actor, "why": str(clean(act.why))}
            new = {**values, "id": uuid7(int(at.timestamp() * 1000)), "tests": _stored(tests), "probes": 0, "nano": 0}
            await connection.execute(insert(worker_quarantines).values(**new, due_at=at, anew=False))
            shown = {"by": act.actor, "why": str(clean(act.why))}
            await _note(connection, worker, version, "quarantined", at, shown)
            after = {"version": version}
            await store_audit.write(connection, act, "worker.quarantined", f"worker:{worker}", None, after)
        return True

    async def release(self, worker: str, version: str, at: datetime, act: Act, *, anew: bool) -> Quarantine | None:
        async with transaction(self._engine) as connection:
            await _lock(connection)
            standing = await _standing(connection, worker, version)
            if standing is None:
                return None
            why = str(clean(act.why))
            await _set(connection, standing.id, ended_at=at, ended_by=act.actor, ended_why=why, anew=anew)
            spent = {"probes": standing.probes, "probes_nano": standing.nano}
            await _note(connection, worker, version, "released", at, {"by": act.actor, "why": why, **spent})
            after = {"version": version, "anew": anew, **spent}
            await store_audit.write(connection, act, "worker.released", f"worker:{worker}", None, after)
            row = (await connection.execute(select(worker_quarantines).where(_q.id == standing.id))).mappings().one()
            return _quarantine(row)

    async def standing(self, since: datetime) -> Sequence[Quarantine]:
        lasting = or_(_q.ended_at.is_(None), _q.ended_at > since)
        listed = select(worker_quarantines).where(lasting).order_by(_q.at, _q.id).limit(LIST_MAX)
        async with transaction(self._engine) as connection:
            return [_quarantine(row) for row in (await connection.execute(listed)).mappings()]

    # ------------------------------------------------------------ probes

    async def questions(
        self, worker: str, version: str, task_type: str, before: datetime, limit: int
    ) -> Sequence[KnownQuestion]:
        e, s, r = experience.c, steps.c, rollouts.c
        of_step = and_(s.rollout_id == e.rollout_id, s.round == e.round, s.step == e.step)
        found = select(s.messages, r.request, r.tags, s.reply, e.success).select_from(
            experience.join(steps, of_step).join(rollouts, r.id == e.rollout_id)
        )
        found = found.where(e.worker == worker, e.worker_version == version, e.at < before)
        found = found.where(e.task_type == task_type if task_type else e.task_type.is_(None))
        whole = (s.task.is_(None), s.status == "done", s.tool_calls.is_(None), r.log_mode == "full")
        found = found.where(*whole, r.parent_id.is_(None), ~r.request.has_key("tools"))
        known = or_(e.success > RIGHT_MIN, func.split_part(r.tags["grader"].astext, "@", 1).in_(REFERENCED))
        async with transaction(self._engine) as connection:
            rows = await connection.execute(found.where(known).order_by(e.at.desc()).limit(limit))
            read = [_question(*row) for row in rows]
        return [question for question in read if question is not None]

    async def lend(self, quarantine_id: str, lease_s: float) -> Quarantine | None:
        due = and_(_q.id == quarantine_id, _q.ended_at.is_(None), _q.due_at <= func.clock_timestamp())
        lent = update(worker_quarantines).where(due).values(due_at=_in(lease_s)).returning(worker_quarantines)
        async with transaction(self._engine) as connection:
            row = (await connection.execute(lent)).mappings().first()
        return None if row is None else _quarantine(row)

    async def probed(self, quarantine_id: str, tests: Sequence[ReleaseTest], nano: int, pause_s: float) -> None:
        async with transaction(self._engine) as connection:
            await _lock(connection)
            stored = select(_q.tests).where(_q.id == quarantine_id, _q.ended_at.is_(None))
            now = await connection.scalar(stored)
            if now is None:
                return
            asked = {(one.task_type, one.signal) for one in tests}
            later = [ReleaseTest.read(one) for one in now]  # a flag may have come meanwhile
            both = [*tests, *(one for one in later if (one.task_type, one.signal) not in asked)]
            counts = {"probes": _q.probes + 1, "nano": _q.nano + nano, "due_at": _in(pause_s)}
            await _set(connection, quarantine_id, tests=_stored(both), **counts)

    async def rest(self, quarantine_id: str, pause_s: float) -> None:
        async with transaction(self._engine) as connection:
            await _set(connection, quarantine_id, due_at=_in(pause_s))

    async def sweep(self, limit: int) -> int:
        old = func.now() - KEPT
        facts = select(_f.id).where(_f.at < old).limit(limit).scalar_subquery()
        ended = select(_q.id).where(_q.ended_at < old).limit(limit).scalar_subquery()
        async with transaction(self._engine) as connection:
            gone = (await connection.execute(delete(worker_facts).where(_f.id.in_(facts)))).rowcount
            return gone + (await connection.execute(delete(worker_quarantines).where(_q.id.in_(ended)))).rowcount


async def _lock(connection: AsyncConnection) -> None:
    await connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))


async def _is_new(connection: AsyncConnection, one: Identity, at: datetime) -> bool:
    """Store an identity, unless its version has too many. Return whether it is new and not the first."""
    same = and_(_i.worker == one.worker, _i.version == one.version)
    if (await connection.execute(update(worker_identities).where(same, _key(one)).values(last_at=at))).rowcount:
        return False
    known = int(await connection.scalar(select(func.count()).select_from(worker_identities).where(same)) or 0)
    if known >= IDENTITIES_MAX:
        return False
    await connection.execute(insert(worker_identities).values(**one._asdict(), first_at=at, last_at=at))
    return known > 0


def _key(one: Identity) -> ColumnElement[bool]:
    return tuple_(_i.model, _i.fingerprint) == (one.model, one.fingerprint)


async def _note(
    connection: AsyncConnection,
    worker: str,
    version: str,
    what: str,
    at: datetime,
    data: Mapping[str, Any],
    subject: str | None = None,
) -> None:
    values = {"worker": worker, "version": version, "what": what, "at": at, "data": clean(dict(data))}
    new = pg.insert(worker_facts).values(**values, subject=subject)
    await connection.execute(new.on_conflict_do_nothing(index_elements=["subject"]))


async def _standing(connection: AsyncConnection, worker: str, version: str) -> Quarantine | None:
    one = and_(_q.worker == worker, _q.version == version, _q.ended_at.is_(None))
    row = (await connection.execute(select(worker_quarantines).where(one))).mappings().first()
    return None if row is None else _quarantine(row)


async def _ended_since(connection: AsyncConnection, worker: str, version: str, at: datetime) -> bool:
    one = select(true()).where(_q.worker == worker, _q.version == version, _q.ended_at >= at)
    return bool(await connection.scalar(one.limit(1)))


async def _set(connection: AsyncConnection, quarantine_id: str, **values: Any) -> None:
    await connection.execute(update(worker_quarantines).where(_q.id == quarantine_id).values(**values))


def _stored(tests: Sequence[ReleaseTest]) -> list[dict[str, Any]]:
    return [clean(test.as_json()) for test in tests]


def _quarantine(row: Mapping[Any, Any]) -> Quarantine:
    plain = {name: row[name] for name in Quarantine.__slots__ if name != "tests"}
    return Quarantine(**plain, tests=tuple(ReleaseTest.read(one) for one in row["tests"]))


def _question(messages: Any, request: Any, tags: Any, reply: Any, success: float) -> KnownQuestion | None:
    """The question that a logged step answers; None for one that is not of text alone, or has no known answer."""
    texts = [message.get("content") for message in messages]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    grader = str(tags.get("grader") or "").partition("@")[0]
    answer = str(tags.get("reference") or "") if grader in REFERENCED else (reply if success > RIGHT_MIN else "")
    params = {name: value for name, value in request.items() if name not in ("model", "messages", "response")}
    return KnownQuestion(messages, params, tags, answer) if answer else None


def _shown(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row as JSON for people; times in ISO 8601."""
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}


def _in(seconds: float) -> ColumnElement[Any]:
    return func.clock_timestamp() + timedelta(seconds=seconds)
