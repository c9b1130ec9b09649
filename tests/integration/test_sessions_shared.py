"""Sessions over real Redis and PostgreSQL that two gateways share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.postgres_server import TEMPLATE, PostgresServer
from tests.redis_server import RedisServer, start_redis
from tests.security.gateway import PROVIDER_KEY, Gateway, ask, running
from tests.upstreams.server import Reply, event, event_stream
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
HEAD = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pair(
    pg_server: PostgresServer, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Gateway]]:
    """Two gateways with one ledger and one budget store."""
    database_url = pg_server.create(TEMPLATE)
    with pytest.MonkeyPatch.context() as environment, ExitStack() as opened:
        environment.setenv("PROVIDER_KEY", PROVIDER_KEY)
        places = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
        yield [opened.enter_context(running(Gateway(place, database_url, redis))) for place in places]
    pg_server.drop(database_url)


def client(gateway: Gateway, secret: str, headers: dict[str, str]) -> httpx.Client:
    named = {**headers, "authorization": f"Bearer {secret}"}
    return httpx.Client(base_url=gateway.public, headers=named, timeout=120)


def shown(gateway: Gateway, secret: str, session: str) -> Any:
    with gateway.client(secret) as http:
        return http.get(f"/v1/sessions/{session}").json()


def test_requests_at_the_last_dollar_on_two_gateways_never_pass_it(pair: list[Gateway]) -> None:
    _, secret = pair[0].key()
    headers = {"x-baton-session": "race", "x-baton-session-usd": "0.0003", "x-baton-session-calls": "30"}

    def one(number: int) -> tuple[int, Any]:
        with client(pair[number % 2], secret, headers) as http:
            reply = http.post(CHAT, json=ask(max_tokens=16))
            return reply.status_code, reply.json()

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, range(24)))
    session = shown(pair[1], secret, "race")
    served = [status for status, _ in replies if status == 200]
    assert Decimal(session["usd"]["spent"]) == Decimal("0.00002") * len(served) <= Decimal("0.0003")
    assert (session["usd"]["held"], session["calls"]["spent"], session["calls"]["held"]) == ("0", len(served), 0)
    assert 1 <= len(served) <= 15
    refused = [body["error"] for status, body in replies if status not in (200, 503)]  # 503: the machine is busy
    assert {(one["code"], one["param"]) for one in refused} == {("insufficient_quota", "x-baton-session")}


def test_a_kill_on_one_gateway_ends_a_stream_on_the_other(pair: list[Gateway]) -> None:
    _, secret = pair[0].key()
    chunk = event(HEAD | {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]})

    def slow(body: dict[str, Any]) -> Reply:
        return event_stream([chunk] * 2_000, gap_s=0.05)

    pair[0].upstream.reply = slow
    lines: list[str] = []
    with client(pair[0], secret, {"x-baton-session": "kill"}) as http:
        with http.stream("POST", CHAT, json=ask(stream=True)) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                if len(lines) == 8:
                    with pair[1].client(secret) as other:
                        killed = other.post("/v1/sessions/kill/kill", json={"why": "it runs away"})
                        assert killed.json()["state"] == "killed"
                        began_s = time.monotonic()
        took_s = time.monotonic() - began_s
        error = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])["error"]
        assert error["code"] == "session_killed"
        assert took_s < 20  # the whole stream takes 100 s; usually a quarter of a second
        pair[0].upstream.reset()
        named = {"x-baton-session": "kill"}
        for gateway in pair:
            with client(gateway, secret, named) as later:
                assert later.post(CHAT, json=ask()).json()["error"]["code"] == "session_killed"
    wait_until(lambda: shown(pair[1], secret, "kill")["usd"]["held"] == "0")
    session = shown(pair[1], secret, "kill")
    assert (session["calls"]["spent"], Decimal(session["usd"]["spent"]) > 0) == (1, True)


def test_a_raise_counts_at_once_and_a_lost_redis_forgets_nothing(pair: list[Gateway], redis: RedisServer) -> None:
    key_id, secret = pair[0].key()
    _, operator = pair[0].key("admin")
    headers = {"x-baton-session": "lost", "x-baton-session-calls": "2"}
    with client(pair[0], secret, headers) as http, pair[1].client(operator, admin=True) as admin:
        assert [http.post(CHAT, json=ask()).status_code for _ in range(3)] == [200, 200, 429]
        before = shown(pair[1], secret, "lost")
        with Redis.from_url(redis.url) as store:
            store.flushall()
        wait_until(lambda: "usd" in shown(pair[1], secret, "lost"))
        # What one gateway settled and had not shipped yet it puts back within seconds; nothing is granted before.
        wait_until(lambda: shown(pair[1], secret, "lost") | {"minutes": {}} == before | {"minutes": {}})
        wait_until(lambda: http.post(CHAT, json=ask()).status_code == 429)
        raised = admin.patch(f"/admin/sessions/{key_id}/lost", json={"calls": 3, "why": "one more"})
        assert raised.json()["calls"] == {"limit": 3, "spent": 2, "held": 0, "left": 1}
        reply = http.post(CHAT, json=ask())
        assert (reply.status_code, reply.headers["x-baton-session-left-calls"]) == (200, "0")
        entries = admin.get("/admin/audit", params={"target": f"session:{key_id}:lost"}).json()["data"]
        assert [(one["act"], one["why"]) for one in entries] == [("session.changed", "one more")]
