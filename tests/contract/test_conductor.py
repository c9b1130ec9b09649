"""What every conductor must do, proven on the fake, the embedded server and (marker `vllm`) a real vLLM."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import jsonschema
import pytest

from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.errors import ConductorError
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd
from tests.contract.conductors import (
    LONG_SCHEMA,
    SCHEMA,
    Served,
    embedded_server,
    fake,
    over_http,
    planning_call,
    text_schema,
)
from tests.contract.conftest import SHIPPED
from tests.waiting import until

REAL_VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])


@pytest.fixture(scope="session")
def embedded_url(tiny_model: Path) -> Iterator[str]:
    """One decoding thread and no queue, so that a slot that is not given back is noticed."""
    with embedded_server(tiny_model, "--threads", "1", "--queue", "0") as (url, _):
        yield url


@pytest.fixture(scope="session")
def shipped_url() -> Iterator[str]:
    with embedded_server(SHIPPED) as (url, _):
        yield url


@pytest.fixture(params=["fake", "embedded", REAL_VLLM])
async def served(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Served]:
    if request.param == "fake":
        yield fake()
        return
    url = request.getfixturevalue(f"{request.param}_url")
    model = SHIPPED if request.param == "vllm" else tiny_model
    served = over_http(url, model, kill=lambda: pytest.fail("shared server"), timeout_s=60.0)
    yield served
    assert isinstance(served.conductor, HttpConductor)
    await served.conductor.close()


async def plan(conductor: Conductor, call: ConductorCall) -> tuple[list[ConductorChunk], ConductorEnd]:
    """The whole stream; its last item is the end and nothing else is."""
    items = [item async for item in conductor.decode(call)]
    chunks, end = items[:-1], items[-1]
    assert isinstance(end, ConductorEnd)
    return [chunk for chunk in chunks if isinstance(chunk, ConductorChunk)], end


def text_of(chunks: list[ConductorChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids_of(chunks: list[ConductorChunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


def logprobs_of(chunks: list[ConductorChunk]) -> list[float]:
    return [logprob for chunk in chunks for logprob in chunk.logprobs]


async def test_ready(served: Served) -> None:
    assert await served.conductor.ready()


async def test_plans_follow_the_schema_at_temperature_one(served: Served) -> None:
    for seed in range(12):
        chunks, end = await plan(served.conductor, planning_call(seed=seed))
        text = text_of(chunks)
        jsonschema.validate(json.loads(text), SCHEMA)
        assert end.finish_reason == "stop"
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or "\\" in text


async def test_each_token_has_its_id_its_text_and_its_logprob(served: Served) -> None:
    chunks, end = await plan(served.conductor, planning_call(seed=5))
    for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.tokens) > 0
    logprobs = logprobs_of(chunks)
    assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in logprobs)
    assert end.usage.completion_tokens == len(logprobs)
    assert not end.usage.estimated


async def test_token_ids_are_the_text(served: Served) -> None:
    chunks, _ = await plan(served.conductor, planning_call(seed=6))
    assert served.text_of(ids_of(chunks)) == text_of(chunks)


async def test_the_prompts_token_ids_come_with_the_plan(served: Served) -> None:
    question = "Which of the two dates is the later one?"
    _, end = await plan(served.conductor, planning_call(question))
    assert len(end.prompt_token_ids) == end.usage.prompt_tokens > 0
    assert "two dates" in served.text_of(end.prompt_token_ids) or "dates" in served.text_of(end.prompt_token_ids)
    assert end.model == "conductor"


async def test_greedy_is_deterministic(served: Served) -> None:
    first, second = [await plan(served.conductor, planning_call(temperature=0.0)) for _ in range(2)]
    assert ids_of(first[0]) == ids_of(second[0])
    assert logprobs_of(first[0]) == pytest.approx(logprobs_of(second[0]), abs=1e-4)


async def test_a_seed_reproduces_a_plan_and_other_seeds_differ(served: Served) -> None:
    ids = [ids_of((await plan(served.conductor, planning_call(seed=seed)))[0]) for seed in (7, 7, 8, 9, 10, 11)]
    assert ids[0] == ids[1]
    assert len(set(ids)) > 1


async def test_the_first_chunk_comes_before_the_plan_is_whole(served: Served) -> None:
    chunks, _ = await plan(served.conductor, planning_call(seed=1, schema=LONG_SCHEMA, tokens_max=300))
    assert len(chunks) > 1
    assert len(chunks[0].token_ids) < len(ids_of(chunks))


async def test_a_token_bound_ends_the_plan_with_length(served: Served) -> None:
    chunks, end = await plan(served.conductor, planning_call(seed=2, tokens_max=5))
    assert (end.finish_reason, len(ids_of(chunks)), end.usage.completion_tokens) == ("length", 5, 5)


async def test_leaving_a_plan_frees_its_place(served: Served) -> None:
    long_call = planning_call(seed=3, schema=LONG_SCHEMA, tokens_max=700)
    async with aclosing(served.conductor.decode(long_call)) as items:  # type: ignore[type-var]
        await anext(items)

    async def planned() -> bool:
        try:
            await plan(served.conductor, planning_call(seed=4))
        except ConductorError:  # the place of a plan that nobody reads is given back soon, not at once
            return False
        return True

    await until(planned)


async def test_a_deadline_that_passes_is_slow(served: Served) -> None:
    call = planning_call(seed=3, schema=LONG_SCHEMA, tokens_max=900, timeout_s=0.0005)
    with pytest.raises(ConductorError) as caught:
        await plan(served.conductor, call)
    assert caught.value.reason == "slow"


@pytest.mark.parametrize("kind", ["fake", "embedded"])
async def test_a_killed_server_is_down(kind: str, tiny_model: Path) -> None:
    if kind == "fake":
        served = fake()
        served.kill()
        await _assert_down(served)
        return
    with embedded_server(tiny_model) as (url, process):
        served = over_http(url, tiny_model, kill=process.kill)
        assert isinstance(served.conductor, HttpConductor)
        await plan(served.conductor, planning_call(seed=1))
        served.kill()
        process.wait(timeout=120)
        await _assert_down(served)
        await served.conductor.close()


async def _assert_down(served: Served) -> None:
    assert not await served.conductor.ready()
    with pytest.raises(ConductorError) as caught:
        await plan(served.conductor, planning_call())
    assert caught.value.reason == "down"
    assert not caught.value.billable  # nothing answered there, so nothing can have been planned


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_logprobs_equal_vllms(temperature: float, vllm_url: str, shipped_url: str) -> None:
    """The shipped weights on both. Greedy: the same tokens and log-probs. Sampled: each side's log-probs are those of
    its own draw, so the pair is compared where both drew the same tokens, up to the first difference."""
    ours, theirs = (over_http(url, SHIPPED, kill=lambda: None, timeout_s=60.0) for url in (shipped_url, vllm_url))
    call = planning_call("Plan: " + "add the numbers, " * 20, temperature=temperature, seed=1, schema=text_schema(80))
    (our_chunks, our_end), (their_chunks, their_end) = (
        await plan(ours.conductor, call),
        await plan(theirs.conductor, call),
    )
    for served in (ours, theirs):
        assert isinstance(served.conductor, HttpConductor)
        await served.conductor.close()
    assert our_end.prompt_token_ids == their_end.prompt_token_ids
    our_ids, their_ids = ids_of(our_chunks), ids_of(their_chunks)
    same = next((i for i, (a, b) in enumerate(zip(our_ids, their_ids, strict=False)) if a != b), len(our_ids))
    if temperature == 0.0:
        assert our_ids == their_ids
        assert same > 30
    assert same > 0
    assert logprobs_of(our_chunks)[:same] == pytest.approx(logprobs_of(their_chunks)[:same], abs=1e-3)
