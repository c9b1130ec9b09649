"""The one parser of admin requests: every refusal names the field and says what it must be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import Request

from gateway.api.edge.bodies import Operators, by_admin_key, number
from gateway.api.edge.places import RequestPlace, RequestPlaces
from gateway.api.edge.stack import BodyPace
from gateway.core.access.audit import Act
from gateway.errors import BadRequest
from gateway.service.admin.keys import KeyAdmin
from gateway.service.request.auth import Authenticator
from tests.fakes.admin import FakeAdmin
from tests.fakes.store import FakeStore
from tests.kit import TestClock

PEPPERS = {1: b"pepper-for-tests-0123456789"}


async def change(body: Any, fields: Any = None, query: str = "") -> tuple[Act, dict[str, Any], str]:
    """What `Operators.change` reads, and the id of the key that sent it."""
    store, clock = FakeStore(), TestClock()
    row, key = await KeyAdmin(FakeAdmin(store), PEPPERS, clock, {}).create_key("ops", "admin")

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": headers,
        "query_string": query.encode(),
    }
    scope["state"] = {"place": RequestPlace(RequestPlaces(8, int), spends=True), "pace": BodyPace()}
    operators = Operators(by_admin_key(Authenticator(store, PEPPERS, clock)), 1_000)
    act, given = await operators.change(Request(scope, receive), fields)
    return act, given, row.public_id


async def test_the_act_names_the_key_and_the_reason_of_the_body_before_the_querys() -> None:
    act, body, key_id = await change({"a": 1, "why": "ticket 12"}, query="why=other")
    assert (act, body) == (Act(f"key:{key_id}", "ticket 12"), {"a": 1})
    assert (await change({}, query="why=other"))[0].why == "other"


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"size": 1}, "size", "Unknown parameter: 'size'."),
        ({"why": "x"}, "why", "Unknown parameter: 'why'."),  # where no audit would keep it
        ({"percent": True}, "percent", "`percent` must be a whole number"),
        ({"percent": "5"}, "percent", "`percent` must be a whole number"),
        ([], None, "the body must be a JSON object"),
    ],
)
async def test_a_body_with_a_wrong_field_is_refused_by_name(body: Any, param: str | None, said: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await change(body, {"percent": int})
    assert (refused.value.param, refused.value.message) == (param, said)


@pytest.mark.parametrize("text", ["", "-1", "0", "11", "1.0", "1e1", "²", "٣", "9" * 30, " 5"])
def test_a_number_outside_its_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadRequest, match="`limit` must be a whole number from 1 to 10"):
        number(text, "limit", 1, 10)
    assert number("10", "limit", 1, 10) == 10
