"""LangChain's standard tests for chat models, over both of OpenAI's APIs."""

from __future__ import annotations

import base64
from typing import Any, ClassVar

import httpx
import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients.conftest import Facts
from tests.clients.test_openresponses import HEART

FILES = {  # what the tests download: the smallest of each kind
    "png": HEART.partition(",")[2],
    "pdf": base64.b64encode(b"%PDF-1.1\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF").decode(),
    "wav": base64.b64encode(
        b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data\0\0\0\0"
    ).decode(),
}


@pytest.fixture(autouse=True)
def _no_web(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, **options: Any) -> httpx.Response:
        return httpx.Response(200, content=base64.b64decode(FILES[url.rpartition(".")[2]]))

    monkeypatch.setattr(httpx, "get", get)


@pytest.fixture(autouse=True, scope="class")
def _address(request: pytest.FixtureRequest, facts: Facts) -> None:
    request.cls.facts = facts


class _Baton(ChatModelIntegrationTests):  # type: ignore[misc]
    """What a gateway over the scripted model can do."""

    facts: ClassVar[Facts]
    responses: ClassVar[bool]

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "baton",
            "base_url": self.facts.base_url,
            "api_key": self.facts.key,
            "use_responses_api": self.responses,
            "stream_usage": True,
        }

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_image_urls(self) -> bool:
        return False  # it is on loopback

    @property
    def supports_image_tool_message(self) -> bool:
        return True

    @property
    def supports_pdf_inputs(self) -> bool:
        return True

    @property
    def supports_pdf_tool_message(self) -> bool:
        return True

    @property
    def supports_audio_inputs(self) -> bool:
        return not self.responses  # that API takes no sound

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "scribe"

    @property
    def supports_json_mode(self) -> bool:
        return not self.responses

    @property
    def has_tool_choice(self) -> bool:
        return True


class TestChatCompletions(_Baton):
    """Over `/v1/chat/completions`."""

    responses = False


class TestResponses(_Baton):
    """Over `/v1/responses`."""

    responses = True


del _Baton
