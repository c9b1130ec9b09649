"""LlamaIndex (`llama-index-llms-openai-like`): chat, stream, tools, structured output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.conftest import Facts
from tests.clients.questions import ASK_BOTH, ASK_PLACE, ASK_WEATHER, BOTH_SAID, HELLO, HELLO_SAID, TOKYO, Place


@pytest.fixture
def llm(facts: Facts) -> Any:
    return OpenAILike(
        model="baton",
        api_base=facts.base_url,
        api_key=facts.key,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=32768,
    )


def user(text: str) -> Any:
    return [ChatMessage(role=MessageRole.USER, content=text)]


def test_chat(llm: Any) -> None:
    assert llm.chat(user(HELLO)).message.content == HELLO_SAID


async def test_chat_async(llm: Any) -> None:
    assert (await llm.achat(user(HELLO))).message.content == HELLO_SAID


def test_complete(llm: Any) -> None:
    assert llm.complete(HELLO).text == HELLO_SAID


def test_stream(llm: Any) -> None:
    parts = [part.delta for part in llm.stream_chat(user(HELLO))]
    assert "".join(parts) == HELLO_SAID
    assert len(parts) > 1


async def test_stream_async(llm: Any) -> None:
    assert "".join([part.delta async for part in await llm.astream_chat(user(HELLO))]) == HELLO_SAID


def test_tools_there_and_back(llm: Any, weather: Callable[..., str]) -> None:
    tool = FunctionTool.from_defaults(weather)
    asked = llm.chat_with_tools([tool], chat_history=user(ASK_BOTH), allow_parallel_tool_calls=True)
    calls = llm.get_tool_calls_from_response(asked)
    assert [call.tool_kwargs for call in calls] == [{"city": "Tokyo"}, {"city": "Lima"}]
    history = [*user(ASK_BOTH), asked.message]
    for call in calls:
        result = tool(**call.tool_kwargs).content
        about = {"tool_call_id": call.tool_id}
        history.append(ChatMessage(role=MessageRole.TOOL, content=result, additional_kwargs=about))
    final = llm.chat_with_tools([tool], chat_history=history)
    assert final.message.content == BOTH_SAID


def test_tools_streamed(llm: Any, weather: Callable[..., str]) -> None:
    tool = FunctionTool.from_defaults(weather)
    parts = list(llm.stream_chat_with_tools([tool], chat_history=user(ASK_WEATHER)))
    assert [call.tool_kwargs for call in llm.get_tool_calls_from_response(parts[-1])] == [{"city": "Tokyo"}]


def test_structured_output(llm: Any) -> None:
    assert llm.structured_predict(Place, PromptTemplate(ASK_PLACE)) == TOKYO


def test_structured_output_as_a_model(llm: Any) -> None:
    assert llm.as_structured_llm(Place).chat(user(ASK_PLACE)).raw == TOKYO
