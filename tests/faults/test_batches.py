"""Files and batches over a whole gateway: OpenAI's SDK in front, a scripted worker behind, and a kill -9 between."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.faults.site import Gateway, Site
from tests.faults.upstream import Bill, Upstream, good
from tests.upstreams.server import Reply
from tests.waiting import BOUND_S, until

ENDED = ("completed", "failed", "expired", "cancelled")
pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def sdk_of(here: Site, gateway: Gateway, key: str = "") -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = gateway.facts["base_url"]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key or here.key, max_retries=0) as sdk:
        yield sdk


def line(custom_id: str, text: str | None = None, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    asked = {"model": "alpha", "messages": [{"role": "user", "content": text or custom_id}], "max_tokens": 6, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def made(sdk: openai.AsyncOpenAI, lines: Sequence[Any], **more: Any) -> Batch:
    """A batch over these lines."""
    file = await sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    endpoint: Any = lines[0]["url"]
    return await sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(sdk: openai.AsyncOpenAI, batch: Batch) -> Batch:
    seen = [batch]

    async def has_ended() -> bool:
        seen.append(await sdk.batches.retrieve(batch.id))
        return seen[-1].status in ENDED

    await until(has_ended, 2 * BOUND_S)
    return seen[-1]


async def lines_of(sdk: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of an output or error file, by custom id."""
    if file_id is None:
        return {}
    texts = (await sdk.files.content(file_id)).text.splitlines()
    lines = [json.loads(text) for text in texts]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


def questions(upstream: Upstream) -> Counter[str]:
    """How often the worker was asked each question."""
    return Counter(bill.body["messages"][-1]["content"] for bill in upstream.bills)


async def test_the_sdk_uploads_creates_polls_and_reads(here: Site) -> None:
    gateway = await here.gateway()
    await here.new_key(rpm=2)  # for live requests
    async with sdk_of(here, gateway) as sdk:
        bad = line("c", messages=[])
        batch = await made(sdk, [line("a"), line("b", model="beta"), bad], metadata={"kind": "test"})
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"kind": "test"})
        done = await ended(sdk, batch)
        assert (done.status, done.errors, done.endpoint) == ("completed", None, "/v1/chat/completions")
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"completed": 2, "failed": 1, "total": 3}
        assert done.usage is not None
        assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (24, 12, 36)
        stages = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
        assert list(stages) == sorted(stage for stage in stages if stage is not None)
        assert done.expires_at == done.created_at + 86_400
        output = await lines_of(sdk, done.output_file_id)
        assert set(output) == {"a", "b"}
        reply = output["a"]["response"]
        completion = openai.types.chat.ChatCompletion.model_validate(reply["body"])
        assert (reply["status_code"], completion.model) == (200, "alpha")
        assert (completion.choices[0].message.content or "").strip() == "one two three four five six"
        failed = (await lines_of(sdk, done.error_file_id))["c"]
        assert (failed["response"]["status_code"], failed["response"]["body"]["error"]["code"]) == (400, "empty_array")
        assert [one.id async for one in sdk.batches.list(limit=1)] == [batch.id]
        rollout_id = completion.id.removeprefix("chatcmpl-")
        logged = await until(lambda: rollout(here, gateway, rollout_id))
        assert logged["status"] == "done"
        scopes = [scope[0] for row in logged["ledger"] if row["kind"] == "hold" for scope in row["scopes"]]
        assert f"batch:{batch.id}" in scopes


