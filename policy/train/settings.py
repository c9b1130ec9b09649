"""Every knob of a training run, with its source. Two profiles; `--set NAME=VALUE` changes any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import cos, pi
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.core.loop.prompt import DIAL, QUALITY_MAX
from gateway.core.policies.readiness import REQUESTS_MIN
from gateway.errors import ConfigError
from policy.reward import RewardSettings


class Settings(BaseModel):
    """What changes the weights that come out. `paper` is the Conductor paper, arXiv:2512.04388; `trials` are
    measured runs on the arena (docs/training.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(0, description="Of every draw: prompts, pools, plans, order")
    steps: int = Field(200, ge=1, le=100_000, description="Batches that are sampled and learnt from (paper: 200)")
    prompts: int = Field(12, ge=1, le=4096, description="Questions a step (paper: 4; trials: 12)")
    samples: int = Field(16, ge=1, le=1024, description="Episodes of each question, G (paper: 64; trials: 16)")
    rounds: int = Field(3, ge=1, le=8, description="Plans a loop may make, as when served")
    temperature: float = Field(1.0, gt=0, le=2, description="Of sampled plans; anything but 1 trains another policy")
    plan_tokens: int = Field(192, ge=8, le=4096, description="Longest plan; a longer one is cut off and has no reward")

    lr: float = Field(
        3e-4, gt=0, lt=1, description="Learning rate of AdamW (paper: 1e-6 for 7B; trials: 3e-4 for 0.9M)"
    )
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="Of the rate (paper: cosine)")
    warmup_share: float = Field(0.03, ge=0, lt=1, description="Of the steps, in which the rate rises (paper: .03)")
    lr_floor: float = Field(0.0, ge=0, le=1, description="Share of the rate at the end of cosine and linear")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="Of AdamW; none in reinforcement learning (TRL)")
    beta2: float = Field(0.98, gt=0, lt=1, description="Of AdamW; short runs want a short memory")
    gradient_norm_max: float = Field(1.0, gt=0, description="Gradients longer than this are shortened (TRL: 1)")
    epochs: int = Field(1, ge=1, le=64, description="Passes over what was sampled; over 1 it is off-policy")
    minibatches: int = Field(1, ge=1, le=256, description="Optimizer steps a pass")
    tokens_max: int = Field(16_384, ge=64, description="In one forward pass, padding included: bounds memory")

    advantage: Literal["group", "leave_one_out", "batch", "category"] = Field(
        "group", description="What a reward is compared with (GRPO 2402.03300; RLOO 2402.14740; logs: batch)"
    )
    divide_by_std: bool = Field(True, description="Divide by the group's std (Dr. GRPO 2503.20783 does not; trials do)")
    std_floor: float = Field(0.1, ge=0, description="Divide by no less, or cents outweigh being right in tame groups")
    std_min: float = Field(1e-4, ge=0, description="Groups that spread less are dropped (ToolOrchestra drops ≤ .1)")
    clip_low: float = Field(0.2, gt=0, le=1, description="PPO's clip below (DAPO 2503.14476: .2)")
    clip_high: float = Field(0.28, gt=0, description="PPO's clip above (DAPO: .28)")
    ratio_max: float = Field(10.0, gt=1, description="Dual clip (1912.09729)")
    weight_max: float = Field(
        2.0, ge=1, description="Truncated importance weights, where `decoupled` (AReaL 2505.24298)"
    )
    decoupled: bool = Field(False, description="Clip against the weights at the step's start, weigh against the log")
    staleness_max: float | None = Field(
        None, gt=0, description="M2PO's bound (2510.01161: .04); none: all tokens train"
    )
    kl_weight: float = Field(
        0.0, ge=0, description="β, towards the weights that training began with, of dead groups too (paper: 0)"
    )
    entropy_weight: float = Field(
        0.0, ge=0, description="Reward for staying undecided, in dead groups too (trials: none)"
    )
    log_kl_max: float | None = Field(
        None, gt=0, description="logged: a step that takes the weights farther from the log, in nats, is shortened"
    )
    log_kl_requests: int = Field(
        0, ge=0, description="logged: with fewer requests than these, `log_kl_max` is less in proportion"
    )
    requests_min: int = Field(0, ge=0, description="logged: training does not begin with fewer requests")
    decisions_only: bool = Field(False, description="Train on workers and links alone, not on task text")

    outcome_above: float = Field(0.5, ge=0, lt=1, description="sft: a plan won where its request's outcome is above")
    plans_max: int = Field(2, ge=1, le=1024, description="sft: at most so many different plans of a question")
    lessons: int = Field(4000, ge=1, le=1_000_000, description="sft, replay: episodes of searched programs to learn")
    held_out_share: float = Field(0.1, ge=0, lt=1, description="sft: of the questions, held out to measure the loss")

    cost_per_usd: float = Field(20.0, ge=0, description="λ, reward that a dollar takes off a right answer (DESIGN §7)")
    latency_per_s: float = Field(0.002, ge=0, description="μ, reward that a second takes off (ToolOrchestra: 1/500)")
    penalty_max: float = Field(0.3, ge=0, lt=0.5, description="Both together take off no more")
    format_reward: float = Field(0.1, ge=0, lt=0.5, description="For a plan that ran and was wrong")
    missed_penalty: float = Field(0.0, ge=0, description="Off a plan that ran, for each contract that no reply kept")
    repaired_penalty: float = Field(
        0.0, ge=0, description="For each contract that was kept after a repair, or by another worker; at most the above"
    )
    rejected_penalty: float = Field(0.0, ge=0, description="For each candidate that a checker rejected")
    verdict_penalty_max: float = Field(
        0.05, ge=0, lt=0.5, description="The three together take off no more; at most `format_reward`"
    )
    quality: tuple[int, int] | None = Field(None, description="Dial places drawn for each question; none: not shown")
    dial: tuple[float, ...] | None = Field(
        None, description="λ at each place of the dial; none: as the first weights know it, else 400 halved a place"
    )
    usd_per_1k_max: float = Field(
        5.0, gt=0, description="replay: the dial stands where 1,000 questions cost no more, unless a request sets it"
    )
    dial_questions: int = Field(
        400, ge=1, le=100_000, description="replay: training questions asked at each place of the dial for that"
    )

    k_of_n: tuple[int, int] | None = Field(None, description="Models in a pool, drawn from LO to HI (paper: k-of-n)")
    redraw_handles: bool = Field(True, description="New handles for every question, so that none is learnt by heart")
    experience_share: float = Field(0.5, ge=0, le=1, description="Of the questions, those with experience shown")
    neighbours: int = Field(50, ge=1, le=1000, description="Questions behind the experience, as the gateway shows it")
    observed: int = Field(400, ge=0, le=100_000, description="Questions put to every worker first, for experience")
    candidates: int = Field(2000, ge=1, le=1_000_000, description="Questions that the curriculum chooses from")
    explore_share: float = Field(0.2, ge=0, le=1, description="Of the questions, those chosen at random")
    learning_value_floor: float = Field(0.02, gt=0, le=1, description="ε of the weight p(1−p)+ε of a question")
    agreeing_weight: float = Field(0.25, ge=0, le=1, description="Weight of questions all workers get right, or wrong")

    checkpoint_steps: int = Field(10, ge=1, description="Steps between checkpoints")
    engine: Literal["auto", "small", "large"] = Field("auto", description="small: plain torch; large: transformers")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the weights, for the large engine")
    recompute: bool | None = Field(
        None,
        description="Activations are computed twice, to hold fewer (1604.06174); none: for the large engine",
    )
    device: str = Field("cpu", description="cpu, cuda or cuda:N")
    rollout_drift_max: float = Field(
        0.05, gt=0, description="--rollouts: nats that vLLM may be off the trainer, as docs/swap.md measures it"
    )
    threads: int = Field(1, ge=1, le=256, description="Of torch; another number rounds differently")
    lora_rank: int = Field(0, ge=0, le=512, description="0: all weights are trained (2106.09685)")
    lora_alpha: float = Field(16.0, gt=0, description="Scale of the adapter is alpha ÷ rank")
    lora_targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), description="Layers adapted"
    )
    lora_merge: bool = Field(False, description="Write full weights with the adapter added, instead of the adapter")

    @model_validator(mode="after")
    def _ranges(self) -> Settings:
        for name, most in (("quality", QUALITY_MAX), ("k_of_n", 10_000)):
            found: tuple[int, int] | None = getattr(self, name)
            if found is not None and not (0 if name == "quality" else 1) <= found[0] <= found[1] <= most:
                raise ValueError(f"{name} {found}: give LO ≤ HI within the range")
        _ = self.reward  # raises on what it refuses
        return self

    @property
    def reward(self) -> RewardSettings:
        """Its weights."""
        dial = self.dial or DIAL
        same = {each.name: getattr(self, each.name) for each in fields(RewardSettings) if each.name != "dial"}
        return RewardSettings(**same, dial=dial)

    def log_kl_bound(self, requests: int) -> float | None:
        """Nats a request that weights may be away from a log of so many requests; None: any number."""
        if self.log_kl_max is None:
            return None
        return self.log_kl_max * min(1.0, requests / max(1, self.log_kl_requests))

    def rate(self, step: int) -> float:
        """The learning rate at `step` (from 0)."""
        warm = min(1.0, (step + 1) / max(1.0, self.warmup_share * self.steps))
        return self.lr * warm * self._decay(step / self.steps)

    def _decay(self, done: float) -> float:
        falls = {"constant": 1.0, "cosine": (1 + cos(pi * done)) / 2, "linear": 1 - done}[self.schedule]
        return self.lr_floor + (1 - self.lr_floor) * falls if self.schedule != "constant" else 1.0


