"""Text completions and embeddings of `ports.Workers`: the fake, and the adapters on OpenAI's wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.adapters.upstream.http import HttpWorkers
from gateway.adapters.upstream.litellm import LiteLLMWorkers
from gateway.core.money.amounts import Usage
from gateway.errors import UpstreamError, UpstreamProtocol, UpstreamRateLimited, UpstreamRefused
from gateway.service.ports.request import WorkerCall, Workers
from tests.contract.test_workers import KEY, a_spec
from tests.fakes.workers import FakeWorkers, Says
from tests.upstreams.texts import Texts
from tests.upstreams.vendor import Script


class Stage:
    """An implementation, its server (none behind the fake), and a worker of it."""

    def __init__(self, workers: Workers, upstream: Texts | None, kind: str, model: str) -> None:
        self.workers = workers
        self.upstream = upstream
        self._spec = a_spec(kind, model, upstream.base if upstream else "http://fake/v1")

    def call(self, endpoint: Any, **body: Any) -> WorkerCall:
        return WorkerCall(self._spec, body, 20.0, "rollout", "step", endpoint=endpoint)

    def plays(self, script: Script) -> None:
        if self.upstream is None:
            usage = Usage(script.prompt_tokens, script.completion_tokens)
            self.workers = FakeWorkers({"w": Says(script.text, (), script.reason, usage, dies_after=script.cut_after)})
        else:
            self.upstream.script = script


@pytest.fixture(params=["fake", "http", "litellm"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    if request.param == "fake":
        yield Stage(FakeWorkers(), None, "openai", "m")
        return
    async with Texts(KEY) as upstream:
        if request.param == "http":
            http = HttpWorkers({"w": KEY}, b"depth")
            yield Stage(http, upstream, "openai", "m")
            await http.close()
            return
        pytest.importorskip("litellm")
        vendor = LiteLLMWorkers({"w": KEY})
        yield Stage(vendor, upstream, "litellm", "text-completion-openai/m")
        await vendor.close()


@pytest.fixture
async def real(stage: Stage) -> Stage:
    if stage.upstream is None:
        pytest.skip("no wire behind the fake")
    return stage


def embeds(stage: Stage, **body: Any) -> WorkerCall:
    call = stage.call("embeddings", **body)
    if call.worker.kind != "litellm":
        return call
    model = "openai/text-embedding-3-small"  # LiteLLM passes `dimensions` on for models it knows, and no others
    return replace(call, worker=call.worker.model_copy(update={"model": model}))


async def test_a_text_comes_in_the_shape_of_a_message(stage: Stage) -> None:
    stage.plays(Script("one two", reason="length"))
    reply = await stage.workers.complete(stage.call("completions", prompt="Say", max_tokens=5))
    choice = reply.body["choices"][0]
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", "one two")
    assert choice["finish_reason"] == "length"
    assert reply.usage == Usage(12, 7)


async def test_a_stream_of_texts_comes_in_the_shape_of_deltas(stage: Stage) -> None:
    stage.plays(Script("one two three"))
    chunks = [c async for c in stage.workers.stream(stage.call("completions", prompt="Say", max_tokens=5))]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "one two three"
    assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7


async def test_a_stream_of_texts_that_dies_is_never_taken_for_whole(stage: Stage) -> None:
    if isinstance(stage.workers, LiteLLMWorkers):
        pytest.skip("its texts come in one piece")
    stage.plays(Script("one two three", cut_after=2))
    with pytest.raises(UpstreamError):
        _ = [c async for c in stage.workers.stream(stage.call("completions", prompt="Say", max_tokens=5))]


async def test_each_input_has_its_embedding(stage: Stage) -> None:
    stage.plays(Script(prompt_tokens=9, completion_tokens=0))
    for given, count in (("one", 1), (["one", "two"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)):
        reply = await stage.workers.complete(embeds(stage, input=given, encoding_format="float"))
        assert len(reply.body["data"]) == count
        assert all(len(item["embedding"]) > 1 for item in reply.body["data"])
        assert reply.usage == Usage(9, 0)


async def test_parameters_reach_the_worker_as_they_are(real: Stage) -> None:
    assert real.upstream is not None
    real.plays(Script("x"))
    given = {"prompt": ["a", "b"], "n": 2, "stop": ["."], "logprobs": 1, "max_tokens": 3, "echo": True, "suffix": "!"}
    reply = await real.workers.complete(real.call("completions", **given))
    request = real.upstream.requests[-1]
    assert request.path == "/v1/completions"
    assert {name: request.body[name] for name in given} == given
    assert len(reply.body["choices"]) == 4
    assert reply.body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    await real.workers.complete(embeds(real, input="a", dimensions=3, encoding_format="float"))
    request = real.upstream.requests[-1]
    assert request.path == "/v1/embeddings"
    assert (request.body["dimensions"], request.body["encoding_format"]) == (3, "float")
    assert request.body["model"] in ("m", "text-embedding-3-small")


async def test_base64_is_asked_for_where_the_wire_is_ours(real: Stage) -> None:
    reply = await real.workers.complete(embeds(real, input="a", encoding_format="base64"))
    ours = isinstance(real.workers, HttpWorkers)
    assert reply.body["data"][0]["embedding"] == ("AAAAPwAAgL8AAIA+" if ours else [0.5, -1.0, 0.25])


@pytest.mark.parametrize("vector", [None, [], ["a"], [True], "not base64!", "AAA=", [1e39]])
async def test_an_embedding_that_is_none_is_the_workers_error(real: Stage, vector: Any) -> None:
    assert real.upstream is not None
    if vector == [True] and isinstance(real.workers, LiteLLMWorkers):
        pytest.skip("LiteLLM takes it for the number 1")
    real.upstream.vector = vector
    with pytest.raises(UpstreamProtocol if isinstance(real.workers, HttpWorkers) else UpstreamError):
        await real.workers.complete(embeds(real, input="a", encoding_format="float"))


async def test_errors_of_both_endpoints_are_mapped(real: Stage) -> None:
    calls = (real.call("completions", prompt="a", max_tokens=3), embeds(real, input="a"))
    for call in calls:
        real.plays(Script(status=429, headers={"retry-after": "3"}))
        with pytest.raises(UpstreamRateLimited) as limited:
            await real.workers.complete(call)
        assert limited.value.retry_after_s == 3
        real.plays(Script(status=400, message="too long"))
        with pytest.raises(UpstreamRefused, match="too long"):
            await real.workers.complete(call)
