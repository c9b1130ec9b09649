"""The routes of OpenAI's Batch API, and the way of a line: the same functions that serve a live request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from gateway.api.edge.bodies import data_key, query_number
from gateway.api.edge.headers import OWN_HEADERS, options_in, take_options
from gateway.api.edge.idempotency import Idempotency
from gateway.api.edge.spec import header_parameters
from gateway.api.edge.stack import Json, Router, never_gone, read_json, reply
from gateway.api.public.chat import Serve
from gateway.core.access.idempotency import IDEMPOTENCY_HEADER
from gateway.core.access.keys import Principal
from gateway.core.log.events import random_hex
from gateway.core.loop.caps import CAP_HEADERS, caps_from_headers
from gateway.core.money.ledger import Scope
from gateway.core.openai.batches.create import parse_batch
from gateway.errors import BatonError
from gateway.service.batches.orders import Orders
from gateway.service.ports.batches import LineReply
from gateway.service.request.auth import Authenticator

PAGE, PAGE_MAX = 20, 100
RETRY_S = 1.0  # where the reply gives no time
RETRIED = (408, 409, 429)  # and every status from 500 on


@dataclass(frozen=True, slots=True)
class BatchesApi:
    """What the routes need. `endpoints`: those that a line may call. `budget_nano_max`: what one batch may cost.
    `begun` is called after a batch was made."""

    orders: Orders
    authenticator: Authenticator
    idempotency: Idempotency
    endpoints: Sequence[str]
    body_bytes_max: int
    budget_nano_max: int
    begun: Callable[[], None]

    def router(self) -> Router:
        """The routes."""
        router = Router(prefix="/v1/batches")
        described = header_parameters(*OWN_HEADERS, IDEMPOTENCY_HEADER, *CAP_HEADERS)
        router.add("POST", "", self.create, openapi_extra=described)
        router.add("GET", "", self.list)
        router.add("GET", "/{batch_id}", self.get)
        router.add("POST", "/{batch_id}/cancel", self.cancel)
        return router

    async def create(self, request: Request) -> Response:
        """Begin a batch over an uploaded file. `x-baton-max-cost-usd` bounds the whole batch; the other options hold
        for each of its lines."""
        principal = await self._who(request)
        body = await read_json(request, self.body_bytes_max, principal.public_id)
        take_options(request, body)
        inner = Request(request.scope, request.receive)  # with the headers that the options became

        async def serve(request: Request) -> Response:
            options = options_in(request.headers)
            caps_from_headers(options)
            order = parse_batch(body, options, self.endpoints, self.budget_nano_max)
            batch = await self.orders.create(principal, order)
            self.begun()
            return Json(batch)

        return await self.idempotency.answer(inner, principal, body, serve)

    async def list(self, request: Request) -> Response:
        """This key's batches, newest first: `limit`, `after` (the id of the last batch of a page)."""
        principal = await self._who(request)
        limit = query_number(request, "limit", PAGE, 1, PAGE_MAX)
        return Json(await self.orders.list(principal, after=request.query_params.get("after") or None, limit=limit))

    async def get(self, request: Request, batch_id: str) -> Response:
        """A batch of this key."""
        return Json(await self.orders.get(await self._who(request), batch_id))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        """Begin no further line of a batch. Those under way end, and the output has what was done."""
        return Json(await self.orders.cancel(await self._who(request), batch_id))

    async def _who(self, request: Request) -> Principal:
        return await data_key(request, self.authenticator)


class LineRequests:
    """Serves lines as requests of their own. `serving`: by path, the function that serves a live request there."""

    def __init__(self, serving: Mapping[str, Serve]) -> None:
        self._serving = serving

    @property
    def endpoints(self) -> Sequence[str]:
        """The paths that a line may call."""
        return tuple(self._serving)

    async def serve(
        self, who: Principal, endpoint: str, body: Any, options: Mapping[str, str], scopes: Sequence[Scope]
    ) -> LineReply:
        """The port LineServer."""
        request_id = f"req_{random_hex()}"
        headers = [(name.encode(), value.encode()) for name, value in options.items()]
        scope = {"type": "http", "method": "POST", "path": endpoint, "query_string": b"", "headers": headers}
        request = Request({**scope, "state": {"request_id": request_id, "scopes": tuple(scopes)}}, never_gone)
        try:
            take_options(request, body)
            inner = Request(request.scope, never_gone)
            response = await self._serving[endpoint](inner, who, body)
        except BatonError as error:
            response = reply(error)
        content = json.loads(bytes(response.body))
        return LineReply(response.status_code, request_id, content, _retry_after_s(response))


def _retry_after_s(response: Response) -> float | None:
    """Seconds after which the request may succeed, or None if it never will."""
    status, headers = response.status_code, response.headers
    if headers.get("x-should-retry") == "false" or (status not in RETRIED and status < 500):
        return None
    return float(headers.get("retry-after-ms", RETRY_S * 1000)) / 1000
