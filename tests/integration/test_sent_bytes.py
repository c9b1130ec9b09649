"""What leaves is what was measured: random schemas through every kind of worker, and the bytes that are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.adapters.upstream import client, http
from gateway.adapters.upstream.litellm import LiteLLMWorkers
from gateway.adapters.upstream.outbound.measure import SendAllowance, bytes_max, guard
from gateway.core.openai.tasks.fields import Sound
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BadRequest, UpstreamError, UpstreamRefused
from gateway.service.loop.bodies import sendable, size_in_bytes
from gateway.service.ports.request import WorkerCall

pytestmark = pytest.mark.litellm
pytest.importorskip("litellm", reason="needs the litellm extra")
STRUCTURE_BYTES = 64  # of a message, a part or a call: braces, and names that no model reads
MODELS = (
    "databricks/databricks-claude-sonnet-4",
    "azure_ai/claude-3-haiku",
    "gemini/gemini-2.5-pro",
    "gemini/gemini-1.5-pro",
    "bedrock/anthropic.claude-3-5-sonnet-20240620-v1:0",
    "bedrock/amazon.nova-pro-v1:0",
    "bedrock/invoke/anthropic.claude-3-5-sonnet-20240620-v1:0",
    "azure_ai/claude-sonnet-4-5",
    "deepseek/deepseek-chat",
    "mistral/mistral-large-latest",
    "groq/llama-3.3-70b-versatile",
    "fireworks_ai/accounts/fireworks/models/llama-v3p1-70b",
    "watsonx/ibm/granite-3-8b",
    "ollama_chat/llama3",
    "openrouter/anthropic/claude-sonnet-4",
    "openai/gpt-4o",
)
Sent = list[bytes]


@pytest.fixture(scope="module")
def sent() -> Iterator[Sent]:
    """The bodies that were about to leave, in place of a network."""
    from litellm.llms.custom_httpx.aiohttp_transport import LiteLLMAiohttpTransport

    bodies: Sent = []

    def capture(self: Any, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            bodies.append(request.read())
        raise httpx.ConnectError("this network takes requests and answers none")

    async def capture_async(self: Any, request: httpx.Request) -> httpx.Response:
        return capture(self, request)

    LiteLLMWorkers({}, reply_bytes_max=1)  # the first one puts the guard around the transport
    patch = pytest.MonkeyPatch()
    for transport in (LiteLLMAiohttpTransport, httpx.AsyncHTTPTransport):
        patch.setattr(transport, "handle_async_request", capture_async)
    patch.setattr(httpx.HTTPTransport, "handle_request", capture)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION_NAME": "us-east-1",
        "DATABRICKS_API_KEY": "key",
        "WATSONX_TOKEN": "token",
        "WATSONX_PROJECT_ID": "project",
    }.items():
        patch.setenv(name, value)
    guard(LiteLLMAiohttpTransport, httpx.AsyncHTTPTransport, httpx.HTTPTransport)
    yield bodies
    patch.undo()


def a_worker(model: str, **fields: Any) -> WorkerSpec:
    url = {} if model.startswith("bedrock") else {"url": "http://127.0.0.1:9"}
    price = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 1}
    entry = {"name": "w", "handle": "atlas", "kind": "litellm", "model": model, "price": price, **url, **fields}
    return WorkerSpec.model_validate(entry)


texts = st.text(max_size=40)
names = st.sampled_from(["a", "b", "name", "définition", "$ref", "definitions", "properties"])
leaves = st.one_of(
    st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from("ABC")),
    st.builds(lambda name: {"$ref": f"#/definitions/{name}"}, st.sampled_from("ABC")),
    st.builds(lambda text: {"type": "string", "description": text}, texts),
    st.builds(lambda values: {"type": "string", "enum": values}, st.lists(texts, min_size=1, max_size=3)),
    st.just({"type": ["integer", "null"]}),
)


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda properties: {"type": "object", "properties": properties, "required": sorted(properties)},
            st.dictionaries(names, inner, max_size=4),
        ),
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3)),
    )


schemas = st.recursive(leaves, _wider, max_leaves=8)
definitions = st.fixed_dictionaries({name: schemas for name in "ABC"})
whole_schemas = st.builds(
    lambda properties, place, defs: {"type": "object", "properties": properties, place: defs},
    st.dictionaries(names, schemas, max_size=4),
    st.sampled_from(["$defs", "definitions"]),
    definitions,
)
tools = st.builds(
    lambda schema, text: {"type": "function", "function": {"name": "go", "description": text, "parameters": schema}},
    whole_schemas,
    texts,
)
formats = st.builds(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}, whole_schemas
)
messages = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text or "?"}, texts),
        st.builds(lambda some: {"role": "user", "content": [{"type": "text", "text": t or "?"} for t in some]},
                  st.lists(texts, min_size=1, max_size=3)),
        st.builds(lambda text: {"role": "system", "content": text or "?"}, texts),
    ),
    min_size=1, max_size=4,
)  # fmt: skip
bodies = st.builds(
    lambda said, tools, reply: {
        "messages": [*said, {"role": "user", "content": "go"}],
        "max_tokens": 50,
        **({"tools": [{**tool, "function": {**tool["function"], "name": f"go{at}"}} for at, tool in enumerate(tools)]}
           if tools else {}),
        **({"response_format": reply} if reply else {}),
    },
    messages, st.lists(tools, max_size=3), st.none() | formats,
)  # fmt: skip
few = settings(
    max_examples=8, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def structure_bytes(body: Mapping[str, Any], item_bytes: int = STRUCTURE_BYTES) -> int:
    """What of a body's JSON is no prompt: some bytes for each message and part."""
    parts = sum(len(one["content"]) for one in body["messages"] if isinstance(one["content"], list))
    return item_bytes * (len(body["messages"]) + parts)


