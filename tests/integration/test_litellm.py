"""LiteLLM's adapter: what it must not do beside translating, and the offline prices."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.host.poolfile import load
from gateway.adapters.host.pricemap import offline_price
from gateway.adapters.upstream.litellm import LiteLLMWorkers
from gateway.core.pool.prices import LongPrompt, Price
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.errors import ConfigError, UpstreamError, UpstreamRefused
from gateway.service.ports.request import WorkerCall
from tests.kit import Kit, ask, model_worker
from tests.upstreams.anthropic import Anthropic
from tests.upstreams.gemini import Gemini
from tests.upstreams.server import Request, event
from tests.upstreams.vendor import Script, ToolCall

pytestmark = pytest.mark.litellm
pytest.importorskip("litellm", reason="needs the litellm extra")
KEY = "sk-ant-0123456789"
SIGNATURE = "c2lnbmF0dXJl" * 60


@pytest.fixture
async def upstream() -> AsyncIterator[Anthropic]:
    async with Anthropic(KEY) as anthropic:
        yield anthropic


@pytest.fixture
async def workers() -> AsyncIterator[LiteLLMWorkers]:
    workers = LiteLLMWorkers({"w": KEY})
    yield workers
    await workers.close()


def a_call(url: str, **body: Any) -> WorkerCall:
    spec = WorkerSpec.model_validate(
        {"name": "w", "handle": "atlas", "kind": "litellm", "model": "anthropic/claude-haiku-4-5", "url": url}
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    return WorkerCall(spec, {"messages": messages, "max_tokens": 50, **body}, 5.0, "rollout", "step")


async def test_the_vendors_own_wire_is_spoken(workers: LiteLLMWorkers, upstream: Anthropic) -> None:
    upstream.script = Script(text="hello")
    await workers.complete(a_call(upstream.url, temperature=0.25, stop=["END"]))
    [request] = upstream.requests
    assert request.body["model"] == "claude-haiku-4-5"
    assert "Be brief." in str(request.body["system"])
    assert [message["role"] for message in request.body["messages"]] == ["user"]
    assert request.body["temperature"] == 0.25
    assert request.body["stop_sequences"] == ["END"]
    assert request.body["max_tokens"] == 50


async def test_the_header_of_the_callers_trace_is_passed_on(workers: LiteLLMWorkers, upstream: Anthropic) -> None:
    upstream.script = Script(text="hello")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call = a_call(upstream.url)
    await workers.complete(replace(call, traceparent=trace))
    _ = [chunk async for chunk in workers.stream(replace(call, traceparent=trace))]
    await workers.complete(call)
    assert [request.headers.get("traceparent") for request in upstream.requests] == [trace, trace, None]


@pytest.mark.parametrize("status", [429, 500, 529])
async def test_it_does_not_retry(workers: LiteLLMWorkers, upstream: Anthropic, status: int) -> None:
    upstream.script = Script(status=status)
    with pytest.raises(UpstreamError):
        await workers.complete(a_call(upstream.url))
    with pytest.raises(UpstreamError):
        _ = [chunk async for chunk in workers.stream(a_call(upstream.url))]
    assert len(upstream.requests) == 2


async def test_it_does_not_cache(workers: LiteLLMWorkers, upstream: Anthropic) -> None:
    for text in ("first", "second"):
        upstream.script = Script(text=text)
        reply = await workers.complete(a_call(upstream.url))
        assert reply.body["choices"][0]["message"]["content"] == text


async def test_an_unsupported_parameter_is_said_not_dropped(workers: LiteLLMWorkers, upstream: Anthropic) -> None:
    upstream.script = Script(text="hello")
    with pytest.raises(UpstreamRefused, match="logit_bias"):
        await workers.complete(a_call(upstream.url, logit_bias={"5": 10}))
    assert not upstream.requests


async def test_a_vendors_parameters_reach_it(workers: LiteLLMWorkers, upstream: Anthropic) -> None:
    upstream.script = Script(text="hello")
    thinking = {"type": "enabled", "budget_tokens": 1024}
    await workers.complete(a_call(upstream.url, thinking=thinking, top_k=5, max_tokens=2000))
    assert upstream.requests[0].body["thinking"] == thinking
    assert upstream.requests[0].body["top_k"] == 5
    with pytest.raises(UpstreamRefused, match="min_p"):
        await workers.complete(a_call(upstream.url, min_p=0.1))


@pytest.mark.parametrize(
    "name", ["api_base", "base_url", "mock_response", "fallbacks", "extra_headers", "custom_llm_provider"]
)
async def test_a_request_cannot_steer_litellm(workers: LiteLLMWorkers, upstream: Anthropic, name: str) -> None:
    with pytest.raises(UpstreamRefused, match=name) as caught:
        await workers.complete(a_call(upstream.url, **{name: "http://127.0.0.1:1"}))
    assert not caught.value.dispatched
    assert not upstream.requests


@pytest.mark.parametrize("url", ["http://169.254.169.254/x.png", " HTTPS://example.org/x.png", "file:///etc/passwd"])
async def test_it_fetches_nothing_for_a_client(workers: LiteLLMWorkers, upstream: Anthropic, url: str) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(UpstreamRefused, match="data: URLs only"):
        await workers.complete(a_call(upstream.url, messages=[{"role": "user", "content": parts}]))
    assert not upstream.requests


async def test_a_vendor_that_fetches_pictures_itself_is_sent_their_url(
    workers: LiteLLMWorkers, upstream: Anthropic
) -> None:
    upstream.script = Script(text="seen")
    url = "https://example.org/x.png"
    parts: list[dict[str, Any]] = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    call = a_call(upstream.url, messages=[{"role": "user", "content": parts}])
    call = replace(call, worker=call.worker.model_copy(update={"fetches": True}))
    await workers.complete(call)
    sent = [part for part in upstream.requests[0].body["messages"][0]["content"] if part["type"] == "image"]
    assert [part["source"] for part in sent] == [{"type": "url", "url": url}]
    for refused in ("http://example.org/x.png", "file:///etc/passwd"):
        parts[1]["image_url"] = {"url": refused}
        with pytest.raises(UpstreamRefused, match="data: URLs only"):
            await workers.complete(call)


async def test_a_call_to_a_closed_port_was_not_dispatched(workers: LiteLLMWorkers) -> None:
    with pytest.raises(UpstreamError, match="cannot be reached") as caught:
        await workers.complete(a_call("http://127.0.0.1:9"))
    assert not caught.value.dispatched
    assert caught.value.retryable


async def test_a_reply_over_the_bound_is_refused(upstream: Anthropic) -> None:
    workers = LiteLLMWorkers({"w": KEY}, reply_bytes_max=1000)
    upstream.script = Script(text="word " * 400)
    with pytest.raises(UpstreamError, match="larger than"):
        await workers.complete(a_call(upstream.url))
    with pytest.raises(UpstreamError, match="larger than"):
        _ = [chunk async for chunk in workers.stream(a_call(upstream.url))]
    await workers.close()


async def test_silence_in_a_stream_is_bounded(upstream: Anthropic) -> None:
    workers = LiteLLMWorkers({"w": KEY}, chunk_gap_s_max=0.2)
    upstream.script = Script(text="one two three", gap_s=0.4)
    with pytest.raises(UpstreamError):
        _ = [chunk async for chunk in workers.stream(replace(a_call(upstream.url), timeout_s=10.0))]
    await workers.close()


def test_offline_prices() -> None:
    haiku = offline_price("anthropic/claude-haiku-4-5")
    assert haiku is not None
    assert (haiku.input_usd_per_mtok, haiku.output_usd_per_mtok) == (Decimal(1), Decimal(5))
    assert offline_price("anthropic/no-such-model") is None
    assert offline_price("gemini/claude-haiku-4-5") is None, "another provider's price is no price"
    small, large = offline_price("gemini/gemini-2.5-pro", 200_000), offline_price("gemini/gemini-2.5-pro", 1_000_000)
    assert small is not None
    assert large is not None
    assert small.above == (), "no prompt is so long"
    assert large.input_usd_per_mtok == small.input_usd_per_mtok
    assert [(tier.prompt_tokens, tier.input_usd_per_mtok) for tier in large.above] == [
        (200_000, 2 * small.input_usd_per_mtok)
    ]
    assert large.at(200_000).input_usd_per_mtok == small.input_usd_per_mtok
    assert large.at(200_001).input_usd_per_mtok == 2 * small.input_usd_per_mtok


class CachingClaude(Anthropic):
    """Claude that reads a prompt from its cache, and writes another."""

    def whole(self, request: Request) -> Mapping[str, Any]:
        body = super().whole(request)
        return {**body, "usage": {**body["usage"], **CACHED}}

    def events(self, request: Request) -> Iterator[bytes]:
        for piece in super().events(request):
            name, _, data = piece.decode().partition("\ndata: ")
            begun = json.loads(data)
            if name == "event: message_start":
                begun["message"]["usage"] |= CACHED
            yield event(begun, name.removeprefix("event: "))


class CachingGemini(Gemini):
    """Gemini that reads a prompt from its cache, and thinks."""

    def _response(self, parts: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        body = super()._response(parts, reason)
        usage = body["usageMetadata"]
        usage |= {"promptTokenCount": 1_012, "cachedContentTokenCount": 1_000, "thoughtsTokenCount": 30}
        return {**body, "usageMetadata": usage | {"totalTokenCount": 1_012 + 30 + usage["candidatesTokenCount"]}}


CACHED = {
    "cache_read_input_tokens": 1_000,
    "cache_creation_input_tokens": 500,
    "cache_creation": {"ephemeral_5m_input_tokens": 400, "ephemeral_1h_input_tokens": 100},
}
RATES = {
    "input_usd_per_mtok": Decimal(1),
    "output_usd_per_mtok": Decimal(5),
    "cache_read_usd_per_mtok": Decimal("0.1"),
    "cache_write_usd_per_mtok": Decimal("1.25"),
    "reasoning_usd_per_mtok": Decimal(10),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tiers", [(), (LongPrompt(prompt_tokens=1_000, input_usd_per_mtok=Decimal(2)),)])
@pytest.mark.parametrize("vendor", ["anthropic", "gemini"])
async def test_cached_written_and_reasoning_tokens_are_charged_to_the_nano_dollar(
    vendor: str, tiers: tuple[LongPrompt, ...], stream: bool
) -> None:
    server: CachingClaude | CachingGemini = CachingClaude(KEY) if vendor == "anthropic" else CachingGemini(KEY)
    model = {"anthropic": "anthropic/claude-haiku-4-5", "gemini": "gemini/gemini-2.5-flash"}[vendor]
    async with server:
        price = Price(**RATES, above=tiers)
        more: dict[str, Any] = {"kind": "litellm", "model": model, "price": price, "context_tokens": 100_000}
        spec = model_worker("w", "atlas", url=server.base, **more)
        workers = LiteLLMWorkers({"w": KEY})
        kit = Kit(workers=workers, pools=PoolFile(workers=(spec,), pools={"default": ("w",)}))
        server.script = Script(text="one two three", prompt_tokens=12, completion_tokens=7)
        running = await kit.serve(ask(model="w", stream=stream))
        await running.result()
        await workers.close()
    rest, kinds = (
        12 * (2_000 if tiers else 1_000),
        {
            "anthropic": 1_000 * 100 + 400 * 1_250 + 100 * 2_000 + 7 * 5_000,
            "gemini": 1_000 * 100 + 30 * 10_000 + 7 * 5_000,
        },
    )
    details = {"anthropic": {"cached_tokens": 1_000, "cache_write_tokens": 500, "cache_write_1h_tokens": 100},
               "gemini": {"cached_tokens": 1_000, "reasoning_tokens": 30}}  # fmt: skip
    [step] = running.record.steps
    assert details[vendor].items() <= (step.usage_details or {}).items()
    assert running.record.cost_nano == rest + kinds[vendor]


def test_a_model_without_a_price_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(
        "workers:\n  - {name: a, handle: atlas, kind: litellm, model: anthropic/none-such}\npools: {default: [a]}\n"
    )
    with pytest.raises(ConfigError, match=r"yaml:2: workers\[0\]\.price: LiteLLM's offline map has no price"):
        load(path, {})


def test_reading_prices_loads_no_litellm_and_loading_it_opens_no_connection() -> None:
    code = """
