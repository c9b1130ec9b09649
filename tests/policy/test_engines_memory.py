"""What a run takes of each device: counted here and by torch, printed and refused before any weights are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the train extra is not installed")
pytest.importorskip("transformers")

from gateway.errors import BadRequest, ConfigError  # noqa: E402
from policy.__main__ import main  # noqa: E402
from policy.serve.shape import load_shape  # noqa: E402
from policy.train.engines.cli import settings_of  # noqa: E402
from policy.train.engines.memory import GIB, adapter_parameters, check, memory, parameters  # noqa: E402
from policy.train.engines.rows import EngineSettings  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.train
QWEN_7B = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "eos_token_id": 151645,
}  # fmt: skip
ROWS, PROMPT, PLAN = 4, 200, 56


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seven")
    (directory / "config.json").write_text(json.dumps(QWEN_7B))
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", heads=8, heads_kv=2, layers=6)


def loaded(directory: Path, rank: int) -> Any:
    """The model in float32, with an adapter of that rank."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if rank:
        peft = pytest.importorskip("peft")
        adapter = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapter)
        model.enable_input_require_grads()
    return model.train()


def saved_bytes(model: Any, rank: int) -> int:
    """What autograd keeps of the layers for one backward pass, each storage once."""
    resting = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resting:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    body = model.base_model.model.model if rank else model.model
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        body(input_ids=torch.randint(5, 300, (ROWS, PROMPT + PLAN)))
    return sum(kept.values())


@pytest.mark.parametrize("rank", [0, 8])
def test_activations_and_parameters_are_those_that_torch_counts(tiny: Path, rank: int) -> None:
    model = loaded(tiny, rank)
    found = memory(tiny, EngineSettings(rows_per_device=ROWS), PROMPT, PLAN, rank=rank)
    assert saved_bytes(model, rank) <= found.activations <= 1.1 * saved_bytes(model, rank)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    shape = load_shape(tiny)
    assert trained == (adapter_parameters(shape, rank) if rank else parameters(shape))
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)
    assert found.weights == 4 * sum(one.numel() for one in model.parameters())


def test_checkpointing_keeps_a_layers_input_and_the_insides_of_one(tiny: Path) -> None:
    model = loaded(tiny, 0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = EngineSettings(rows_per_device=ROWS)
    whole = memory(tiny, settings, PROMPT, PLAN).activations
    less = memory(tiny, replace(settings, gradient_checkpointing=True), PROMPT, PLAN).activations
    one_layer = whole // 6
    assert saved_bytes(model, 0) <= less <= saved_bytes(model, 0) + one_layer


def test_the_papers_run_of_7b_by_profile(seven: Path) -> None:
    assert parameters(load_shape(seven)) == 7_615_616_512  # as Qwen publishes it
    adapter, full = settings_of(None, [], "paper-lora"), settings_of(None, [], "paper-full")
    for settings in (adapter, full):
        assert (settings.steps, settings.rows_per_step) == (200, 4 * 64)
    one = memory(seven, adapter, 2048, 512, rank=adapter.lora_rank)
    four, alone = (memory(seven, full, 2048, 512, shards=shards) for shards in (4, 1))
    check(one, 80 * GIB, "a card")
    check(four, 80 * GIB, "a card")
    assert [round(found.total / GIB) for found in (one, four, alone)] == [30, 47, 143]
    with pytest.raises(ConfigError, match=r"142\.90 GiB .*has 80\.00 GiB.*largest part is optimizer: split it over"):
        check(alone, 80 * GIB, "a card")
    wide = memory(seven, replace(adapter, rows_per_device=64, gradient_checkpointing=False), 2048, 512, rank=16)
    with pytest.raises(ConfigError, match="largest part is activations: --set gradient_checkpointing=true"):
        check(wide, 80 * GIB, "a card")


def test_the_command_prints_it_and_refuses(seven: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["engines", "memory", "--init", str(seven)]
    assert main([*given, "--profile", "paper-lora"]) == 0
    assert capsys.readouterr().out.startswith("memory of a device: 29.75 GiB (weights 14.34, gradients 0.15,")
    assert main([*given, "--profile", "paper-full", "--devices", "4"]) == 0
    assert "in shards over 4 devices" in capsys.readouterr().out
    assert main([*given, "--profile", "paper-full", "--devices", "2", "--device-gib", "40"]) == 2
    assert "the device has 40.00 GiB" in capsys.readouterr().err


def test_a_run_says_what_it_takes_and_is_refused_before_weights_are_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = pytest.importorskip("policy.train.engines.trl_trainer", reason="the trl extra is not installed")
    from tests.policy.engine_toys import load, logged

    rows = logged(load(tiny), 16, masked=False)
    settings = EngineSettings(steps=1, rows_per_step=16, rows_per_device=16, baseline="batch")
    said: list[str] = []
    trainer.train_with_trl(rows, tiny, tmp_path / "out", settings, work=tmp_path / "work", say=said.append)
    assert said[0].startswith("memory of a device: 0.0")
    monkeypatch.setattr(trainer, "host_bytes", lambda: 1 << 20)
    monkeypatch.setattr(trainer, "_model", lambda *_: pytest.fail("it read the weights"))
    with pytest.raises(ConfigError, match=r"this machine's share for one process has 0\.00 GiB"):
        trainer.train_with_trl(rows, tiny, tmp_path / "two", settings, work=tmp_path / "work")


def test_a_profile_is_changed_by_settings(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("steps: 7\n")
    settings = settings_of(tmp_path / "s.yaml", ["lora_rank=4"], "paper-lora")
    assert (settings.steps, settings.lora_rank, settings.gradient_checkpointing) == (7, 4, True)
    (tmp_path / "s.yaml").write_text("- steps\n")
    with pytest.raises(BadRequest, match="--settings"):
        settings_of(tmp_path / "s.yaml", [])
