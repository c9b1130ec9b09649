"""Requests that are refused because of the load before anything parses them: what clients read, what is counted, and
what the connection is good for afterwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.api.edge.access import LINES_PER_S_MAX, Accesses, AccessLog
from gateway.api.edge.stack import Edge, read_json
from gateway.cli.process.listeners import IDLE_S, BoundedProtocol, Listener, bind
from tests.waiting import BOUND_S, until

ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
CHANGES = (b"x-request-id:", b"date:")


class Gate:
    """A gateway of one place. `full`: whether another has taken it. `parsed`: requests that a parser has read."""

    def __init__(self, lines: AccessLog) -> None:
        self.full = True
        self.parsed = 0
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.metrics = PrometheusMetrics()
        edge = Edge(self._app, 1, lambda: int(self.full), accesses=Accesses(self.metrics, lines))
        self.listener = Listener(edge, bind("127.0.0.1", 0, strict=True), drain_s=1, head_bytes_max=4096)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await read_json(Request(scope, receive), 4096, "k")
        self.began.set()
        await self.go.wait()
        await PlainTextResponse("done")(scope, receive, send)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"baton_{name}", labels) or 0.0


async def _open(lines: AccessLog, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, begin = Gate(lines), BoundedProtocol.on_message_begin

    def counted(self: BoundedProtocol) -> None:
        gate.parsed += 1
        begin(self)

    monkeypatch.setattr(BoundedProtocol, "on_message_begin", counted)
    await gate.listener.open()
    return gate


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    made = await _open("off", monkeypatch)
    yield made
    await made.listener.close()


class Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, *pieces: bytes) -> tuple[list[bytes], bytes]:
        """Lines of the head and the body of the reply to a request that is sent in pieces."""
        for piece in pieces:
            self.writer.write(piece)
            await asyncio.sleep(0.02)
        return await self.read()

    async def read(self) -> tuple[list[bytes], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), BOUND_S)).split(b"\r\n")
        length = next(line for line in head if line.startswith(b"content-length:")).partition(b":")[2]
        return head, await asyncio.wait_for(self.reader.readexactly(int(length)), BOUND_S)


async def connect(gate: Gate) -> Line:
    return Line(*await asyncio.open_connection(*gate.listener.sock.getsockname()))


async def test_a_refusal_says_the_same_whether_it_was_parsed_or_not(gate: Gate) -> None:
    line = await connect(gate)
    (unread, body), (parsed, same) = await line.ask(ASK), await line.ask(ASK[:-2], ASK[-2:])
    assert gate.parsed == 1
    assert unread[0] == b"HTTP/1.1 503 Service Unavailable"
    assert b"retry-after: 1" in unread
    assert body == same

    def constant(head: list[bytes]) -> set[bytes]:
        return {each for each in head if not each.startswith(CHANGES)}

    assert constant(unread) == constant(parsed)
    assert set(unread) & {each for each in parsed if each.startswith(b"x-request-id:")} == set()
    line.writer.close()


async def test_of_all_that_come_at_once_for_one_place_one_is_parsed(gate: Gate) -> None:
    gate.full = False
    gate.go.clear()
    lines = [await connect(gate) for _ in range(5)]
    for line in lines:  # without a turn of the event loop between them
        line.writer.write(ASK)
    await gate.began.wait()
    refused = [await line.read() for line in lines[1:]]
    assert all(head[0] == b"HTTP/1.1 503 Service Unavailable" for head, _ in refused)
    assert gate.parsed == 1
    gate.go.set()
    assert (await lines[0].read())[1] == b"done"
    assert (await lines[1].ask(ASK))[1] == b"done"  # nothing stays promised
    for line in lines:
        line.writer.close()


async def test_a_connection_serves_again_once_there_is_a_place(gate: Gate) -> None:
    line = await connect(gate)
    for _ in range(3):
        assert (await line.ask(ASK))[1].startswith(b'{"error"')
    gate.full = False
    for _ in range(2):
        assert (await line.ask(ASK))[1] == b"done"
    gate.full = True
    assert (await line.ask(ASK))[1].startswith(b'{"error"')
    assert gate.parsed == 2
    line.writer.close()


async def test_what_was_refused_unread_is_counted(gate: Gate) -> None:
    line = await connect(gate)
    for _ in range(5):
        await line.ask(ASK)
    assert gate.parsed == 0
    assert gate.count("refusals_total", status="503", code="overloaded") == 5
    assert gate.count("http_replies_total", route="unknown", status="503") == 5
    assert gate.count("http_seconds_count", route="unknown") == 5
    line.writer.close()


async def test_a_flood_is_lines_first_and_then_their_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = await _open("errors", monkeypatch)
    with caplog.at_level(logging.INFO, "baton.access"):
        line = await connect(gate)
        while not 0 < gate.parsed < gate.count("refusals_total", status="503", code="overloaded"):
            line.writer.write(ASK)
            await line.read()
        refused = gate.count("refusals_total", status="503", code="overloaded")
        assert len(caplog.records) >= min(gate.parsed, LINES_PER_S_MAX)
        while "lines were left out" not in caplog.text:
            line.writer.write(ASK)
            await line.read()
    assert refused > LINES_PER_S_MAX
    line.writer.close()
    await gate.listener.close()


async def test_a_request_behind_one_that_is_served_is_refused_after_it(gate: Gate) -> None:
    gate.full = False
    gate.go.clear()
    line = await connect(gate)
    line.writer.write(ASK)
    await gate.began.wait()
    gate.full = True
    line.writer.write(ASK)
    await until(lambda: gate.parsed == 2)
    gate.go.set()
    assert (await line.read())[1] == b"done"
    assert (await line.read())[1].startswith(b'{"error"')
    line.writer.close()


async def test_an_idle_connection_that_is_refused_meanwhile_stays(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.listener.config.timeout_keep_alive = 1
    line = await connect(gate)
    for _ in range(8):
        assert (await line.ask(ASK))[1].startswith(b'{"error"')
        await asyncio.sleep(0.2)
    assert await asyncio.wait_for(line.reader.read(), BOUND_S) == b""  # and is closed once it rests
    line.writer.close()


async def test_an_idle_connection_whose_next_request_has_come_is_not_closed(gate: Gate) -> None:
    gate.full = False
    line = await connect(gate)
    assert (await line.ask(ASK))[1] == b"done"
    (server_side,) = gate.listener.server_state.connections
    assert isinstance(server_side, BoundedProtocol)
    server_side._since_s -= 2 * IDLE_S
    line.writer.write(ASK)
    server_side.timeout_keep_alive_handler()  # before the event loop reads what has just come
    assert (await line.read())[1] == b"done"
    server_side._since_s -= 2 * IDLE_S
    server_side.timeout_keep_alive_handler()
    assert await asyncio.wait_for(line.reader.read(), BOUND_S) == b""
    line.writer.close()


async def test_a_connection_that_only_was_refused_is_closed_once_it_rests(gate: Gate) -> None:
    gate.listener.config.timeout_keep_alive = 1
    line = await connect(gate)
    await line.ask(ASK)
    assert await asyncio.wait_for(line.reader.read(), BOUND_S) == b""
    line.writer.close()
