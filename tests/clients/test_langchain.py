"""LangChain (`langchain-openai`): chat, stream, tools, structured output, embeddings; over both of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.conftest import Facts
from tests.clients.questions import ASK_BOTH, ASK_PLACE, BOTH_SAID, HELLO, HELLO_SAID, TOKYO, Place


@pytest.fixture(params=["chat completions", "responses"])
def model(request: pytest.FixtureRequest, facts: Facts) -> Any:
    return ChatOpenAI(
        model="baton",
        base_url=facts.base_url,
        api_key=facts.key,
        use_responses_api=request.param == "responses",
        stream_usage=True,
    )


def test_chat(model: Any) -> None:
    reply = model.invoke(HELLO)
    assert reply.text == HELLO_SAID
    assert reply.usage_metadata["total_tokens"] > 0


async def test_chat_async(model: Any) -> None:
    assert (await model.ainvoke(HELLO)).text == HELLO_SAID


def test_stream(model: Any) -> None:
    chunks = list(model.stream(HELLO))
    assert "".join(chunk.text for chunk in chunks) == HELLO_SAID
    assert len([chunk for chunk in chunks if chunk.text]) > 1
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["total_tokens"] > 0


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_there_and_back(model: Any, weather: Callable[..., str], streamed: bool) -> None:
    tool = StructuredTool.from_function(weather)
    bound = model.bind_tools([tool])
    messages: list[Any] = [HumanMessage(ASK_BOTH)]
    if streamed:
        chunks = list(bound.stream(messages))
        asked = chunks[0]
        for chunk in chunks[1:]:
            asked += chunk
    else:
        asked = bound.invoke(messages)
    messages.append(asked)
    assert [call["args"] for call in asked.tool_calls] == [{"city": "Tokyo"}, {"city": "Lima"}]
    for call in asked.tool_calls:
        found = tool.invoke(call)
        assert isinstance(found, ToolMessage)
        messages.append(found)
    assert bound.invoke(messages).text == BOTH_SAID


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    assert model.with_structured_output(Place, method=method).invoke(ASK_PLACE) == TOKYO


def test_embeddings(facts: Facts) -> None:
    embedder = OpenAIEmbeddings(
        model="embedder", base_url=facts.base_url, api_key=facts.key, check_embedding_ctx_length=False
    )
    assert [vector[0] for vector in embedder.embed_documents(["a", "abc"])] == [1.0, 3.0]
