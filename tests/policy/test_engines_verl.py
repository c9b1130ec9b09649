"""A run of verl: the files it is started from, verl's own code on them, and one real step on Ray, without a GPU.

The second half needs verl (scripts/test-verl) and asks verl itself: does its schema take the configuration, does its
dataset read the rows, does our agent loop give what was logged, are its advantages and its loss ours. Last it trains.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch", reason="the train extra is not installed")

import pyarrow.parquet as pq  # noqa: E402

from gateway.errors import BadRequest, ConfigError  # noqa: E402
from policy.__main__ import main  # noqa: E402
from policy.train.engines.rows import EngineRow, EngineSettings, prepare  # noqa: E402
from policy.train.engines.verl_run import AGENT, write_run  # noqa: E402
from policy.train.step.grpo import LossSettings, grpo_loss  # noqa: E402
from policy.train.step.rows import MissingLogprobs  # noqa: E402
from tests.policy.engine_toys import logged, write_export  # noqa: E402
from tests.tiny_model import write_tiny_model  # noqa: E402

verl = pytest.mark.verl
SETTINGS = EngineSettings(
    steps=6, rows_per_step=8, rows_per_device=4, decisions_only=True, loss=LossSettings(clip_high=0.3, ratio_max=4.0)
)


def load_model(directory: Path) -> Any:
    """The weights by transformers alone: here is no TRL."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def rows(count: int = 12) -> list[EngineRow]:
    """Groups of four of which one plan is right; prompts of 3 or 4 tokens, plans of 2 or 3, the last one forced."""
    return [
        EngineRow(
            name=f"rollout-{index}/0",
            group=f"question-{index // 4}",
            prompt_ids=[11, 12, 13, 14][: 3 + index % 2],
            plan_ids=[70 + index % 4, 80, 2][-2 - index % 2 :],
            logprobs=[-0.2 * (1 + index % 5), -0.3, 0.0][-2 - index % 2 :],
            reward=float(index % 4 == 0),
            decisions=[True, index % 3 > 0, True][-2 - index % 2 :],
        )
        for index in range(count)
    ]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    model = write_tiny_model(tmp_path / "model", heads=2, heads_kv=1, layers=1)
    write_run(rows(), str(model), tmp_path / "run", SETTINGS, nodes=1, gpus=2)
    return tmp_path / "run"


@pytest.mark.train
def test_the_configuration_is_bypass_mode_over_logged_rows(run_dir: Path) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["algorithm"]["rollout_correction"] == {
        "bypass_mode": True,
        "loss_type": "ppo_clip",
        "rollout_is": None,
    }
    assert config["algorithm"]["norm_adv_by_std_in_grpo"] is False
    assert config["actor_rollout_ref"]["rollout"]["agent"] == {"default_agent_loop": AGENT}
    assert config["actor_rollout_ref"]["actor"]["clip_ratio_c"] == 4.0
    assert (config["data"]["max_prompt_length"], config["data"]["max_response_length"]) == (4, 3)
    assert config["trainer"]["total_training_steps"] == 6
    assert (run_dir / "run.sh").stat().st_mode & 0o111


@pytest.mark.train
def test_the_rows_hold_what_was_logged_and_the_advantage(run_dir: Path) -> None:
    found = [one["extra_info"]["logged"] for one in pq.read_table(run_dir / "rows.parquet").to_pylist()]
    wanted = {one.row.name: one for one in prepare(rows(), SETTINGS)}
    assert len(found) == len(wanted) == 10  # two have no token that decides
    for one, told in zip(wanted.values(), found, strict=True):
        assert told["response_ids"] == list(one.row.plan_ids)
        assert told["logprobs"] == pytest.approx(list(one.row.logprobs or ()))
        assert told["response_mask"] == [int(x) for x in one.trains]
        assert told["advantage"] == pytest.approx(one.row.reward - 0.25)


