"""`openai` for Python, the Responses API: create, stream, parse, tools, conversations by id, the tool runner."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.clients.conftest import Facts
from tests.clients.questions import (
    ASK_BOTH,
    ASK_PLACE,
    ASK_WEATHER,
    BOTH_SAID,
    HELLO,
    HELLO_SAID,
    TOKYO,
    WEATHER_SAID,
    WEATHER_TOOL,
    Place,
)

MODEL = "baton"
TOOL: Any = {"type": "function", **WEATHER_TOOL["function"]}  # type: ignore[dict-item]  # flat, unlike chat's


@pytest.fixture
def client(facts: Facts) -> openai.OpenAI:
    return openai.OpenAI(base_url=facts.base_url, api_key=facts.key)


@pytest.fixture
def asynchronous(facts: Facts) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=facts.base_url, api_key=facts.key)


def test_create(client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(model=MODEL, input=HELLO, instructions="Be short.")
    reply = raw.parse()
    assert (reply.output_text, reply.status, reply.instructions) == (HELLO_SAID, "completed", "Be short.")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens > 0
    assert raw.headers["x-baton-steps"] == "2"


async def test_create_async(asynchronous: openai.AsyncOpenAI) -> None:
    reply = await asynchronous.responses.create(model=MODEL, input=[{"role": "user", "content": HELLO}])
    assert reply.output_text == HELLO_SAID


def test_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input=HELLO, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == HELLO_SAID
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=ASK_PLACE, text_format=Place) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(deltas) > 1
    assert final.output_parsed == TOKYO


async def test_the_stream_helper_async(asynchronous: openai.AsyncOpenAI) -> None:
    async with asynchronous.responses.stream(model=MODEL, input=HELLO) as stream:
        assert (await stream.get_final_response()).output_text == HELLO_SAID


def test_parse(client: openai.OpenAI) -> None:
    assert client.responses.parse(model=MODEL, input=ASK_PLACE, text_format=Place).output_parsed == TOKYO


async def test_parse_async(asynchronous: openai.AsyncOpenAI) -> None:
    reply = await asynchronous.responses.parse(model=MODEL, input=ASK_PLACE, text_format=Place)
    assert reply.output_parsed == TOKYO


@pytest.mark.parametrize("by_id", [True, False], ids=["by previous_response_id", "with the items sent back"])
def test_tools_there_and_back(client: openai.OpenAI, weather: Callable[..., str], by_id: bool) -> None:
    asked = client.responses.create(model=MODEL, input=ASK_BOTH, tools=[TOOL])
    calls = [item for item in asked.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Tokyo"}, {"city": "Lima"}]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": weather(**json.loads(call.arguments))}
        for call in calls
    ]
    if by_id:
        final = client.responses.create(model=MODEL, input=results, tools=[TOOL], previous_response_id=asked.id)
        assert final.previous_response_id == asked.id
    else:
        history: list[Any] = [{"role": "user", "content": ASK_BOTH}, *asked.output, *results]
        final = client.responses.create(model=MODEL, input=history, tools=[TOOL], store=False)
    assert final.output_text == BOTH_SAID


def test_tools_streamed(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=ASK_BOTH, tools=[TOOL]) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Tokyo"}, {"city": "Lima"}]


def test_a_conversation_goes_on_by_id(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=HELLO)
    second = client.responses.create(model=MODEL, input="And again.", previous_response_id=first.id)
    assert second.output_text.startswith("You said: And again.")
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message", "message", "message"]


def test_read_and_delete(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=HELLO)
    assert client.responses.retrieve(made.id).output_text == HELLO_SAID
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_cut_off(client: openai.OpenAI) -> None:
    reply = client.responses.create(model=MODEL, input=HELLO, max_output_tokens=16, temperature=0)
    assert reply.status == "completed"
    short = client.responses.create(model=MODEL, input=" ".join(["word"] * 40), max_output_tokens=16)
    assert short.status == "incomplete"
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


def test_a_refusal_is_one(client: openai.OpenAI) -> None:
    message = client.responses.create(model="refuser", input=HELLO).output[0]
    assert message.type == "message"
    assert [part.type for part in message.content] == ["refusal"]


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="no-such", input=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as lost:
        client.responses.create(model=MODEL, input=HELLO, previous_response_id="resp_0")
    assert lost.value.param == "previous_response_id"


def test_a_stream_that_dies_says_so(client: openai.OpenAI) -> None:
    kinds: list[str] = []
    with pytest.raises(openai.APIError):
        kinds.extend(event.type for event in client.responses.create(model="cutter", input=HELLO, stream=True))


@pytest.mark.skipif(
    importlib.util.find_spec("openai.lib.responses_tool_runner") is None, reason="this openai has no tool runner"
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(client: openai.OpenAI, weather: Callable[..., str], stream: bool) -> None:
    runner = importlib.import_module("openai.lib.responses_tool_runner")
    function = runner.RegisteredFunction(TOOL, lambda arguments: weather(**arguments))
    tools = runner.ResponsesToolRunner(functions=[function])
    final = tools.run(client, {"model": MODEL, "input": ASK_WEATHER}, stream=stream)
    assert final.output_text == WEATHER_SAID
