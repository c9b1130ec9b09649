"""What a worker can do wrong, one server each, over real sockets: every one ends in its named error, in time."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.adapters.upstream.client import http_client
from gateway.adapters.upstream.http import HttpWorkers
from gateway.adapters.upstream.http1 import connection
from gateway.core.money.amounts import Usage
from gateway.core.openai.vendors.usage import read_usage
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused, UpstreamTimeout
from gateway.service.ports.request import WorkerCall, WorkerReply
from tests.upstreams.server import Handler, Reply, Server, event, raw_reply
from tests.waiting import BOUND_S, until

KEY = "sk-test-0123456789abcdef"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def completion(content: str = "fine", usage: Any = None) -> bytes:
    message = {"role": "assistant", "content": content}
    body: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    body["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return json.dumps(body | ({"usage": usage} if usage is not None else {})).encode()


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]})


def sends(*pieces: bytes, pause_s: float = 0.0) -> Handler:
    """A worker that sends these bytes and hangs up."""
    return lambda request: raw_reply(*pieces, gap_s=pause_s)


def streams(usage: Any) -> Handler:
    """A worker that streams `four` with this usage."""
    last = event(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage}
    )
    return sends(EVENTS + chunk({"content": "four"}) + chunk({}, "stop") + last + b"data: [DONE]\n\n")


def replies(body: bytes, *headers: str) -> Handler:
    lines = "".join(f"{line}\r\n" for line in headers).encode()
    return sends(HEAD + lines + f"content-length: {len(body)}\r\n\r\n".encode() + body)


def status(code: int, body: bytes = b"{}", *headers: str) -> Handler:
    lines = "".join(f"{line}\r\n" for line in headers)
    return sends(f"HTTP/1.1 {code} X\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body)


def a_call(port: int, timeout_s: float = 60.0) -> WorkerCall:
    spec = WorkerSpec.model_validate(
        {
            "name": "w",
            "handle": "atlas",
            "kind": "openai",
            "model": "m",
            "url": f"http://127.0.0.1:{port}/v1",
            "price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "1"},
        }
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    return WorkerCall(spec, body, timeout_s, "rollout", "step")


@pytest.fixture
async def workers() -> AsyncIterator[HttpWorkers]:
    workers = HttpWorkers({"w": KEY}, b"secret", reply_bytes_max=1 << 20, event_bytes_max=1 << 16, chunk_gap_s_max=0.5)
    yield workers
    await workers.close()


async def whole(workers: HttpWorkers, handler: Handler, timeout_s: float = 60.0) -> WorkerReply:
    async with Server(handler) as server:
        return await workers.complete(a_call(server.port, timeout_s))


async def streamed(workers: HttpWorkers, handler: Handler, timeout_s: float = 60.0) -> list[Any]:
    async with Server(handler) as server:
        return [each async for each in workers.stream(a_call(server.port, timeout_s))]


async def test_refusing_the_connection(workers: HttpWorkers) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(UpstreamError, match="cannot be reached") as caught:
        await workers.complete(a_call(port))
    assert caught.value.retryable
    assert not caught.value.dispatched


async def test_a_stream_that_cannot_be_read_frees_its_place() -> None:
    workers, stream = HttpWorkers({}, b"secret", client=http_client(1)), EVENTS.removesuffix(b"\r\n")
    for _ in range(2):
        with pytest.raises(UpstreamProtocol, match="encoding"):
            await whole(workers, sends(stream + b"content-encoding: br\r\n\r\n"))
    await workers.close()


async def test_hanging(workers: HttpWorkers) -> None:
    with pytest.raises(UpstreamTimeout):
        await whole(workers, sends(b"", pause_s=30), timeout_s=0.2)


async def test_too_many_requests_with_a_time_to_come_back(workers: HttpWorkers) -> None:
    with pytest.raises(UpstreamRateLimited) as caught:
        await whole(workers, status(429, b'{"error": {"message": "slow"}}', "retry-after-ms: 1500", "retry-after: 9"))
    assert caught.value.retry_after_s == pytest.approx(1.5)
    assert caught.value.retryable


@pytest.mark.parametrize("code", [408, 409, 425, 500, 502, 503, 529])
async def test_failing_for_now(workers: HttpWorkers, code: int) -> None:
    with pytest.raises(UpstreamError) as caught:
        await whole(workers, status(code, b"<html>oops</html>"))
    assert caught.value.retryable
    assert caught.value.upstream_status == code


@pytest.mark.parametrize("code", [400, 404, 413, 422])
async def test_refusing_the_request(workers: HttpWorkers, code: int) -> None:
    body = json.dumps({"error": {"message": f"no, {KEY}", "param": "tools", "code": "bad_tools"}}).encode()
    with pytest.raises(UpstreamRefused) as caught:
        await whole(workers, status(code, body))
    assert (caught.value.message, caught.value.param, caught.value.code) == ("no, [key]", "tools", "bad_tools")
    assert not caught.value.retryable


@pytest.mark.parametrize("code", [401, 403])
async def test_refusing_the_key_names_no_key(workers: HttpWorkers, code: int) -> None:
    with pytest.raises(UpstreamError, match="refused Baton's key") as caught:
        await whole(workers, status(code, b'{"error": {"message": "Incorrect API key provided: sk-test-01*****cdef"}}'))
    assert "sk-test" not in caught.value.message
    assert not caught.value.retryable


async def test_resetting_in_the_middle_of_a_stream(workers: HttpWorkers) -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        yield EVENTS + chunk({"content": "half"})
        await asyncio.sleep(0.05)
        server.reset()

    async with Server(lambda request: Reply(pieces=pieces(), raw=True)) as server:
        with pytest.raises(UpstreamProtocol):
            _ = [each async for each in workers.stream(a_call(server.port))]


async def test_dribbling_is_bounded_over_the_whole_call(workers: HttpWorkers) -> None:
    slow = sends(HEAD + b"\r\n", *(bytes([byte]) for byte in completion()), pause_s=1.0)
    with pytest.raises(UpstreamTimeout):  # the whole would take minutes
        await asyncio.wait_for(whole(workers, slow, timeout_s=0.4), BOUND_S)


async def test_falling_silent_in_the_middle_of_a_stream(workers: HttpWorkers) -> None:
    with pytest.raises(UpstreamTimeout):
        await streamed(workers, sends(EVENTS + chunk({"content": "half"}), b"", pause_s=3.0))


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {not json\n\n",
        b"data: [1, 2]\n\n",
        b'data: {"choices": ["x"]}\n\n',
        b'data: {"choices": {"0": 1}}\n\n',
        b"data: " + b"x" * (1 << 17) + b"\n\n",
        b"\n".join([b"data: " + b"x" * 1000] * 100) + b"\n\n",
        b"<html>what stream?</html>",
    ],
)
async def test_a_stream_of_nonsense(workers: HttpWorkers, stream: bytes) -> None:
    with pytest.raises(UpstreamProtocol):
        await streamed(workers, sends(EVENTS + stream))


async def test_an_error_in_the_middle_of_a_stream(workers: HttpWorkers) -> None:
    error = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
    with pytest.raises(UpstreamError, match="engine died") as caught:
        await streamed(workers, sends(EVENTS + chunk({"content": "half"}) + error))
    assert caught.value.upstream_status == 500
    named = b'event: error\ndata: {"message": "overloaded"}\n\n'
    with pytest.raises(UpstreamError, match="overloaded"):
        await streamed(workers, sends(EVENTS + named))


async def test_no_usage_is_estimated_and_says_so(workers: HttpWorkers) -> None:
    reply = await whole(workers, replies(completion("x" * 41)))
    assert reply.usage.estimated
    assert reply.usage.completion_tokens == 11  # 41 bytes ÷ 4, rounded up
    assert reply.usage.prompt_tokens > 10
    chunks = await streamed(workers, sends(EVENTS + chunk({"content": "x" * 41}) + chunk({}, "stop")))
    assert chunks[-1]["usage"]["estimated"] is True
    assert chunks[-1]["usage"]["completion_tokens"] == 11


@pytest.mark.parametrize("lie", [{"prompt_tokens": -5, "completion_tokens": "3x"}, {"prompt_tokens": 1.5}, ["no"], {}])
async def test_usage_that_is_nonsense_counts_as_none(workers: HttpWorkers, lie: Any) -> None:
    reply = await whole(workers, replies(completion("four", lie)))
    assert reply.usage.estimated
    assert reply.usage.completion_tokens == 1


async def test_usage_above_the_worker_s_whole_context_is_cut(workers: HttpWorkers) -> None:
    lie = {
        "prompt_tokens": 8193,
        "completion_tokens": 10**12,
        "completion_tokens_details": {"reasoning_tokens": 10**12},
    }
    for reply in (
        (await whole(workers, replies(completion("four", lie)))).usage,
        read_usage((await streamed(workers, streams(lie)))[-1]),
    ):
        assert reply is not None
        assert (reply.prompt_tokens, reply.completion_tokens, reply.estimated, reply.clipped) == (
            8192,
            8192,
            True,
            True,
        )


async def test_a_bill_of_several_times_what_was_asked_is_cut_unless_it_is_for_thinking(workers: HttpWorkers) -> None:
    lie = {"prompt_tokens": 9, "completion_tokens": 900}  # max_tokens was 50
    thinking = {**lie, "completion_tokens_details": {"reasoning_tokens": 890}}
    assert (await whole(workers, replies(completion("four", thinking)))).usage == Usage(9, 900)
    for reply in (
        (await whole(workers, replies(completion("four", lie)))).usage,
        read_usage((await streamed(workers, streams(lie)))[-1]),
    ):
        assert reply is not None
        assert (reply.prompt_tokens, reply.completion_tokens, reply.estimated, reply.clipped) == (9, 200, True, True)


async def test_a_body_of_100_mib(workers: HttpWorkers) -> None:
    announced = sends(HEAD + b"content-length: 104857600\r\n\r\n", b"x" * 65536, pause_s=5)
    with pytest.raises(UpstreamProtocol, match="larger than") as caught:
        await whole(workers, announced, timeout_s=2)
    assert not caught.value.retryable
    with pytest.raises(UpstreamProtocol, match="larger than"):
        await whole(workers, sends(HEAD + b"\r\n", *[b"x" * (1 << 20)] * 100))
    with pytest.raises(UpstreamProtocol, match="larger than"):
        await streamed(workers, sends(EVENTS, *[chunk({"content": "x" * 1000}) * 100] * 100))


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "br"])
async def test_a_gzip_bomb(workers: HttpWorkers, encoding: str) -> None:
    bomb = gzip.compress(b"0" * (64 << 20))
    with pytest.raises(UpstreamProtocol, match=r"larger than|encoding"):
        await whole(workers, replies(bomb, f"content-encoding: {encoding}"))


async def test_honest_gzip_is_read(workers: HttpWorkers) -> None:
    reply = await whole(workers, replies(gzip.compress(completion("zipped")), "content-encoding: gzip"))
    assert reply.body["choices"][0]["message"]["content"] == "zipped"
    with pytest.raises(UpstreamProtocol, match=r"cut short|broken"):
        await whole(workers, replies(gzip.compress(completion("zipped"))[:-20], "content-encoding: gzip"))
    with pytest.raises(UpstreamProtocol, match="broken"):
        await whole(workers, replies(b"no gzip at all", "content-encoding: gzip"))


async def test_a_redirect_to_a_link_local_address_is_not_followed(workers: HttpWorkers) -> None:
    with pytest.raises(UpstreamError, match="redirect") as caught:
        await whole(workers, status(307, b"", "location: http://169.254.169.254/latest/meta-data"))
    assert not caught.value.retryable


async def test_bad_utf8(workers: HttpWorkers) -> None:
    with pytest.raises(UpstreamProtocol, match="not JSON"):
        await whole(workers, replies(completion("y").replace(b'"y"', b'"\xff\xfe"')))
    with pytest.raises(UpstreamProtocol, match="UTF-8"):
        await streamed(workers, sends(EVENTS + b'data: {"choices": "\xff"}\n\n'))


async def test_an_early_end(workers: HttpWorkers) -> None:
    with pytest.raises(UpstreamProtocol):
        await whole(workers, sends(HEAD + b"content-length: 500\r\n\r\n" + completion()))
    with pytest.raises(UpstreamProtocol, match="before its reply was complete"):
        await streamed(workers, sends(EVENTS + chunk({"content": "half"})))
    with pytest.raises(UpstreamProtocol):
        await whole(workers, sends(b""))


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"null", b"{}", b'{"choices": []}', b'{"choices": [{}]}', b'{"choices": 3}', b"[" * 100_000],
)
async def test_a_reply_that_is_no_completion(workers: HttpWorkers, body: bytes) -> None:
    with pytest.raises(UpstreamProtocol):
        await whole(workers, replies(body))


async def test_a_last_event_without_its_blank_line_counts(workers: HttpWorkers) -> None:
    chunks = await streamed(workers, sends(EVENTS + chunk({"content": "all"}) + chunk({}, "stop").rstrip()))
    assert [choice["finish_reason"] for each in chunks for choice in each["choices"]] == [None, "stop"]


async def test_cookies_do_not_travel_from_one_call_to_the_next(workers: HttpWorkers) -> None:
    async with Server(replies(completion(), "set-cookie: who=first; Path=/")) as server:
        call = a_call(server.port)
        await workers.complete(call)
        await workers.complete(call)
    assert ["cookie" in request.headers for request in server.requests] == [False, False]


async def test_a_body_json_cannot_carry_never_leaves(workers: HttpWorkers) -> None:
    call = a_call(9)
    with pytest.raises(UpstreamRefused) as caught:
        await workers.complete(replace(call, body={**call.body, "temperature": float("nan")}))
    assert not caught.value.dispatched


@pytest.mark.parametrize("end", ["cancelled", "timeout", "cut"])
async def test_what_came_of_a_whole_reply_is_there_when_it_breaks_off(
    workers: HttpWorkers, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(connection, "GATHER_S", BOUND_S)  # nothing is read before the end
    is_read = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield EVENTS
        await is_read.wait()
        yield chunk({"content": "one"}) + chunk({"content": " two"})
        await asyncio.sleep(0.0 if end == "cut" else BOUND_S)

    async with Server(lambda request: Reply(pieces=pieces(), cut=True, raw=True)) as server:
        call = a_call(server.port, timeout_s=2.0 if end == "timeout" else 60.0)
        task = asyncio.create_task(workers.complete(call))
        opened = workers._client.connections()._open
        await until(lambda: any(each._is_gathering for each in opened))
        is_read.set()
        if end == "cancelled":
            await until(lambda: any(each._size for each in opened))
            assert not call.so_far.started
            task.cancel()
        with pytest.raises(asyncio.CancelledError if end == "cancelled" else UpstreamError):
            await task
    assert call.so_far.body()["choices"][0]["message"]["content"] == "one two"
