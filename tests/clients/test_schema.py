"""Every kind of reply against OpenAI's published schema, twice: by our own checks and by the newest SDK's models."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject

from tests import openai_shapes as shapes
from tests.clients import strict
from tests.clients.conftest import Facts
from tests.clients.questions import ASK_BOTH, ASK_PLACE, HELLO, WEATHER_TOOL, Place

PLACE = {"name": "place", "strict": True, "schema": {**Place.model_json_schema(), "additionalProperties": False}}
CHATS: dict[str, dict[str, Any]] = {
    "text": {},
    "choices with logprobs": {"n": 2, "logprobs": True, "top_logprobs": 1},
    "tool calls": {"messages": [{"role": "user", "content": ASK_BOTH}], "tools": [WEATHER_TOOL]},
    "json": {
        "messages": [{"role": "user", "content": ASK_PLACE}],
        "response_format": {"type": "json_schema", "json_schema": PLACE},
    },
    "a refusal": {"model": "refuser"},
    "cut off": {"max_completion_tokens": 1},
}
FLAT_TOOL = {"type": "function", **WEATHER_TOOL["function"]}  # type: ignore[dict-item]
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {},
    "with everything": {"instructions": "Be short.", "metadata": {"a": "b"}, "temperature": 0.5, "store": False},
    "tool calls": {"input": ASK_BOTH, "tools": [FLAT_TOOL]},
    "json": {"input": ASK_PLACE, "text": {"format": {"type": "json_schema", **PLACE}}},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "a refusal": {"model": "refuser"},
    "cut off": {"input": " ".join(["word"] * 40), "max_output_tokens": 16},
}
ERRORS: dict[str, tuple[str, Any, int]] = {
    "no such path": ("/nowhere", {}, 404),
    "no messages": ("/chat/completions", {"model": "baton"}, 400),
    "not an object": ("/chat/completions", [], 400),
    "a wrong type": ("/chat/completions", {"model": "baton", "messages": [], "temperature": "hot"}, 400),
    "no such model": ("/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "a"}]}, 404),
    "a broken worker": ("/chat/completions", {"model": "broken", "messages": [{"role": "user", "content": "a"}]}, 502),
    "a busy worker": ("/chat/completions", {"model": "limited", "messages": [{"role": "user", "content": "a"}]}, 429),
    "no input": ("/responses", {"model": "baton"}, 400),
    "no embedding input": ("/embeddings", {"model": "embedder"}, 400),
    "no prompt": ("/completions", {"model": "scribe"}, 400),
}
CODE = re.compile(r"[a-z][a-z0-9_]*")


@pytest.fixture
def http(facts: Facts) -> httpx.Client:
    return httpx.Client(base_url=facts.base_url, headers={"authorization": f"Bearer {facts.key}"}, timeout=30)


def chat(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "baton", "messages": [{"role": "user", "content": HELLO}]} | CHATS[name] | more


def response(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "baton", "input": HELLO} | RESPONSES[name] | more


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("name", CHATS)
def test_chat(http: httpx.Client, name: str) -> None:
    reply = http.post("/chat/completions", json=chat(name))
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    assert shapes.problems(shapes.CHAT_COMPLETION, reply.json()) == []
    assert strict.problems(ChatCompletion, reply.json()) == []


@pytest.mark.parametrize("usage", [False, True], ids=["no usage", "usage"])
@pytest.mark.parametrize("name", CHATS)
def test_chat_streamed(http: httpx.Client, name: str, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    reply = http.post("/chat/completions", json=chat(name, stream=True, **options))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert shapes.chat_stream_problems(reply.text, usage=usage) == []
    assert [problem for chunk in events(reply.text) for problem in strict.problems(ChatCompletionChunk, chunk)] == []


def test_a_stream_that_dies(http: httpx.Client) -> None:
    reply = http.post("/chat/completions", json=chat("text", model="cutter", stream=True))
    assert "[DONE]" not in reply.text
    assert shapes.problems(shapes.ERROR, events(reply.text)[-1]) == []


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(http: httpx.Client, name: str) -> None:
    reply = http.post("/responses", json=response(name))
    assert reply.status_code == 200
    assert shapes.problems(shapes.RESPONSE, reply.json()) == []
    assert strict.problems(Response, reply.json()) == []


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_streamed(http: httpx.Client, name: str) -> None:
    reply = http.post("/responses", json=response(name, stream=True))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert shapes.response_stream_problems(reply.text) == []
    assert [problem for event in events(reply.text) for problem in strict.problems(ResponseStreamEvent, event)] == []


def test_a_response_stream_that_dies(http: httpx.Client) -> None:
    told = events(http.post("/responses", json=response("text", model="cutter", stream=True)).text)
    failed, error = told[-2:]  # the first is OpenAI's; the second is what its SDKs raise
    assert (failed["type"], error["type"]) == ("response.failed", "error")
    assert strict.problems(ResponseStreamEvent, failed) == []
    assert failed["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("name", ERRORS)
def test_errors(http: httpx.Client, name: str) -> None:
    path, body, status = ERRORS[name]
    reply = http.post(path, json=body)
    assert reply.status_code == status
    assert shapes.problems(shapes.ERROR, reply.json()) == []
    assert strict.problems(ErrorObject, reply.json()["error"]) == []
    assert CODE.fullmatch(reply.json()["error"]["code"] or "null")
    assert reply.headers["x-request-id"].startswith("req_")


def test_models(http: httpx.Client) -> None:
    listed = http.get("/models").json()
    assert shapes.problems(shapes.MODELS, listed) == []
    assert [problem for model in listed["data"] for problem in strict.problems(Model, model)] == []
    assert shapes.problems(shapes.MODEL, http.get("/models/baton").json()) == []


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(http: httpx.Client, encoding: str) -> None:
    body = {"model": "embedder", "input": ["a", "b"], "encoding_format": encoding}
    reply = http.post("/embeddings", json=body).json()
    assert shapes.problems(shapes.EMBEDDINGS, reply) == []
    if encoding == "float":  # the SDK's model is of what it makes of base64
        assert strict.problems(CreateEmbeddingResponse, reply) == []


def test_completions(http: httpx.Client) -> None:
    body = {"model": "scribe", "prompt": "Once", "max_tokens": 16}
    reply = http.post("/completions", json=body).json()
    assert shapes.problems(shapes.COMPLETION, reply) == []
    assert strict.problems(Completion, reply) == []
    streamed = events(http.post("/completions", json=body | {"stream": True}).text)
    assert [problem for chunk in streamed for problem in shapes.problems(shapes.COMPLETION, chunk)] == []
