"""The client against servers that misbehave: each way to fail has its reason, and nothing is read without a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.adapters.upstream.pooled import pooled_workers
from gateway.core.openai.structured import strict_schema
from gateway.core.pool.workers import PoolFile
from gateway.errors import ConductorError
from gateway.service.loop.conducting import TIMES_MIN, Patience
from gateway.service.ports.request import ConductorChunk, ConductorEnd
from tests.contract.conductors import SCHEMA, planning_call
from tests.kit import ONE_STEP, Kit, ask, model_worker
from tests.upstreams.openai import OpenAI
from tests.upstreams.server import Handler, Reply, Request, Server, event, event_stream, json_reply, raw_reply
from tests.upstreams.vendor import Script
from tests.waiting import BOUND_S


@asynccontextmanager
async def conductor_on(handler: Handler, **options: Any) -> AsyncIterator[HttpConductor]:
    """A client of a server whose every path answers with `handler`."""
    async with Server(handler) as server:
        conductor = HttpConductor(f"{server.url}/v1", "conductor", **({"timeout_s": 60.0} | options))
        try:
            yield conductor
        finally:
            await conductor.close()


def chunk(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}
    return event({"model": "m-1", "choices": [choice]})


def sends(*pieces: bytes, pause_s: float = 0.0, cut: bool = False) -> Handler:
    """A stream of these pieces; `cut`: the connection dies after the last."""
    return lambda request: event_stream(pieces, pause_s, cut=cut)


async def reason_of(conductor: HttpConductor, timeout_s: float = 5.0) -> str:
    with pytest.raises(ConductorError) as caught:
        async for _ in conductor.decode(planning_call(timeout_s=timeout_s)):
            pass
    return caught.value.reason


TOKEN = {"token": "a", "logprob": -0.5}
BAD_STREAMS: dict[str, tuple[Handler, str]] = {
    "not JSON": (sends(b"data: {\n\n"), "unparseable"),
    "a JSON list": (sends(b"data: []\n\n"), "unparseable"),
    "no delta": (sends(b'data: {"choices": [{"finish_reason": "stop"}]}\n\n'), "unparseable"),
    "delta is text": (sends(b'data: {"choices": [{"delta": "x"}]}\n\n'), "unparseable"),
    "ids are words": (sends(chunk("a", token_ids=["x"], logprobs={"content": [TOKEN]})), "unparseable"),
    "more ids than log-probs": (sends(chunk("a", token_ids=[1, 2], logprobs={"content": [TOKEN]})), "unparseable"),
    "a log-prob is text": (sends(chunk("a", logprobs={"content": [{"token": "a", "logprob": "x"}]})), "unparseable"),
    "not UTF-8": (sends(b"data: \xff\xfe\n\n"), "unparseable"),
    "an endless line": (sends(*[b"data: " + b"x" * 65_536] * 20), "unparseable"),
    "a plan of 10 MB": (sends(*[chunk("x" * 50_000)] * 200), "unparseable"),
    "an error event": (sends(b'data: {"error": {"message": "engine died", "code": 500}}\n\n'), "down"),
    "ends early": (sends(chunk("{")), "down"),
    "dies early": (sends(chunk("{"), cut=True), "down"),
    "says nothing": (sends(), "down"),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
async def test_bad_streams(name: str) -> None:
    handler, reason = BAD_STREAMS[name]
    async with conductor_on(handler) as conductor:
        assert await reason_of(conductor) == reason


@pytest.mark.parametrize(
    ("status", "reason"),
    [(500, "down"), (503, "down"), (429, "down"), (400, "refused"), (401, "refused"), (404, "refused")],
)
async def test_statuses(status: int, reason: str) -> None:
    async with conductor_on(lambda request: json_reply({"error": {"message": "no"}}, status)) as conductor:
        assert await reason_of(conductor) == reason
        assert not await conductor.ready()


@pytest.mark.parametrize("handler", [sends(chunk("{"), pause_s=20.0), sends(*[b": \n\n"] * 400, pause_s=0.05)])
async def test_a_hanging_or_dribbling_server_is_slow(handler: Handler) -> None:
    async with conductor_on(handler) as conductor:
        assert await reason_of(conductor, timeout_s=0.2) == "slow"  # at its end it would be `down`


async def test_the_clients_own_bound_holds_when_the_call_allows_more() -> None:
    async with conductor_on(sends(chunk("{"), pause_s=3.0), timeout_s=0.2) as conductor:
        assert await reason_of(conductor, timeout_s=60.0) == "slow"


async def test_after_failures_in_a_row_calls_fail_at_once() -> None:
    calls: list[Request] = []

    def handler(request: Request) -> Reply:
        calls.append(request)
        return Reply(status=500)

    async with conductor_on(handler, breaker=Breaker(failures_max=3, cool_down_s=60.0)) as conductor:
        assert [await reason_of(conductor) for _ in range(6)] == ["down"] * 6
    assert len(calls) == 3


@pytest.mark.parametrize("ended_by", ["itself", "its caller"])
async def test_a_hang_opens_the_breaker_whoever_ends_the_call(ended_by: str) -> None:
    breaker = Breaker(failures_max=2, cool_down_s=60.0)
    hang = sends(chunk("{"), *[b": still there\n\n"] * 1_000, pause_s=0.02)
    async with conductor_on(hang, breaker=breaker, timeout_s=0.1 if ended_by == "itself" else 60.0) as conductor:
        for _ in range(2):
            if ended_by == "itself":
                assert await reason_of(conductor) == "slow"
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reason_of(conductor, 0.1), 0.1)
        assert breaker.is_open
        assert await reason_of(conductor) == "down"


async def test_a_hang_costs_a_few_requests_a_little_and_the_others_nothing() -> None:
    hangs = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        while hangs.is_set():
            yield b": still there\n\n"
            await asyncio.sleep(0.01)
        yield chunk(ONE_STEP[0], "stop")

    waits_s = []
    async with conductor_on(lambda request: Reply(pieces=pieces())) as conductor:
        kit = Kit(conductor=conductor, patience=Patience(60.0, 1.0))
        for _ in range(TIMES_MIN):
            assert (await kit.serve()).record.fallback is None
        hangs.set()
        for _ in range(12):
            began_s = time.monotonic()
            running = await kit.serve()
            waits_s.append(time.monotonic() - began_s)
            assert await kit.text(running)
            assert running.record.fallback in ("conductor_slow", "conductor_down")
    assert max(waits_s) < 30, "not the time-out of 60 s"
    assert [record.fallback for record in kit.metrics.records][-7:] == ["conductor_down"] * 7, "the breaker is open"


FAILING_PLANNERS: dict[str, Handler] = {
    "down": lambda request: json_reply({"error": {"message": "out of order"}}, 503),
    "prose": sends(chunk("I would ask "), chunk("the best one.", "stop"), event("[DONE]")),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", list(FAILING_PLANNERS))
async def test_a_planner_that_fails_over_http_has_each_question_answered_once(how: str, stream: bool) -> None:
    async with conductor_on(FAILING_PLANNERS[how]) as conductor, OpenAI("key") as server:
        server.script = Script("42")
        workers = (model_worker("alpha", "atlas", url=server.base), model_worker("beta", "birch", url=server.base))
        pools = PoolFile(workers=workers, pools={"default": ("alpha", "beta")})
        pooled = pooled_workers(pools, {"alpha": "key", "beta": "key"}, b"secret")
        try:
            kit = Kit(workers=pooled, conductor=conductor, pools=pools, rounds=3)
            served = [await kit.serve(ask(stream=stream)) for _ in range(8)]
        finally:
            await pooled.close()
        assert [await kit.text(running) for running in served] == ["42"] * 8
        assert len(server.requests) == 8
        assert {running.record.fallback for running in served} <= {f"conductor_{name}" for name in ("down", "not_json")}


async def test_a_hasty_request_does_not_open_the_breaker_for_the_others() -> None:
    breaker = Breaker(failures_max=1, cool_down_s=60.0)
    hang = sends(chunk("{"), *[b": still there\n\n"] * 1_000, pause_s=0.02)
    async with conductor_on(hang, breaker=breaker) as conductor:
        with pytest.raises(ConductorError, match="in time"):
            async for _ in conductor.decode(planning_call(timeout_s=0.1, hasty=True)):
                pass
    assert not breaker.is_open


async def test_refusals_do_not_open_the_breaker() -> None:
    async with conductor_on(
        lambda request: Reply(status=404), breaker=Breaker(failures_max=1, cool_down_s=60.0)
    ) as conductor:
        assert [await reason_of(conductor) for _ in range(3)] == ["refused"] * 3


async def test_leaving_midway_closes_the_connection_and_is_no_failure() -> None:
    gone = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield chunk("{")
        try:
            while True:
                yield b": waiting\n\n"
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    breaker = Breaker(failures_max=1, cool_down_s=60.0)
    async with conductor_on(lambda request: Reply(pieces=pieces()), breaker=breaker) as conductor:
        items = conductor.decode(planning_call())
        await anext(items)
        await items.aclose()
        await asyncio.wait_for(gone.wait(), BOUND_S)
        first = await anext(again := conductor.decode(planning_call()))
        assert isinstance(first, ConductorChunk)
        await again.aclose()


# ---------------------------------------------------------------- hosted models


def choosy(*refused: str, seen: list[dict[str, Any]]) -> Handler:
    """A hosted model that calls these options bad, one at a time, in OpenAI's words."""

    def handler(request: Request) -> Reply:
        body = request.body
        seen.append(body)
        for name in refused:
            if name in body:
                message = f"Unsupported parameter: '{name}' is not supported with this model."
                return json_reply({"error": {"message": message, "param": name}}, 400)
        return event_stream([chunk('{"steps":[]}'), chunk(finish="stop"), event("[DONE]")])

    return handler


