"""What every engine that judges must do, proven on the embedded runtime, torch (marker `train`), the embedded server
over HTTP, and (marker `vllm`) a real vLLM: it samples plans with their log-probs, and scores plans as it would log
them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.engines.policies import write_adapter
from gateway.adapters.engines.http import EngineApi
from gateway.core.loop.plan import PlanLimits, decision_mask, plan_schema, validate
from gateway.errors import ConductorError
from gateway.service.ports.request import ConductorCall, ConductorChunk, Sampling
from policy.engines.choice import EngineChoice
from policy.engines.directory import read_conductors
from policy.engines.opening import open_engine
from policy.engines.port import LoggedPlan, PlanEngine, sampled
from policy.recipes.engines import EngineProcess
from tests.contract.conductors import embedded_server
from tests.contract.conftest import SHIPPED

LIMITS = PlanLimits(("atlas", "quill", "forge"), 3)
SCHEMA = plan_schema(LIMITS)
EXACT = 1e-3  # nats, float32 on both sides
TORCH = pytest.param("torch", marks=pytest.mark.train)
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    place = tmp_path_factory.mktemp("adapters")
    for base in (tiny_model, SHIPPED):
        (place / base.name).symlink_to(base)  # an adapter's base is looked for beside it
    return {base: write_adapter(base, place / f"{base.name}-7", 7, scale=0.3) for base in (tiny_model, SHIPPED)}


@pytest.fixture(scope="session")
def base_url(tiny_model: Path) -> Iterator[str]:
    with embedded_server(tiny_model) as (url, _):
        yield f"{url}/v1"


@pytest.fixture(scope="session")
def adapter_url(tiny_model: Path, adapters: dict[Path, Path]) -> Iterator[str]:
    with embedded_server(adapters[tiny_model]) as (url, _):
        yield f"{url}/v1"


@pytest.fixture(params=["embedded", TORCH, "endpoint", VLLM])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(kind: str, tiny_model: Path) -> Path:
    return SHIPPED if kind == "vllm" else tiny_model


@pytest.fixture
async def engine(kind: str, base: Path, request: pytest.FixtureRequest) -> AsyncIterator[PlanEngine]:
    async with _opened(kind, base, request, "base_url") as found:
        yield found


@pytest.fixture
async def adapted(
    kind: str, base: Path, adapters: dict[Path, Path], request: pytest.FixtureRequest
) -> AsyncIterator[PlanEngine]:
    async with _opened(kind, adapters[base], request, "adapter_url") as found:
        yield found


def _opened(
    kind: str, directory: Path, request: pytest.FixtureRequest, server: str
) -> AbstractAsyncContextManager[PlanEngine]:
    name = kind
    if kind == "endpoint":
        name = request.getfixturevalue(server)
    elif kind == "vllm":
        name = f"{request.getfixturevalue('vllm_url')}/v1"
    return open_engine(read_conductors([directory])[directory], EngineChoice(name))


@asynccontextmanager
async def reference(directory: Path) -> AsyncIterator[PlanEngine]:
    async with open_engine(read_conductors([directory])[directory], EngineChoice("embedded", 1)) as found:
        yield found


def call(text: str = "Add 2 and 3.", **sampling: Any) -> ConductorCall:
    values = {"temperature": 1.0, "seed": 1, "tokens_max": 160, **sampling}
    return ConductorCall([{"role": "user", "content": text}], SCHEMA, Sampling(**values), 60.0)


async def logged(engine: PlanEngine, asked: ConductorCall) -> tuple[LoggedPlan, list[float]]:
    """A plan as the gateway would log it."""
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[float] = []
    prompt_ids: tuple[int, ...] = ()
    async for item in engine.decode(asked):
        if isinstance(item, ConductorChunk):
            texts += item.tokens
            ids += item.token_ids
            logprobs += item.logprobs
        else:
            prompt_ids = item.prompt_token_ids
    heat = asked.sampling.temperature
    return LoggedPlan(prompt_ids, ids, decision_mask(texts), asked.schema, heat), logprobs


async def test_a_plan_follows_its_schema_with_a_log_prob_for_each_token(engine: PlanEngine) -> None:
    one = await sampled(engine, call(tokens_max=512))
    again, other = await sampled(engine, call(tokens_max=512)), await sampled(engine, call(seed=2))
    greedy = await sampled(engine, call(temperature=0))
    assert (one.text, one.token_ids) == (again.text, again.token_ids)
    assert one.logprobs == pytest.approx(again.logprobs, abs=EXACT)
    assert one.prompt_ids == other.prompt_ids == greedy.prompt_ids != ()
    assert len(one.token_ids) == len(one.logprobs) > 0
    assert all(logprob <= 1e-3 for logprob in one.logprobs)
    assert greedy.text.startswith('{"steps":[{"worker":"')
    assert greedy.token_ids == (await sampled(engine, call(temperature=0, seed=9))).token_ids
    assert await engine.ready()
    assert engine.plan_ms is not None


async def test_plans_that_are_asked_for_at_once_are_those_asked_for_alone(engine: PlanEngine) -> None:
    calls = [call(f"Add 2 and {number}.", seed=number, tokens_max=48) for number in range(4)]
    alone = [await sampled(engine, one) for one in calls]
    together = await asyncio.gather(*(sampled(engine, one) for one in calls))
    assert [plan.token_ids for plan in together] == [plan.token_ids for plan in alone]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_an_engine_scores_its_plans_as_it_sampled_them(engine: PlanEngine, temperature: float) -> None:
    made = [await logged(engine, call(f"Add 2 and {n}.", temperature=temperature, seed=n)) for n in range(4)]
    scores = await engine.score([plan for plan, _ in made])
    for (plan, logprobs), score in zip(made, scores, strict=True):
        assert len(score) == len(plan.plan_ids)
        decided = [(a, b) for a, b, decides in zip(score, logprobs, plan.decisions, strict=True) if decides]
        assert any(a < 0 for a, _ in decided)
        for ours, theirs in decided:
            assert ours == pytest.approx(theirs, abs=EXACT)
        assert {a for a, decides in zip(score, plan.decisions, strict=True) if not decides} <= {0.0}


async def test_scores_are_those_of_the_embedded_runtime(engine: PlanEngine, base: Path) -> None:
    async with reference(base) as exact:
        plans = [(await logged(exact, call(f"Add {n} and 3.", seed=n)))[0] for n in range(3)]
        plans = [replace(plan, temperature=heat) for plan in plans for heat in (0.0, 0.6, 1.0, 1.7)]
        for ours, theirs in zip(await engine.score(plans), await exact.score(plans), strict=True):
            assert ours == pytest.approx(theirs, abs=EXACT)


async def test_an_adapter_is_scored_with_its_own_weights(
    adapted: PlanEngine, base: Path, adapters: dict[Path, Path]
) -> None:
    async with reference(base) as without, reference(adapters[base]) as exact:
        plan = (await logged(without, call()))[0]
        [ours], [theirs], [unadapted] = [await each.score([plan]) for each in (adapted, exact, without)]
        assert ours == pytest.approx(theirs, abs=EXACT)
        assert ours != pytest.approx(unadapted, abs=10 * EXACT)
        assert (await sampled(adapted, call(temperature=0))).text == (await sampled(exact, call(temperature=0))).text


async def test_what_the_grammar_forbids_has_no_probability(engine: PlanEngine) -> None:
    plan, _ = await logged(engine, call())
    wrong = list(plan.plan_ids)
    wrong[2] = wrong[0]
    whole, [none] = (await engine.score([plan]))[0], await engine.score([replace(plan, plan_ids=wrong)])
    assert none[:2] == pytest.approx(whole[:2], abs=EXACT)
    assert set(none[2:]) == {-math.inf}


async def test_a_prompt_without_room_is_refused(engine: PlanEngine) -> None:
    with pytest.raises(ConductorError) as refused:
        [item async for item in engine.decode(call("word " * 9000))]
    assert refused.value.reason == "refused"
    assert (await sampled(engine, call("word " * 9000))).text == ""


async def test_sampling_that_an_engine_lacks_is_refused_and_never_ignored(engine: PlanEngine, kind: str) -> None:
    if kind == "vllm":
        assert set((await sampled(engine, call(top_k=1))).logprobs) == {0.0}
        assert set((await sampled(engine, call())).logprobs) != {0.0}
        return
    with pytest.raises(ConductorError, match="top_k"):
        [item async for item in engine.decode(call(top_k=5))]


async def test_a_plan_that_ends_is_valid(engine: PlanEngine) -> None:
    schema = plan_schema(PlanLimits(("atlas", "quill"), 1))
    made = [await sampled(engine, replace(call(seed=n, tokens_max=600), schema=schema)) for n in range(3)]
    for plan in made:
        if plan.text.endswith("}"):
            assert validate(plan.text, PlanLimits(("atlas", "quill"), 1)).steps


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_an_adapter_is_loaded_for_as_long_as_it_is_judged(
    vllm: EngineProcess, adapters: dict[Path, Path]
) -> None:
    api = EngineApi(vllm.url)
    before = set(await api.models())
    choice, directory = EngineChoice(f"{vllm.url}/v1"), adapters[SHIPPED]

    async def fail() -> None:
        async with open_engine(read_conductors([directory])[directory], choice):
            assert len(set(await api.models()) - before) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert set(await api.models()) == before
    await api.close()
