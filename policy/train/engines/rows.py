"""Logged rows as every engine takes them: checked, with advantages, and with the tokens that train.

The advantages are computed here, once, with `policy.train.step.grpo`, and not by the engine: traffic has one rollout a
question, so an engine's own groups of G samples of one prompt would leave it nothing to compare.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gateway.errors import BadRequest
from policy.reward import RewardSettings
from policy.serve.tokens import Tokens
from policy.train.step.grpo import LossSettings, batch_advantages, group_advantages
from policy.train.step.masks import Masks
from policy.train.step.rows import TrainingRow, grouped, require_logprobs

ROWS_MAX = 1_000_000
COLUMNS = ("uid", "prompts", "responses", "rollout_log_probs", "decision_mask", "reward", "extra_info")
Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One sampled plan. Token arrays have one element a plan token; `logprobs` are the server's own, after temperature
    and grammar mask. `allowed`: the mask each token was drawn under, one bit a vocabulary entry, lowest bit first (as
    `policy.train.step.masks` gives them), or None where they are not known."""

    name: str
    group: str  # equal for rows that answer the same question
    prompt_ids: Sequence[int]
    plan_ids: Sequence[int]
    logprobs: Sequence[float] | None
    reward: float
    decisions: Sequence[bool]  # false for the text of a task
    allowed: Sequence[Bits] | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine; the defaults are the Conductor paper's for a 7B model (docs/engines.md)."""

    steps: int = 200  # optimizer steps
    rows_per_step: int = 256  # over all devices
    rows_per_device: int = 8  # in one forward pass; only memory and speed depend on it
    learning_rate: float = 1e-6
    warmup_share: float = 0.03
    schedule: Literal["cosine", "constant", "constant_with_warmup", "linear"] = "cosine"
    grad_norm_max: float = 1.0
    baseline: Literal["group", "batch"] = "group"  # what a reward is compared with
    divide_by_std: bool = False
    decisions_only: bool = False
    temperature: float = 1.0  # the rows were sampled at
    loss: LossSettings = field(default_factory=LossSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)  # of the rows, where the export says none
    lora_rank: int = 0  # 0: all weights; an adapter goes on at its own rank
    bf16: bool = False
    gradient_checkpointing: bool = False
    checkpoint_steps: int = 20
    seed: int = 1
    trl: Mapping[str, Any] = field(default_factory=dict)  # further arguments of TRL's GRPOConfig

    def __post_init__(self) -> None:
        if min(self.steps, self.rows_per_step, self.rows_per_device, self.checkpoint_steps) < 1:
            raise BadRequest("steps, rows_per_step, rows_per_device and checkpoint_steps are at least 1")
        if self.rows_per_step < 2 or self.rows_per_step % self.rows_per_device:
            raise BadRequest("rows_per_step is at least 2 and a multiple of rows_per_device")
        if self.loss.staleness_max is not None:
            raise BadRequest("staleness_max is our own trainer's; these engines have none, so drop stale rows instead")


