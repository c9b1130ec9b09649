"""What every engine of policy versions must do, proven on the fake, the embedded server (full weights and adapters)
and (marker `vllm`) a real vLLM with LoRA."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import count
from pathlib import Path

import pytest

from bench.engines.policies import SPOILS, spoil
from gateway.adapters.engines.embedded import EmbeddedEngine
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.vllm import VllmLora
from gateway.adapters.upstream.client import Breaker
from gateway.adapters.upstream.conductor.client import HttpConductor
from gateway.errors import ConductorError, EngineDown, NotFound, VersionRefused
from gateway.service.ports.request import ConductorChunk, ConductorEnd
from policy.recipes.engines import EngineProcess
from tests.contract.engines import Scene, ask, asking, close, fake_scene, maker, probe_of
from tests.waiting import BOUND_S

REAL_VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])
DRIFT_MAX = 0.001
PRESENT = 4  # versions an engine under test holds at most, those it started with included
names: Callable[[], str] = (f"conductor@{number}" for number in count(1)).__next__


@pytest.fixture(scope="session")
def embedded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess("embedded", tiny_model, tmp_path_factory.mktemp("embedded"))
    process.versions_max = PRESENT
    process.start()
    yield process
    process.stop()


@pytest.fixture(params=["fake", "embedded-full", "embedded-adapter", REAL_VLLM])
async def scene(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Scene]:
    kind, _, made = request.param.partition("-")
    if kind == "fake":
        yield fake_scene(tiny_model, tmp_path)
        return
    process: EngineProcess = request.getfixturevalue(kind)
    if not process.alive():
        process.start()
    api = EngineApi(process.url, key=process.key)
    engine = EmbeddedEngine(api) if kind == "embedded" else VllmLora(api, base=process.base, versions_max=PRESENT)
    conductor = HttpConductor(f"{process.url}/v1", "conductor", timeout_s=60.0, breaker=Breaker(failures_max=10_000))

    def restart() -> None:
        process.kill()
        process.start()

    at_start = frozenset({"conductor"} if kind == "embedded" else ())
    make = maker(process.base, tmp_path, made or "adapter")
    yield Scene(engine, conductor, make, restart, process.kill, at_start)
    if process.alive():
        for version in await engine.loaded() - at_start:
            await engine.unload(version)
    await close(conductor)
    await engine.close()


async def test_a_loaded_version_answers_under_its_name(scene: Scene) -> None:
    version = names()
    with pytest.raises(ConductorError):
        await ask(scene.conductor, version)
    await scene.engine.load(version, scene.make(1))
    text, end = await ask(scene.conductor, version)
    assert (end.model, end.finish_reason) == (version, "length")
    assert text
    assert await scene.engine.loaded() == scene.at_start | {version}


async def test_versions_stand_side_by_side_with_their_own_weights(scene: Scene) -> None:
    versions = {names(): scene.make(seed) for seed in (1, 2, 3)}
    for version, directory in versions.items():
        await scene.engine.load(version, directory)
    for version in versions:
        for other, directory in versions.items():
            drift = await scene.engine.probe(version, probe_of(directory))
            assert (drift <= DRIFT_MAX) == (version == other), (version, other, drift)


async def test_loading_again_does_nothing_and_a_name_is_never_given_twice(scene: Scene) -> None:
    version, directory, other = names(), scene.make(1), scene.make(2)
    await scene.engine.load(version, directory)
    await scene.engine.load(version, directory)
    with pytest.raises(VersionRefused) as refused:
        await scene.engine.load(version, other)
    assert refused.value.reason == "taken"
    assert await scene.engine.probe(version, probe_of(directory)) <= DRIFT_MAX


async def test_a_request_in_flight_finishes_on_its_version(scene: Scene) -> None:
    old, new = names(), names()
    await scene.engine.load(old, scene.make(1))
    undisturbed, _ = await ask(scene.conductor, old, tokens_max=300)
    text, end = "", None
    async with aclosing(scene.conductor.decode(asking(old, tokens_max=300))) as items:  # type: ignore[type-var]
        async for item in items:
            if not text:
                await scene.engine.load(new, scene.make(2))
                await scene.engine.unload(old)
                with pytest.raises(ConductorError):
                    await ask(scene.conductor, old)
                assert (await ask(scene.conductor, new))[1].model == new
            if isinstance(item, ConductorChunk):
                text += item.text
            else:
                end = item
    assert isinstance(end, ConductorEnd)
    assert (text, end.model, end.finish_reason) == (undisturbed, old, "length")


async def test_a_thing_unloaded_is_gone_and_unloading_twice_is_nothing(scene: Scene) -> None:
    version, directory = names(), scene.make(1)
    await scene.engine.load(version, directory)
    await scene.engine.unload(version)
    await scene.engine.unload(version)
    assert await scene.engine.loaded() == scene.at_start
    with pytest.raises(NotFound):
        await scene.engine.probe(version, probe_of(directory))
    await scene.engine.load(version, directory)
    assert (await ask(scene.conductor, version))[1].model == version


@pytest.mark.parametrize("how", SPOILS)
async def test_a_bad_version_is_refused_by_name_and_the_engine_goes_on(how: str, scene: Scene) -> None:
    good, bad = names(), names()
    await scene.engine.load(good, scene.make(1))
    before, _ = await ask(scene.conductor, good)
    directory = scene.make(2)
    reason = spoil(directory, how)
    with pytest.raises(VersionRefused) as refused:
        await scene.engine.load(bad, directory)
    assert refused.value.reason == reason
    assert str(directory) in str(refused.value) or bad in str(refused.value)
    assert await scene.engine.loaded() == scene.at_start | {good}
    assert (await ask(scene.conductor, good))[0] == before


async def test_a_version_above_the_limit_is_refused_until_one_is_unloaded(scene: Scene) -> None:
    room = PRESENT - len(scene.at_start)
    versions = [names() for _ in range(room + 1)]
    directory = scene.make(1)
    for version in versions[:-1]:
        await scene.engine.load(version, directory)
    with pytest.raises(VersionRefused) as refused:
        await scene.engine.load(versions[-1], directory)
    assert refused.value.reason == "full"
    await scene.engine.unload(versions[0])
    await scene.engine.load(versions[-1], directory)
    assert await scene.engine.loaded() == scene.at_start | set(versions[1:])


async def test_loads_at_the_same_time_all_arrive(scene: Scene) -> None:
    versions = {names(): scene.make(seed) for seed in (1, 2, 3)}
    await asyncio.gather(*(scene.engine.load(version, directory) for version, directory in versions.items()))
    assert await scene.engine.loaded() == scene.at_start | set(versions)


async def test_a_restart_forgets_and_loading_again_brings_back(scene: Scene) -> None:
    wanted = {names(): scene.make(seed) for seed in (1, 2)}
    spoiled = scene.make(3)
    for version, directory in wanted.items():
        await scene.engine.load(version, directory)
    scene.restart()  # in this thread: the leash is tied to it
    assert await scene.engine.loaded() == scene.at_start
    spoil(spoiled, "NaN weights")
    lost = names()
    with pytest.raises(VersionRefused) as refused:
        await scene.engine.load(lost, spoiled)
    assert refused.value.reason == "not_finite"
    for version, directory in wanted.items():
        await scene.engine.load(version, directory)
    assert await scene.engine.loaded() == scene.at_start | set(wanted)
    for version, directory in wanted.items():
        assert await scene.engine.probe(version, probe_of(directory)) <= DRIFT_MAX


@pytest.mark.parametrize("scene", ["fake", "embedded-full"], indirect=True)
async def test_an_engine_that_is_gone_is_said_to_be_down_at_once(scene: Scene) -> None:
    directory = scene.make(1)
    scene.stop()
    calls = [scene.engine.loaded(), scene.engine.load("a@1", directory), scene.engine.unload("a@1")]
    for call in [*calls, scene.engine.probe("a@1", probe_of(directory))]:
        with pytest.raises(EngineDown):
            await asyncio.wait_for(call, BOUND_S)