async def test_options_that_a_hosted_model_refuses_are_left_out_from_then_on() -> None:
    seen: list[dict[str, Any]] = []
    handler = choosy("logprobs", "max_tokens", "temperature", seen=seen)
    async with conductor_on(handler, structured="json_schema", api_key="k") as conductor:
        for _ in range(2):
            items = [item async for item in conductor.decode(planning_call())]
            assert isinstance(items[-1], ConductorEnd)
            assert items[-1].usage.estimated
            assert items[-1].model == "m-1"
    assert len(seen) == 5
    last = seen[-1]
    assert last["max_completion_tokens"] == 256
    assert not {"logprobs", "max_tokens", "temperature", "return_token_ids", "structured_outputs"} & set(last)


async def test_vllm_is_never_asked_for_less() -> None:
    seen: list[dict[str, Any]] = []
    async with conductor_on(choosy("logprobs", seen=seen)) as conductor:
        assert await reason_of(conductor) == "refused"
    assert len(seen) == 1
    assert seen[0]["return_token_ids"] is seen[0]["logprobs"] is True


@pytest.mark.parametrize(
    ("structured", "fields"),
    [
        ("vllm", {"structured_outputs", "return_token_ids"}),
        ("json_schema", {"response_format"}),
        ("json_object", {"response_format"}),
        ("none", set()),
    ],
)
async def test_each_dialect_sends_its_fields(structured: Any, fields: set[str]) -> None:
    seen: list[dict[str, Any]] = []
    async with conductor_on(choosy(seen=seen), structured=structured, logprobs=False) as conductor:
        assert [item async for item in conductor.decode(planning_call(seed=3))]
    assert set(seen[0]) & {"structured_outputs", "return_token_ids", "response_format"} == fields
    assert seen[0]["seed"] == 3
    assert "logprobs" not in seen[0]


