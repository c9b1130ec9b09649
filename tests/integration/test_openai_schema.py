"""Replies of the running API against OpenAI's published schema (tests/openai_shapes.py): keys, types, order.

`make test-clients` does the same for every route of a whole gateway, and with the newest SDK's own models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.errors import UpstreamRateLimited
from tests import openai_shapes as shapes
from tests.fakes.workers import Says
from tests.integration.test_api import served
from tests.kit import Kit, ask

CALLS = [
    {"id": f"call_{city}", "type": "function", "function": {"name": "get_weather", "arguments": f'{{"city":"{city}"}}'}}
    for city in ("Lima", "Tokyo")
]
SAYS: Mapping[str, Says] = {
    "text": Says("one two, Zürich 東京 🎼"),
    "tool calls": Says(None, tool_calls=CALLS, finish_reason="tool_calls"),
    "cut off": Says("one", finish_reason="length"),
}
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS: Mapping[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}]}
FLAT_TOOLS = {"tools": [{"type": "function", **FUNCTION, "strict": False}]}


@pytest.mark.parametrize("says", SAYS)
async def test_chat(says: str) -> None:
    async with served(Kit(workers={"alpha": SAYS[says]})) as gateway:
        for body in (ask(**TOOLS), ask(**TOOLS, n=2)):
            reply = await gateway.http.post("/v1/chat/completions", json=body)
            assert shapes.problems(shapes.CHAT_COMPLETION, reply.json()) == []


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("says", SAYS)
async def test_chat_streamed(says: str, usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": usage}}
    async with served(Kit(workers={"alpha": SAYS[says]})) as gateway:
        reply = await gateway.http.post("/v1/chat/completions", json=ask(stream=True, **TOOLS, **options))
    assert shapes.chat_stream_problems(reply.text, usage=usage) == []


@pytest.mark.parametrize("says", SAYS)
async def test_responses(says: str) -> None:
    body = {"model": "baton", "input": "hi", **FLAT_TOOLS}
    async with served(Kit(workers={"alpha": SAYS[says]})) as gateway:
        whole = await gateway.http.post("/v1/responses", json=body)
        streamed = await gateway.http.post("/v1/responses", json={**body, "stream": True})
    assert shapes.problems(shapes.RESPONSE, whole.json()) == []
    assert shapes.response_stream_problems(streamed.text) == []


async def test_models_and_errors() -> None:
    kit = Kit(workers={"alpha": UpstreamRateLimited("slow down", retryable=False, upstream_status=429)})
    async with served(kit) as gateway:
        listed = await gateway.http.get("/v1/models")
        assert shapes.problems(shapes.MODELS, listed.json()) == []
        for reply in (
            await gateway.http.post("/v1/chat/completions", json=ask(model="alpha")),
            await gateway.http.post("/v1/chat/completions", json=ask(model="alpha", stream=True)),
            await gateway.http.post("/v1/chat/completions", json=ask(model="gpt-9")),
            await gateway.http.post("/v1/responses", json={"model": "baton"}),
            await gateway.http.get("/v1/models/gpt-9"),
            await gateway.http.put("/v1/models"),
            await gateway.http.get("/v1/models", headers={"authorization": "Bearer sk-no"}),
        ):
            assert reply.status_code >= 400
            assert shapes.problems(shapes.ERROR, reply.json()) == []


def spoiled(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


async def test_the_checks_see_what_breaks_clients() -> None:
    async with served(Kit(workers={"alpha": SAYS["text"]})) as gateway:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}}
        text = (await gateway.http.post("/v1/chat/completions", json=ask(stream=True, **options))).text
        whole = (await gateway.http.post("/v1/chat/completions", json=ask())).json()
    assert shapes.chat_stream_problems(text, usage=True) == []
    for worse in (
        spoiled(text, "data: [DONE]\n\n", ""),
        spoiled(text, '"delta":{},"finish_reason":"stop"', '"delta":{"content":"x"},"finish_reason":"stop"'),
        spoiled(text, ',"logprobs":null', ""),
        spoiled(text, '"role":"assistant",', ""),
        spoiled(text, '"choices":[],', '"choices":[{}],'),
        spoiled(text, '"usage":null', '"cost":0'),
    ):
        assert shapes.chat_stream_problems(worse, usage=True) != []
    assert shapes.chat_stream_problems(text, usage=False) != []
    for name in ("id", "object", "created", "model", "choices"):
        less = {key: value for key, value in whole.items() if key != name}
        assert shapes.problems(shapes.CHAT_COMPLETION, less) != []
    with_null = spoiled(json.dumps(whole), '"refusal": null', '"refusal": null, "tool_calls": null')
    assert shapes.problems(shapes.CHAT_COMPLETION, json.loads(with_null)) != []
