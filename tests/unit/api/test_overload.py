"""The edge under more than it may serve: refused at once, before a body is read; what is free goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from gateway.api.edge.places import LARGE_BODY_BYTES, RequestPlace, RequestPlaces
from gateway.api.edge.stack import Edge, read_json, reply
from gateway.errors import BatonError, Unavailable

SPENDING_MAX = 8


class Held:
    """An application whose requests wait until they are let go, and the edge in front of it."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.served = self.bodies = 0
        self.abandoned = 0
        self.edge = Edge(self.app, SPENDING_MAX, lambda: self.abandoned)
        self.tasks: list[asyncio.Task[tuple[int, dict[bytes, bytes]]]] = []

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            try:
                await read_json(Request(scope, receive), 1_000, "k")
            except BatonError as error:
                await reply(error)(scope, receive, send)
                return
        self.served += 1
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, method: str, path: str) -> tuple[int, dict[bytes, bytes]]:
        """Status and headers."""
        sent: list[Message] = []

        async def receive() -> Message:
            self.bodies += 1
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        await self.edge(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"])

    async def begin(self, n: int, method: str = "POST", path: str = "/v1/chat/completions") -> None:
        self.tasks += [asyncio.create_task(self.ask(method, path)) for _ in range(n)]
        await settled()


async def settled() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_spending_requests_above_the_bound_are_refused_unread() -> None:
    held = Held()
    await held.begin(SPENDING_MAX)
    status, headers = await held.ask("POST", "/v1/responses")
    assert status == 503
    assert headers[b"retry-after"] == b"1"
    assert b"x-request-id" in headers
    assert (held.served, held.bodies) == (SPENDING_MAX, SPENDING_MAX)
    held.go.set()
    assert {status for status, _ in await asyncio.gather(*held.tasks)} == {200}
    assert (await held.ask("POST", "/v1/chat/completions"))[0] == 200


async def test_work_whose_client_left_counts_until_it_ends() -> None:
    held = Held()
    held.abandoned = 3
    await held.begin(SPENDING_MAX - 3)
    assert (await held.ask("POST", "/v1/responses"))[0] == 503
    assert held.served == SPENDING_MAX - 3
    held.abandoned = 2
    await held.begin(1)
    held.go.set()
    assert {status for status, _ in await asyncio.gather(*held.tasks)} == {200}


@pytest.mark.parametrize(
    "path", ["/v1/outcomes", "/v1/sessions/s/kill", "/v1/sessions/s/freeze", "/v1/responses/r/cancel"]
)
async def test_a_fifth_is_kept_for_what_spends_nothing(path: str) -> None:
    held = Held()
    await held.begin(SPENDING_MAX + 3)
    await held.begin(1, "POST", path)
    await held.begin(1, "GET", "/v1/rollouts/r")
    assert held.served == SPENDING_MAX + 2
    assert (await held.ask("GET", "/v1/models"))[0] == 503  # 2 of 10 are kept, and taken
    await held.begin(3, "GET", "/readyz")
    assert held.served == SPENDING_MAX + 5  # probes need no place
    held.go.set()
    statuses = sorted(status for status, _ in await asyncio.gather(*held.tasks))
    assert statuses == [200] * (SPENDING_MAX + 5) + [503] * 3


def places(bodies_bytes_max: int) -> RequestPlaces:
    return RequestPlaces(SPENDING_MAX, int, bodies_bytes_max=bodies_bytes_max)


def test_large_bodies_are_bounded_by_their_bytes() -> None:
    here = places(5 * LARGE_BODY_BYTES)
    first, second = RequestPlace(here, spends=True), RequestPlace(here, spends=True)
    for part in (1, 2, 3):  # as it comes
        first.hold(part * LARGE_BODY_BYTES)
    second.hold(2 * LARGE_BODY_BYTES)
    with pytest.raises(Unavailable) as caught:
        second.hold(2 * LARGE_BODY_BYTES + 1)
    assert caught.value.headers["retry-after"] == "1"
    third = RequestPlace(here, spends=True)
    third.hold(LARGE_BODY_BYTES - 1)  # is not counted
    with pytest.raises(Unavailable):
        third.hold(LARGE_BODY_BYTES)
    first.leave()
    second.hold(4 * LARGE_BODY_BYTES)
    for place in (second, third):
        place.leave()
    assert here.bodies_bytes == 0


def test_one_body_alone_always_has_room() -> None:
    here = places(LARGE_BODY_BYTES)
    place = RequestPlace(here, spends=True)
    place.hold(9 * LARGE_BODY_BYTES)
    with pytest.raises(Unavailable):
        RequestPlace(here, spends=True).hold(LARGE_BODY_BYTES)
    place.leave()
    assert here.bodies_bytes == 0


async def test_a_body_counts_until_its_request_ends() -> None:
    piece = b'{"a":"' + b"x" * LARGE_BODY_BYTES + b'"}'

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_json(Request(scope, receive), 2 * LARGE_BODY_BYTES, "k")
        counted.append(scope["state"]["place"].places.bodies_bytes)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    counted: list[int] = []
    edge = Edge(app, SPENDING_MAX)

    async def receive() -> Message:
        return {"type": "http.request", "body": piece, "more_body": False}

    async def send(message: Message) -> None:
        assert message["status"] == 200

    for _ in range(2):
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        await edge(scope, receive, send)
    assert counted == [len(piece), len(piece)]
