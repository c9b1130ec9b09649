"""Swaps and rollbacks while rollouts stream: none fails, each runs on one version, nothing bad gets in.

The trial is `bench.engines.swap`'s: on the embedded server always, on a real vLLM (marker `vllm`) with adapters and
with full weights in place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.engines.policies import SPOILS
from bench.engines.swap import Figures, as_json, table, trial
from policy.recipes.engines import EngineProcess
from tests.contract.conftest import SHIPPED
from tests.sizes import SLACK

ROLLBACK_S_MAX, FLIP_S_MAX = 10.0, 1.0  # what the project promises


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess("embedded", SHIPPED, tmp_path_factory.mktemp("swap"))
    process.start()
    yield process
    process.stop()


def assert_promises(figures: Figures, swaps: int, rollbacks: int) -> None:
    assert [rollout for rollout in figures.rollouts if not rollout.whole] == []
    assert (len(figures.load_s), len(figures.rollback_s)) == (swaps, rollbacks)
    assert max(figures.rollback_s) <= ROLLBACK_S_MAX * SLACK
    assert max(figures.flip_s) <= FLIP_S_MAX * SLACK
    assert len(figures.versions) >= swaps  # every version planned something
    assert figures.refused == {how: reason for how, (_, reason) in SPOILS.items()}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adapter", "full"])
async def test_swaps_under_load_on_the_embedded_server(kind: str, served: EngineProcess, tmp_path: Path) -> None:
    async with trial(served, kind, tmp_path) as one:
        await one.run(swaps=6, rollbacks=2, streams=2, bad=tuple(SPOILS))
        await one.restart(served)  # raises where a version is not back, proven
    assert_promises(one.figures, 6, 2)
    assert one.figures.restored_s is not None
    assert "0 failed or on two versions" in table(one.figures)
    assert as_json(one.figures)["failed"] == 0
    assert one.figures.good


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_twenty_swaps_and_five_rollbacks_on_vllm(vllm: EngineProcess, tmp_path: Path) -> None:
    async with trial(vllm, "adapter", tmp_path) as one:
        await one.run(swaps=20, rollbacks=5, streams=4, bad=tuple(SPOILS))
    assert_promises(one.figures, 20, 5)


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_full_weights_in_place_under_load_on_vllm(vllm: EngineProcess, tmp_path: Path) -> None:
    async with trial(vllm, "full", tmp_path) as one:
        await one.run(swaps=6, rollbacks=2, streams=4, bad=tuple(SPOILS))
    assert_promises(one.figures, 6, 2)


async def test_a_trial_notices_what_it_is_for(tmp_path: Path, served: EngineProcess) -> None:
    async with trial(served, "adapter", tmp_path) as one:
        await one.run(swaps=1, rollbacks=0, streams=1, bad=())
        assert not one.figures.good  # no bad version was tried
        one.pointer.version = "nobody@1"
        assert not (await one.rollout(1)).whole