def prompt_bytes(content: bytes) -> int:
    """The bytes of what was sent without blanks between values, and without escapes."""
    return len(json.dumps(json.loads(content), ensure_ascii=False, separators=(",", ":")).encode())


@pytest.mark.parametrize("model", MODELS)
def test_no_vendor_is_sent_more_than_is_held_for(model: str, sent: Sent) -> None:
    spec, workers = a_worker(model), LiteLLMWorkers({"w": "key"})
    seen: Sent = []
    errors: list[UpstreamError | None] = []

    @few
    @given(bodies)
    def run(body: dict[str, Any]) -> None:
        sent.clear()
        try:
            measured = asyncio.run(sendable(spec, body))
        except BadRequest:
            return
        held = size_in_bytes(spec, measured).tokens_max + structure_bytes(measured)
        error: UpstreamError | None = None
        try:
            asyncio.run(workers.complete(WorkerCall(spec, measured, 20.0, "rollout", "step")))
        except UpstreamError as failure:
            error = failure
        errors.append(error)
        assert "more than was held for" not in str(error)
        for content in sent[-1:]:
            assert prompt_bytes(content) <= held
            seen.append(content)

    run()
    assert seen, errors


OWN = {  # workers that are asked without LiteLLM, and what an item's form takes of bytes
    "chat": (a_worker("gpt-5", kind="openai"), STRUCTURE_BYTES),
    "responses": (a_worker("gpt-5", kind="openai", api="responses"), 2 * STRUCTURE_BYTES),
    "messages": (a_worker("anthropic/claude-sonnet-4-5"), STRUCTURE_BYTES),
}


@pytest.mark.parametrize("wire", OWN)
@few
@given(bodies)
def test_wires_of_our_own_have_schemas_as_they_are(wire: str, body: dict[str, Any]) -> None:
    spec, item_bytes = OWN[wire]
    measured = asyncio.run(sendable(spec, body))
    assert measured is body
    call = WorkerCall(spec, measured, 20.0, "rollout", "step")
    content = client.encode(http.as_sent(call, http.request_body(call)))
    assert prompt_bytes(content) <= size_in_bytes(spec, measured).tokens_max + structure_bytes(measured, item_bytes)
    sent = [tool.get("function", tool) for tool in json.loads(content).get("tools", ())]
    schemas = [tool.get("parameters") or tool["input_schema"] for tool in sent]
    assert schemas == [tool["function"]["parameters"] for tool in body.get("tools", ())]


def doubling(levels: int) -> dict[str, Any]:
    pair = {f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 2} for n in range(levels)}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": {**pair, f"D{levels}": {}}}


@pytest.mark.parametrize("model", ["gemini/gemini-2.5-pro", "bedrock/amazon.nova-pro-v1:0"])
async def test_a_request_that_litellm_enlarges_does_not_leave(model: str, sent: Sent) -> None:
    workers, tool = LiteLLMWorkers({"w": "key"}), {"name": "go", "parameters": doubling(9)}
    body = {"messages": [{"role": "user", "content": "go"}], "tools": [{"type": "function", "function": tool}]}
    call = WorkerCall(a_worker(model), body, 20.0, "rollout", "step")
    for work in (workers.complete(call), anext(aiter(workers.stream(replace(call, body=body))))):
        sent.clear()
        with pytest.raises(UpstreamRefused, match="more than was held for") as caught:
            await work
        assert not caught.value.dispatched
        assert not sent


async def test_a_request_that_litellm_cannot_translate_costs_nothing(sent: Sent) -> None:
    workers, tool = LiteLLMWorkers({"w": "key"}), {"name": "go", "parameters": {"properties": {"$ref": {}}}}
    body = {"messages": [{"role": "user", "content": "go"}], "tools": [{"type": "function", "function": tool}]}
    sent.clear()
    with pytest.raises(UpstreamRefused, match="cannot translate") as caught:
        await workers.complete(WorkerCall(a_worker("gemini/gemini-2.5-pro"), body, 20.0, "rollout", "step"))
    assert not caught.value.dispatched
    assert not sent


async def test_a_body_is_the_same_after_it_was_sent(sent: Sent) -> None:
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}]}
    body["tools"] = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    before = json.dumps(body)
    for model in MODELS:
        with pytest.raises(UpstreamError):
            await LiteLLMWorkers({"w": "key"}).complete(WorkerCall(a_worker(model), body, 20.0, "rollout", "step"))
        assert json.dumps(body) == before
    assert len(sent) >= len(MODELS)


def test_only_requests_in_the_block_are_bounded() -> None:
    reached: list[int] = []

    class Transport(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            reached.append(len(request.content))
            return httpx.Response(200)

    guard(Transport)
    with httpx.Client(transport=Transport()) as client:
        with SendAllowance(10) as allowance:
            client.post("http://w", content=b"x" * 10)
            with suppress(Exception):
                client.post("http://w", content=b"x" * 11)
        client.post("http://w", content=b"x" * 12)
    assert reached == [10, 12]
    assert allowance.excess_bytes == 11


def test_files_count_by_their_bytes() -> None:
    small, large = ({"model": "m", "file": Sound("a.wav", "audio/wav", b"x" * size)} for size in (10, 1010))
    assert bytes_max(large) - bytes_max(small) == 1000
