"""TRL begins with each kind of policy and goes on from its own adapters; what TRL itself is given is checked first."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the train extra is not installed")
pytest.importorskip("trl", reason="the trl extra is not installed")

from peft import PeftModel  # noqa: E402

from gateway.errors import BadRequest, ConfigError  # noqa: E402
from policy.__main__ import main  # noqa: E402
from policy.serve.engine import Slots  # noqa: E402
from policy.serve.lora import read_config, read_pairs  # noqa: E402
from policy.serve.manifest import read_complete  # noqa: E402
from policy.serve.versions import Versions  # noqa: E402
from policy.start.pretrained.seal import seal  # noqa: E402
from policy.train.engines import trl_arguments  # noqa: E402
from policy.train.engines.cli import TrlRun, run_on_trl, settings_of  # noqa: E402
from policy.train.engines.rows import EngineSettings  # noqa: E402
from policy.train.engines.seal import sealer  # noqa: E402
from policy.train.engines.trl_arguments import checked, grpo_config  # noqa: E402
from policy.train.engines.trl_trainer import Stopping, train_with_trl  # noqa: E402
from policy.train.run.initial import initial_weights  # noqa: E402
from policy.train.settings import Settings  # noqa: E402
from policy.train.spec import TrainSpec  # noqa: E402
from policy.train.weights.start import open_start  # noqa: E402
from tests.policy.engine_toys import load, logged, right_share, write_export  # noqa: E402
from tests.tiny_model import write_tiny_llama, write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.train, pytest.mark.trl]
SETTINGS = EngineSettings(
    steps=2, rows_per_step=32, rows_per_device=16, learning_rate=2e-2, warmup_share=0.0, schedule="constant",
    baseline="batch", checkpoint_steps=1, lora_rank=4,
)  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A Llama as a hub gives it, without a manifest."""
    torch.set_num_threads(1)
    return write_tiny_llama(tmp_path / "tiny-llama")


@pytest.fixture
def base(hub: Path) -> Path:
    seal(hub)
    return hub


def model_of(directory: Path) -> Any:
    """The weights in a directory, an adapter's on its base."""
    start = open_start(directory)
    model = load(start.home)
    return PeftModel.from_pretrained(model, directory) if start.base else model


def trained(init: Path, out: Path, settings: EngineSettings = SETTINGS, *, version: str = "") -> Any:
    """Train on rows that `init` itself sampled. Return what TRL logged."""
    start, rows = open_start(init), logged(model_of(init), 64, masked=True)
    finish = sealer(start, version or f"toy@{len(out.name)}", settings, len(rows), "rows", "a command")
    adapter = init if start.base else None
    return train_with_trl(
        rows, start.home, out, settings, work=out.with_suffix(".work"), adapter=adapter, finish=finish
    )


def drift(directory: Path) -> float:
    """How far the serving engine is from the probe that the trainer wrote."""
    slots = Slots(1)
    try:
        return Versions(slots).open("conductor@1", directory).drift
    finally:
        slots.close()


