"""Our settings as TRL's `GRPOConfig`, and whatever else TRL takes under `trl.NAME`, checked against the installed TRL.

`--set trl.use_vllm=true --set trl.vllm_mode=server …` gives TRL a vLLM: each step it sends the new weights there.
Nothing is sampled from it: rows are logged. The correction that TRL makes for its own samples is off, since the ratio
is taken against the logged log-probs already.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gateway.errors import BadRequest, ConfigError
from policy.train.engines.rows import EngineSettings

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import TrainingArguments
        from trl import GRPOConfig
except ImportError as error:
    raise ConfigError(f"TRL is not installed ({error.name}); scripts/install trl adds it") from None

VLLM_MODES = ("colocate", "server")


def grpo_config(work: Path, settings: EngineSettings) -> Any:
    """The arguments of a run. Makes the directory `work`. Raises ConfigError where the devices do not share a step's
    rows evenly, or where vLLM is to be used and is not installed; BadRequest for an argument that TRL does not take."""
    cpu = not torch.cuda.is_available()
    work.mkdir(parents=True, exist_ok=True)
    world = int(TrainingArguments(str(work), use_cpu=cpu, report_to=[]).world_size)
    if settings.rows_per_step % (settings.rows_per_device * world):
        raise ConfigError(
            f"rows_per_step {settings.rows_per_step} is no multiple of rows_per_device {settings.rows_per_device} "
            f"times {world} devices"
        )
    ours = _ours(work, settings, world, cpu=cpu)
    theirs = checked(settings.trl, ours)
    try:
        return GRPOConfig(**ours, **theirs)
    except (ValueError, TypeError) as error:
        raise BadRequest(f"TRL does not take these arguments: {str(error).splitlines()[0]}") from None


def checked(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """What is given for TRL itself, with what it needs. Raises BadRequest naming an argument that TRL has not, or that
    a setting of ours decides; ConfigError without vLLM where it is to be used."""
    known = {one.name for one in fields(GRPOConfig) if one.init}
    for name in given:
        if name not in known:
            raise BadRequest(f"setting trl.{name}: the installed TRL has no such argument of GRPOConfig")
        if name in ours:
            raise BadRequest(f"setting trl.{name}: a setting of docs/engines.md decides it; set that one")
    if not given.get("use_vllm"):
        return dict(given)
    mode = given.get("vllm_mode", VLLM_MODES[0])
    if mode not in VLLM_MODES:
        raise BadRequest(f"setting trl.vllm_mode={mode}: it is {' or '.join(VLLM_MODES)}")
    if given.get("vllm_importance_sampling_correction"):
        raise BadRequest(
            "setting trl.vllm_importance_sampling_correction: the ratio against the logged log-probs is the "
            "correction; leave it out"
        )
    if find_spec("vllm") is None:
        raise ConfigError("setting trl.use_vllm needs vLLM beside TRL (and CUDA, for its weight sync): install vllm")
    return {**given, "vllm_importance_sampling_correction": False}


def _ours(work: Path, settings: EngineSettings, world: int, *, cpu: bool) -> dict[str, Any]:
    """`delta` is the dual clip, `dapo` our token mean."""
    loss = settings.loss
    return {
        "output_dir": str(work),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.rows_per_device,
        "gradient_accumulation_steps": settings.rows_per_step // (settings.rows_per_device * world),
        "num_generations": settings.rows_per_step,  # one "group": the advantages are ours
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": settings.warmup_share,
        "weight_decay": 0.0,
        "max_grad_norm": settings.grad_norm_max,
        "temperature": settings.temperature,
        "loss_type": "dapo",
        "epsilon": loss.clip_low,
        "epsilon_high": loss.clip_high,
        "delta": loss.ratio_max,
        "beta": loss.kl_weight,
        "entropy_coef": loss.entropy_weight,
        "scale_rewards": "none",
        "shuffle_dataset": False,
        "bf16": settings.bf16,
        "use_cpu": cpu,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "save_strategy": "steps",
        "save_steps": settings.checkpoint_steps,
        "save_total_limit": 2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": settings.seed,
    }
