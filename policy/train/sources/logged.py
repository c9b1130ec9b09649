"""Rows of the log: nothing is sampled. A step is one pass over all of them, against the log-probs that were stored.

Rows that cannot be trained on are left out by name. If no row is left, or all rewards are equal, the run does not
begin.

Two kinds of rows. A plan that the conductor sampled has the log-prob of each token. A plan that the rule drew has one
propensity μ, the exact probability of its arm: it is written as the student would write it and weighed as a whole by
min(π(plan) / μ, cap) (`step/grpo.py`), the truncated importance weight of Ionides (2008) for the contextual bandit of
Swaminathan & Joachims (ICML 2015). The batch mean is the baseline, so that what a log has much of is not avoided or
sought for its share alone (their propensity overfitting, NeurIPS 2015).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError
from policy.dataset import curate, parquet
from policy.dataset import row as dataset
from policy.dataset.refusals import RowRefused, listed
from policy.dataset.rules import ROUTERS, reward_of, unparsed
from policy.reward import RewardSettings
from policy.train.metrics import Value
from policy.train.sources.sampled import Batch
from policy.train.spec import chosen
from policy.train.step.rows import TrainingRow, checked, plan_weight, require_outcomes

EXPORT_ROWS_MAX = 1_000_000
WEIGHT_MIN = 0.05


@dataclass(frozen=True, slots=True)
class TrainableRows:
    """Rows that can be trained on, the rollouts they are of, and why the others were left out."""

    rows: list[TrainingRow]
    rollouts: int
    refused: list[str]


class LoggedSource:
    """Every batch is all rows of the log. Raises ConfigError on a log that teaches nothing."""

    def __init__(self, log_rows: TrainableRows, version: str, requests_min: int = 0) -> None:
        """`version`: the one that training begins with, `conductor@7`; what the log has of older ones is stale.
        `requests_min`: with fewer requests training does not begin."""
        left_out = listed(Counter(log_rows.refused))
        if not log_rows.rows:
            raise ConfigError(f"no rollout can be trained on: {left_out or 'none was selected'}")
        if log_rows.rollouts < requests_min:
            raise ConfigError(_too_few(log_rows, requests_min) + (f". Left out: {left_out}" if left_out else ""))
        require_outcomes([row.reward for row in log_rows.rows])
        self._found = log_rows
        behind = [_behind(row.version, version) for row in log_rows.rows]
        self._metrics: dict[str, Value] = {
            "reward": sum(row.reward for row in log_rows.rows) / len(log_rows.rows),
            "episodes": log_rows.rollouts,
            "refused": {name: float(count) for name, count in sorted(Counter(log_rows.refused).items())},
            "staleness": sum(behind) / len(behind),
            "drawn_share": sum(row.propensity is not None for row in log_rows.rows) / len(log_rows.rows),
        }

    async def batch(self, step: int) -> Batch:
        """As the interface says."""
        began_s = time.perf_counter()
        rollouts = 0 if step else self._found.rollouts
        return Batch(self._found.rows, rollouts, self._metrics | {"sampling_s": time.perf_counter() - began_s})

    def state(self) -> dict[str, Any]:
        """Empty: this source keeps no state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """As the interface says."""


def _too_few(log_rows: TrainableRows, requests_min: int) -> str:
    """How many more judged requests are wanted, at the share of this log's that can be trained on."""
    share = len(log_rows.rows) / (len(log_rows.rows) + len(log_rows.refused))
    wanted = math.ceil((requests_min - log_rows.rollouts) / share)
    return (
        f"about {wanted:,} more judged requests are needed: {log_rows.rollouts:,} of this log can be trained on, "
        f"{share:.0%} of its plans, and {requests_min:,} are the least. A larger BATON_EXPLORE_SHARE needs fewer; "
        f"--set requests_min={log_rows.rollouts} trains on what is there"
    )


def _behind(version: str, now: str) -> float:
    """How many versions a row is older than the weights, as far as their names say."""
    name, _, number = version.rpartition("@")
    base, _, latest = now.rpartition("@")
    same = name == base and number.isdigit() and latest.isdigit()
    return float(max(0, int(latest) - int(number))) if same else 0.0


def of_database(url: str, filters: Mapping[str, Any]) -> list[dataset.Row]:
    """The training side of a log in PostgreSQL. `filters`: fields of Selection and Rules by name. Raises as
    `curate.load`."""
    selection, rules = chosen(filters)
    return curate.load(url, selection, rules).train


def exported(path: Path) -> list[dataset.Row]:
    """The training side of such a file. Raises ConfigError."""
    return [row for row in islice(parquet.read(path), EXPORT_ROWS_MAX) if row.split == "train"]


def of_dataset(
    rows: Sequence[dataset.Row],
    prompt_hash: str,
    weights: RewardSettings,
    drawn: Callable[[dataset.Row, float], TrainingRow] | None = None,
) -> TrainableRows:
    """Rows of policy.dataset: one each, with the outcome, cost and latency of the whole request. `drawn`: makes the row
    of a plan that the rule drew, with its reward; None: these are left out."""
    refused_plans = unparsed(rows)
    trainable: list[TrainingRow] = []
    refused: list[str] = []
    for row in rows:
        try:
            value = reward_of(row, row.root_id not in refused_plans, weights)
            if row.planner in ROUTERS:
                trainable.append(_drawn(row, value, drawn))
                continue
            if row.prompt_hash != prompt_hash:
                raise RowRefused("other_prompt")
            trainable.append(_row(row, value))
        except RowRefused as error:
            refused.append(error.reason)
    return TrainableRows(trainable, len({row.episode for row in trainable}), refused)


def _drawn(row: dataset.Row, value: float, drawn: Callable[[dataset.Row, float], TrainingRow] | None) -> TrainingRow:
    if row.propensity is None:
        raise RowRefused("no_propensity")
    if drawn is None:
        raise RowRefused("drawn")
    return drawn(row, value)


def likely(log_rows: TrainableRows, weight_max: float) -> TrainableRows:
    """The rows without those of the rule whose weight min(π(plan) / μ, cap) is below WEIGHT_MIN under the first
    weights, of which `logprobs` are: twenty of them would count as one, and an optimizer that normalises its steps
    would follow their noise."""
    stay = [row for row in log_rows.rows if row.propensity is None or plan_weight(row, weight_max) >= WEIGHT_MIN]
    refused = [*log_rows.refused, *["unlikely"] * (len(log_rows.rows) - len(stay))]
    return TrainableRows(stay, len({row.episode for row in stay}), refused)


def _row(row: dataset.Row, value: float) -> TrainingRow:
    return checked(
        row,
        reward=value,
        episode=row.root_id,
        question=row.group,
        category=row.task_type or "",
        first=row.round == 1 and row.depth == 0,
    )
