"""A run of verl on Ray over logged rows, as files: `config.yaml`, `rows.parquet`, `agent_loop.yaml`, `run.sh`.

verl has no batch mode for recorded trajectories, so its sampler is replaced at the place it offers for that: an agent
loop of ours (`policy.train.engines.verl_loop`) hands out the row's own tokens and log-probs where a rollout would be
sampled.
1. One row a prompt and `rollout.n: 1`: verl's GRPO leaves the score of a group of one as it is
   (`compute_grpo_outcome_advantage`), so the score that the loop reports is the advantage, computed by
   `policy.train.engines.rows` as for the other engines.
2. `rollout_correction.bypass_mode`: the logged log-probs are the old log-probs, and the PPO ratio is taken against them
   (https://verl.readthedocs.io/en/latest/algo/rollout_corr.html).
3. `rollout.name: logged`: where verl would start an inference server on every GPU, there is none (verl_loop.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.errors import BadRequest, ConfigError
from policy.train.engines.rows import EngineRow, EngineSettings, Prepared, prepare

AGENT = "baton_logged"
LOOP = "policy.train.engines.verl_loop"  # every process of the run imports it
LOOP_CLASS = f"{LOOP}.LoggedAgentLoop"
ROLLOUT = "logged"  # as verl_loop.py registers it
VERL_VERSION = "0.9.1"
SCHEDULES = {"cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
SCRIPT = """#!/usr/bin/env bash
# verl {version} on Ray: on the head node, with baton and verl installed for every node's Python and this directory
# at the same path on all of them. More arguments override the configuration: trainer.n_gpus_per_node=4
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
modules="${{VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}}{loop}"
export VERL_USE_EXTERNAL_MODULES="$modules"
exec python3 -m verl.trainer.main_ppo --config-dir "$here" --config-name config \\
  data.train_files="$here/rows.parquet" data.val_files="$here/rows.parquet" \\
  actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/agent_loop.yaml" \\
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES='$modules'" "$@"
"""


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_run` wrote."""

    script: Path
    rows: int
    steps_a_pass: int