def test_a_base_then_three_rounds_on_its_adapters(base: Path, tmp_path: Path) -> None:
    rounds = [tmp_path / "r", tmp_path / "rr", tmp_path / "rrr"]
    first = trained(base, rounds[0])
    second = trained(rounds[0], rounds[1], replace(SETTINGS, lora_rank=0))
    trained(rounds[1], rounds[2])
    for told in (first, second):  # each round's rows were sampled by the very weights that it begins with
        assert told.log[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    weights = read_complete(base).manifest.weights_sha256
    for directory, parent in zip(rounds, ("tiny-llama@0", "toy@1", "toy@2"), strict=True):
        manifest = read_complete(directory).manifest
        assert (manifest.kind, manifest.parent, manifest.source) == ("adapter", parent, "")
        assert (manifest.base, manifest.base_sha256) == ("tiny-llama@0", weights)
        assert manifest.base_source == str(base)
        assert {path.name for path in directory.iterdir()} == {*manifest.sha256, "manifest.json"}
        assert read_config(directory) == (4, 2.0)
        assert manifest.params == sum(side.size for pair in read_pairs(directory).values() for side in pair.values())
    before, after = read_pairs(rounds[1]), read_pairs(rounds[2])
    assert max(float(np.abs(after[name]["B"] - before[name]["B"]).max()) for name in before) > 0
    rows = logged(load(base), 64, masked=True)
    shares = [right_share(model_of(one), rows) for one in (base, *rounds)]
    assert shares[3] > shares[1] > shares[0]
    assert drift(rounds[1]) < 1e-3


def test_our_own_trainer_goes_on_from_an_adapter_of_trl(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path / "one")
    initial = initial_weights(TrainSpec(env="arena", init=tmp_path / "one", settings=Settings(lora_rank=0)))
    probe = initial.manifest.probe
    with torch.no_grad():
        states = initial.weights.states([tuple(probe["prompt_ids"])], [0], [tuple(probe["token_ids"])])
        scores = initial.weights.logits(states)
    found = scores.log_softmax(-1).gather(1, torch.tensor(probe["token_ids"])[:, None])[:, 0]
    assert found.tolist() == pytest.approx(probe["logprobs"], abs=1e-4)


def test_all_weights_of_a_base_become_a_sealed_policy(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path / "full", replace(SETTINGS, lora_rank=0, learning_rate=1e-3), version="toy@1")
    manifest = read_complete(tmp_path / "full").manifest
    assert (manifest.kind, manifest.parent, manifest.base, manifest.source) == ("sealed", "tiny-llama@0", "", "")
    assert manifest.params == read_complete(base).manifest.params
    assert drift(tmp_path / "full") < 1e-3


def test_a_sealed_policy_gets_an_adapter(tmp_path: Path) -> None:
    home = write_tiny_model(tmp_path / "sealed", heads=2, heads_kv=1, layers=1)
    trained(home, tmp_path / "one", version="toy@1")
    assert read_complete(tmp_path / "one").manifest.base == "tiny@0"
    assert drift(tmp_path / "one") < 1e-3


def test_a_model_without_a_manifest_is_begun_with_by_the_command(hub: Path, tmp_path: Path) -> None:
    data, out = write_export(logged(load(hub), 64, masked=False), tmp_path / "rows.parquet"), tmp_path / "out"
    given = {"steps": 1, "rows_per_step": 32, "rows_per_device": 32, "lora_rank": 4, "baseline": "batch"}
    told = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    words = [
        "train",
        "--engine",
        "trl",
        "--env",
        "logged",
        "--export",
        str(data),
        "--init",
        str(hub),
        "--out",
        str(out),
    ]
    assert main([*words, *told]) == 0
    manifest = read_complete(out).manifest
    assert (manifest.id, manifest.parent, manifest.base_source) == ("conductor@1", "tiny-llama", str(hub))


def test_stopped_and_resumed_a_second_round_ends_in_the_same_adapter(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path / "one")
    rows, stopping = logged(model_of(tmp_path / "one"), 64, masked=True), Stopping()
    stopping.asked = True
    given: dict[str, Any] = {"adapter": tmp_path / "one"}
    train_with_trl(rows, base, tmp_path / "whole", SETTINGS, work=tmp_path / "w1", **given)
    parts: dict[str, Any] = {**given, "work": tmp_path / "w2", "resume": True}
    assert train_with_trl(rows, base, tmp_path / "parts", SETTINGS, callbacks=[stopping], **parts) is None
    assert train_with_trl(rows, base, tmp_path / "parts", SETTINGS, **parts) is not None
    whole, again = (tmp_path / name / "adapter_model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == again.read_bytes()


def test_checkpointed_activations_change_no_gradient_of_an_adapter(base: Path, tmp_path: Path) -> None:
    norms = []
    for name, checkpointing in (("plain", False), ("checkpointed", True)):
        settings = replace(SETTINGS, steps=1, gradient_checkpointing=checkpointing)
        norms.append(trained(base, tmp_path / name, settings, version="toy@1").log[0]["grad_norm"])
    assert norms[0] > 0
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_another_rank_or_a_lost_base_is_one_line(base: Path, tmp_path: Path) -> None:
    trained(base, tmp_path / "one")
    with pytest.raises(ConfigError, match="goes on at its rank, 4"):
        trained(tmp_path / "one", tmp_path / "two", replace(SETTINGS, lora_rank=8))
    shutil.rmtree(base)
    with pytest.raises(Exception, match="which is neither loaded nor in"):
        open_start(tmp_path / "one")


# ---------------------------------------------------------------- what TRL itself is given


def test_vllm_is_trls_own_setting_and_its_arguments_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it goes without CUDA: the object that TRL starts vLLM from."""
    pairs = ["trl.use_vllm=true", "trl.vllm_mode=server", "trl.vllm_server_base_url=http://127.0.0.1:8126"]
    settings = settings_of(None, [*pairs, "rows_per_step=8"])
    with pytest.raises(ConfigError, match="install vllm"):
        grpo_config(tmp_path, settings)
    monkeypatch.setattr(trl_arguments, "find_spec", lambda name: object())
    built = grpo_config(tmp_path, settings)
    assert (built.use_vllm, built.vllm_mode, built.vllm_server_base_url) == (True, "server", "http://127.0.0.1:8126")
    assert built.vllm_importance_sampling_correction is False
    together = grpo_config(tmp_path, settings_of(None, ["trl.use_vllm=true", "trl.vllm_gpu_memory_utilization=0.4"]))
    assert (together.vllm_mode, together.vllm_gpu_memory_utilization) == ("colocate", 0.4)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"use_vlm": True}, "trl.use_vlm: the installed TRL has no such argument"),
        ({"learning_rate": 1e-4}, "trl.learning_rate: a setting of docs/engines.md decides it"),
        ({"use_vllm": True, "vllm_mode": "aside"}, "trl.vllm_mode=aside: it is colocate or server"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": True}, "is the correction; leave it out"),
    ],
)
def test_what_trl_does_not_take_is_named(given: dict[str, Any], line: str) -> None:
    with pytest.raises(BadRequest, match=line):
        checked(given, {"learning_rate": 1e-6})


def test_a_value_that_trl_refuses_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="TRL does not take these arguments"):
        grpo_config(tmp_path, settings_of(None, ["trl.vllm_importance_sampling_clip_min=5.0"]))
    with pytest.raises(BadRequest, match="setting trl: a mapping"):
        settings_of(None, ["trl=1"])


def test_the_command_of_a_bad_version_writes_nothing(base: Path, tmp_path: Path) -> None:
    data = write_export(logged(load(base), 32, masked=False), tmp_path / "rows.parquet")
    with pytest.raises(BadRequest, match="name it like conductor@8"):
        run_on_trl(TrlRun(data, base, tmp_path / "out", "conductor"))
    assert not (tmp_path / "out").exists()
