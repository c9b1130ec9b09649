"""The same learning on TRL: from logs alone, the ratio against what was logged, resumed to the same bytes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the train extra is not installed")
pytest.importorskip("trl", reason="the trl extra is not installed")

from gateway.core.loop.plan import PlanLimits, plan_schema  # noqa: E402
from gateway.errors import BadRequest, Unavailable  # noqa: E402
from policy.__main__ import main  # noqa: E402
from policy.reward import taught_dial  # noqa: E402
from policy.serve.manifest import read_complete  # noqa: E402
from policy.serve.shape import load_shape  # noqa: E402
from policy.serve.tokens import Tokens  # noqa: E402
from policy.train.engines.rows import EngineRow, EngineSettings, of_training, prepare  # noqa: E402
from policy.train.engines.trl_trainer import (  # noqa: E402
    Stopping,
    last_checkpoint,
    make_trainer,
    quiet,
    train_with_trl,
)
from policy.train.sources.conductor import Decoded, Sampler  # noqa: E402
from policy.train.step.grpo import LossSettings, grpo_loss  # noqa: E402
from policy.train.step.masks import Masks  # noqa: E402
from policy.train.step.rows import (  # noqa: E402
    MissingLogprobs,
    TrainingRow,
)
from policy.train.weights.small import SmallWeights  # noqa: E402
from tests.policy.engine_toys import load, logged, right_share, write_export  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402

pytestmark = [pytest.mark.train, pytest.mark.trl]
CONFIGS = Path(__file__).parents[2] / "deploy" / "accelerate"
SETTINGS = EngineSettings(
    steps=12,
    rows_per_step=32,
    rows_per_device=16,
    learning_rate=3e-3,
    warmup_share=0.0,
    schedule="constant",
    baseline="batch",
    checkpoint_steps=4,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("trl") / "model", heads=2, heads_kv=1, layers=1)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return load(model_dir)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_the_better_plan_is_learnt_from_logs_alone(
    tmp_path: Path, model_dir: Path, model: Any, masked: bool, baseline: Any
) -> None:
    rows = logged(model, 128, masked=masked)
    settings = replace(SETTINGS, baseline=baseline)
    trained = train_with_trl(rows, model_dir, tmp_path / "out", settings, work=tmp_path / "work")
    assert trained is not None
    before, after = right_share(model, rows), right_share(load(tmp_path / "out"), rows)
    assert before < 0.6
    assert after > before + 0.2
    assert trained.steps == 12
    lines = (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][:12] == list(range(1, 13))


@pytest.mark.parametrize("masked", [False, True])
def test_the_ratio_is_one_on_fresh_logs(tmp_path: Path, model_dir: Path, model: Any, masked: bool) -> None:
    rows = logged(model, 64, masked=masked)
    trained = train_with_trl(rows, model_dir, tmp_path / "out", replace(SETTINGS, steps=2), work=tmp_path / "work")
    assert trained is not None
    first, second = trained.log
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert first["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert first["m2"] < 1e-9
    assert second["m2"] > 1e-4


def test_the_ratio_is_one_on_plans_that_our_sampler_drew(tmp_path: Path, model_dir: Path) -> None:
    """Under the grammar of real plans, task text included."""
    shape = load_shape(model_dir)
    tokens = Tokens(model_dir, shape)
    masks, schema = Masks(tokens), plan_schema(PlanLimits(("atlas", "quill"), 2))
    prompts = [tuple(tokens.encode_chat([{"role": "user", "content": f"What is {n}?"}])) for n in range(4)]
    drawn = [Decoded(prompts[n % 4], masks.root(schema), 1.0, 40, Random(n)) for n in range(32)]
    Sampler(SmallWeights.load(model_dir, shape), tokens, masks, 4096).decode(drawn)
    rows = [
        TrainingRow(
            *(one.prompt_ids, tuple(one.ids), tuple(one.logprobs), (True,) * len(one.ids), schema, 1.0),
            reward=float(index % 3 == 0),
            episode=f"q{index % 4}/{index}",
            question=f"q{index % 4}",
        )
        for index, one in enumerate(drawn)
    ]
    assert len({len(row.plan_ids) for row in rows}) > 1
    given = of_training(rows, tokens, SETTINGS)
    trained = train_with_trl(given, model_dir, tmp_path / "out", replace(SETTINGS, steps=1), work=tmp_path / "work")
    assert trained is not None
    assert trained.log[0]["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert trained.log[0]["weight_mean"] == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(BadRequest, match=r"sampled at temperature 1, scored at 0\.5"):
        of_training(rows, tokens, replace(SETTINGS, temperature=0.5))


def test_masked_logs_scored_without_their_masks_are_no_fresh_logs(tmp_path: Path, model_dir: Path, model: Any) -> None:
    rows = [replace(one, allowed=None) for one in logged(model, 64, masked=True)]
    trained = train_with_trl(rows, model_dir, tmp_path / "out", replace(SETTINGS, steps=1), work=tmp_path / "work")
    assert trained is not None
    assert trained.log[0]["ratio_mean"] < 0.5


def test_rows_without_logprobs_are_refused_by_name(tmp_path: Path, model_dir: Path, model: Any) -> None:
    rows = logged(model, 32, masked=False)
    rows[7] = replace(rows[7], logprobs=None)
    with pytest.raises(MissingLogprobs, match="rollout-7/0"):
        train_with_trl(rows, model_dir, tmp_path / "out", SETTINGS, work=tmp_path / "work")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("masked", [False, True])
def test_its_loss_is_ours(tmp_path: Path, model_dir: Path, model: Any, masked: bool) -> None:
    """Stale rows of unequal length, so that ratios, both clips, the dual clip and the token mean all show."""
    rows = _stale(logged(model, 32, masked=masked))
    loss = LossSettings(clip_low=0.2, clip_high=0.28, ratio_max=3.0)
    settings = replace(SETTINGS, steps=1, rows_per_device=32, learning_rate=0.0, loss=loss)
    trained = train_with_trl(rows, model_dir, tmp_path / "out", settings, work=tmp_path / "work")
    assert trained is not None
    prepared = prepare(rows, settings)
    ours = grpo_loss(
        *_scored(model, prepared, masked),
        torch.tensor([one.advantage for one in prepared]),
        torch.tensor([one.trains for one in prepared]),
        loss,
    )
    assert 0.2 < ours.metrics["clip_share"] < 0.9
    assert ours.metrics["ratio_max"] > 3.0
    assert trained.log[0]["loss"] == pytest.approx(ours.metrics["loss"], abs=2e-5)
    for name in ("ratio_mean", "ratio_max", "m2", "kl_behaviour", "weight_mean", "ess_share"):
        assert trained.log[0][name] == pytest.approx(ours.metrics[name], rel=1e-4)


def _stale(rows: list[EngineRow]) -> list[EngineRow]:
    shifts = (-1.5, -0.1, 0.0, 0.4)
    return [
        replace(row, logprobs=[min(-1e-4, x + shifts[index % 4]) for x in row.logprobs or ()])
        for index, row in enumerate(rows)
    ]


def _scored(model: Any, prepared: Sequence[Any], masked: bool) -> tuple[Any, Any]:
    """Log-probs of the plans under these weights, and as logged."""
    found = []
    for one in prepared:
        ids, start = [*one.row.prompt_ids, *one.row.plan_ids], len(one.row.prompt_ids)
        logits = model(torch.tensor([ids])).logits[0, start - 1 : -1].detach()
        if masked:
            bits = torch.stack([torch.from_numpy(mask) for mask in one.row.allowed])
            allowed = torch.tensor([[(int(row[t >> 3]) >> (t & 7)) & 1 for t in range(384)] for row in bits]).bool()
            logits = logits.masked_fill(~allowed, -torch.inf)
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(one.row.plan_ids)[:, None])[:, 0])
    return torch.stack(found), torch.tensor([one.row.logprobs for one in prepared])


def test_gradients_add_up_over_accumulated_parts(tmp_path: Path, model_dir: Path, model: Any) -> None:
    rows = _stale(logged(model, 32, masked=False))
    losses = []
    for rows_per_device in (32, 8):
        settings = replace(SETTINGS, steps=1, rows_per_device=rows_per_device)
        trainer = make_trainer(prepare(rows, settings), model_dir, tmp_path / str(rows_per_device), settings)
        with quiet():
            trainer.train()
        losses.append([x["grad_norm"] for x in trainer.state.log_history if "grad_norm" in x])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_adapter_is_trained_where_a_rank_is_given(tmp_path: Path, model_dir: Path, model: Any) -> None:
    from peft import PeftModel

    rows = logged(model, 64, masked=False)
    settings = replace(SETTINGS, lora_rank=2, learning_rate=2e-2)
    train_with_trl(rows, model_dir, tmp_path / "out", settings, work=tmp_path / "work")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    adapted = PeftModel.from_pretrained(load(model_dir), tmp_path / "out")
    assert right_share(adapted, rows) > right_share(model, rows) + 0.1


def test_asked_to_stop_it_leaves_a_checkpoint_and_goes_on_to_the_same_weights(
    tmp_path: Path, model_dir: Path, model: Any
) -> None:
    rows = logged(model, 64, masked=True)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_with_trl(rows, model_dir, whole, SETTINGS, work=tmp_path / "w1")
    stopping = Stopping()
    stopping.asked = True
    given: dict[str, Any] = {"work": tmp_path / "w2", "resume": True}
    assert train_with_trl(rows, model_dir, parts, SETTINGS, callbacks=[stopping], **given) is None
    assert not parts.exists()
    (tmp_path / "w2" / "checkpoint-9").mkdir()  # cut short while it was written
    trained = train_with_trl(rows, model_dir, parts, SETTINGS, **given)
    assert trained is not None
    assert [x["step"] for x in trained.log] == list(range(1, 13))
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), RuntimeError("[enforce fail] PytorchStreamWriter failed writing file")],
    ids=["disk", "torch"],
)
def test_a_disk_that_is_full_in_the_middle_of_a_checkpoint_keeps_the_last_one(
    tmp_path: Path, model_dir: Path, model: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second checkpoint has its weights and no optimizer; with room again the run ends as if nothing had been."""
    rows = logged(model, 64, masked=True)
    real = torch.save

    def full(content: Any, place: Any, *given: Any, **named: Any) -> None:
        if "checkpoint-8" in str(place):
            Path(place).write_bytes(b"torn")
            raise error
        real(content, place, *given, **named)

    given: dict[str, Any] = {"work": tmp_path / "work", "resume": True}
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(Unavailable, match="free some space and run again with --resume"):
            train_with_trl(rows, model_dir, tmp_path / "out", SETTINGS, **given)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "work" / "checkpoint-8").is_dir()
    assert str(last_checkpoint(tmp_path / "work")).endswith("checkpoint-4")
    train_with_trl(rows, model_dir, tmp_path / "out", SETTINGS, **given)
    train_with_trl(rows, model_dir, tmp_path / "whole", SETTINGS, work=tmp_path / "other")
    one, other = (tmp_path / name / "model.safetensors" for name in ("out", "whole"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.timeout(400)  # whole processes, each of which imports TRL
def test_the_command_survives_a_kill_and_seals_a_policy_directory(tmp_path: Path, model_dir: Path, model: Any) -> None:
    data = write_export(logged(model, 80, masked=False), tmp_path / "rows.parquet")
    slow = tmp_path / "slow"
    first = subprocess.Popen(_command(data, model_dir, slow, steps=120), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not list((tmp_path / "slow.work").glob("checkpoint-*/trainer_state.json")):
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert not slow.exists()
    told = subprocess.run(
        [*_command(data, model_dir, slow, steps=120), "--resume"], check=True, capture_output=True, text=True
    )
    assert json.loads(told.stdout) == {
        "out": str(slow), "steps": 120, "rows": 64, "rows_read": 64, "processes": 1,
    }  # fmt: skip
    assert "step 120 of 120: reward" in told.stderr
    assert "step 1 of" not in told.stderr
    manifest = read_complete(slow).manifest
    assert (manifest.name, manifest.version, manifest.parent, manifest.rollouts) == ("toy", "1", "tiny@0", 64)
    assert manifest.config["engine"] == "trl"
    ids = [*manifest.probe["prompt_ids"], *manifest.probe["token_ids"]]
    spread = load(slow)(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    start = len(manifest.probe["prompt_ids"]) - 1
    found = [float(spread[start + at, token]) for at, token in enumerate(manifest.probe["token_ids"])]
    assert found == pytest.approx(manifest.probe["logprobs"], abs=1e-5)


def _command(data: Path, init: Path, out: Path, steps: int) -> list[str]:
    given = {"data": data, "init": init, "out": out, "version": "toy@1"}
    settings = {"steps": steps, "rows_per_step": 32, "rows_per_device": 32, "learning_rate": 1e-3, "baseline": "batch"}
    return [
        *(sys.executable, "-m", "policy", "engines", "trl"),
        *(word for name, value in given.items() for word in (f"--{name}", str(value))),
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
    ]


def test_train_reaches_it_and_what_comes_out_is_the_next_version(tmp_path: Path, model_dir: Path, model: Any) -> None:
    """`train --engine trl`: the same engine; and the dial that the parent was taught with goes on being known."""
    init = shutil.copytree(model_dir, tmp_path / "init")
    known = json.loads((init / "manifest.json").read_text())
    dial = [float(9 - place) for place in range(10)]
    known["config"] = {"settings": {"dial": dial}}
    (init / "manifest.json").write_text(json.dumps(known))
    data = write_export(logged(model, 32, masked=False), tmp_path / "rows.parquet")
    out = tmp_path / "out"
    given = ["train", "--engine", "trl", "--env", "logged", "--export", str(data), "--init", str(init)]
    settings = {"steps": 1, "rows_per_step": 32, "rows_per_device": 32, "learning_rate": 1e-3, "baseline": "batch"}
    told = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    assert main([*given, *told, "--out", str(out)]) == 0
    manifest = read_complete(out).manifest
    assert (manifest.name, manifest.version, manifest.parent) == ("tiny", "1", "tiny@0")
    assert manifest.config["engine"] == "trl"
    assert taught_dial(manifest.config) == tuple(dial)


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [("cpu", "MULTI_GPU", 2), ("gpus", "MULTI_GPU", 8), ("fsdp", "FSDP", 8), ("deepspeed", "DEEPSPEED", 8)],
)
def test_accelerate_reads_the_files_we_ship(name: str, kind: str, processes: int) -> None:
    """It refuses keys that it does not know."""
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert (config.distributed_type.name, config.num_processes) == (kind, processes)
    if kind == "FSDP":
        assert (config.fsdp_config["fsdp_version"], config.fsdp_config["fsdp_state_dict_type"]) == (
            2,
            "FULL_STATE_DICT",
        )
    if kind == "DEEPSPEED":
        assert (config.deepspeed_config["zero_stage"], config.deepspeed_config["zero3_save_16bit_model"]) == (3, True)
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"cpu", "gpus", "fsdp", "deepspeed"}
