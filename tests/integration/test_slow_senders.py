"""Clients that send a head and a few bytes of a body, and then nothing: they keep nobody else out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from gateway.api.edge.stack import BodyPace
from gateway.cli.process.listeners import BoundedProtocol
from tests.integration.test_api import Served, served
from tests.kit import Kit, ask
from tests.sizes import sized
from tests.waiting import BOUND_S, until

IN_FLIGHT_MAX = 8
SENDERS = sized(small=60, ci=60, long=600)
PATIENT = {"spending_max": IN_FLIGHT_MAX, "pace": BodyPace(BOUND_S, 1, BOUND_S)}
QUICK = {"pace": BodyPace(s_max=0.6, bytes_per_s_min=100, grace_s=0.2)}


class Sender:
    """One connection that has sent a head and nine bytes of its body."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def status(self) -> int:
        """The status of the reply."""
        return int((await asyncio.wait_for(self.reader.readline(), BOUND_S)).split()[1])

    def answered(self) -> bool:
        return bool(self.reader._buffer)  # type: ignore[attr-defined]

    async def closed(self) -> bool:
        """Read to the end of the connection."""
        with suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), BOUND_S)
        return True


@asynccontextmanager
async def slow_senders(gateway: Served, key: str, n: int, path: str) -> AsyncIterator[list[Sender]]:
    """`n` connections that have sent a head and nine bytes of a body of 1,000."""
    host, port = gateway.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 1000\r\n\r\n"
    senders: list[Sender] = []
    try:
        for _ in range(n):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.encode() + b'{"model":')
            senders.append(Sender(reader, writer))
        await asyncio.sleep(0.1)
        yield senders
    finally:
        for sender in senders:
            sender.writer.transport.abort()


async def normal_traffic(gateway: Served, n: int = 5) -> list[int]:
    """The statuses of requests and probes of another key."""
    statuses = []
    for _ in range(n):
        statuses.append((await gateway.http.post("/v1/chat/completions", json=ask())).status_code)
        for path in ("/livez", "/readyz", "/metrics", "/v1/models"):
            statuses.append((await gateway.http.get(path)).status_code)
    return statuses


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/outcomes"])
async def test_slow_senders_of_one_key_shut_nobody_out(path: str) -> None:
    async with served(Kit(), edges=PATIENT) as gateway:
        _, other = await gateway.keys.create_key("slow")
        async with slow_senders(gateway, other, SENDERS, path) as senders:
            assert set(await normal_traffic(gateway)) == {200}
            refused = [sender for sender in senders if sender.answered()]
            assert len(refused) == SENDERS - 10  # one key may send as many bodies as there are places
            assert {await sender.status() for sender in refused} == {429}


async def test_the_keys_own_limits_count_before_the_body() -> None:
    async with served(Kit(), edges=PATIENT) as gateway:
        _, other = await gateway.keys.create_key("slow", rpm=3, concurrency=1)
        async with slow_senders(gateway, other, SENDERS, "/v1/chat/completions") as senders:
            await until(lambda: sum(sender.answered() for sender in senders) == SENDERS - 1)
            assert set(await normal_traffic(gateway)) == {200}
            refused = [await sender.status() for sender in senders if sender.answered()]
            assert refused == [429] * (SENDERS - 1)


async def test_a_body_that_does_not_come_is_408_and_frees_the_keys_place() -> None:
    async with served(Kit(), edges=QUICK) as gateway:
        _, other = await gateway.keys.create_key("slow", rpm=2, concurrency=1)
        async with slow_senders(gateway, other, 1, "/v1/chat/completions") as [sender]:
            assert await sender.status() == 408
            assert await sender.closed()
        headers = {"authorization": f"Bearer {other}"}
        one, two = [await gateway.http.post("/v1/chat/completions", json=ask(), headers=headers) for _ in "ab"]
        assert (one.status_code, two.status_code) == (200, 429)  # the slow one counts in the minute


async def test_a_body_over_its_deadline_is_408_however_steadily_it_comes() -> None:
    async with (
        served(Kit(), edges=QUICK) as gateway,
        slow_senders(gateway, gateway.data_key, 1, "/v1/chat/completions") as [sender],
    ):
        status = asyncio.create_task(sender.status())
        while not status.done():
            sender.writer.write(b" " * 10)
            await asyncio.sleep(0.05)
        assert await status == 408


async def test_a_body_that_comes_in_pieces_is_served() -> None:
    async with served(Kit(), edges=QUICK) as gateway:

        async def pieces() -> AsyncIterator[bytes]:
            for piece in json.dumps(ask()).partition(","):
                yield piece.encode()
                await asyncio.sleep(0.01)

        assert (await gateway.http.post("/v1/chat/completions", content=pieces())).status_code == 200


async def test_refused_bodies_count_as_no_request() -> None:
    async with served(Kit()) as gateway:
        _, other = await gateway.keys.create_key("other", rpm=1)
        headers = {"authorization": f"Bearer {other}"}
        for body in ("{", "[]", '{"model": "baton"}', json.dumps(ask(model="no-such"))):
            refused = await gateway.http.post("/v1/chat/completions", content=body, headers=headers)
            assert refused.status_code in (400, 404)
        reply = await gateway.http.post("/v1/chat/completions", json=ask(), headers=headers)
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_body_that_goes_on_after_its_reply_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "linger_s", 0.1)
    async with (
        served(Kit(), edges=PATIENT) as gateway,
        slow_senders(gateway, "bt_data_wrong", 1, "/v1/chat/completions") as [sender],
    ):
        assert await sender.status() == 401
        sender.writer.write(b"x" * 10)
        assert await sender.closed()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/outcomes", "/admin/keys"])
async def test_a_client_that_leaves_in_mid_upload_is_no_error(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(Kit()) as gateway:
        key = gateway.admin_key if path.startswith("/admin") else gateway.data_key
        async with slow_senders(gateway, key, 3, path):
            pass
        assert (await gateway.http.get("/livez")).status_code == 200
        await asyncio.sleep(0.1)
    lines = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert {record.name for record in lines} <= {"baton.access"}  # one line for each refusal, and no traceback
    assert not [record for record in lines if record.exc_info]