async def test_the_key_and_the_calls_headers_are_sent() -> None:
    headers: dict[str, str] = {}

    def handler(request: Request) -> Reply:
        headers.update(request.headers)
        return event_stream([chunk("{}", "stop")])

    async with conductor_on(handler, api_key="secret") as conductor:
        call = planning_call()
        async for _ in conductor.decode(
            type(call)(call.messages, call.schema, call.sampling, 5.0, headers={"x-a": "b"})
        ):
            pass
    assert (headers["authorization"], headers["x-a"]) == ("Bearer secret", "b")


async def test_describe_tells_the_manifest_or_why_not() -> None:
    entries: list[dict[str, Any]] = [{"id": "other"}]

    async with conductor_on(lambda request: json_reply({"data": entries})) as conductor:
        assert not await conductor.ready()
        entries.append({"id": "conductor", "baton": {"prompt_version": "1"}})
        assert await conductor.ready()
        assert await conductor.describe() == {"id": "conductor", "owned_by": "", "prompt_version": "1"}
        entries[-1] = {"id": "conductor"}
        assert await conductor.describe() == {"id": "conductor", "owned_by": ""}


@pytest.mark.parametrize(
    ("owner", "dialect"), [("vllm", "structured_outputs"), ("openai", "response_format"), (None, "response_format")]
)
async def test_the_dialect_is_asked_for_until_the_server_answers(owner: str | None, dialect: str) -> None:
    """A conductor that was down when the gateway started is asked again, not taken for a hosted model for ever."""
    bodies: list[Any] = []
    listed: list[Reply] = [json_reply({"error": {"message": "starting"}}, status=503)] * 2

    def answer(request: Request) -> Reply:
        if request.path.endswith("/models"):
            entries = [] if owner is None else [{"id": "conductor", "owned_by": owner}]
            return listed.pop() if listed else json_reply({"data": entries})
        bodies.append(request.body)
        return event_stream([chunk("{}", "stop"), b"data: [DONE]\n\n"])

    async with conductor_on(answer, structured="auto") as conductor:
        assert [await reason_of(conductor) for _ in range(2)] == ["down", "down"]
        for _ in range(2):
            async for _ in conductor.decode(planning_call()):
                pass
    assert len(bodies) == 2
    for body in bodies:
        assert dialect in body
        named = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert {name: body[name] for name in named if name in body} == (named if owner == "vllm" else {})


