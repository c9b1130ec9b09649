"""A route without FastAPI's layers answers as the same route within them."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from gateway.api.edge.access import Accesses
from gateway.api.edge.stack import Direct, DirectRoute, Edge, Json, Router, install
from gateway.errors import BadRequest

PATH = "/v1/ask"


class Routes:
    """What is counted of each reply, by route."""

    def __init__(self) -> None:
        self.counted: list[tuple[str, int, str | None]] = []

    def replied(self, route: str, status: int, code: str | None, seconds: float, times: int = 1) -> None:
        self.counted += [(route, status, code)] * times


async def ask(request: Request) -> Response:
    if request.headers.get("x-ask") == "bad":
        raise BadRequest("not like this", param="x")
    if request.headers.get("x-ask") == "bug":
        raise ZeroDivisionError
    return Json({"answer": 4}, headers={"x-baton-steps": "1"})


def client(routes: Routes, *, direct: bool) -> httpx.AsyncClient:
    app, router = FastAPI(redirect_slashes=False), Router()
    install(app)
    router.add("POST", PATH, ask)
    app.include_router(router)
    served = Edge(Direct(app, DirectRoute(PATH, ask)) if direct else app, accesses=Accesses(routes, "off"))
    transport = httpx.ASGITransport(served, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://baton")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", PATH, {}, 200),
        ("POST", PATH, {"x-ask": "bad"}, 400),
        ("POST", PATH, {"x-ask": "bug"}, 500),
        ("GET", PATH, {}, 405),
        ("POST", PATH + "/", {}, 404),
    ],
)
async def test_it_answers_as_fastapi_does(method: str, path: str, headers: dict[str, str], status: int) -> None:
    answers, counted = [], []
    for direct in (True, False):
        routes = Routes()
        async with client(routes, direct=direct) as http:
            reply = await http.request(method, path, headers=headers)
        own = {
            name: value for name, value in reply.headers.items() if name not in ("x-request-id", "openai-processing-ms")
        }
        answers.append((reply.status_code, reply.content, own))
        counted.append(routes.counted)
    assert answers[0][0] == status
    assert answers[0] == answers[1]
    assert counted[0] == counted[1]
