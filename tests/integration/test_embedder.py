"""The embedder by URL against servers that behave and that do not; and what a gateway makes of its vectors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.adapters.postgres.rows import event_rows
from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.embedder import HttpEmbedder
from gateway.core.loop.experience.likeness import EMBEDDED_CHARS_MAX, EMBEDDING_DIM, embed
from gateway.errors import Unavailable
from tests.kit import KEY, Kit, ask
from tests.upstreams.server import Handler, Reply, Request, Server, json_reply


@asynccontextmanager
async def embedder_on(handler: Handler, **options: Any) -> AsyncIterator[HttpEmbedder]:
    """A client of a server whose every path answers with `handler`."""
    async with Server(handler) as server:
        embedder = HttpEmbedder(f"{server.url}/v1/", "small", **({"timeout_s": 5.0} | options))
        try:
            yield embedder
        finally:
            await embedder.close()


class Letters:
    """Embeds a text as the count of each letter. It keeps the bodies it gets, and the last headers."""

    def __init__(self, numbers: int = 384) -> None:
        self.numbers = numbers
        self.bodies: list[dict[str, Any]] = []
        self.headers: Mapping[str, str] = {}

    def embeddings(self, request: Request) -> Reply:
        body = request.body
        self.bodies.append(body)
        self.headers = request.headers
        vector = [0.1 + body["input"].count(chr(97 + i % 26)) for i in range(self.numbers)]
        return json_reply({"data": [{"index": 0, "embedding": vector}], "model": "small"})


def says(body: Any, status: int = 200) -> Handler:
    if isinstance(body, str):
        return lambda request: Reply(body.encode(), status)
    return lambda request: json_reply(body, status)


async def hangs(request: Request) -> Reply:
    await asyncio.sleep(60)
    return Reply()


async def test_a_vector_comes_back_fitted_and_alike_texts_stay_alike() -> None:
    server = Letters()
    async with embedder_on(server.embeddings, api_key="secret-key") as embedder:
        cat, cats, dog = [await embedder.embed(text) for text in ("a cat sat", "a cat sat a", "dog dog dog")]
        assert await embedder.embed(" \n") == [0.0] * EMBEDDING_DIM
        await embedder.embed("x" * (EMBEDDED_CHARS_MAX + 9))
    assert len(cat) == EMBEDDING_DIM
    assert math.hypot(*cat) == pytest.approx(1)
    assert sum(a * b for a, b in zip(cat, cats, strict=True)) > 0.9 > sum(a * b for a, b in zip(cat, dog, strict=True))
    assert [len(body["input"]) for body in server.bodies] == [9, 11, 11, EMBEDDED_CHARS_MAX]
    assert {body["model"] for body in server.bodies} == {"small"}
    assert server.headers["authorization"] == "Bearer secret-key"


BAD: dict[str, Handler] = {
    "an error": says({"error": {"message": "no such model"}}, 404),
    "no JSON": says("<html>"),
    "no data": says({"data": []}),
    "no list": says({"data": {"embedding": [1.0]}}),
    "base64": says({"data": [{"embedding": "AAAA"}]}),
    "no numbers": says({"data": [{"embedding": ["1"]}]}),
    "truth values": says({"data": [{"embedding": [True]}]}),
    "zeros": says({"data": [{"embedding": [0, 0]}]}),
    "beyond a float": says({"data": [{"embedding": [10**400, 1]}]}),
    "infinity": says('{"data": [{"embedding": [1e999, 1]}]}'),
    "too much": says({"data": [{"embedding": [0.5] * 400_000}]}),
    "a redirect": says({}, 307),
}


@pytest.mark.parametrize("how", list(BAD))
async def test_a_reply_that_is_no_vector_is_unavailable(how: str) -> None:
    async with embedder_on(BAD[how]) as embedder:
        with pytest.raises(Unavailable, match="embedder"):
            await embedder.embed("a cat")


async def test_another_length_than_before_is_refused() -> None:
    server = Letters(384)
    async with embedder_on(server.embeddings) as embedder:
        await embedder.embed("a cat")
        server.numbers = 512
        with pytest.raises(Unavailable, match="512 numbers after one of 384"):
            await embedder.embed("a cat")


async def test_a_slow_server_is_given_up_and_after_some_failures_left_alone() -> None:
    async with embedder_on(hangs, timeout_s=0.05, breaker=Breaker(failures_max=2, cool_down_s=60.0)) as embedder:
        for said in ("TimeoutError", "TimeoutError", "calls to it are paused"):
            with pytest.raises(Unavailable, match=said):
                await embedder.embed("a cat")


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    embedder = HttpEmbedder("http://127.0.0.1:9/v1", "small", timeout_s=5.0)
    with pytest.raises(Unavailable):
        await embedder.embed("a cat")
    await embedder.close()


# ---------------------------------------------------------------- in the request path


def logged_embedding(kit: Kit) -> Any:
    (row,) = [row for event in kit.journal.events if event.kind == "rollout" for row in event_rows(event).rollouts]
    assert (row["task_embedder"] is None) == (row["task_embedding"] is None)
    return row["task_embedding"]


def test_vectors_of_another_endpoint_or_model_have_another_name() -> None:
    places = [("http://h:1/v1", "a"), ("http://h:1/v1/", "a"), ("http://h:1/v1", "b"), ("http://h:2/v1", "a")]
    names = [HttpEmbedder(url, model).name for url, model in places]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(name.startswith("url:") and "h:1" not in name for name in names)


async def test_the_vector_is_logged_with_the_rollout_and_no_secret_leaves() -> None:
    server = Letters()
    async with embedder_on(server.embeddings) as embedder:
        kit = Kit(embedder=embedder)
        question = "write to ann@example.org with provider-secret-value"
        await kit.serve(ask(question), replace(KEY, log_mode="redacted"))
        assert logged_embedding(kit) == pytest.approx(await embedder.embed(server.bodies[0]["input"]))
    assert "provider-secret-value" not in server.bodies[0]["input"]
    assert "ann@example.org" not in server.bodies[0]["input"]


async def test_a_key_that_logs_no_text_logs_no_vector() -> None:
    async with embedder_on(Letters().embeddings) as embedder:
        kit = Kit(embedder=embedder)
        await kit.serve(ask("a cat"), replace(KEY, log_mode="metadata"))
    assert logged_embedding(kit) is None


async def test_without_its_embedder_a_gateway_plans_without_experience_and_hashes_nothing() -> None:
    async with embedder_on(BAD["an error"]) as embedder:
        kit = Kit(embedder=embedder)
        running = await kit.serve(ask("a cat"))
    assert running.error is None
    assert "experience" in kit.metrics.degradations
    assert logged_embedding(kit) is None  # a hashed one would be compared with the model's


async def test_the_default_leaves_the_vector_to_the_shipper() -> None:
    kit = Kit()
    await kit.serve(ask("a cat"))
    assert logged_embedding(kit) == pytest.approx(embed("a cat"))
