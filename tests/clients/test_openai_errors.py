"""`openai` for Python, what it raises and what it tries again."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.clients.conftest import Facts

HELLO: Any = [{"role": "user", "content": "Say hello."}]


class Counted:
    """A client that counts its requests on the wire."""

    def __init__(self, facts: Facts, key: str = "", **settings: Any) -> None:
        self.requests = 0
        http = openai.DefaultHttpxClient(event_hooks={"request": [self._count]})
        self.sdk = openai.OpenAI(base_url=facts.base_url, api_key=key or facts.key, http_client=http, **settings)

    def _count(self, _request: Any) -> None:
        self.requests += 1

    def ask(self, **request: Any) -> Any:
        return self.sdk.chat.completions.create(**{"model": "baton", "messages": HELLO} | request)


def told(error: openai.APIStatusError) -> tuple[int, str | None, str | None, str | None]:
    return error.status_code, error.type, error.param, error.code


def test_a_wrong_key(facts: Facts) -> None:
    client = Counted(facts, "sk-wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        client.ask()
    assert told(caught.value) == (401, "invalid_request_error", None, "invalid_api_key")
    assert caught.value.request_id
    assert client.requests == 1


def test_an_unknown_model(facts: Facts) -> None:
    client = Counted(facts)
    for call in (lambda: client.ask(model="no-such"), lambda: client.sdk.models.retrieve("no-such")):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert told(caught.value) == (404, "invalid_request_error", "model", "model_not_found")
    assert client.requests == 2


@pytest.mark.parametrize(
    ("request_", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"extra_body": {"api_base": "http://127.0.0.1:9"}}, "api_base", "refused_field"),
        ({"model": "picky"}, "temperature", "unsupported_value"),
    ],
)
def test_a_bad_request_names_the_field(facts: Facts, request_: dict[str, Any], param: str, code: str) -> None:
    client = Counted(facts)
    with pytest.raises(openai.BadRequestError) as caught:
        client.ask(**request_)
    assert told(caught.value) == (400, "invalid_request_error", param, code)
    assert client.requests == 1


def test_no_money_is_not_tried_again(facts: Facts) -> None:
    client = Counted(facts, facts.broke_key)
    with pytest.raises(openai.RateLimitError) as caught:
        client.ask()
    assert told(caught.value) == (429, "insufficient_quota", None, "insufficient_quota")
    assert client.requests == 1


def test_a_rate_limit_says_when(facts: Facts) -> None:
    client = Counted(facts, facts.slow_key, max_retries=0)

    def twice() -> None:
        client.ask()
        client.ask()

    with pytest.raises(openai.RateLimitError) as caught:
        twice()
    assert told(caught.value) == (429, "rate_limit_error", None, "rate_limit_exceeded")
    headers = caught.value.response.headers
    assert 0 < int(headers["retry-after"]) <= 60
    assert int(headers["retry-after-ms"]) <= 1000 * int(headers["retry-after"])
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_a_busy_worker_is_tried_again_when_it_said(facts: Facts) -> None:
    client = Counted(facts, max_retries=1)
    with pytest.raises(openai.RateLimitError) as caught:
        client.ask(model="limited")
    assert caught.value.type == "rate_limit_error"
    assert 0 < float(caught.value.response.headers["retry-after-ms"]) <= 1000
    assert client.requests == 2


def test_a_failing_worker_is_a_server_error(facts: Facts) -> None:
    client = Counted(facts, max_retries=0)
    with pytest.raises(openai.InternalServerError) as caught:
        client.ask(model="broken")
    assert caught.value.status_code == 502
    assert caught.value.type == "upstream_error"


def test_a_stream_that_dies_raises_in_the_loop(facts: Facts) -> None:
    seen: list[Any] = []
    with pytest.raises(openai.APIError) as caught:
        seen.extend(Counted(facts).ask(model="cutter", stream=True))
    assert not isinstance(caught.value, openai.APIStatusError | openai.APIConnectionError)
    assert caught.value.type == "upstream_error"


async def test_errors_async(facts: Facts) -> None:
    async with openai.AsyncOpenAI(base_url=facts.base_url, api_key=facts.key, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="no-such", messages=HELLO)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="broken", messages=HELLO)
