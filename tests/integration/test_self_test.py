"""The self-test of propensities on real weights: each fault of a server is refused by name, and a sound one is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.engines.faulty_engine import Fault, FaultyEngine
from bench.engines.policies import write_adapter
from bench.engines.propensity import ADAPTER_SCALE, faults_of, self_test
from gateway.adapters.engines.http import EngineApi
from gateway.adapters.engines.propensity import trust_in
from gateway.adapters.engines.vllm import DRIFT_MAX

SHIPPED = Path(__file__).resolve().parents[2] / "policy" / "shipped" / "arena-3"
REASONS = {
    "none": "",
    "top_k 50": "propensity",
    "top_k 5": "propensity",
    "temperature 0.7": "propensity",
    "temperature 0.95": "propensity",
    "min_p 0.1": "propensity",
    "repetition_penalty 1.1": "propensity",
    "another adapter": "probe",
    "another chat template": "tokenizer",
    "another tokenizer": "tokenizer",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained weights: what random ones say is too flat for a small fault to show."""
    base = tmp_path_factory.mktemp("self-test") / "arena-3"
    shutil.copytree(SHIPPED, base)
    return base


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return write_adapter(base, base.parent / "adapter", 1, scale=ADAPTER_SCALE)


@pytest.fixture(scope="module")
def faults(base: Path) -> dict[str, Fault]:
    return faults_of(base, base.parent)


@pytest.mark.parametrize("name", REASONS)
async def test_each_fault_is_refused_by_name_at_the_load(
    name: str, base: Path, adapter: Path, faults: dict[str, Fault]
) -> None:
    engine = FaultyEngine(base, faults[name])
    reason, drift = await self_test(engine, base, adapter, 0)
    assert reason == REASONS[name]
    assert engine.loras == {}
    if name == "none":
        assert drift < DRIFT_MAX / 10
    elif reason != "tokenizer":
        assert drift > DRIFT_MAX


def test_every_fault_that_is_measured_is_tested(faults: dict[str, Fault]) -> None:
    assert set(faults) == set(REASONS)


@pytest.mark.parametrize(("name", "trainable"), [("none", True), ("top_k 5", False), ("temperature 0.7", False)])
async def test_plans_of_a_plain_server_are_trained_on_only_without_a_fault(
    name: str, trainable: bool, base: Path, faults: dict[str, Fault]
) -> None:
    """A server that holds no versions: it has no probe, so its sampling alone is tested."""
    api = EngineApi("http://vllm", client=FaultyEngine(base, faults[name]).client())
    trust = await trust_in(api, "conductor")
    await api.close()
    assert trust.trainable is trainable
    assert ("top_k, a temperature or a penalty is on" in trust.reason) is not trainable
