"""`openai` for Python, the routes that are passed through: embeddings and legacy completions."""

from __future__ import annotations

import openai
import pytest

from tests.clients.conftest import Facts


@pytest.fixture
def client(facts: Facts) -> openai.OpenAI:
    return openai.OpenAI(base_url=facts.base_url, api_key=facts.key)


def test_embeddings(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="embedder", input=["a", "abc"])
    assert [item.embedding for item in reply.data] == [[1.0, 1.0, -0.5, 0.25], [3.0, 1.0, -0.5, 0.25]]
    assert [item.index for item in reply.data] == [0, 1]
    assert reply.usage.total_tokens > 0


def test_embeddings_as_floats_of_fewer_dimensions(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="embedder", input="abc", encoding_format="float", dimensions=2)
    assert reply.data[0].embedding == [3.0, 1.0]


def test_embeddings_of_a_model_that_has_none(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="no-such", input="a")
    assert caught.value.code == "model_not_found"


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="scribe", prompt="Once", max_tokens=16)
    assert reply.choices[0].text == " and so on: Once"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None


def test_completions_streamed(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="scribe", prompt="Once", max_tokens=16, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == " and so on: Once"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_embeddings_async(facts: Facts) -> None:
    async with openai.AsyncOpenAI(base_url=facts.base_url, api_key=facts.key) as client:
        reply = await client.embeddings.create(model="embedder", input="abcd")
    assert reply.data[0].embedding[0] == 4.0
