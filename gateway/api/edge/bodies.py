"""What requests say: whose key they have; of the admin API who acts and why, and the fields of the body; numbers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from gateway.api.edge.headers import header_map
from gateway.api.edge.stack import read_json
from gateway.core.access.audit import Act
from gateway.core.access.keys import KeyClass, Principal, may_change
from gateway.core.openai.shapes import check_names, missing_parameter, parse_digits
from gateway.errors import BadRequest, Forbidden
from gateway.service.admin import limits
from gateway.service.request.auth import Authenticator

KINDS: Mapping[type, str] = {str: "a string", int: "a whole number", bool: "true or false", dict: "an object"}
Fields = Mapping[str, type]  # the fields a body may have; `object` where the use case checks the type


Actor = Callable[[Request], Awaitable[Act]]  # who acts, as the audit names them, and their role
READS = ("GET", "HEAD")


def by_admin_key(authenticator: Authenticator) -> Actor:
    """The admin key of the request, as `key:ID`, with its role. The actor raises Unauthorized for any other key."""

    async def actor(request: Request) -> Act:
        principal = await _owner_of(request, authenticator, "admin")
        return Act(f"key:{principal.public_id}", role=principal.role)

    return actor


async def data_key(request: Request, authenticator: Authenticator, bearer: str | None = None) -> Principal:
    """The data key of a request. `bearer`: where it is not in `Authorization`. Raises Unauthorized, Unavailable."""
    return await _owner_of(request, authenticator, "data", bearer)


async def _owner_of(
    request: Request, authenticator: Authenticator, key_class: KeyClass, bearer: str | None = None
) -> Principal:
    """The key of a request, which its line in the access log names."""
    header = bearer or header_map(request.scope).get("authorization")
    principal = await authenticator.authenticate(header, key_class)
    request.scope["state"]["key_id"] = principal.public_id
    return principal


@dataclass(frozen=True, slots=True)
class Operators:
    """Reads every request of the admin API. `actor` refuses requests without the right key; a role that may only read
    is refused every method but GET and HEAD, whatever the route."""

    actor: Actor
    body_bytes_max: int

    async def act(self, request: Request) -> Act:
        """Who acts, and the `why` of the query. Raises Unauthorized, Forbidden, BadRequest."""
        act = await self.actor(request)
        if request.method not in READS and not may_change(act.role):
            raise Forbidden(f"keys of role `{act.role}` may only read", code="role_forbids")
        return replace(act, why=limits.why(request.query_params.get("why", "")))

    async def change(self, request: Request, fields: Fields | None = None) -> tuple[Act, dict[str, Any]]:
        """The act, with the body's `why` where it has one, and the other fields of the body.

        `fields` None: the use case checks names and types. Raises Unauthorized, Forbidden, TooLarge, and
        BadRequest naming the first field that is unknown or has the wrong type.
        """
        act = await self.act(request)
        body = await read_json(request, self.body_bytes_max, act.actor)
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object", code="invalid_type")
        if fields is not None:
            _check(body, fields)
        if "why" in body:
            act = replace(act, why=limits.why(body.pop("why")))
        return act, body


def required(body: dict[str, Any], name: str, kind: type = str) -> Any:
    """Remove a field from the body and return it. Raises BadRequest where it is missing or has the wrong type."""
    if name not in body:
        raise missing_parameter(name)
    _check({name: body[name]}, {name: kind})
    return body.pop(name)


def _check(body: Mapping[str, Any], fields: Fields) -> None:
    for name, value in check_names(body, fields).items():
        kind = fields[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BadRequest(f"`{name}` must be {KINDS[kind]}", param=name, code="invalid_type")


def number(text: str, name: str, least: int, most: int) -> int:
    """The whole number that a header or a query parameter gives. Raises BadRequest naming it."""
    value = parse_digits(text)
    if value is None or not least <= value <= most:
        raise BadRequest(f"`{name}` must be a whole number from {least} to {most}", param=name)
    return value


def query_number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """`number` of the query; `default` where it is absent or empty."""
    return number(request.query_params.get(name) or str(default), name, least, most)
