"""instructor over `openai`: chat, stream, tools, structured output, in its modes that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import instructor
import openai
import pytest
from pydantic import BaseModel, field_validator

from tests.clients.conftest import Facts
from tests.clients.questions import ASK_BOTH, ASK_PLACE, HELLO, HELLO_SAID, TOKYO, Place

MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON"]


def asking(text: str, **settings: Any) -> dict[str, Any]:
    return {"model": "baton", "messages": [{"role": "user", "content": text}], **settings}


def client(facts: Facts, mode: str) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=facts.base_url, api_key=facts.key), mode=getattr(instructor.Mode, mode)
    )


def test_chat(facts: Facts) -> None:
    reply = client(facts, "TOOLS").create(response_model=None, **asking(HELLO))
    assert reply.choices[0].message.content == HELLO_SAID


@pytest.mark.parametrize("mode", MODES)
def test_structured_output(facts: Facts, mode: str) -> None:
    got = client(facts, mode).create(response_model=Place, max_retries=0, **asking(ASK_PLACE))
    assert (got.city, got.millions) == (TOKYO.city, TOKYO.millions)


async def test_structured_output_async(facts: Facts) -> None:
    one = instructor.from_openai(openai.AsyncOpenAI(base_url=facts.base_url, api_key=facts.key))
    got = await one.create(response_model=Place, **asking(ASK_PLACE))
    assert (got.city, got.millions) == (TOKYO.city, TOKYO.millions)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_stream(facts: Facts, mode: str) -> None:
    parts = list(client(facts, mode).create_partial(response_model=Place, **asking(ASK_PLACE)))
    assert len(parts) > 1
    assert (parts[-1].city, parts[-1].millions) == (TOKYO.city, TOKYO.millions)


def test_tools_in_parallel(facts: Facts, weather: Callable[..., str]) -> None:
    class GetWeather(BaseModel):
        """The weather in a city."""

        city: str

    got = list(client(facts, "PARALLEL_TOOLS").create(response_model=Iterable[GetWeather], **asking(ASK_BOTH)))
    assert [weather(call.city) for call in got] == ["Tokyo: 5 degrees and frogs", "Lima: 4 degrees and frogs"]


def test_a_reply_that_fails_validation_is_asked_again_with_the_error(facts: Facts) -> None:
    tries: list[int] = []

    class Picky(Place):
        @field_validator("millions")
        @classmethod
        def _second_time(cls, value: int) -> int:
            tries.append(value)
            if len(tries) == 1:
                raise ValueError("try again")
            return value

    got = client(facts, "TOOLS").create(response_model=Picky, max_retries=2, **asking(ASK_PLACE))
    assert got.city == TOKYO.city
    assert len(tries) == 2
