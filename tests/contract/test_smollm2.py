"""A pretrained instruct model on a real vLLM: the base under a name of its own, a swap to an adapter under traffic, and
both judged there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bench.engines.policies import write_adapter
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.vllm import VllmLora
from gateway.adapters.postgres.policies.policy_files import take_in
from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.errors import BatonError
from policy.engines.choice import EngineChoice
from policy.engines.directory import read_conductors
from policy.engines.opening import open_engine
from policy.recipes.engines import EngineProcess
from policy.start.pretrained.packaged import PACKAGED, import_packaged
from tests.contract.engines import ask
from tests.contract.test_plan_engine import EXACT, call, logged

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
STREAMS = 3
TOKENS = 24  # of a plan under traffic


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    if request.config.option.markexpr != "vllm":
        pytest.skip("needs a real vLLM: make test-vllm")
    place = tmp_path_factory.mktemp("smollm2")
    try:
        base = import_packaged(PACKAGED["smollm2"], place / "base").directory
    except BatonError as error:
        pytest.skip(error.message)
    process = EngineProcess("vllm", base, place)
    process.start()
    yield process
    process.stop()


@pytest.fixture
async def engine(served: EngineProcess) -> AsyncIterator[VllmLora]:
    found = VllmLora(EngineApi(served.url, timeout_s=300.0), base=served.base, rank_max=8)
    yield found
    for version in await found.loaded():
        await found.unload(version)
    await found.close()


@pytest.fixture
async def conductor(served: EngineProcess) -> AsyncIterator[HttpConductor]:
    found = HttpConductor(f"{served.url}/v1", "conductor", timeout_s=300.0, breaker=Breaker(failures_max=10_000))
    yield found
    await found.close()


async def test_a_base_is_served_under_its_versions_name_by_an_adapter_that_changes_nothing(
    served: EngineProcess, engine: VllmLora, conductor: HttpConductor, tmp_path: Path
) -> None:
    published = take_in(served.base, tmp_path / "policies").place
    await engine.load("smollm2@0", published)
    text, end = await ask(conductor, "smollm2@0", TOKENS)
    assert (text, end.model) == ((await ask(conductor, "conductor", TOKENS))[0], "smollm2@0")


async def test_a_swap_from_the_base_to_an_adapter_under_traffic_fails_no_request(
    served: EngineProcess, engine: VllmLora, conductor: HttpConductor, tmp_path: Path
) -> None:
    published = take_in(served.base, tmp_path / "policies").place
    adapter = write_adapter(served.base, tmp_path / "adapter", 1, rank=8, scale=0.02)
    await engine.load("smollm2@0", published)
    pointer, done = ["smollm2@0"], asyncio.Event()
    answered: list[tuple[str, str]] = []

    async def stream() -> None:
        while not done.is_set():
            given = pointer[0]
            answered.append((given, (await ask(conductor, given, TOKENS))[1].model))

    async with asyncio.TaskGroup() as traffic:
        for _ in range(STREAMS):
            traffic.create_task(stream())
        await engine.load("smollm2@1", adapter)
        pointer[0] = "smollm2@1"
        while sum(given == "smollm2@1" for given, _ in answered) < STREAMS:
            await asyncio.sleep(0.1)
        done.set()
    await engine.unload("smollm2@0")
    assert {given for given, _ in answered} == {"smollm2@0", "smollm2@1"}
    assert [pair for pair in answered if pair[0] != pair[1]] == []
    assert await engine.loaded() == {"smollm2@1"}


async def test_base_and_adapter_are_scored_there_as_on_the_embedded_runtime(
    served: EngineProcess, tmp_path: Path
) -> None:
    adapter = write_adapter(served.base, tmp_path / "adapter", 1, rank=8, scale=0.02)
    conductors = read_conductors([served.base, adapter])
    for path in (served.base, adapter):
        async with (
            open_engine(conductors[path], EngineChoice("embedded", 1)) as exact,
            open_engine(conductors[path], EngineChoice(f"{served.url}/v1")) as there,
        ):
            plan, _ = await logged(exact, call(tokens_max=TOKENS))
            assert (await there.score([plan]))[0] == pytest.approx((await exact.score([plan]))[0], abs=EXACT)