PROFILES: Mapping[str, Mapping[str, Any]] = {
    "small": {},
    "recorded": {
        "steps": 60,
        "lr": 2e-4,
        "schedule": "linear",
        "quality": (0, QUALITY_MAX),
        "redraw_handles": False,
        "experience_share": 0.7,
        "checkpoint_steps": 20,
    },
    "logged": {
        "steps": 4,
        "minibatches": 8,
        "advantage": "batch",
        "decisions_only": True,
        "log_kl_max": 0.75,  # half of the gate's bound: it measures on requests that training has not seen
        "log_kl_requests": 4000,
        "requests_min": REQUESTS_MIN,
        "lr": 3e-4,
        "warmup_share": 0.0,
    },
    "taught": {
        "steps": 200,
        "prompts": 8,
        "lr": 2e-4,
        "schedule": "cosine",
        "warmup_share": 0.05,
        "checkpoint_steps": 25,
    },
    "paper": {
        "prompts": 4,
        "samples": 64,
        "steps": 200,
        "lr": 1e-6,
        "schedule": "cosine",
        "divide_by_std": True,
        "std_floor": 0.0,
        "plan_tokens": 512,
        "beta2": 0.999,
        "dtype": "bfloat16",
        "tokens_max": 32_768,
    },
}


def changes_of(texts: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` each, as values of Settings. Raises ConfigError on anything else."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in Settings.model_fields:
            raise ConfigError(f"--set {text}: write NAME=VALUE with a setting of docs/training.md")
        changes[name] = _read(value)
    return changes


def settings_of(profile: str, texts: Sequence[str]) -> Settings:
    """A profile with `NAME=VALUE` changes. Raises ConfigError naming the setting."""
    if profile not in PROFILES:
        raise ConfigError(f"--profile {profile}: there are {', '.join(PROFILES)}")
    try:
        return Settings.model_validate({**PROFILES[profile], **changes_of(texts)})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "settings"
        raise ConfigError(f"--set {where}: {first['msg']}") from None


def _read(value: str) -> Any:
    """JSON where it is JSON, `LO-HI` as a pair, else text."""
    low, dash, high = value.partition("-")
    if dash and low.isdigit() and high.isdigit():
        return (int(low), int(high))
    try:
        return json.loads(value)
    except ValueError:
        return None if value == "none" else value
