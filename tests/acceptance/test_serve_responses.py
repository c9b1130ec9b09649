"""`/v1/responses` on a whole gateway: its process, its journal, its database, the simulated workers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.acceptance.test_serve import Gateway, serving
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.long

QUESTION = "How many grams are there in 51 kilograms?"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Not pytest's own directory, as in test_serve."""
    with tempfile.TemporaryDirectory(prefix="baton-responses-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    return write_tiny_model(place / "model")


def client_of(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.facts["base_url"], api_key=gateway.facts["data_key"], max_retries=0)


def test_a_conversation_goes_on_after_the_gateway_was_killed(place: Path, model: Path) -> None:
    with serving(place / "data", model) as gateway, client_of(gateway) as client:
        first = client.responses.create(model="baton/rule", input=QUESTION, instructions="Answer with a number.")
        assert first.output_text
        second = client.responses.create(model="baton/rule", input="And in 52?", previous_response_id=first.id)
        with client.responses.stream(model="baton/rule", input="And in 53?", previous_response_id=second.id) as stream:
            third = stream.until_done().get_final_response()
        gateway.process.kill()
        gateway.process.wait()
        (gateway.directory / "serve.json").unlink()  # of the killed one; the next one writes its own
    with serving(place / "data", model) as gateway, client_of(gateway) as client:
        assert client.responses.retrieve(third.id).output_text == third.output_text
        turns = list(client.responses.input_items.list(third.id, order="asc"))
        assert [turn.role for turn in turns] == ["user", "assistant", "user", "assistant", "user"]  # type: ignore[union-attr]
        assert turns[0].content[0].text == QUESTION  # type: ignore[union-attr, index]
        fourth = client.responses.create(model="baton/rule", input="Thank you.", previous_response_id=third.id)
        assert fourth.status == "completed"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        assert client.responses.retrieve(second.id).output_text == second.output_text
