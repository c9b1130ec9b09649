"""A worker's reply in another form than was asked for is that reply, over real sockets; an error in one is an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.money.amounts import Usage
from gateway.core.openai.reply import ReplyBuilder
from gateway.core.openai.vendors.usage import read_usage
from gateway.errors import UpstreamError, UpstreamOverloaded, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused
from gateway.service.ports.request import WorkerReply
from tests.integration.test_worker_failures import HEAD, a_call, chunk, completion, replies, sends
from tests.upstreams.server import Handler, Server, event

EVENTS = "text/event-stream"
JSON = "application/json"
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
TOOL = {"type": "function", "function": {"name": "f"}}
STREAM = chunk({"role": "assistant", "content": ""}) + chunk({"content": "fi"}) + chunk({"content": "ne"})
STREAM += chunk({}, "stop") + event({"id": "c", "choices": [], "usage": USAGE}) + event("[DONE]")
WHOLE = completion("fine", USAGE)


@pytest.fixture
async def workers() -> AsyncIterator[HttpWorkers]:
    workers = HttpWorkers({}, b"secret")
    yield workers
    await workers.close()


def typed(body: bytes, kind: str | None) -> Handler:
    """A worker that answers with a body under a media type."""
    line = "" if kind is None else f"content-type: {kind}\r\n"
    return sends(f"HTTP/1.1 200 OK\r\n{line}content-length: {len(body)}\r\n\r\n".encode() + body)


async def asked_whole(workers: HttpWorkers, handler: Handler, **more: Any) -> WorkerReply:
    async with Server(handler) as server:
        call = a_call(server.port)
        return await workers.complete(replace(call, body={**call.body, **more}))


async def asked_stream(workers: HttpWorkers, handler: Handler) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the reply that the chunks make, the last chunk)."""
    built, last = ReplyBuilder(), dict[str, Any]()
    async with Server(handler) as server:
        async for each in workers.stream(a_call(server.port)):
            built.add(each.get("choices") or ())
            last = dict(each)
    return built.body()["choices"][0], last


@pytest.mark.parametrize("kind", [EVENTS, JSON, "text/plain", None])
@pytest.mark.parametrize("body", [WHOLE, STREAM, b"\n\n" + WHOLE, b"\xef\xbb\xbf" + STREAM, b": hello\n\n" + STREAM])
async def test_a_reply_is_read_in_either_form_under_any_media_type(
    workers: HttpWorkers, body: bytes, kind: str | None
) -> None:
    for more in ({}, {"tools": [TOOL]}):  # with tools it is asked for in one piece
        reply = await asked_whole(workers, typed(body, kind), **more)
        assert reply.body["choices"][0]["message"]["content"] == "fine"
        assert reply.body["choices"][0]["finish_reason"] == "stop"
        assert reply.usage == Usage(7, 2)
    choice, last = await asked_stream(workers, typed(body, kind))
    assert (choice["message"]["content"], choice["finish_reason"]) == ("fine", "stop")
    assert read_usage(last) == Usage(7, 2)


async def test_a_whole_reply_with_calls_is_a_stream_of_them(workers: HttpWorkers) -> None:
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")]
    body = json.loads(WHOLE)
    body["choices"][0] |= {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
    choice, _ = await asked_stream(workers, typed(json.dumps(body).encode(), JSON))
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["f", "g"]
    assert choice["finish_reason"] == "tool_calls"


async def test_a_stream_that_is_over_without_a_reason_is_whole(workers: HttpWorkers) -> None:
    over = chunk({"content": "fine"}) + event("[DONE]")
    reply = await asked_whole(workers, typed(over, EVENTS))
    assert reply.body["choices"][0]["message"]["content"] == "fine"
    choice, last = await asked_stream(workers, typed(over, EVENTS))
    assert choice["message"]["content"] == "fine"
    assert last["done"] is True
    with pytest.raises(UpstreamProtocol):
        await asked_whole(workers, typed(chunk({"content": "fi"}), EVENTS))
    with pytest.raises(UpstreamProtocol):
        await asked_stream(workers, typed(chunk({"content": "fi"}), EVENTS))


async def test_a_stream_of_which_one_choice_ends_is_cut(workers: HttpWorkers) -> None:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    pieces = [{"index": at, "delta": {"content": "x"}, "finish_reason": "stop" if at else None} for at in (0, 1)]
    with pytest.raises(UpstreamProtocol):
        await asked_whole(workers, typed(b"".join(event(head | {"choices": [one]}) for one in pieces), EVENTS))


async def test_a_filtered_reply_has_no_message(workers: HttpWorkers) -> None:
    filtered = {"index": 0, "finish_reason": "content_filter", "content_filter_results": {"hate": {"filtered": True}}}
    body = json.dumps({"id": "c", "choices": [filtered], "usage": USAGE}).encode()
    reply = await asked_whole(workers, replies(body), tools=[TOOL])
    assert reply.body["choices"][0]["finish_reason"] == "content_filter"
    assert reply.usage == Usage(7, 2)


ERRORS: list[tuple[dict[str, Any], type[UpstreamError], int]] = [
    ({"error": {"message": "no more today", "code": 429}}, UpstreamRateLimited, 429),
    ({"error": {"message": "no more today", "type": "overloaded_error"}}, UpstreamOverloaded, 529),
    ({"object": "error", "message": "no more today", "code": 400}, UpstreamRefused, 400),
    ({"error": "no more today"}, UpstreamError, 200),
]


@pytest.mark.parametrize(("error", "kind", "status"), ERRORS)
async def test_an_error_with_status_200_is_that_error(
    workers: HttpWorkers, error: dict[str, Any], kind: type[UpstreamError], status: int
) -> None:
    body = json.dumps(error).encode()
    for handler in (typed(body, JSON), typed(body, EVENTS), typed(b"data: " + body + b"\n\n", EVENTS)):
        for asked in (asked_whole, asked_stream):
            with pytest.raises(kind, match="no more today") as caught:
                await asked(workers, handler)
            assert caught.value.upstream_status == status
    behind = typed(chunk({"content": "fi"}) + event(error), EVENTS)
    with pytest.raises(kind, match="no more today"):
        await asked_stream(workers, behind)


async def test_a_list_around_an_error_is_not_in_its_way(workers: HttpWorkers) -> None:
    body = json.dumps([{"error": {"code": 503, "status": "UNAVAILABLE", "message": "overloaded"}}]).encode()
    with pytest.raises(UpstreamOverloaded, match="overloaded"):
        await asked_stream(workers, typed(body, JSON))


async def test_more_bytes_than_the_length_says_do_not_hold_the_reply_up(workers: HttpWorkers) -> None:
    long = sends(HEAD + f"content-length: {len(WHOLE)}\r\n\r\n".encode() + WHOLE + b"and more", pause_s=0)
    assert (await asked_whole(workers, long)).body["choices"][0]["message"]["content"] == "fine"
