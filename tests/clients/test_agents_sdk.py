"""OpenAI's Agents SDK, tracing off: chat, stream, tools, hand-off, structured output; over both of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import agents
import openai
import pytest

from tests.clients.conftest import Facts
from tests.clients.questions import ASK_BOTH, ASK_PLACE, BOTH_SAID, HELLO, HELLO_SAID, TOKYO, Place

MODELS = {"chat completions": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, facts: Facts) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=facts.base_url, api_key=facts.key)
    return MODELS[request.param](model="baton", openai_client=client)


async def test_chat(model: Any) -> None:
    result = await agents.Runner.run(agents.Agent(name="greeter", model=model, instructions="Greet."), HELLO)
    assert result.final_output == HELLO_SAID


async def test_chat_goes_on(model: Any) -> None:
    agent = agents.Agent(name="greeter", model=model)
    first = await agents.Runner.run(agent, HELLO)
    again = [*first.to_input_list(), {"role": "user", "content": "And again."}]
    assert (await agents.Runner.run(agent, again)).final_output.startswith("You said: And again.")


async def test_stream(model: Any) -> None:
    result = agents.Runner.run_streamed(agents.Agent(name="greeter", model=model), HELLO)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == HELLO_SAID == result.final_output
    assert len(deltas) > 1


async def test_tools_there_and_back(model: Any, weather: Callable[..., str]) -> None:
    agent = agents.Agent(name="forecaster", model=model, tools=[agents.function_tool(weather)])
    assert (await agents.Runner.run(agent, ASK_BOTH)).final_output == BOTH_SAID


async def test_tools_streamed(model: Any, weather: Callable[..., str]) -> None:
    agent = agents.Agent(name="forecaster", model=model, tools=[agents.function_tool(weather)])
    result = agents.Runner.run_streamed(agent, ASK_BOTH)
    items = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
    assert items.count("tool_called") == items.count("tool_output") == 2
    assert result.final_output == BOTH_SAID


async def test_structured_output(model: Any) -> None:
    agent = agents.Agent(name="geographer", model=model, output_type=Place)
    assert (await agents.Runner.run(agent, ASK_PLACE)).final_output == TOKYO


async def test_a_hand_off_is_a_tool_call(model: Any) -> None:
    other = agents.Agent(name="other", model=model)
    first = agents.Agent(name="first", model=model, handoffs=[other])
    result = await agents.Runner.run(first, HELLO)
    assert result.last_agent is other
    assert result.final_output