import socket, sys
from gateway.adapters.upstream.litellm import LiteLLMWorkers
from gateway.adapters.host.pricemap import offline_price
assert offline_price("anthropic/claude-haiku-4-5")
assert "litellm" not in sys.modules
def refuse(*args, **kwargs): raise SystemExit("importing LiteLLM opened a connection")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
LiteLLMWorkers({})
import litellm
assert litellm.callbacks == [] and litellm.cache is None and litellm.num_retries == 0
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout


class Signing(Gemini):
    """Gemini 3: every call is signed."""

    def _parts(self) -> list[dict[str, Any]]:
        return [part | ({"thoughtSignature": SIGNATURE} if "functionCall" in part else {}) for part in super()._parts()]


class Thinking(Anthropic):
    """Claude with extended thinking."""

    def _blocks(self) -> list[dict[str, Any]]:
        return [{"type": "thinking", "thinking": "let me see", "signature": SIGNATURE}, *super()._blocks()]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("vendor", ["gemini", "anthropic"])
async def test_a_vendors_signatures_survive_a_client_that_knows_only_openai(vendor: str, stream: bool) -> None:
    server: Signing | Thinking = Signing(KEY) if vendor == "gemini" else Thinking(KEY)
    model = {"gemini": "gemini/gemini-3-pro-preview", "anthropic": "anthropic/claude-haiku-4-5"}[vendor]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with server:
        spec = model_worker("w", "atlas", kind="litellm", model=model, url=server.base, output_tokens_max=4096)
        workers = LiteLLMWorkers({"w": KEY})
        kit = Kit(workers=workers, pools=PoolFile(workers=(spec,), pools={"default": ("w",)}))
        server.script = Script(tool_calls=[ToolCall("toolu_1", "f", {})], reason="tool_calls")
        body = ask(tools=[tool], model="w", stream=stream)
        body |= {"reasoning_effort": "low"} if vendor == "anthropic" else {}
        message = (await (await kit.serve(body)).result())["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert len(call["id"]) <= 40
        plain = {name: call[name] for name in ("id", "type", "function")}
        turn = [
            {"role": "assistant", "content": message["content"], "tool_calls": [plain]},
            {"role": "tool", "tool_call_id": call["id"], "content": "1"},
        ]
        server.script = Script(text="done")
        await (await kit.serve({**body, "messages": [*body["messages"], *turn]})).result()
        await workers.close()
    sent = json.dumps(server.requests[-1].body)
    assert sent.count(SIGNATURE) == 1
    if vendor == "anthropic":
        assert server.requests[-1].body["messages"][1]["content"][0]["type"] == "thinking"
        assert "thinking" in server.requests[-1].body
