"""What the routes that change something share: who asks, why, and a body that is an object."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from gateway.api.edge.stack import read_json
from gateway.core.access.audit import Act
from gateway.errors import BadRequest
from gateway.service.admin import limits
from gateway.service.request.auth import Authenticator


async def operator(request: Request, authenticator: Authenticator) -> Act:
    """The admin key that asks, as the audit names it, with the query's `why`. Raises Unauthorized, BadRequest."""
    principal = await authenticator.authenticate(request.headers.get("authorization"), "admin")
    return Act(f"key:{principal.public_id}", limits.why(request.query_params.get("why", "")))


async def asked(request: Request, bytes_max: int, act: Act) -> tuple[dict[str, Any], Act]:
    """The body's fields, `why` taken out of them. Raises BadRequest."""
    body = await read_json(request, bytes_max)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    why = body.pop("why", act.why)
    return body, Act(act.actor, limits.why(why))


def required(body: dict[str, Any], name: str) -> str:
    """Take a text out of the body that must be there. Raises BadRequest."""
    if not isinstance(body.get(name), str):
        raise BadRequest(f"give a `{name}`", param=name, code="missing_required_parameter")
    return str(body.pop(name))


def whole(request: Request, name: str, default: int, most: int) -> int:
    """A whole number of the query, from 1 on. Raises BadRequest."""
    given = request.query_params.get(name) or str(default)
    if not (given.isascii() and given.isdigit() and len(given) < 20 and 1 <= int(given) <= most):
        raise BadRequest(f"`{name}` must be a whole number from 1 to {most}", param=name)
    return int(given)
