"""Admin routes of rollouts: the search, its export as JSON lines, and one rollout of any key."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from gateway.api.edge.bodies import Operators, number
from gateway.api.edge.stack import Router
from gateway.api.operator.pages import HEADERS, parameters, private
from gateway.core.access.audit import Act
from gateway.errors import BadRequest, NotFound
from gateway.service.admin import limits
from gateway.service.admin.explain import Explain
from gateway.service.ports.admin import STATUSES, Reports, RolloutsQuery

log = logging.getLogger("baton")
PAGE_DEFAULT, PAGE_MAX = 50, 200
EXPORT_LINES_MAX = 10_000
TEXT_CHARS_MIN = 3
OUTCOMES = {"any": True, "none": False}
TEXTS = ("before", "key", "policy", "worker", "fault", "user")
NUMBERS = ("outcome_min", "outcome_max", "cost_min_usd", "cost_max_usd")
LINES: Mapping[str, Any] = {"responses": {"200": {"content": {"application/x-ndjson": {}}}}}
FILTERS = (*TEXTS, *NUMBERS, "status", "outcome", "since", "until", "tag", "text")


@dataclass(frozen=True, slots=True)
class RolloutsApi:
    """What the routes need."""

    reports: Reports
    explaining: Explain
    operators: Operators

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/admin/rollouts")
        router.add("GET", "", self.list)
        router.add("GET", "/export", self.export, openapi_extra=dict(LINES))
        router.add("GET", "/{rollout_id}", self.show)
        router.add("GET", "/{rollout_id}/explain", self.explain)
        return router

    async def list(self, request: Request) -> Response:
        """One page of the requests of all keys, newest first: `limit`, `before` (the `next` of the last page), and
        filters: `key`, `policy` (asked for, in use, or a version), `status` (done, failed, aborted, fallback, capped),
        `worker`, `fault` (cause of a fallback, a cap, or an error's code), `outcome` (any, none), `outcome_min`,
        `outcome_max`, `cost_min_usd`, `cost_max_usd`, `since`, `until` (ISO 8601), `user` (the end user), `tag` (a name
        of `metadata`, or `name:value`), `text` (in the messages or the reply). A page looks at 20,000 requests at most,
        with `text` at 2,000; `scanned_to` is the time back to which it looked where that ended it, and `next` goes
        on."""
        await self.operators.act(request)
        return private(await self.reports.rollouts_page(read_query(request)))

    async def export(self, request: Request) -> Response:
        """What the list with the same filters shows, as JSON lines, newest first: 10,000 at most. Where there may be
        more, the last line is `{"next": …}`, which is the `before` of another export. The log says who took it."""
        act = await self.operators.act(request)
        query = replace(read_query(request), limit=PAGE_MAX)
        first = await self.reports.rollouts_page(query)
        headers = {**HEADERS, "content-disposition": 'attachment; filename="rollouts.jsonl"'}
        return StreamingResponse(self._lines(query, first, act), media_type="application/x-ndjson", headers=headers)

    async def _lines(self, query: RolloutsQuery, page: Mapping[str, Any], act: Act) -> AsyncIterator[str]:
        count = 0
        while True:
            count += len(page["data"])
            yield "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in page["data"])
            if page["next"] is None or count >= EXPORT_LINES_MAX or page["scanned_to"] is not None:
                break
            page = await self.reports.rollouts_page(replace(query, before=page["next"]))
        if page["next"] is not None:
            yield json.dumps({"next": page["next"]}) + "\n"
        log.info("admin %s exported %d rollouts", act.actor.replace(":", " "), count)

    async def show(self, request: Request, rollout_id: str) -> Response:
        """The whole tree of any key's rollout, by rollout or completion id. The log says who read it."""
        return private(await self._tree(request, rollout_id))

    async def explain(self, request: Request, rollout_id: str) -> Response:
        """Why any key's request went where it went, by rollout or completion id: see docs/explain.md. The log says who
        read it."""
        return private(await self.explaining.for_operator(await self._tree(request, rollout_id)))

    async def _tree(self, request: Request, rollout_id: str) -> Mapping[str, Any]:
        act = await self.operators.act(request)
        tree = await self.reports.rollout_any(rollout_id)
        if tree is None:
            raise NotFound(f"no rollout `{rollout_id[:64]}`", param="rollout_id")
        log.info("admin %s read rollout %s of key %s", act.actor.replace(":", " "), tree["id"], tree["key_id"])
        return tree


def read_query(request: Request) -> RolloutsQuery:
    """The search that the query of a request describes. Raises BadRequest, which names the parameter."""
    query = parameters(request, "limit", *FILTERS)

    def read(name: str, reader: Callable[[str, str], Any]) -> Any:
        return reader(name, query[name]) if name in query else None

    return RolloutsQuery(
        limit=number(query.get("limit", str(PAGE_DEFAULT)), "limit", 1, PAGE_MAX),
        status=read("status", _status),
        judged=read("outcome", _outcome),
        outcome_min=read("outcome_min", _share),
        outcome_max=read("outcome_max", _share),
        cost_min_nano=read("cost_min_usd", limits.nano),
        cost_max_nano=read("cost_max_usd", limits.nano),
        since=read("since", _time),
        until=read("until", _time),
        tag=read("tag", _tag),
        text=read("text", _text),
        **{name: query.get(name) for name in TEXTS},
    )


def _status(name: str, value: str) -> str:
    if value not in STATUSES:
        raise BadRequest(f"`{name}` must be one of {', '.join(STATUSES)}", param=name)
    return value


def _outcome(name: str, value: str) -> bool:
    if value not in OUTCOMES:
        raise BadRequest(f"`{name}` must be any or none", param=name)
    return OUTCOMES[value]


def _share(name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise BadRequest(f"`{name}` must be a number from 0 to 1", param=name)
    return share


def _time(name: str, value: str) -> datetime:
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        raise BadRequest(f"`{name}` must be a time such as 2026-11-22T18:00:00Z", param=name) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _tag(_: str, value: str) -> tuple[str, str | None]:
    tag, colon, of = value.partition(":")
    return tag, of if colon else None


def _text(name: str, value: str) -> str:
    if len(value) < TEXT_CHARS_MIN:
        raise BadRequest(f"`{name}` needs {TEXT_CHARS_MIN} characters", param=name)
    return value