@pytest.mark.train
def test_the_command_writes_a_run_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_export(rows(20), tmp_path / "rows.parquet"), tmp_path / "run"
    given = ["engines", "verl", "--data", str(data), "--model", "/models/seven", "--out", str(out), "--gpus", "2"]
    assert main([*given, "--set", "rows_per_step=512"]) == 2
    assert "fewer than one step's 512" in capsys.readouterr().err
    assert not out.exists()
    assert main([*given, "--set", "rows_per_step=8", "--set", "rows_per_device=4"]) == 0
    assert "steps a pass; start it with" in capsys.readouterr().out
    assert yaml.safe_load((out / "config.yaml").read_text())["actor_rollout_ref"]["model"]["path"] == "/models/seven"
    assert main([*given, "--set", "rows_per_step=8", "--set", "rows_per_device=4"]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.train
def test_rows_that_verl_cannot_use_are_refused_by_name(tmp_path: Path) -> None:
    def write(changed: list[EngineRow], settings: EngineSettings, gpus: int = 2) -> None:
        write_run(changed, "m", tmp_path / "run", settings, nodes=1, gpus=gpus)

    with pytest.raises(MissingLogprobs, match="rollout-3/0"):
        write([replace(one, logprobs=None) if one.name == "rollout-3/0" else one for one in rows()], SETTINGS)
    with pytest.raises(ConfigError, match="times 3 devices"):
        write(rows(), SETTINGS, gpus=3)
    with pytest.raises(BadRequest, match="'linear' is not in verl"):
        write(rows(), replace(SETTINGS, schedule="linear"))
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- with verl itself


def composed(run_dir: Path, name: str = "config") -> Any:
    """The configuration over verl's own defaults, as `run.sh` composes it; or, by name, another file there."""
    from hydra import compose, initialize_config_dir

    files = {
        "data.train_files": run_dir / "rows.parquet",
        "data.val_files": run_dir / "rows.parquet",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": run_dir / "agent_loop.yaml",
    }
    with initialize_config_dir(str(run_dir), version_base=None):
        return compose(
            name,
            overrides=[
                "hydra.searchpath=[pkg://verl.trainer.config]",
                *(f"{setting}={path}" for setting, path in files.items()),
            ],
        )


def unknown(given: Mapping[str, Any], known: Mapping[str, Any], at: str = "") -> list[str]:
    """Names in `given` that `known` has not. hydra itself lets a file add what it likes."""
    found = []
    for name, value in given.items():
        if name not in known:
            found.append(f"{at}{name}")
        elif isinstance(value, Mapping) and isinstance(known[name], Mapping):
            found += unknown(value, known[name], f"{at}{name}.")
    return found


@verl
def test_verl_knows_every_name_and_finds_the_run_valid(run_dir: Path) -> None:
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    ours = yaml.safe_load((run_dir / "config.yaml").read_text())
    ours.pop("defaults")
    (run_dir / "theirs.yaml").write_text("defaults: [ppo_trainer]\n")
    theirs: Any = OmegaConf.to_container(composed(run_dir, "theirs"))
    assert unknown(ours, theirs) == []
    assert unknown({"data": {"shufle": 1}}, theirs) == ["data.shufle"]
    config = composed(run_dir)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert config.actor_rollout_ref.rollout.prompt_length == 4


@verl
def test_the_script_starts_verl_on_this_configuration(run_dir: Path) -> None:
    """`--cfg job` prints what it would run."""
    told = subprocess.run(
        ["bash", str(run_dir / "run.sh"), "--cfg", "job", "--resolve"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    job = yaml.safe_load(told.stdout)
    assert job["algorithm"]["rollout_correction"]["bypass_mode"] is True
    assert job["actor_rollout_ref"]["actor"]["strategy"] == "fsdp2"
    assert job["data"]["train_files"] == str(run_dir / "rows.parquet")


def trajectories(run_dir: Path) -> list[Any]:
    """Every row, read by verl's dataset and handed out by the loop that `agent_loop.yaml` names."""
    import hydra
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    config, model = composed(run_dir), run_dir.parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = RLHFDataset([str(run_dir / "rows.parquet")], tokenizer, config.data)
    batch = collate_fn([dataset[index] for index in range(len(dataset))])
    (loop,) = yaml.safe_load((run_dir / "agent_loop.yaml").read_text())
    made = hydra.utils.instantiate(
        {"_target_": loop["_target_"]},
        trainer_config=DictConfigWrap(config),
        server_manager=SimpleNamespace(),  # asked for anything, it fails
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
    )

    async def every() -> list[Any]:
        kwargs = [{name: values[index] for name, values in batch.items()} for index in range(len(dataset))]
        return [await made.run({}, global_steps=3, **one) for one in kwargs]

    return asyncio.run(every())


@verl
def test_the_agent_loop_hands_out_what_was_logged(run_dir: Path) -> None:
    prepared = prepare(rows(), SETTINGS)
    for one, told in zip(prepared, trajectories(run_dir), strict=True):
        tensors = told.as_dict()
        assert tensors["prompts"].tolist() == list(one.row.prompt_ids)
        assert tensors["responses"].tolist() == list(one.row.plan_ids)
        assert tensors["response_mask"].tolist() == [int(x) for x in one.trains]
        assert tensors["rollout_log_probs"].tolist() == pytest.approx(list(one.row.logprobs or ()))
        assert float(tensors["rm_scores"].sum()) == pytest.approx(one.advantage)
        assert (told.extra_fields["min_global_steps"], told.extra_fields["max_global_steps"]) == (3, 3)


@verl
def test_a_row_longer_than_the_configuration_has_room_for_is_refused(run_dir: Path) -> None:
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["data"]["max_response_length"] = 1
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="row rollout-1/0 is longer"):
        trajectories(run_dir)


@verl
def test_advantages_and_loss_are_ours(run_dir: Path) -> None:
    """Through verl's own GRPO estimator (every row a group of its own) and its PPO loss, bypass mode's."""
    import numpy as np
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    told, prepared = [one.as_dict() for one in trajectories(run_dir)], prepare(rows(), SETTINGS)
    mask, scores, old = (
        _padded([one[name] for one in told]) for name in ("response_mask", "rm_scores", "rollout_log_probs")
    )
    uids = np.array([str(index) for index in range(len(told))], dtype=object)
    advantages, _ = compute_grpo_outcome_advantage(scores, mask, uids, norm_adv_by_std_in_grpo=False)
    ours = torch.tensor([one.advantage for one in prepared])
    assert torch.allclose(advantages, ours[:, None] * mask, atol=1e-6)
    new = old + torch.linspace(-0.9, 1.9, old.numel()).view_as(old)
    actor = omega_conf_to_dataclass(composed(run_dir).actor_rollout_ref.actor)
    loss_fn = get_policy_loss_fn(actor.policy_loss.loss_mode)
    theirs, metrics = loss_fn(old, new, advantages, mask, loss_agg_mode=actor.loss_agg_mode, config=actor)
    wanted = grpo_loss(new, old, ours, mask.bool(), SETTINGS.loss)
    assert float(theirs) == pytest.approx(wanted.metrics["loss"], abs=1e-6)
    assert metrics["actor/pg_clipfrac"] > 0.1
    assert metrics["actor/pg_clipfrac_lower"] > 0


@verl
@pytest.mark.timeout(1200)  # a Ray cluster of a dozen processes, each of which imports verl
def test_one_step_on_ray_in_two_workers(tmp_path: Path) -> None:
    """verl's trainer and transfer queue, FSDP2 over gloo, a checkpoint: all but the devices (verl_cpu.py)."""
    model = write_tiny_model(tmp_path / "model", heads=2, heads_kv=1, layers=1)
    logs = [replace(row, group="one") for row in logged(load_model(model), 32, masked=False)]
    settings = EngineSettings(
        steps=1, rows_per_step=32, rows_per_device=16, learning_rate=1e-2, warmup_share=0.0, schedule="constant",
        checkpoint_steps=1,
    )  # fmt: skip
    write_run(logs, str(model), tmp_path / "run", settings, nodes=1, gpus=2)
    here = {
        "trainer.device": "cpu",
        "+ray_kwargs.ray_init.num_cpus": 64,  # places, of which verl's helpers take one each
        "+ray_kwargs.ray_init.num_gpus": 2,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,  # that takes flash attention
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "reward.num_workers": 1,
        "data.dataloader_num_workers": 0,
    }
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VERL_USE_EXTERNAL_MODULES": "tests.policy.verl_cpu",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # whose FSDP engine is taken
        "OMP_NUM_THREADS": "1",
        "RAY_raylet_start_wait_time_s": "300",
    }
    command = ["bash", str(tmp_path / "run" / "run.sh"), *(f"{name}={value}" for name, value in here.items())]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (line,) = re.findall(r"step:1 - .*", done.stdout)
    told = {name: float(value) for name, value in re.findall(r"([\w/]+):(?:np\.\w+\()?(-?[\d.e-]+)", line)}
    prepared = prepare(logs, settings)
    tokens = sum(sum(one.trains) for one in prepared)
    fresh = -sum(one.advantage * sum(one.trains) for one in prepared) / tokens  # the ratio is 1
    assert told["actor/pg_loss"] == pytest.approx(fresh, abs=0.02)  # verl computes in bfloat16
    assert abs(told["actor/ppo_kl"]) < 0.05
    assert told["actor/grad_norm"] > 0
    saved = tmp_path / "checkpoints" / "baton" / "conductor" / "global_step_1" / "actor"
    assert {path.name for path in saved.glob("model_*.pt")} == {f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)}


def _padded(tensors: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence([one.float() for one in tensors], batch_first=True)
