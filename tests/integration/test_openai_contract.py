"""What clients of api.openai.com rely on, over real sockets: streams to the byte, errors, headers, browsers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from gateway.adapters.upstream.http import HttpWorkers
from gateway.api.edge import stack as edge
from gateway.api.edge.headers import EXPOSED, with_cors
from gateway.cli.process.listeners import BoundedProtocol, Listener
from gateway.core.money.amounts import Usage
from gateway.errors import (
    BadRequest,
    BatonError,
    CapReached,
    DeadlineExceeded,
    UpstreamError,
    UpstreamInvalid,
    UpstreamOverloaded,
    UpstreamProtocol,
    UpstreamRateLimited,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.service.ports.request import WorkerCall, WorkerReply
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.kit import Kit, ask, model_worker, plan
from tests.service.test_answers import GOOD, STRICT, Raw, one, pool
from tests.upstreams.server import Server, event, event_stream
from tests.waiting import BOUND_S, until

CHAT = "/v1/chat/completions"
BAD_SHAPE = '{"x": "one" }'


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every event but `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def post(gateway: Served, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await gateway.http.post(CHAT, json=ask(**fields), headers=dict(headers or {}))


def chunk(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_has_the_keys_and_the_order_that_openais_has(usage: bool) -> None:
    kit = Kit(workers={"alpha": Says("one two three")})
    async with served(kit) as gateway:
        reply = await post(gateway, model="alpha", stream=True, stream_options={"include_usage": usage})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(reply.text)
    told = {(c["id"], c["created"], c["model"], c["object"]) for c in chunks}
    assert len(told) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    for each in chunks:
        for choice in each["choices"]:
            assert set(choice) == {"index", "delta", "finish_reason", "logprobs"}
        assert ("usage" in each) is usage
    answer = chunks[:-1] if usage else chunks
    assert [c["choices"][0]["finish_reason"] for c in answer] == [None] * (len(answer) - 1) + ["stop"]
    assert answer[-1]["choices"][0]["delta"] == {}
    if usage:
        assert all(c["usage"] is None for c in answer)
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 15)
        assert set(chunks[-1]["usage"]) >= {"prompt_tokens_details", "completion_tokens_details"}
    assert reply.text.rstrip().endswith("data: [DONE]")
    assert reply.text.count("[DONE]") == 1


@pytest.mark.parametrize(("wanted", "there"), [(True, True), (False, False), (None, False)])
async def test_obfuscation_is_there_where_it_is_asked_for(wanted: bool | None, there: bool) -> None:
    async with served(Kit(workers={"alpha": Says("one two")})) as gateway:
        options = {} if wanted is None else {"include_obfuscation": wanted}
        reply = await post(gateway, model="alpha", stream=True, stream_options=options)
    assert all(("obfuscation" in each) is there for each in events(reply.text))


async def test_reasoning_is_passed_through_whole_and_streamed() -> None:
    body = {"choices": [{"message": {"content": "4", "reasoning_content": "2+2"}, "finish_reason": "stop"}]}
    chunks = [chunk({"reasoning_content": "2+"}), chunk({"reasoning_content": "2"}), chunk({"content": "4"})]
    kit = Kit(workers=Raw(body, [*chunks, chunk({}, finish_reason="stop")]))
    async with served(kit) as gateway:
        whole = (await post(gateway, model="alpha")).json()["choices"][0]["message"]
        streamed = events((await post(gateway, model="alpha", stream=True)).text)
    assert (whole["content"], whole["reasoning_content"]) == ("4", "2+2")
    deltas = [each["choices"][0]["delta"] for each in streamed]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "2+2"


async def test_half_a_character_goes_out_as_it_came_and_numbers_that_json_lacks_as_null() -> None:
    """Two halves of a surrogate pair in two chunks: a client that joins the texts has the character."""
    halves = [chunk({"content": "\ud83d"}), chunk({"content": "\ude00"})]
    odd = {"content": [{"token": "x", "logprob": float("-inf")}], "refusal": None}
    body = {"choices": [{"message": {"content": "\ud83d"}, "finish_reason": "stop", "logprobs": odd}]}
    kit = Kit(workers=Raw(body, [*halves, chunk({"content": "x"}, logprobs=odd), chunk({}, finish_reason="stop")]))
    async with served(kit) as gateway:
        streamed = (await post(gateway, model="alpha", stream=True)).text
        whole = await post(gateway, model="alpha")
    assert '"content":"\\ud83d"' in streamed
    assert '"content":"\\ude00"' in streamed
    assert "Infinity" not in streamed + whole.text
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["logprobs"]["content"][0]["logprob"] is None


TEXT = "Grüße, 世界! 👩‍👩‍👧 — ∑ñ"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_text_is_exact_to_the_byte_wherever_the_worker_cuts_its_bytes(size: int) -> None:
    frames = [chunk({"content": TEXT}), chunk({}, finish_reason="stop")]
    raw = b"".join(map(event, [*frames, "[DONE]"]))
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    workers = HttpWorkers({}, b"depth")
    async with Server(lambda request: event_stream(pieces)) as server:
        kit = Kit(workers=workers, pools=pool(model_worker("alpha", "atlas", url=f"{server.url}/v1")))
        async with served(kit) as gateway:
            reply = await post(gateway, model="alpha", stream=True)
    await workers.close()
    assert f'"content":"{TEXT}"'.encode() in reply.content
    said = [each["choices"][0]["delta"].get("content", "") for each in events(reply.content.decode())]
    assert "".join(said) == TEXT


class Endless:
    """A worker that never stops talking; `said` counts its chunks."""

    def __init__(self) -> None:
        self.said = 0
        self.closed = asyncio.Event()

    async def complete(self, call: WorkerCall) -> WorkerReply:
        raise AssertionError("only streams")

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        try:
            while True:
                self.said += 1
                yield chunk({"content": "x" * 8192})
        finally:
            self.closed.set()


async def test_a_reader_that_does_not_read_holds_the_worker_back() -> None:
    worker = Endless()
    async with served(Kit(workers=worker)) as gateway:
        body = json.dumps(ask(model="alpha", stream=True)).encode()
        sock = socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1])))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.data_key}\r\n"
        sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        before = -1
        while before != worker.said or not worker.said:  # until nothing moves any more
            before = worker.said
            await asyncio.sleep(0.3)
        held = worker.said
        assert held < 3000  # what the kernel's buffers and our queue take; without a bound it never stops
        sock.setblocking(False)
        loop, read = asyncio.get_running_loop(), 0
        while worker.said <= held:  # a reader that reads again is served again
            read += len(await loop.sock_recv(sock, 65_536))
        assert read
        sock.close()
        await asyncio.wait_for(worker.closed.wait(), BOUND_S)
        await until(lambda: not gateway.kit.completer.in_flight)
        assert await gateway.kit.open_nano() == 0


async def test_each_connection_sends_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    made = BoundedProtocol.connection_made

    def connection_made(self: BoundedProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        made(self, transport)
        flags.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(BoundedProtocol, "connection_made", connection_made)
    async with served(Kit()) as gateway:
        await gateway.http.get("/livez")
    assert flags
    assert all(flags)


async def test_progress_is_comments_that_clients_skip() -> None:
    script = (plan(("atlas", None, []), ("birch", None, [0])),)
    async with served(Kit(script, {"beta": Says("the end")})) as gateway:
        reply = await post(gateway, {"x-baton-progress": "on"}, stream=True)
        assert ': baton {"event": "planned"' in reply.text
        assert ': baton {"event": "step_ended"' in reply.text
        assert reply.text.endswith("data: [DONE]\n\n")
        patient = gateway.sdk.with_options(default_headers={"x-baton-progress": "on"})
        stream = await patient.chat.completions.create(**ask(stream=True))
        text = "".join([each.choices[0].delta.content or "" async for each in stream])
        assert text == "the end"
        silent = await post(gateway, stream=True)
        assert '"event"' not in silent.text


async def test_a_stream_of_the_wrong_shape_is_an_error_event_for_the_sdk() -> None:
    async with served(Kit(workers={"alpha": Says(BAD_SHAPE)})) as gateway:
        reply = await post(gateway, model="alpha", stream=True, response_format=STRICT)
        assert "[DONE]" not in reply.text
        assert events(reply.text)[-1]["error"]["code"] == "invalid_structured_output"
        assert not any(c["choices"][0]["finish_reason"] for c in events(reply.text)[:-1])
        with pytest.raises(openai.APIError):
            async for _ in await gateway.sdk.chat.completions.create(
                **ask(model="alpha", stream=True, response_format=STRICT)
            ):
                pass


async def test_the_sdk_parses_what_was_promised() -> None:
    async with served(Kit(workers={"alpha": Says(GOOD)})) as gateway:
        made = await gateway.sdk.chat.completions.create(**ask(model="alpha", response_format=STRICT))
        assert json.loads(made.choices[0].message.content or "") == {"x": 1}


# ---------------------------------------------------------------- errors

# what the worker did, and what the client is told: status, type, code, x-should-retry, retry-after-ms
FAILED: list[tuple[BatonError, int, str, str, str | None, str | None]] = [
    (UpstreamRateLimited("slow down", upstream_status=429, retry_after_s=7), 429, "rate_limit_error",
        "upstream_rate_limited", "true", "7000"),
    (UpstreamRateLimited("tomorrow", upstream_status=429, retry_after_s=600), 429, "rate_limit_error",
        "upstream_rate_limited", "true", "600000"),
    (UpstreamOverloaded("busy", upstream_status=503, retry_after_s=0.5), 503, "upstream_error", "upstream_overloaded",
        "true", "500"),
    (UpstreamTimeout("late"), 504, "upstream_error", "upstream_timeout", "true", None),
    (UpstreamError("boom", upstream_status=500, retryable=True), 502, "upstream_error", "upstream_error", "true", None),
    (UpstreamError("the worker's key was refused", upstream_status=401), 502, "upstream_error", "upstream_error",
        "false", None),
    (UpstreamProtocol("nonsense"), 502, "upstream_error", "upstream_protocol", "true", None),
    (UpstreamRefused("too long", upstream_status=400, code="context_length_exceeded", param="messages"), 400,
        "invalid_request_error", "context_length_exceeded", None, None),
    (UpstreamInvalid("twice wrong"), 502, "upstream_error", "invalid_structured_output", "false", None),
    (DeadlineExceeded("over"), 504, "timeout_error", "deadline_exceeded", "false", None),
    (CapReached("calls", "too many"), 400, "invalid_request_error", "cap_reached", "false", None),
]  # fmt: skip


@pytest.mark.parametrize(("error", "status", "type_", "code", "retry", "wait_ms"), FAILED)
@pytest.mark.parametrize("stream", [False, True])
async def test_each_error_of_a_worker_has_its_own_status_and_code(
    error: BatonError, status: int, type_: str, code: str, retry: str | None, wait_ms: str | None, stream: bool
) -> None:
    async with served(Kit(workers={"alpha": error}, attempts_max=1)) as gateway:
        reply = await post(gateway, model="alpha", stream=stream)
    body = reply.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert (reply.status_code, body["type"], body["code"]) == (status, type_, code)
    assert reply.headers.get("x-should-retry") == retry
    assert reply.headers.get("retry-after-ms") == wait_ms
    assert (reply.headers.get("retry-after") is None) is (wait_ms is None)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (UpstreamOverloaded("busy", upstream_status=503, retry_after_s=0.01), 2),
        (UpstreamError("no", upstream_status=401), 1),
        (UpstreamRateLimited("tomorrow", upstream_status=429, retry_after_s=600), 1),
        (DeadlineExceeded("over"), 1),
        (UpstreamRefused("no", upstream_status=400), 1),
    ],
)
async def test_the_sdk_tries_again_what_may_pass_and_nothing_else(error: BatonError, tries: int) -> None:
    kit = Kit(workers={"alpha": [error, Says("ok")]}, attempts_max=1)
    async with served(kit) as gateway:
        patient = gateway.sdk.with_options(max_retries=1)
        calling = patient.chat.completions.create(**ask(model="alpha"))
        if tries == 2:
            assert (await calling).choices[0].message.content == "ok"
        else:
            with pytest.raises(openai.APIStatusError):
                await asyncio.wait_for(calling, BOUND_S)
    assert len(kit.workers.calls) == tries


async def test_rates_and_when_they_reset_are_on_replies_and_refusals() -> None:
    async with served(Kit(), rpm=1, tpm=100_000) as gateway:
        reply = await post(gateway)
        refused = await post(gateway)
    assert reply.headers["x-ratelimit-limit-requests"] == "1"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert int(reply.headers["x-ratelimit-remaining-tokens"]) < 100_000
    for what in ("requests", "tokens"):
        assert re.fullmatch(r"(\d+m)?[\d.]+s", reply.headers[f"x-ratelimit-reset-{what}"])
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert (refused.headers["x-should-retry"], refused.headers["x-ratelimit-remaining-requests"]) == ("true", "0")
    assert re.fullmatch(r"[\d.]+s|1m0s", refused.headers["x-ratelimit-reset-requests"])
    assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000


async def test_every_reply_has_openais_own_headers() -> None:
    async with served(Kit()) as gateway:
        replies = [
            await post(gateway),
            await post(gateway, stream=True),
            await post(gateway, temperature="hot"),
            await gateway.http.get("/v1/nothing"),
            await gateway.http.get("/v1/models"),
        ]
    for reply in replies:
        assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"])
        assert reply.headers["openai-version"] == "2020-10-01"
        assert int(reply.headers["openai-processing-ms"]) >= 0
    assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)


# ---------------------------------------------------------------- unknown properties


async def test_unknown_properties_are_named_in_a_header_and_counted() -> None:
    kit = Kit(workers={"alpha": Says()})
    async with served(kit) as gateway:
        for stream in (False, True):
            reply = await post(gateway, model="alpha", stream=stream, flavour=5, provider={"order": []})
            assert reply.headers["x-baton-dropped-fields"] == "flavour,provider"
    assert kit.metrics.dropped_fields == 4
    assert all({"flavour", "provider"}.isdisjoint(call.body) for call in kit.workers.calls)


# ---------------------------------------------------------------- browsers


async def browsed(origins: tuple[str, ...], method: str, headers: Mapping[str, str]) -> httpx.Response:
    app = FastAPI()
    edge.install(app)

    @app.post(CHAT)
    async def chat() -> None:
        raise BadRequest("no")

    transport = httpx.ASGITransport(edge.Edge(with_cors(app, origins)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.request(method, CHAT, headers=dict(headers))


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "https://app.example", None),
        (("https://app.example",), "https://app.example", "https://app.example"),
        (("https://app.example",), "https://evil.example", None),
        (("https://app.example",), "https://app.example.evil.example", None),
        (("*",), "https://any.example", "*"),
    ],
)
async def test_pages_of_listed_origins_may_call_and_read_and_no_others(
    origins: tuple[str, ...], origin: str, allowed: str | None
) -> None:
    asked = await browsed(origins, "OPTIONS", {"origin": origin, **PREFLIGHT})
    assert asked.headers.get("access-control-allow-origin") == allowed
    assert (asked.status_code == 200) is (allowed is not None)
    reply = await browsed(origins, "POST", {"origin": origin})
    assert reply.status_code == 400
    assert reply.headers.get("access-control-allow-origin") == allowed
    exposed = reply.headers["access-control-expose-headers"].lower()
    assert "x-request-id" in exposed
    if allowed:
        assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
        assert all(name in exposed for name in EXPOSED)
        assert "access-control-allow-credentials" not in reply.headers


# ---------------------------------------------------------------- a listener of its own


async def test_a_head_that_is_too_large_is_openai_shaped_too() -> None:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    listener = Listener(edge.Edge(FastAPI()), sock, drain_s=1.0, head_bytes_max=1024)
    await listener.open()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
        writer.write(b"GET /v1/models HTTP/1.1\r\nx: " + b"y" * 4096)
        text = (await reader.read()).decode()
        writer.close()
    finally:
        await listener.close()
    assert set(json.loads(text.partition("\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


async def test_usage_is_the_whole_trees() -> None:
    script = (plan(("atlas", None, []), ("birch", None, [0])),)
    kit = Kit(script, {"alpha": Says(usage=Usage(10, 5)), "beta": Says(usage=Usage(20, 7))})
    async with served(kit) as gateway:
        reply = await post(gateway, stream=True, stream_options={"include_usage": True})
    assert events(reply.text)[-1]["usage"]["total_tokens"] == 42


async def test_n_streams_as_openais_does() -> None:
    kit = Kit(workers={"alpha": [Says("a"), Says("b")]}, pools=one(cannot=("n",)))
    async with served(kit) as gateway:
        stream = await gateway.sdk.chat.completions.create(**ask(model="alpha", n=2, stream=True))
        texts: dict[int, str] = {}
        async for each in stream:
            for choice in each.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {0: "a", 1: "b"}


REASONING = {"x-baton-progress": "reasoning"}
NOTES = {"plan 1 by conductor, 2 steps", "step 1 (alpha) runs", "step 2 (beta) runs"}  # a step may start in mid-plan
SEES_FIRST = (plan(("atlas", "look it up", []), ("birch", None, [0])),)


async def test_progress_is_reasoning_before_the_reply_and_no_worker_gets_it_back() -> None:
    async with served(Kit(SEES_FIRST, {"beta": Says("the end")})) as gateway:
        reply = await post(gateway, REASONING, stream=True, stream_options={"include_usage": True})
        chunks = events(reply.text)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert deltas[0]["role"] == "assistant"
        said = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        assert set(said.splitlines()) == {f"[baton] {note}" for note in NOTES}
        assert "".join(delta.get("content") or "" for delta in deltas) == "the end"
        assert ': baton {"event"' not in reply.text
        last = chunks[-1]
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 30)
        assert last["baton"]["cost_usd"] == story(reply.text)["x-baton-cost-usd"] != "0"
        answered = {"role": "assistant", "content": "the end", "reasoning_content": said + "and a thought of its own"}
        await gateway.http.post(
            "/v1/chat/completions",
            json={"model": "alpha", "messages": [answered, {"role": "user", "content": "and now?"}]},
        )
        returned = gateway.kit.workers.calls[-1].body["messages"][0]
        assert returned == answered | {"reasoning_content": "and a thought of its own"}


async def test_progress_is_a_reasoning_summary_of_a_response() -> None:
    async with served(Kit(SEES_FIRST, {"beta": Says("the end")})) as gateway:
        asked = {"model": "baton", "input": "a", "stream": True}
        reply = await gateway.http.post("/v1/responses", json=asked, headers=REASONING)
        sent = events(reply.text)
        notes = [one["delta"] for one in sent if one["type"] == "response.reasoning_summary_text.delta"]
        assert set(notes) == NOTES
        assert [one["sequence_number"] for one in sent] == list(range(len(sent)))
        response = sent[-1]["response"]
        reasoning, message = response["output"]
        assert [part["text"] for part in reasoning["summary"]] == notes
        assert (message["content"][0]["text"], response["baton"]["cost_usd"] != "0") == ("the end", True)
        added = next(one["item"] for one in sent if one["type"] == "response.output_item.added")
        assert (added["type"], added["summary"]) == ("reasoning", [])
        stream = gateway.sdk.with_options(default_headers=REASONING).responses.stream(model="baton", input="a")
        async with stream as typed:
            final = await typed.get_final_response()
        assert (final.output_text, final.output[0].type) == ("the end", "reasoning")


def story(text: str) -> dict[str, str]:
    """The closing comment of a stream."""
    line = next(line for line in text.splitlines() if line.startswith(": baton {"))
    told: dict[str, str] = json.loads(line.removeprefix(": baton "))
    return told