# the Conductor paper's run of 7B weights, 200 steps of 4 questions with 64 samples each, on cards of 80 GB
PROFILES: Mapping[str, Mapping[str, Any]] = {
    "paper-lora": {  # one card
        "bf16": True, "gradient_checkpointing": True, "lora_rank": 16, "learning_rate": 1e-5, "rows_per_device": 8,
    },
    "paper-full": {  # four cards or more, with deploy/accelerate/fsdp.yaml
        "bf16": True, "gradient_checkpointing": True, "learning_rate": 1e-6, "rows_per_device": 8,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row that teaches something. `trains`: tokens in the loss."""

    row: EngineRow
    advantage: float
    trains: tuple[bool, ...]


def prepare(rows: Sequence[EngineRow], settings: EngineSettings) -> list[Prepared]:
    """Rows with an advantage and tokens to put it on. Raises MissingLogprobs naming rows without behaviour log-probs,
    BadRequest where arrays differ in length, where masks are given for some rows only, or where nothing is left."""
    require_logprobs([row.name for row in rows], [row.plan_ids for row in rows], [row.logprobs for row in rows])
    for row in rows:
        lengths = {len(row.plan_ids), len(row.decisions), len(row.plan_ids if row.allowed is None else row.allowed)}
        if len(lengths) > 1 or not row.prompt_ids:
            raise BadRequest(
                f"row {row.name}: plan tokens, decision mask and grammar masks differ in length, or no prompt"
            )
    if len({row.allowed is None for row in rows}) > 1:
        raise BadRequest("grammar masks are there for some rows only: give them for all or for none")
    prepared = [
        Prepared(row, advantage, trained_tokens(row, settings.decisions_only))
        for row, advantage in zip(rows, _advantages(rows, settings), strict=True)
        if advantage
    ]
    useful = [row for row in prepared if any(row.trains)]
    if not useful:
        raise BadRequest(
            f"none of {len(rows)} rows teaches anything: within each group all rewards are equal; "
            'try baseline "batch", which compares rows of different questions'
        )
    return useful


def trained_tokens(row: EngineRow, decisions_only: bool) -> tuple[bool, ...]:
    """All tokens but those the grammar forced, whose log-prob is 0 and whose gradient under the mask is 0 too: an
    engine that knows no mask would take them for choices. With `decisions_only`, task text is left out as well."""
    logprobs = row.logprobs or ()
    return tuple(
        logprob < 0.0 and (decision or not decisions_only)
        for logprob, decision in zip(logprobs, row.decisions, strict=True)
    )


def _advantages(rows: Sequence[EngineRow], settings: EngineSettings) -> list[float]:
    import torch

    rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    if settings.baseline == "batch":
        found = batch_advantages(rewards, divide_by_std=settings.divide_by_std)
    else:
        numbers = {name: index for index, name in enumerate(dict.fromkeys(row.group for row in rows))}
        groups = torch.tensor([numbers[row.group] for row in rows], dtype=torch.long)
        found = group_advantages(rewards, groups, divide_by_std=settings.divide_by_std)
    return [float(one) for one in found]


def order(count: int, settings: EngineSettings) -> list[int]:
    """The order of rows for all of the run: passes over `count` rows, each shuffled by the seed. Known before, so
    that a resumed run goes on where it stopped."""
    shuffler, wanted = random.Random(settings.seed), settings.steps * settings.rows_per_step
    found: list[int] = []
    while len(found) < wanted:
        found += shuffler.sample(range(count), count)
    return found[:wanted]


def read_rows(path: Path, settings: EngineSettings) -> list[EngineRow]:
    """The rows of `traces export --format verl`, the train side where the export was split. Raises BadRequest, also
    where the settings ask for another reward than the default: that of such a row was computed with the export."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if settings.reward != RewardSettings():
        raise BadRequest(
            f"--set reward…: the rewards of {path} were computed when it was written; "
            "export it with `traces export --format verl --reward NAME=VALUE`"
        )
    try:
        table = pq.read_table(path, columns=list(COLUMNS))
    except (OSError, pa.ArrowException, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise BadRequest(
            f"{path}: not an export in verl's shape ({reason}); `traces export --format verl` makes one"
        ) from None
    if table.num_rows > ROWS_MAX:
        raise BadRequest(f"{path}: {table.num_rows} rows, more than {ROWS_MAX}; export a shorter time")
    rows = [_row(index, one) for index, one in enumerate(table.to_pylist()) if _trains(one)]
    if not rows:
        raise BadRequest(f"{path}: no row to train on")
    return rows


def of_training(rows: Sequence[TrainingRow], tokens: Tokens, settings: EngineSettings) -> list[EngineRow]:
    """Our own trainer's rows, with the masks of their schemas. Raises BadRequest where they were sampled at another
    temperature than the settings say, since an engine scores all rows at one."""
    other = sorted({row.temperature for row in rows} - {settings.temperature})
    if other:
        raise BadRequest(
            f"rows sampled at temperature {other[0]:g}, scored at {settings.temperature:g}: set temperature"
        )
    masks, (_, groups) = Masks(tokens), grouped(rows)
    return [
        EngineRow(
            name=f"{row.episode}/{index}",
            group=str(group),
            prompt_ids=row.prompt_ids,
            plan_ids=row.plan_ids,
            logprobs=row.logprobs,
            reward=row.reward,
            decisions=row.decisions,
            allowed=masks.of(row.schema, row.plan_ids),
        )
        for index, (row, group) in enumerate(zip(rows, groups, strict=True))
    ]


def _trains(one: Mapping[str, Any]) -> bool:
    return bool((one["extra_info"] or {}).get("split", "train") == "train")


def _row(index: int, one: Mapping[str, Any]) -> EngineRow:
    about = one["extra_info"] or {}
    plan = one["responses"] or []
    return EngineRow(
        name=f"{about.get('rollout_id', f'row {index}')}/{about.get('round', 0)}",
        group=str(one["uid"]),
        prompt_ids=one["prompts"] or [],
        plan_ids=plan,
        logprobs=one["rollout_log_probs"],
        reward=float(one["reward"]),
        decisions=[bool(x) for x in one["decision_mask"] or [1] * len(plan)],
    )