def write_run(
    rows: Sequence[EngineRow], model: str, out: Path, settings: EngineSettings, nodes: int, gpus: int
) -> Written:
    """Write the run's directory, whole or not at all. Raises MissingLogprobs and BadRequest on rows or settings that
    verl can't take, ConfigError where the GPUs do not share a step's rows evenly."""
    prepared = prepare(rows, settings)
    if len(prepared) < settings.rows_per_step:
        raise BadRequest(
            f"{len(prepared)} rows with an advantage are fewer than one step's {settings.rows_per_step}: "
            "verl would train on none of them; set rows_per_step lower"
        )
    if out.exists():
        raise BadRequest(f"{out} is there already; name a new directory")
    config = configuration(prepared, model, settings, nodes, gpus)
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (part / "agent_loop.yaml").write_text(yaml.safe_dump([{"name": AGENT, "_target_": LOOP_CLASS}]))
    (part / "run.sh").write_text(SCRIPT.format(version=VERL_VERSION, loop=LOOP))
    (part / "run.sh").chmod(0o755)
    write_rows(prepared, part / "rows.parquet")
    part.rename(out)
    return Written(out / "run.sh", len(prepared), len(prepared) // settings.rows_per_step)


def configuration(
    prepared: Sequence[Prepared], model: str, settings: EngineSettings, nodes: int, gpus: int
) -> dict[str, Any]:
    """What differs from verl's own `ppo_trainer` defaults, over which hydra lays it."""
    if settings.rows_per_step % (settings.rows_per_device * nodes * gpus):
        raise ConfigError(
            f"rows_per_step {settings.rows_per_step} is no multiple of rows_per_device {settings.rows_per_device} "
            f"times {nodes * gpus} devices"
        )
    if settings.schedule not in SCHEDULES:
        raise BadRequest(f"schedule {settings.schedule!r} is not in verl; it has {', '.join(SCHEDULES)}")
    return {
        "defaults": ["ppo_trainer", "_self_"],
        "data": {
            "train_batch_size": settings.rows_per_step,
            "max_prompt_length": max(len(one.row.prompt_ids) for one in prepared),
            "max_response_length": max(len(one.row.plan_ids) for one in prepared),
            "filter_overlong_prompts": False,
            "shuffle": True,
            "seed": settings.seed,
        },
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": False,
            "use_kl_in_reward": False,
            "rollout_correction": {"bypass_mode": True, "loss_type": "ppo_clip", "rollout_is": None},
        },
        "actor_rollout_ref": {
            "model": _model(model, settings),
            "actor": _actor(settings),
            "rollout": _rollout(settings),
            "ref": {"log_prob_micro_batch_size_per_gpu": settings.rows_per_device},
        },
        "trainer": {
            "nnodes": nodes,
            "n_gpus_per_node": gpus,
            "total_epochs": -(-settings.steps // max(1, len(prepared) // settings.rows_per_step)),
            "total_training_steps": settings.steps,
            "save_freq": settings.checkpoint_steps,
            "resume_mode": "auto",
            "test_freq": -1,
            "val_before_train": False,
            "logger": ["console"],
            "project_name": "baton",
            "experiment_name": "conductor",
        },
    }


def _model(model: str, settings: EngineSettings) -> dict[str, Any]:
    return {
        "path": model,
        "enable_gradient_checkpointing": settings.gradient_checkpointing,
        "lora_rank": settings.lora_rank,
        "lora_alpha": 2 * settings.lora_rank or 16,
    }


def _actor(settings: EngineSettings) -> dict[str, Any]:
    loss = settings.loss
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": settings.rows_per_step,
        "ppo_micro_batch_size_per_gpu": settings.rows_per_device,
        "ppo_epochs": 1,
        "clip_ratio": loss.clip_low,
        "clip_ratio_low": loss.clip_low,
        "clip_ratio_high": loss.clip_high,
        "clip_ratio_c": loss.ratio_max,
        "loss_agg_mode": "token-mean",
        "entropy_coeff": loss.entropy_weight,
        "use_kl_loss": loss.kl_weight > 0,
        "kl_loss_coef": loss.kl_weight,
        "kl_loss_type": "low_var_kl",
        "grad_clip": settings.grad_norm_max,
        "optim": {
            "lr": settings.learning_rate,
            "lr_warmup_steps_ratio": settings.warmup_share,
            "lr_scheduler_type": SCHEDULES[settings.schedule],
            "weight_decay": 0.0,
        },
    }


def _rollout(settings: EngineSettings) -> dict[str, Any]:
    return {
        "name": ROLLOUT,
        "n": 1,
        "temperature": settings.temperature,
        "calculate_log_probs": True,
        "tensor_model_parallel_size": 1,
        "log_prob_micro_batch_size_per_gpu": settings.rows_per_device,
        "agent": {"default_agent_loop": AGENT},
    }


def write_rows(prepared: Sequence[Prepared], path: Path) -> None:
    """The columns that verl's dataset wants, and under `extra_info.logged` what the agent loop hands out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [
        {
            "data_source": "baton",
            "prompt": [{"role": "user", "content": one.row.name}],
            "ability": "planning",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "name": one.row.name, "logged": _logged(one)},
        }
        for index, one in enumerate(prepared)
    ]
    pq.write_table(pa.Table.from_pylist(records), path)


def _logged(one: Prepared) -> dict[str, Any]:
    return {
        "prompt_ids": list(one.row.prompt_ids),
        "response_ids": list(one.row.plan_ids),
        "response_mask": [int(x) for x in one.trains],
        "logprobs": list(one.row.logprobs or ()),
        "advantage": one.advantage,
        "reward": one.row.reward,
    }
