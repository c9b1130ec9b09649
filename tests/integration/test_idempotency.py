"""Idempotency-Key over real sockets: the OpenAI SDK in front, the shipped fakes behind."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import openai
import pytest

from gateway.core.money.amounts import Usage
from gateway.errors import UpstreamError, UpstreamRefused
from tests.fakes.workers import Says
from tests.integration.test_api import Served, served
from tests.kit import Kit, ask
from tests.waiting import at_some_pace, until

ONE = {"idempotency-key": "order-1"}
REPLAY = "x-baton-idempotent-replay"


async def send(gateway: Served, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return await gateway.http.post("/v1/chat/completions", json=ask(**fields), headers=headers or ONE)


async def test_the_same_request_again_gets_the_first_reply_and_spends_nothing() -> None:
    kit = Kit(workers={"alpha": [Says("first"), Says("second")]})
    async with served(kit) as gateway:
        first = await send(gateway)
        spent = await kit.posted_nano(f"key:{kit.metrics.records[0].key_id}")
        again = await send(gateway)
        assert first.status_code == again.status_code == 200
        assert again.content == first.content
        assert (REPLAY in first.headers, again.headers[REPLAY]) == (False, "true")
        for name in ("x-baton-rollout-id", "x-baton-cost-usd", "content-type"):
            assert again.headers[name] == first.headers[name]
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        assert len(kit.workers.calls) == 1
        assert await kit.posted_nano(f"key:{kit.metrics.records[0].key_id}") == spent > 0
        other = await send(gateway, {"idempotency-key": "order-2"})
        assert other.json()["choices"][0]["message"]["content"] == "second"


async def test_without_the_header_no_reply_is_stored() -> None:
    kit = Kit()
    async with served(kit) as gateway:
        for _ in range(2):
            reply = await gateway.http.post("/v1/chat/completions", json=ask())
            assert REPLAY not in reply.headers
        assert (len(kit.workers.calls), kit.replies.rows) == (2, {})


async def test_a_stream_is_replayed_as_a_stream() -> None:
    kit = Kit(workers={"alpha": Says("one two three", piece_delay_s=0.002)})
    async with served(kit) as gateway:

        async def text(**more: Any) -> tuple[str, str | None]:
            stream = await gateway.sdk.chat.completions.create(
                **ask(stream=True, stream_options={"include_usage": True}), extra_headers=ONE, **more
            )
            chunks = [chunk async for chunk in stream]
            words = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            return words + str(chunks[-1].usage), stream.response.headers.get(REPLAY)

        first, again = await text(), await text()
        assert first[0].startswith("one two three")
        assert again[0] == first[0]
        assert (first[1], again[1]) == (None, "true")
        assert len(kit.workers.calls) == 1


async def test_another_body_or_path_is_422_naming_the_header() -> None:
    kit = Kit()
    async with served(kit) as gateway:
        await send(gateway)
        other = await send(gateway, text="Something else?")
        assert other.status_code == 422
        assert other.json()["error"]["code"] == "idempotency_key_reused"
        assert other.json()["error"]["param"] == "Idempotency-Key"
        reordered = dict(reversed(ask().items()))
        same = await gateway.http.post("/v1/chat/completions", json=reordered, headers=ONE)
        assert same.headers[REPLAY] == "true"
        assert len(kit.workers.calls) == 1


async def test_a_hundred_at_once_are_one_execution() -> None:
    kit = Kit(workers={"alpha": Says("once", delay_s=0.2)})
    async with served(kit) as gateway:
        await gateway.http.get("/v1/models")
        replies = await asyncio.gather(*(send(gateway) for _ in range(100)))
        carried_out = [reply for reply in replies if reply.status_code == 200 and REPLAY not in reply.headers]
        waiting = [reply for reply in replies if reply.status_code == 409]
        replayed = [reply for reply in replies if reply.headers.get(REPLAY) == "true"]
        assert (len(carried_out), len(waiting) + len(replayed)) == (1, 99)
        assert {reply.json()["error"]["code"] for reply in waiting} <= {"idempotency_key_in_use"}
        assert {reply.headers["retry-after"] for reply in waiting} <= {"1"}
        again = await asyncio.gather(*(send(gateway) for _ in range(99)))
        assert {reply.headers[REPLAY] for reply in again} == {"true"}
        assert len({reply.content for reply in again}) == 1
        assert len(kit.workers.calls) == 1


async def test_the_sdk_that_is_told_to_wait_gets_the_reply_by_itself() -> None:
    kit = Kit(workers={"alpha": Says("once", delay_s=0.5)})
    async with served(kit) as gateway:
        patient = gateway.sdk.with_options(max_retries=2)
        both = await asyncio.gather(*(patient.chat.completions.create(**ask(), extra_headers=ONE) for _ in range(2)))
        assert [one.choices[0].message.content for one in both] == ["once", "once"]
        assert len(kit.workers.calls) == 1


async def answered(gateway: Served, **changes: Any) -> httpx.Response:
    """The reply to the request once the first of its kind is no longer under way."""

    async def settled() -> httpx.Response | None:
        reply = await send(gateway, **changes)
        return None if reply.status_code == 409 else reply

    return cast(httpx.Response, await until(settled))


async def test_a_client_that_leaves_finds_the_reply_when_it_comes_back() -> None:
    async def story(pace: int) -> None:
        kit = Kit(workers={"alpha": Says("late", delay_s=1.0 * pace)})
        async with served(kit) as gateway:
            asking = asyncio.create_task(send(gateway))
            await until(lambda: kit.workers.in_flight)
            asking.cancel()
            await until(lambda: gateway.idempotency.abandoned == 1 or not kit.workers.in_flight)
            assert gateway.idempotency.abandoned == 1
            reply = await answered(gateway)
            assert reply.json()["choices"][0]["message"]["content"] == "late"
            assert reply.headers[REPLAY] == "true"
            assert (gateway.idempotency.abandoned, kit.workers.cancelled) == (0, [])

    await at_some_pace(story)


async def test_a_stream_whose_reader_left_is_kept_whole() -> None:
    kit = Kit(workers={"alpha": Says("a b c d e f g h", piece_delay_s=0.02)})
    async with served(kit) as gateway:
        async with gateway.http.stream("POST", "/v1/chat/completions", json=ask(stream=True), headers=ONE) as leaving:
            await anext(leaving.aiter_bytes())
        reply = await answered(gateway, stream=True)
        assert reply.text.rstrip().endswith("data: [DONE]")
        assert len(kit.workers.calls) == 1


async def test_a_request_that_never_began_is_not_stored_for_replay() -> None:
    kit = Kit()
    async with served(kit) as gateway:
        bad = await send(gateway, temperature="hot")
        assert bad.status_code == 400
        unknown = await send(gateway, model="nobody")
        assert unknown.status_code == 404
        kit.budget_store.away = True
        assert (await send(gateway)).status_code == 503
        kit.budget_store.away = False
        good = await send(gateway)
        assert (good.status_code, REPLAY in good.headers) == (200, False)


async def test_a_failure_that_may_pass_and_cost_nothing_is_tried_again() -> None:
    failed = UpstreamError("down", upstream_status=503)
    kit = Kit(workers={"alpha": [failed, Says("up")]}, attempts_max=1)
    async with served(kit) as gateway:
        assert (await send(gateway, model="alpha")).status_code == 502
        assert (await send(gateway, model="alpha")).json()["choices"][0]["message"]["content"] == "up"


async def test_a_failure_that_cost_something_stands_and_says_not_to_retry() -> None:
    lost = UpstreamError("hung up", dispatched=True)
    kit = Kit(workers={"alpha": [lost, Says("never asked")]}, attempts_max=1)
    async with served(kit) as gateway:
        first = await send(gateway, model="alpha")
        again = await send(gateway, model="alpha")
        assert first.status_code == again.status_code == 502
        assert first.headers["x-baton-cost-usd"] != "0"
        assert again.json() == first.json()
        assert again.headers["x-should-retry"] == "false"
        patient = gateway.sdk.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError):
            await patient.chat.completions.create(**ask(model="alpha"), extra_headers=ONE)
        assert len(kit.workers.calls) == 1


async def test_a_request_that_the_worker_calls_bad_is_bad_again() -> None:
    kit = Kit(workers={"alpha": UpstreamRefused("no", upstream_status=400)}, attempts_max=1)
    async with served(kit) as gateway:
        first, again = await send(gateway, model="alpha"), await send(gateway, model="alpha")
        assert first.status_code == again.status_code == 400
        assert again.headers[REPLAY] == "true"
        assert len(kit.workers.calls) == 1


@pytest.mark.parametrize("log_mode", ["redacted", "metadata"])
async def test_a_key_that_logs_no_texts_stores_no_reply(log_mode: str) -> None:
    kit = Kit()
    async with served(kit, log_mode=log_mode) as gateway:
        first, again = await send(gateway), await send(gateway)
        assert (first.status_code, again.status_code) == (200, 409)
        assert again.json()["error"]["code"] == "idempotent_reply_not_kept"
        assert first.headers["x-baton-rollout-id"] in again.json()["error"]["message"]
        assert again.headers["x-should-retry"] == "false"
        assert [row.reply and row.reply.body for row in kit.replies.rows.values()] == [None]
        assert len(kit.workers.calls) == 1


async def test_a_reply_over_the_bound_is_given_once() -> None:
    kit = Kit(workers={"alpha": Says("x" * 5000, usage=Usage(10, 5))})
    async with served(kit, body_bytes_max=4000) as gateway:
        assert len((await send(gateway)).json()["choices"][0]["message"]["content"]) == 5000
        assert (await send(gateway)).json()["error"]["code"] == "idempotent_reply_not_kept"
        assert len(kit.workers.calls) == 1


async def test_the_store_away_is_503_and_nothing_is_carried_out() -> None:
    kit = Kit()
    async with served(kit) as gateway:
        await send(gateway, {"idempotency-key": "before"})
        kit.replies.away = True
        refused = await send(gateway)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "idempotency_unavailable"
        assert refused.headers["retry-after"] == "1"
        assert len(kit.workers.calls) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_that_is_none_is_400(key: str) -> None:
    async with served(Kit()) as gateway:
        refused = await send(gateway, {"idempotency-key": key})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "Idempotency-Key"


async def test_api_keys_do_not_share_replies() -> None:
    kit = Kit()
    async with served(kit) as gateway:
        first = await send(gateway)
        _, other = await gateway.keys.create_key("other")
        theirs = await send(gateway, ONE | {"authorization": f"Bearer {other}"})
        assert REPLAY not in theirs.headers
        assert theirs.headers["x-baton-rollout-id"] != first.headers["x-baton-rollout-id"]
