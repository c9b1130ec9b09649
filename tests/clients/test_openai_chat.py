"""`openai` for Python, chat completions: sync and async, plain and with its helpers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

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


@pytest.fixture
def client(facts: Facts) -> openai.OpenAI:
    return openai.OpenAI(base_url=facts.base_url, api_key=facts.key)


@pytest.fixture
def asynchronous(facts: Facts) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=facts.base_url, api_key=facts.key)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_chat_behind_a_plan_of_two_steps(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=user(HELLO))
    reply = raw.parse()
    assert reply.choices[0].message.content == HELLO_SAID
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == MODEL
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 0
    assert raw.headers["x-baton-steps"] == "2"
    assert raw.headers["x-baton-policy"].startswith("conductor")
    assert "x-baton-fallback" not in raw.headers
    assert reply._request_id == raw.headers["x-request-id"]


async def test_chat_async(asynchronous: openai.AsyncOpenAI) -> None:
    reply = await asynchronous.chat.completions.create(model=MODEL, messages=user(HELLO))
    assert reply.choices[0].message.content == HELLO_SAID


def test_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=user(HELLO), stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == HELLO_SAID
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks].count("stop") == 1
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.usage is None for c in chunks)


async def test_stream_async_with_usage(asynchronous: openai.AsyncOpenAI) -> None:
    stream = await asynchronous.chat.completions.create(
        model=MODEL, messages=user(HELLO), stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(HELLO), stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    said = "".join(event.delta for event in events if event.type == "content.delta")
    assert said == HELLO_SAID == final.choices[0].message.content
    assert [event.content for event in events if event.type == "content.done"] == [HELLO_SAID]
    assert final.usage is not None


async def test_the_stream_helper_async_parses(asynchronous: openai.AsyncOpenAI) -> None:
    async with asynchronous.chat.completions.stream(
        model=MODEL, messages=user(ASK_PLACE), response_format=Place
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == TOKYO


def test_parse(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(model=MODEL, messages=user(ASK_PLACE), response_format=Place)
    assert reply.choices[0].message.parsed == TOKYO


async def test_parse_async(asynchronous: openai.AsyncOpenAI) -> None:
    reply = await asynchronous.chat.completions.parse(model=MODEL, messages=user(ASK_PLACE), response_format=Place)
    assert reply.choices[0].message.parsed == TOKYO


def test_json_object(client: openai.OpenAI) -> None:
    messages = user(f"{ASK_PLACE} Answer in JSON.")
    reply = client.chat.completions.create(model=MODEL, messages=messages, response_format={"type": "json_object"})
    assert json.loads(reply.choices[0].message.content or "") == TOKYO.model_dump()


@pytest.mark.parametrize(("ask", "said", "calls"), [(ASK_WEATHER, WEATHER_SAID, 1), (ASK_BOTH, BOTH_SAID, 2)])
def test_tools_there_and_back(
    client: openai.OpenAI, weather: Callable[..., str], ask: str, said: str, calls: int
) -> None:
    tools: Any = [WEATHER_TOOL]
    messages: list[Any] = user(ask)
    asked = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0]
    assert asked.finish_reason == "tool_calls"
    assert asked.message.content is None
    assert len(asked.message.tool_calls or ()) == calls
    messages.append(asked.message)
    for call in asked.message.tool_calls or ():
        assert call.type == "function"
        result = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    final = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0]
    assert (final.finish_reason, final.message.content) == ("stop", said)


def test_tools_streamed_by_the_helper(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER_TOOL]
    with client.chat.completions.stream(model=MODEL, messages=user(ASK_BOTH), tools=tools) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.index, event.parsed_arguments) for event in done] == [(0, {"city": "Tokyo"}), (1, {"city": "Lima"})]
    ids = [call.id for call in final.choices[0].message.tool_calls or ()]
    assert len(set(ids)) == 2


def test_a_tool_call_parsed_into_a_model(client: openai.OpenAI) -> None:
    class GetWeather(BaseModel):
        """The weather in a city."""

        city: str

    reply = client.chat.completions.parse(
        model=MODEL, messages=user(ASK_WEATHER), tools=[openai.pydantic_function_tool(GetWeather)]
    )
    calls = reply.choices[0].message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == [GetWeather(city="Tokyo")]


def test_tool_choice(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER_TOOL]
    none = client.chat.completions.create(model=MODEL, messages=user(HELLO), tools=tools, tool_choice="none")
    assert none.choices[0].message.tool_calls is None
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    one = client.chat.completions.create(model=MODEL, messages=user(HELLO), tools=tools, tool_choice=named)
    assert len(one.choices[0].message.tool_calls or ()) == 1


def test_choices_logprobs_stop_and_length(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=user(HELLO), n=3, logprobs=True, top_logprobs=1, stop=["hello"]
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {choice.message.content for choice in reply.choices} == {"You said: Say "}
    logprobs = reply.choices[2].logprobs
    assert logprobs is not None
    assert "".join(token.token for token in logprobs.content or ()) == "You said: Say "
    short = client.chat.completions.create(model=MODEL, messages=user(HELLO), max_completion_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("You said:", "length")


def test_a_cut_off_answer_is_not_parsed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=user(ASK_PLACE), response_format=Place, max_completion_tokens=1
        )


def test_a_refusal_is_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="refuser", messages=user(HELLO))
    assert whole.choices[0].message.refusal == "I can't help with that."
    with client.chat.completions.stream(model="refuser", messages=user(HELLO)) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.refusal == "I can't help with that."


def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert {"baton", "baton/rule", "scribe"} <= set(names)
    assert client.models.retrieve("baton/rule").id == "baton/rule"


def test_policies_by_model_name(client: openai.OpenAI) -> None:
    reply = client.chat.completions.with_raw_response.create(model="scribe", messages=user(HELLO))
    assert reply.parse().choices[0].message.content == HELLO_SAID
    assert reply.headers["x-baton-steps"] == "1"


def test_the_same_idempotency_key_is_answered_once(client: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": f"clients-{openai.__version__}"}
    first = client.chat.completions.create(model=MODEL, messages=user(HELLO), extra_headers=headers)
    again = client.chat.completions.create(model=MODEL, messages=user(HELLO), extra_headers=headers)
    assert again == first
    with pytest.raises(openai.UnprocessableEntityError):
        client.chat.completions.create(model=MODEL, messages=user("Else."), extra_headers=headers)
