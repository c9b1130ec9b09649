"""A conductor by URL without an engine of versions: its log-probs are logged once the server has proven them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.adapters.engines.http import SELF_TEST_TEXTS, EngineApi
from gateway.adapters.engines.propensity import LOOK_S, ProvenConductor, trust_in
from gateway.errors import ConductorError, EngineDown
from gateway.service.ports.request import ConductorChunk
from tests.contract.conductors import planning_call, scripted_plan
from tests.fakes.conductor import ScriptedConductor
from tests.fakes.vllm import FakeVllm
from tests.tiny_model import write_tiny_model

SAMPLED, SCORED = "/v1/chat/completions", "/v1/completions"


@dataclass
class Scene:
    """A server under test, the conductor before it, and the clock."""

    vllm: FakeVllm
    plans: ScriptedConductor
    conductor: ProvenConductor
    now_s: list[float]

    async def logged(self) -> bool:
        """Whether the next plan has log-probs."""
        chunks = [item async for item in self.conductor.decode(planning_call()) if isinstance(item, ConductorChunk)]
        assert all(chunk.token_ids for chunk in chunks)
        found = {bool(chunk.logprobs) for chunk in chunks}
        assert len(found) == 1
        return found.pop()

    async def looked(self) -> None:
        """Wait until the server was looked at."""
        task = self.conductor._looking
        assert task is not None
        await task


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    vllm, now_s = FakeVllm(write_tiny_model(tmp_path / "base")), [0.0]
    plans = ScriptedConductor(scripted_plan)
    api = EngineApi("http://vllm", client=vllm.client())
    conductor = ProvenConductor(plans, api, "conductor", now_s=lambda: now_s[0])
    yield Scene(vllm, plans, conductor, now_s)
    await conductor.close()


async def test_log_probs_are_logged_once_they_are_proven(scene: Scene) -> None:
    assert not await scene.logged()
    await scene.looked()
    assert await scene.logged()
    assert Counter(scene.vllm.calls) == {"/v1/models": 1, SAMPLED: SELF_TEST_TEXTS, SCORED: SELF_TEST_TEXTS}


async def test_a_model_that_was_tested_is_looked_at_and_not_tested_again(scene: Scene) -> None:
    await scene.logged()
    await scene.looked()
    await scene.logged()
    assert scene.vllm.calls.count("/v1/models") == 1
    scene.now_s[0] += LOOK_S
    assert await scene.logged()
    await scene.looked()
    assert scene.vllm.calls.count("/v1/models") == 2
    assert scene.vllm.calls.count(SAMPLED) == SELF_TEST_TEXTS


async def test_a_server_that_samples_otherwise_is_served_and_never_trained_on(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.vllm.sampled_off = 0.2
    with caplog.at_level(logging.WARNING, "gateway.conductor"):
        assert not await scene.logged()
        await scene.looked()
        assert not await scene.logged()
    [line] = caplog.messages
    assert "not trained on" in line
    assert "0.2 nats off" in line
    assert "top_k, a temperature or a penalty is on" in line


async def test_another_model_under_the_same_name_is_tested_anew(scene: Scene, tmp_path: Path) -> None:
    await scene.logged()
    await scene.looked()
    scene.vllm.base = scene.vllm.weights = write_tiny_model(tmp_path / "other", seed=1)
    scene.vllm.sampled_off = 0.2
    scene.now_s[0] += LOOK_S
    await scene.logged()
    await scene.looked()
    assert scene.vllm.calls.count(SAMPLED) == 2 * SELF_TEST_TEXTS
    assert not await scene.logged()


async def test_a_server_that_was_away_is_tested_anew(scene: Scene) -> None:
    await scene.logged()
    await scene.looked()
    scene.plans.down = True
    with pytest.raises(ConductorError):
        await scene.logged()
    scene.plans.down = False
    assert not await scene.logged()
    await scene.looked()
    assert await scene.logged()
    assert scene.vllm.calls.count(SAMPLED) == 2 * SELF_TEST_TEXTS


async def test_a_server_that_cannot_be_tested_yet_is_asked_again(scene: Scene) -> None:
    scene.vllm.dead = True
    assert not await scene.logged()
    await scene.looked()
    scene.vllm.dead = False
    assert not await scene.logged()
    await scene.looked()
    assert await scene.logged()


async def test_a_server_without_token_ids_is_named_and_asked_for_nothing(scene: Scene) -> None:
    scene.vllm.owner = "somebody"
    trust = await trust_in(EngineApi("http://vllm", client=scene.vllm.client()), "conductor")
    assert not trust.trainable
    assert trust.reason.startswith("its server gives no token ids")
    assert scene.vllm.calls == ["/v1/models"]


async def test_a_server_that_does_not_say_what_it_sampled_is_named(scene: Scene) -> None:
    scene.vllm.fails[SAMPLED] = 400
    trust = await trust_in(EngineApi("http://vllm", client=scene.vllm.client()), "conductor")
    assert not trust.trainable
    assert "does not return token ids with their log-probs" in trust.reason
    scene.vllm.dead = True
    with pytest.raises(EngineDown):
        await trust_in(EngineApi("http://vllm", client=scene.vllm.client()), "conductor")
