"""`/v1/completions` and `/v1/embeddings` over real sockets: the OpenAI SDK in front, the shipped fakes behind."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import UpstreamRateLimited
from tests.fakes.workers import Says
from tests.integration.test_api import served
from tests.kit import KEY, PRICE, Kit, ask, model_worker, pool_file


def kit(**scripts: Any) -> Kit:
    vectors: WorkerSpec = model_worker("vectors", "vault", task="embeddings")
    return Kit(workers=scripts, pools=pool_file(vectors))


async def test_a_text_completion_is_answered_logged_and_paid() -> None:
    here = kit(alpha=Says("forty-two", finish_reason="length", usage=Usage(10, 5)))
    async with served(here) as gateway:
        raw = await gateway.sdk.completions.with_raw_response.create(model="alpha", prompt="6 x 7 =", max_tokens=5)
        reply = raw.parse()
        assert (reply.object, reply.choices[0].text, reply.choices[0].finish_reason) == (
            "text_completion",
            "forty-two",
            "length",
        )
        assert reply.usage is not None
        assert reply.usage.total_tokens == 15
        assert reply.id == f"cmpl-{raw.headers['x-baton-rollout-id'].replace('-', '')}"
        key = here.metrics.records[0].key_id
        assert await here.posted_nano(f"key:{key}") == cost_nano(PRICE, Usage(10, 5))
        assert await here.open_nano(f"key:{key}") == 0
        call = here.workers.calls[0]
        assert (call.endpoint, dict(call.body)) == ("completions", {"prompt": "6 x 7 =", "max_tokens": 5})
        logged = await gateway.http.get(f"/v1/rollouts/{raw.headers['x-baton-rollout-id']}")
        assert logged.json()["request"] == {"model": "alpha", "prompt": "6 x 7 =", "max_tokens": 5}
        assert logged.json()["reply"]["choices"][0]["text"] == "forty-two"
        assert here.conductor.calls == []


async def test_a_text_completion_streams_in_its_own_shape() -> None:
    async with served(kit(alpha=Says("one two three"))) as gateway:
        stream = await gateway.sdk.completions.create(
            model="alpha", prompt="count", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *said, last = chunks
    assert "".join(chunk.choices[0].text for chunk in said) == "one two three"
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert [chunk.choices[0].finish_reason for chunk in said if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 15


async def test_an_upstream_that_dies_midway_is_an_error_and_never_done() -> None:
    async with served(kit(alpha=Says("one two three", dies_after=2))) as gateway:
        reply = await gateway.http.post("/v1/completions", json={"model": "alpha", "prompt": "a", "stream": True})
    assert reply.status_code == 200
    assert '"error"' in reply.text
    assert "[DONE]" not in reply.text


async def test_embeddings_are_answered_counted_and_paid_without_their_vectors_in_the_log() -> None:
    here = kit(vectors=Says(usage=Usage(8, 0)))
    async with served(here) as gateway:
        raw = await gateway.sdk.embeddings.with_raw_response.create(model="vectors", input=["a", "b"])
        reply = raw.parse()  # the SDK asks for base64 by itself
        assert [item.embedding for item in reply.data] == [[0.5, -1.0], [1.5, -1.0]]
        assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == ("vectors", 8, 8)
        key = here.metrics.records[0].key_id
        assert await here.posted_nano(f"key:{key}") == cost_nano(PRICE, Usage(8, 0))
        assert await here.open_nano(f"key:{key}") == 0
        logged = (await gateway.http.get(f"/v1/rollouts/{raw.headers['x-baton-rollout-id']}")).json()
        assert (logged["reply"]["embeddings"], logged["reply"]["data"]) == (2, [])
        assert logged["request"]["input"] == ["a", "b"]
        plain = await gateway.http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
        assert plain.json()["data"] == [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]


async def test_each_model_does_its_own_task_alone() -> None:
    async with served(kit()) as gateway:
        names = [model.id async for model in await gateway.sdk.models.list()]
        assert "vectors" in names
        assert "baton/fixed:vectors" not in names
        for path, body in (
            ("/v1/embeddings", {"model": "alpha", "input": "a"}),
            ("/v1/embeddings", {"model": "baton", "input": "a"}),
            ("/v1/embeddings", {"model": "vote", "input": "a"}),
            ("/v1/completions", {"model": "vectors", "prompt": "a"}),
            ("/v1/completions", {"model": "baton", "prompt": "a"}),
            ("/v1/completions", {"model": "self", "prompt": "a"}),
            ("/v1/chat/completions", ask(model="vectors")),
            ("/v1/chat/completions", ask(model="baton/fixed:vectors")),
        ):
            refused = await gateway.http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), (path, body)
        assert gateway.kit.workers.calls == []


async def test_a_worker_of_embeddings_takes_no_part_in_plans() -> None:
    here = kit()
    running = await here.serve()
    assert "vault" not in str(here.conductor.calls[0].messages)
    assert [entry["name"] for entry in running.record.pool if entry["name"] == "vectors"] == []


async def test_bad_requests_have_their_named_error_and_reach_no_worker() -> None:
    async with served(kit()) as gateway:
        for path, body, param in (
            ("/v1/embeddings", {"model": "vectors", "input": []}, "input"),
            ("/v1/embeddings", {"model": "vectors", "input": "a", "dimensions": "many"}, "dimensions"),
            ("/v1/embeddings", {"input": "a"}, "model"),
            ("/v1/completions", {"model": "alpha"}, "prompt"),
            ("/v1/completions", {"model": "alpha", "prompt": "a", "api_key": "x"}, "api_key"),
        ):
            refused = await gateway.http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert gateway.kit.workers.calls == []
        assert (await gateway.http.post("/v1/embeddings", headers={"authorization": ""}, json={})).status_code == 401


async def test_limits_budgets_and_upstream_errors_count_here_too() -> None:
    here = kit(vectors=UpstreamRateLimited("busy", upstream_status=429, retry_after_s=2.0))
    async with served(here, budget_usd="0.000000001") as gateway:
        poor = await gateway.http.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
        assert (poor.status_code, poor.json()["error"]["code"]) == (429, "insufficient_quota")
    async with served(here, rpm=1) as gateway:
        once = gateway.sdk.with_options(max_retries=0)
        with pytest.raises(openai.RateLimitError, match="busy"):
            await once.embeddings.create(model="vectors", input="a")
        with pytest.raises(openai.RateLimitError, match="requests a minute"):
            await once.completions.create(model="alpha", prompt="a")


async def test_a_batch_over_the_cap_on_tokens_is_refused_naming_it() -> None:
    async with served(kit()) as gateway:
        refused = await gateway.http.post(
            "/v1/embeddings",
            json={"model": "vectors", "input": ["x" * 500] * 20},
            headers={"x-baton-max-tokens": "1000"},
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "cap_reached"
        assert gateway.kit.workers.calls == []


async def test_an_idempotency_key_holds_here_too() -> None:
    async with served(kit()) as gateway:
        for path, body in (
            ("/v1/embeddings", {"model": "vectors", "input": "a"}),
            ("/v1/completions", {"model": "alpha", "prompt": "a"}),
        ):
            first, again = [
                await gateway.http.post(path, json=body, headers={"idempotency-key": path}) for _ in range(2)
            ]
            assert again.content == first.content
            assert again.headers["x-baton-idempotent-replay"] == "true"
        other = await gateway.http.post(
            "/v1/completions", json={"model": "alpha", "prompt": "a"}, headers={"idempotency-key": "/v1/embeddings"}
        )
        assert other.status_code == 422
        assert len(gateway.kit.workers.calls) == 2


async def test_many_prompts_and_choices_are_held_for_and_bounded() -> None:
    here = kit()
    async with served(here) as gateway:
        body = {"model": "alpha", "prompt": ["a", "b"], "n": 3, "max_tokens": 10_000}
        await gateway.http.post("/v1/completions", json=body)
    assert here.workers.calls[0].body["max_tokens"] == 64  # the worker's own bound
    assert here.metrics.records[0].hold_nano >= cost_nano(PRICE, Usage(0, 6 * 64))
    assert KEY.budget_nano is None
