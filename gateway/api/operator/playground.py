"""The console's playground: one chat request under a data key, from an admin key that may change things."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request, Response

from gateway.api.edge.bodies import Operators, required
from gateway.api.edge.stack import Router
from gateway.core.access.keys import Principal
from gateway.errors import BadRequest, Unauthorized

log = logging.getLogger("baton")
Serve = Callable[[Request, Principal, Any], Awaitable[Response]]
Enter = Callable[[Principal], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True, slots=True)
class PlaygroundApi:
    """What the route needs. `owner`: the principal of a key's id. `enter` counts a request against the limits of its
    key, `serve` answers it."""

    operators: Operators
    owner: Callable[[str], Awaitable[Principal]]
    enter: Enter
    serve: Serve

    def router(self) -> Router:
        """The route."""
        router = Router(prefix="/admin")
        router.add("POST", "/playground", self.ask)
        return router

    async def ask(self, request: Request) -> Response:
        """Answer a chat request under the data key whose id is `key`, with its budgets, limits and log: the other
        fields are those of `/v1/chat/completions`, without `stream`. The header `x-baton-rollout-id` names its
        rollout. The log says who asked."""
        act, body = await self.operators.change(request)
        principal = await self._owner(required(body, "key"))
        if body.get("stream"):
            raise BadRequest("the playground streams nothing; leave `stream` out", param="stream")
        async with self.enter(principal) as entry:
            entry.counts = False  # until it is known what it asks for
            request.state.entry = entry
            reply = await self.serve(request, principal, body)
        log.info("admin %s asked as key %s", act.actor.replace(":", " "), principal.public_id)
        return reply

    async def _owner(self, public_id: str) -> Principal:
        """The principal of a data key. Raises BadRequest, where its own 401 would be about the admin's key."""
        try:
            principal = await self.owner(public_id)
        except Unauthorized as error:
            raise BadRequest(error.message, param="key") from None
        if principal.key_class != "data":
            raise BadRequest("`key` must be the id of a data key", param="key")
        return replace(principal, is_operators=True)  # it is an operator who asks
