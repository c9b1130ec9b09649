"""The search of rollouts: one page at a time, newest first, and bounded.

Key, end user, time and place in the list use indexes. Every other filter is checked on the requests that these leave,
newest first, and at most SCANNED_MAX of them for one page: a search for what hardly ever happens ends early, with a
cursor to go on from. A search for text reads whole requests, so it looks at fewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Select,
    String,
    and_,
    cast,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
)
from sqlalchemy.dialects.postgresql import JSONPATH
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres import rows
from gateway.adapters.postgres.admin_tables import keys
from gateway.adapters.postgres.reports.books import id_of
from gateway.adapters.postgres.sources import is_heard
from gateway.adapters.postgres.tables import outcomes, rollouts, steps
from gateway.errors import BadRequest
from gateway.service.ports.admin import RolloutsQuery

SCANNED_MAX = 20_000
TEXT_COST = 10  # a request whose text is read counts as so many
CURSOR = re.compile(r"(\d{1,17})\.([0-9a-f-]{36})")
QUESTION, REPLY = "$.messages[*].content", "$.choices[*].message.content"
FLAGS = ("fallback", "capped")
READ = ("tags", "policy_assigned", "request", "reply")  # columns that filters need beside those shown


async def page(connection: AsyncConnection, query: RolloutsQuery, scanned_max: int = SCANNED_MAX) -> dict[str, Any]:
    """A page of rollouts: {data, next, scanned_to}. `next`: where the page after this one begins, None at the end.
    `scanned_to`: the time back to which was looked, where the limit of one page ended the search. Raises BadRequest."""
    most = scanned_max if query.text is None else max(scanned_max // TEXT_COST, 1)
    scanned = await _last_scanned(connection, query, most)
    records = (await connection.execute(page_query(query, most, scanned))).mappings().all()
    shown = records[: query.limit]
    last = shown[-1] if len(records) > len(shown) else None
    limit = None if last is not None else scanned
    called = await _workers_of(connection, [row["id"] for row in shown])
    return {
        "object": "list",
        "data": [_line(row, called.get(row["id"], [])) for row in shown],
        "next": _cursor(last) if last is not None else limit and _cursor(limit),
        "scanned_to": limit and limit["created_at"].isoformat(),
    }


def page_query(query: RolloutsQuery, scanned_max: int, scanned: Mapping[Any, Any] | None = None) -> Select[Any]:
    """The rows of a page, and one more where there is one. `scanned`: the last request that it looks at, if there may
    be more behind it."""
    c = rollouts.c
    shown = dict.fromkeys((*rows.SUMMARY, "key_id", "error", *READ))
    near = _newest(query, *(c[name] for name in shown)).limit(scanned_max).subquery("near")
    named = near.outerjoin(keys, keys.c.public_id == near.c.key_id)
    columns = (near.c[name] for name in shown if name not in READ)
    statement = (
        select(*columns, keys.c.name.label("key_name")).select_from(named).where(*_filters(query, near, scanned))
    )
    return statement.order_by(near.c.created_at.desc(), near.c.id.desc()).limit(query.limit + 1)


async def _last_scanned(connection: AsyncConnection, query: RolloutsQuery, most: int) -> Mapping[Any, Any] | None:
    """The last request that a page looked at, if there may be more behind it."""
    c = rollouts.c
    last = _newest(query, c.created_at, c.id).offset(most - 1).limit(1)
    row: Mapping[Any, Any] | None = (await connection.execute(last)).mappings().one_or_none()
    return row


def _newest(query: RolloutsQuery, *columns: ColumnElement[Any]) -> Select[Any]:
    """Top-level requests by the filters that have an index, newest first."""
    c = rollouts.c
    statement = select(*columns).where(c.depth == 0)
    if query.before is not None:
        statement = statement.where(tuple_(c.created_at, c.id) < _place(query.before))
    if query.key is not None:
        statement = statement.where(c.key_id == rows.clean(query.key))
    if query.user is not None:
        statement = statement.where(c.end_user == rows.clean(query.user))
    if query.since is not None:
        statement = statement.where(c.created_at >= query.since)
    if query.until is not None:
        statement = statement.where(c.created_at < query.until)
    return statement.order_by(c.created_at.desc(), c.id.desc())


def _filters(
    query: RolloutsQuery, near: FromClause, scanned: Mapping[Any, Any] | None
) -> Iterator[ColumnElement[bool]]:
    """The conditions that have no index."""
    c = near.c
    if query.policy is not None:
        policy = rows.clean(query.policy)
        names = (c.policy_used, c.policy_requested, c.policy_version, c.policy_assigned)
        yield or_(*(name == policy for name in names))
    if query.status is not None:
        yield c[query.status].is_not(None) if query.status in FLAGS else c.status == query.status
    if query.fault is not None:
        fault = rows.clean(query.fault)
        yield or_(c.fallback == fault, c.capped == fault, c.error["code"].astext == fault)
    if query.worker is not None:
        step = exists().where(steps.c.rollout_id == c.id, steps.c.worker == rows.clean(query.worker))
        yield step if scanned is None else step.where(steps.c.rollout_id >= id_of(scanned["created_at"]))
    if query.cost_min_nano is not None:
        yield c.cost_nano >= query.cost_min_nano
    if query.cost_max_nano is not None:
        yield c.cost_nano <= query.cost_max_nano
    if query.tag is not None:
        name, value = rows.clean(query.tag)
        yield c.tags.has_key(name) if value is None else c.tags.contains({name: value})
    if query.text is not None:
        yield _says(query.text, c)
    yield from _judged(query, c.id)


def _judged(query: RolloutsQuery, rollout_id: ColumnElement[Any]) -> Iterator[ColumnElement[bool]]:
    """The conditions on judgements of the whole request, on a scale from 0 to 1."""
    value = outcomes.c.value
    of = and_(outcomes.c.rollout_id == rollout_id, outcomes.c.step.is_(None), value.is_not(None))
    of = and_(of, is_heard(outcomes.c.source))
    if query.judged is not None:
        yield exists().where(of) if query.judged else ~exists().where(of)
    if query.outcome_min is not None:
        yield exists().where(of, value >= query.outcome_min)
    if query.outcome_max is not None:
        yield exists().where(of, value <= query.outcome_max)


def _says(text: str, c: Any) -> ColumnElement[bool]:
    """Whether question or reply contain a text, in any case of letters. The text is compared as JSON writes it."""
    written = json.dumps(rows.clean(text), ensure_ascii=False)[1:-1]
    contents = ((c.request, QUESTION), (c.reply, REPLY))
    texts = [cast(func.jsonb_path_query_array(body, cast(path, JSONPATH)), String) for body, path in contents]
    return or_(*(content.icontains(written, autoescape=True) for content in texts))


def _cursor(row: Mapping[Any, Any]) -> str:
    return f"{(row['created_at'] - rows.EPOCH) // timedelta(microseconds=1)}.{row['id']}"


def _place(cursor: str) -> Any:
    """Parse `before`: microseconds and id of the last row seen; the id orders rows of one microsecond."""
    match = CURSOR.fullmatch(cursor)
    try:
        after = str(UUID(match[2])) if match else None
    except ValueError:
        after = None
    if match is None or after is None:
        raise BadRequest("`before` must be the `next` of another page", param="before")
    at = rows.EPOCH + timedelta(microseconds=int(match[1]))
    return tuple_(literal(at, rollouts.c.created_at.type), literal(after, rollouts.c.id.type))


async def _workers_of(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, list[str]]:
    """Map each rollout to the workers of its steps, in order."""
    query = select(steps.c.rollout_id, steps.c.worker).where(steps.c.rollout_id.in_(ids))
    called: dict[str, list[str]] = {}
    for rollout_id, worker in await connection.execute(query.order_by(steps.c.round, steps.c.step)):
        called.setdefault(rollout_id, []).append(worker)
    return called


def _line(row: Mapping[Any, Any], workers: list[str]) -> dict[str, Any]:
    """One line of the list: client, worker, cost; never a prompt or a reply."""
    ended = row["finished_at"]
    took_ms = None if ended is None else (ended - row["created_at"]) / timedelta(milliseconds=1)
    who = {name: row[name] for name in ("key_id", "key_name")}
    code = (row["error"] or {}).get("code")
    return rows.summary(row) | who | {"workers": workers, "latency_ms": took_ms, "error_code": code}