async def rollout(here: Site, gateway: Gateway, rollout_id: str) -> Any:
    dashed = "-".join(rollout_id[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
    headers = {"authorization": f"Bearer {here.key}"}
    async with here.http.get(f"{gateway.facts['base_url']}/rollouts/{dashed}", headers=headers) as reply:
        return await reply.json() if reply.status == 200 else None


async def test_files_have_openais_shapes_and_belong_to_their_key(here: Site) -> None:
    gateway = await here.gateway(BATON_FILE_BYTES_MAX="2048", BATON_FILES_BYTES_PER_KEY_MAX="4096")
    await here.new_key()
    other, _ = await here.new_key()
    async with sdk_of(here, gateway, here.keys[0]) as sdk, sdk_of(here, gateway, other) as stranger:
        expires: Any = {"anchor": "created_at", "seconds": 3600}
        file = await sdk.files.create(file=("in.jsonl", b"x" * 2048), purpose="batch", expires_after=expires)
        assert (file.bytes, file.filename, file.purpose, file.status) == (2048, "in.jsonl", "batch", "processed")
        assert file.expires_at == file.created_at + 3600
        assert await sdk.files.retrieve(file.id) == file
        assert (await sdk.files.content(file.id)).content == b"x" * 2048
        second = await sdk.files.create(file=("b.jsonl", b""), purpose="batch")
        assert second.expires_at == second.created_at + 30 * 86_400
        assert {one.id async for one in sdk.files.list(limit=1)} == {file.id, second.id}
        assert [one async for one in stranger.files.list()] == []
        for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)
        with pytest.raises(openai.BadRequestError) as foreign:
            await stranger.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert foreign.value.param == "input_file_id"
        with pytest.raises(openai.APIStatusError) as large:
            await sdk.files.create(file=("in.jsonl", b"x" * 100_000), purpose="batch")
        assert large.value.status_code == 413
        await sdk.files.create(file=("in.jsonl", b"x" * 2000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as full:
            await sdk.files.create(file=("in.jsonl", b"x" * 2000), purpose="batch")
        assert (full.value.status_code, full.value.code) == (413, "files_too_large")
        with pytest.raises(openai.BadRequestError) as purpose:
            await sdk.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
        assert purpose.value.param == "purpose"
        assert (await sdk.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await sdk.files.retrieve(file.id)


async def test_what_is_wrong_with_a_batch_is_named(here: Site) -> None:
    gateway = await here.gateway()
    await here.new_key()
    async with sdk_of(here, gateway) as sdk:
        bad = await ended(sdk, await made(sdk, [line("a"), line("a"), line("b", stream=True), line("c", url="/v1/x")]))
        assert bad.status == "failed"
        assert bad.errors is not None
        assert [(error.line, error.code, error.param) for error in bad.errors.data or ()] == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "invalid_value", "body.stream"),
            (4, "mismatched_endpoint", "url"),
        ]
        file = await sdk.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
        asked: dict[str, Any] = {
            "input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"
        }  # fmt: skip
        wrong: Sequence[tuple[str, Any]] = (
            ("endpoint", "/v1/files"), ("completion_window", "soon"), ("input_file_id", "file-0"),
            ("metadata", {"a": 1}), ("output_expires_after", {"anchor": "created_at", "seconds": 1}),
        )  # fmt: skip
        for name, value in wrong:
            with pytest.raises(openai.BadRequestError) as refused:
                await sdk.batches.create(**asked | {name: value})
            assert (refused.value.param or "").startswith(name)
        with pytest.raises(openai.NotFoundError):
            await sdk.batches.retrieve("batch_0")
        with pytest.raises(openai.ConflictError):
            await sdk.batches.cancel(bad.id)
    assert here.upstream.bills == []


async def test_a_batch_has_a_budget_of_its_own(here: Site) -> None:
    """Each line may cost up to 12 + 6 tokens at their prices, and a small hold more; the batch stops at its own cap."""
    gateway = await here.gateway()
    await here.new_key()
    async with sdk_of(here, gateway) as sdk:
        lines = [line(f"c{n}", model="flat") for n in range(6)]
        batch = await made(sdk, lines, extra_body={"baton": {"max_cost_usd": "0.0045"}})
        done = await ended(sdk, batch)
        failed = await lines_of(sdk, done.error_file_id)
        errors = [each["response"]["body"]["error"] for each in failed.values()]
        assert {error["code"] for error in errors} == {"insufficient_quota"}
        assert f"batch:{batch.id}" in errors[0]["message"]
        assert len(here.upstream.bills) == 6 - len(failed) <= 4
        assert len(failed) >= 2
        assert (await sdk.chat.completions.create(model="flat", messages=[{"role": "user", "content": "x"}])).id


async def test_responses_run_in_a_batch_too(here: Site) -> None:
    gateway = await here.gateway()
    await here.new_key()
    async with sdk_of(here, gateway) as sdk:
        asked = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": {"model": "alpha", "input": "x"}}
        done = await ended(sdk, await made(sdk, [asked]))
        body = (await lines_of(sdk, done.output_file_id))["r"]["response"]["body"]
        response = openai.types.responses.Response.model_validate(body)
        assert response.output_text.startswith("one two")
        assert (await sdk.responses.retrieve(response.id)).output_text == response.output_text


async def test_lines_of_one_conversation_are_served_one_after_another(here: Site) -> None:
    serving, most = 0, 0

    async def slow(upstream: Upstream, bill: Bill) -> Reply:
        nonlocal serving, most
        serving += 1
        most = max(most, serving)
        await asyncio.sleep(0.5)
        serving -= 1
        return await good(upstream, bill)

    here.upstream.behave = slow
    gateway = await here.gateway()
    await here.new_key()
    async with sdk_of(here, gateway) as sdk:
        conversation = (await sdk.conversations.create()).id
        body = {"model": "alpha", "conversation": conversation, "max_output_tokens": 16}
        turn = {"method": "POST", "url": "/v1/responses"}
        turns = [{**turn, "custom_id": f"t{n}", "body": {**body, "input": f"turn {n}"}} for n in range(5)]
        done = await ended(sdk, await made(sdk, turns))
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"completed": 5, "failed": 0, "total": 5}
        assert most == 1
        items = [item async for item in sdk.conversations.items.list(conversation, order="asc")]
        texts = [str(item.model_dump()["content"][0]["text"]) for item in items]
        assert sorted(texts[::2]) == [f"turn {n}" for n in range(5)]  # each is followed by its own reply
        sizes = sorted(len(bill.body["messages"]) for bill in here.upstream.bills)
        assert sizes == [1, 3, 5, 7, 9]  # a turn has every one before it


async def test_a_cancelled_batch_sends_no_further_line_and_has_what_was_done(here: Site) -> None:
    gate = asyncio.Event()

    async def waits(upstream: Upstream, bill: Bill) -> Reply:
        await gate.wait()
        return await good(upstream, bill)

    here.upstream.behave = waits
    gateway = await here.gateway(BATON_BATCH_LINES_MAX="2")
    await here.new_key()
    async with sdk_of(here, gateway) as sdk:
        batch = await made(sdk, [line(f"c{n}") for n in range(6)])
        await until(lambda: len(here.upstream.bills) == 2)
        assert (await sdk.batches.cancel(batch.id)).status == "cancelling"
        gate.set()
        done = await ended(sdk, batch)
        assert done.status == "cancelled"
        assert set(await lines_of(sdk, done.output_file_id)) == {"c0", "c1"}
        failed = await lines_of(sdk, done.error_file_id)
        assert {name: each["error"]["code"] for name, each in failed.items()} == {
            f"c{n}": "batch_cancelled" for n in range(2, 6)
        }
    assert len(here.upstream.bills) == 2


async def killed_in_mid_batch(here: Site, lines: int) -> tuple[Gateway, Batch]:
    """A gateway that was killed while it served lines of a batch, some of which were done."""
    here.settings |= {"BATON_BATCH_LINES_MAX": "3", "BATON_BATCH_LEASE_S": "1"}
    here.upstream.delay_s = 0.05
    gateway = await here.gateway()
    await here.new_key()
    async with sdk_of(here, gateway) as sdk:
        batch = await made(sdk, [line(f"c{n}") for n in range(lines)])

        async def is_halfway() -> bool:
            seen = (await sdk.batches.retrieve(batch.id)).request_counts
            return seen is not None and seen.completed >= lines // 3

        await until(is_halfway)
    await gateway.kill()
    return gateway, batch


async def check_batch(here: Site, gateway: Gateway, batch: Batch, lines: int) -> None:
    """Every line has one result, and none was sent again but those that were being served at the kill."""
    async with sdk_of(here, gateway) as sdk:
        done = await ended(sdk, batch)
        assert (done.status, done.error_file_id) == ("completed", None)
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.total) == (lines, lines)
        assert set(await lines_of(sdk, done.output_file_id)) == {f"c{n}" for n in range(lines)}
    asked = questions(here.upstream)
    assert len(asked) == lines
    assert sum(asked.values()) - lines <= 3


@pytest.mark.long
async def test_a_killed_gateway_continues_its_batch(here: Site) -> None:
    gateway, batch = await killed_in_mid_batch(here, 24)
    gateway.start()
    await gateway.serving()
    await check_batch(here, gateway, batch, 24)


@pytest.mark.long
async def test_another_gateway_continues_the_batch_of_a_killed_one(here: Site) -> None:
    _, batch = await killed_in_mid_batch(here, 24)
    heir = await here.gateway()
    await check_batch(here, heir, batch, 24)
