"""pydantic-ai: chat, stream, tools, structured output in its three ways; over both of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

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
    Place,
)

MODELS = {"chat completions": OpenAIChatModel, "responses": OpenAIResponsesModel}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, facts: Facts) -> Any:
    return MODELS[request.param]("baton", provider=OpenAIProvider(base_url=facts.base_url, api_key=facts.key))


async def test_chat(model: Any) -> None:
    result = await Agent(model).run(HELLO)
    assert result.output == HELLO_SAID


async def test_chat_goes_on(model: Any) -> None:
    agent = Agent(model, instructions="Be short.")
    first = await agent.run(HELLO)
    second = await agent.run("And again.", message_history=first.all_messages())
    assert second.output.startswith("You said: And again.")


async def test_stream(model: Any) -> None:
    async with Agent(model).run_stream(HELLO) as result:
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    assert "".join(parts) == HELLO_SAID
    assert len(parts) > 1


@pytest.mark.parametrize(("ask", "said"), [(ASK_WEATHER, WEATHER_SAID), (ASK_BOTH, BOTH_SAID)])
async def test_tools_there_and_back(model: Any, weather: Callable[..., str], ask: str, said: str) -> None:
    agent = Agent(model, tools=[weather])
    assert (await agent.run(ask)).output == said


async def test_tools_streamed(model: Any, weather: Callable[..., str]) -> None:
    async with Agent(model, tools=[weather]).run_stream(ASK_BOTH) as result:
        assert await result.get_output() == BOTH_SAID


@pytest.mark.parametrize("way", [lambda kind: kind, NativeOutput, PromptedOutput], ids=["tool", "native", "prompted"])
async def test_structured_output(model: Any, way: Any) -> None:
    assert (await Agent(model, output_type=way(Place)).run(ASK_PLACE)).output == TOKYO


async def test_structured_output_after_a_tool(model: Any, weather: Callable[..., str]) -> None:
    result = await Agent(model, tools=[weather], output_type=Place).run(ASK_PLACE)
    assert result.output == TOKYO
    assert result.usage.requests == 2