async def test_a_connection_that_was_being_closed_is_replaced_once() -> None:
    """As vLLM's server closes an idle connection when the next call is on its way."""
    hung_up: list[str] = []

    def answer(request: Request) -> Reply:
        if len(hung_up) < 1:
            hung_up.append(request.path)
            return raw_reply()
        return event_stream([chunk("{}", "stop"), b"data: [DONE]\n\n"])

    async with conductor_on(answer) as conductor:
        items = [item async for item in conductor.decode(planning_call())]
    assert (hung_up, "".join(getattr(item, "text", "") for item in items)) == (["/v1/chat/completions"], "{}")


def test_an_unknown_dialect_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="structured"):
        HttpConductor("http://x/v1", "m", structured="yaml")  # type: ignore[arg-type]


def test_the_strict_schema_has_types_everywhere() -> None:
    strict = strict_schema(
        {"a": {"enum": ["x"]}, "b": {"enum": [0, 1]}, "c": {"const": "all"}, "d": {"type": "array", "maxItems": 0}}
    )
    assert strict == {
        "a": {"enum": ["x"], "type": "string"},
        "b": {"enum": [0, 1], "type": "integer"},
        "c": {"enum": ["all"], "type": "string"},
        "d": {"type": "array", "maxItems": 0, "items": {"type": "integer"}},
    }
    assert strict_schema(SCHEMA)["properties"]["steps"]["items"]["properties"]["worker"]["type"] == "string"


async def test_what_came_before_a_broken_event_is_decoded_first() -> None:
    together = chunk("a", token_ids=[1], logprobs={"content": [TOKEN]}) + chunk("b") + b"data: {\n\n" + chunk("c")
    async with conductor_on(sends(together)) as conductor:
        items = conductor.decode(planning_call())
        first = await anext(items)
        assert isinstance(first, ConductorChunk)
        assert (first.text, first.token_ids, first.logprobs, first.tokens) == ("ab", (1,), (-0.5,), ("a",))
        with pytest.raises(ConductorError) as caught:
            await anext(items)
        assert caught.value.reason == "unparseable"
