"""The embedded server's HTTP: OpenAI's shapes, refusals by name, and no decode for a client that left."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import uvicorn

from policy.serve.engine import Slots
from policy.serve.server import create_app
from policy.serve.versions import Versions
from tests.contract.conductors import LONG_SCHEMA, SCHEMA
from tests.tiny_model import write_tiny_model
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One decoding thread and no queue, on a thread of this process."""
    versions = Versions(Slots(threads=1, queue_max=0))
    versions.start_with("conductor", write_tiny_model(tmp_path_factory.mktemp("server") / "tiny", layers=8))
    server = uvicorn.Server(uvicorn.Config(create_app(versions), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=120)
    versions.close()


def body(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": "conductor",
        "messages": [{"role": "user", "content": "Plan."}],
        "temperature": 1.0,
        "seed": 4,
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def completion_tokens(url: str) -> float:
    """How many tokens the server has decoded so far."""
    post(url)  # the counter does not exist before the first
    text = httpx.get(f"{url}/metrics").text
    return float(text.split('tokens_total{kind="completion"} ')[1].split("\n")[0])


def post(url: str, **changes: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body(**changes), timeout=120.0)


def test_streamed_and_whole_say_the_same(url: str) -> None:
    options = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = post(url, **options).json()
    raw = post(url, **options, stream=True, stream_options={"include_usage": True}).text
    assert raw.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    choice = whole["choices"][0]
    assert "".join(c["delta"]["content"] for c in choices) == choice["message"]["content"]
    assert [token for c in choices for token in c.get("token_ids", [])] == choice["token_ids"]
    streamed = [entry for c in choices for entry in (c["logprobs"] or {"content": []})["content"]]
    assert [e["token"] for e in streamed] == [e["token"] for e in choice["logprobs"]["content"]]
    assert all(1 <= len(entry["top_logprobs"]) <= 2 for entry in streamed)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [choice["finish_reason"]] == ["stop"]


def test_the_openai_sdk_reads_it(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["conductor"]
        reply = client.chat.completions.create(
            model="conductor",
            messages=[{"role": "user", "content": "Plan."}],
            response_format={"type": "json_schema", "json_schema": {"name": "plan", "schema": SCHEMA, "strict": True}},
        )
        jsonschema.validate(json.loads(reply.choices[0].message.content or ""), SCHEMA)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])


def test_json_object_and_free_text(url: str) -> None:
    text = post(url, structured_outputs=None, response_format={"type": "text"}, max_tokens=4).json()
    assert text["usage"]["completion_tokens"] <= 4
    cut = post(url, structured_outputs=None, response_format={"type": "json_object"}, max_tokens=30).json()
    assert cut["choices"][0]["message"]["content"].startswith("{")


def test_the_manifest_is_told_in_models(url: str) -> None:
    entry = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert entry["baton"]["prompt_version"] == "compact-1"
    assert entry["max_model_len"] == 1024
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/version").json()["version"]


@pytest.mark.parametrize(
    ("changes", "status", "code", "said"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "does not exist"),
        ({"n": 0}, 400, None, "n: "),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported_parameter", "tools"),
        ({"temperature": 3}, 400, None, "temperature"),
        ({"messages": []}, 400, None, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, None, "messages"),
        ({"messages": [{"role": "user", "content": "far too long " * 2000}]}, 400, "context_length_exceeded", "room"),
        ({"max_tokens": 5000}, 400, "context_length_exceeded", "room"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, 400, None, ""),
        ({"response_format": {"type": "json_schema"}, "structured_outputs": None}, 400, None, "json_schema"),
        ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, 413, "request_too_large", "larger"),
    ],
)
def test_refusals_have_openais_shape(url: str, changes: dict[str, Any], status: int, code: str, said: str) -> None:
    reply = post(url, **changes)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], said in error["message"]) == (code, True)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff"])
def test_bodies_that_are_no_request(url: str, raw: bytes) -> None:
    reply = httpx.post(f"{url}/v1/chat/completions", content=raw)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_decode(url: str, stream: bool) -> None:
    long = body(stream=stream, structured_outputs={"json": LONG_SCHEMA}, max_tokens=900)
    before = completion_tokens(url)
    with httpx.Client(timeout=httpx.Timeout(20.0, read=20.0 if stream else 0.03)) as client:
        request = client.build_request("POST", f"{url}/v1/chat/completions", json=long)
        if stream:
            client.send(request, stream=True).close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.send(request)
    wait_until(lambda: "baton_conductor_in_flight 0.0" in httpx.get(f"{url}/metrics").text)
    assert completion_tokens(url) - before < 900
    assert post(url).status_code == 200


def test_a_full_server_says_503(url: str) -> None:
    long = body(stream=True, structured_outputs={"json": LONG_SCHEMA}, max_tokens=900)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=long) as reply:
        assert reply.status_code == 200
        busy = post(url)
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "overloaded")
    wait_until(lambda: post(url).status_code == 200)


def test_metrics_count(url: str) -> None:
    post(url)
    text = httpx.get(f"{url}/metrics").text
    for name in ("requests_total", "tokens_total", "decode_seconds_count", "in_flight"):
        assert f"baton_conductor_{name}" in text
