"""Training from a base and on from an adapter: every round's adapter is of the base, and plans as it was trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gateway.errors import ConfigError
from policy.engines.directory import read_conductors
from policy.serve.engine import Slots
from policy.serve.lora import read_config, read_pairs
from policy.serve.manifest import read_complete
from policy.serve.versions import Versions
from policy.start.pretrained.seal import seal
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from policy.train.run.initial import initial_weights  # noqa: E402
from policy.train.run.session import train  # noqa: E402
from policy.train.settings import Settings  # noqa: E402
from policy.train.spec import TrainSpec  # noqa: E402

LORA = Settings(
    steps=1, prompts=3, samples=8, observed=0, candidates=8, rounds=1, plan_tokens=100, lr=1e-3, warmup_share=0.0
).model_copy(update={"lora_rank": 4, "lora_alpha": 8.0})


def quiet(_: str) -> None:
    """Progress of tests is not shown."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = write_tiny_llama(tmp_path / "tiny-llama")
    seal(directory)
    return directory


def trained(init: Path, out: Path, **changes: object) -> Path:
    spec = TrainSpec(env="arena", init=init, settings=LORA.model_copy(update=changes))
    train(spec, out, out.with_suffix(".work"), False, quiet)
    return out


def test_three_rounds_go_on_from_the_adapter_before(base: Path, tmp_path: Path) -> None:
    rounds = [trained(base, tmp_path / "one")]
    rounds.append(trained(rounds[0], tmp_path / "two", lora_rank=0))
    rounds.append(trained(rounds[1], tmp_path / "three", lora_rank=4))
    weights = read_complete(base).manifest.weights_sha256
    parents = [("tiny-llama@0", "tiny-llama@1"), ("tiny-llama@1", "tiny-llama@2"), ("tiny-llama@2", "tiny-llama@3")]
    for directory, (parent, name) in zip(rounds, parents, strict=True):
        manifest = read_complete(directory).manifest
        assert (manifest.kind, manifest.id, manifest.parent) == ("adapter", name, parent)
        assert (manifest.base, manifest.base_sha256) == ("tiny-llama@0", weights)
        assert read_config(directory) == (4, 2.0)
    moved = [
        max(float(np.abs(after[module]["B"] - before[module]["B"]).max()) for module in before)
        for before, after in zip(*(map(read_pairs, part) for part in (rounds, rounds[1:])), strict=False)
    ]
    assert max(moved) > 0  # a round whose plans all earn the same leaves the adapter as it was
    assert any(np.any(pair["B"]) for pair in read_pairs(rounds[0]).values())


def test_an_adapter_of_a_base_is_served_as_it_was_trained(base: Path, tmp_path: Path) -> None:
    """The probe of the manifest is the trainer's; the server gives the same log-probs."""
    adapter = trained(base, tmp_path / "elsewhere" / "one")
    slots = Slots(1)
    versions = Versions(slots)
    try:
        served = versions.open("conductor@1", adapter)
        assert served.drift < 1e-3
        assert served.about["kind"] == "adapter"
    finally:
        slots.close()
    assert read_conductors([adapter])[adapter].base is not None


def test_training_goes_on_exactly_where_the_adapter_was(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "one")
    spec = TrainSpec(env="arena", init=adapter, settings=LORA.model_copy(update={"lora_rank": 0}))
    initial = initial_weights(spec)
    probe = initial.manifest.probe
    ids = (tuple(probe["prompt_ids"]), tuple(probe["token_ids"]))
    with torch.no_grad():
        logits = initial.weights.logits(initial.weights.states([ids[0]], [0], [ids[1]]))
        found = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1])[:, None])[:, 0]
    assert found.tolist() == pytest.approx(probe["logprobs"], abs=1e-4)


def test_another_rank_than_the_adapters_is_refused(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "one")
    spec = TrainSpec(env="arena", init=adapter, settings=LORA.model_copy(update={"lora_rank": 8}))
    with pytest.raises(ConfigError, match="goes on at its rank, 4"):
        initial_weights(spec)


def test_an_adapter_whose_base_is_gone_is_one_line(base: Path, tmp_path: Path) -> None:
    adapter = trained(base, tmp_path / "one")
    shutil.rmtree(base)
    with pytest.raises(Exception, match="which is neither loaded nor in"):
        initial_weights(TrainSpec(env="arena", init=adapter, settings=LORA))


def test_an_adapter_can_be_merged_into_full_weights(base: Path, tmp_path: Path) -> None:
    merged = trained(base, tmp_path / "full", lora_merge=True)
    manifest = read_complete(merged).manifest
    assert (manifest.kind, manifest.parent) == ("sealed", "tiny-llama@0")
    slots = Slots(1)
    try:
        assert Versions(slots).open("conductor@1", merged).drift < 1e-3
    finally:
        slots.close()
