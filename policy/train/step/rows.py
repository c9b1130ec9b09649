"""Planning calls as rows to train on: the same path for calls that were sampled here and for calls out of the log.

Pure. A row is one plan: the prompt's tokens, the plan's tokens with the log-probs they were drawn with, and the schema
whose grammar masked them. The schema follows from what the round was allowed and must have the hash that was logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.log.rollout import RolloutRecord, RoundRecord
from gateway.errors import ConfigError
from policy.dataset import row as dataset
from policy.dataset.refusals import RowRefused
from policy.dataset.rules import grammar_of, token_fault
from policy.environments.base import Episode
from policy.serve.sampling import GREEDY_BELOW

LOGPROB_SLACK = 1e-3  # a server's rounding may put a certain token a little over log 1


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One plan. Token arrays have one element a plan token. `episode` and `question` are ids: of the request it was
    made for, and of what was asked; `reward` is the request's."""

    prompt_ids: tuple[int, ...]
    plan_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    decisions: tuple[bool, ...]
    schema: Mapping[str, Any]
    temperature: float
    reward: float
    episode: str
    question: str
    category: str = ""
    version: str = ""
    first: bool = True  # of its episode: round 1 of the request's own loop
    propensity: float | None = None  # of the whole plan, which a router drew; then `logprobs` are of the first weights


def plan_weight(row: TrainingRow, weight_max: float) -> float:
    """The truncated importance weight of a plan under the first weights; 1 of one that was sampled token by token."""
    return 1.0 if row.propensity is None else min(weight_max, math.exp(sum(row.logprobs)) / row.propensity)


def rows_of(episode: Episode, reward: float, question: str, category: str) -> list[TrainingRow]:
    """Every planning call of an episode that decoded anything, child loops included. Raises RowRefused."""
    name = f"{question}/{episode.sample}"
    return [
        row_of(loop, planned, reward, name, question, category)
        for loop in (episode.record, *episode.children)
        for planned in loop.rounds
        if planned.planner == "conductor" and planned.plan_token_ids
    ]


def row_of(
    record: RolloutRecord, planned: RoundRecord, reward: float, episode: str, question: str, category: str
) -> TrainingRow:
    """One planning call of a record. Raises RowRefused."""
    return checked(
        planned,
        reward=reward,
        episode=episode,
        question=question,
        category=category,
        first=planned.round == 1 and record.parent_id is None,
    )


def checked(planned: RoundRecord | dataset.Row, **more: Any) -> TrainingRow:
    """The row of a planning call whose token arrays are complete, whose sampling can be repeated and whose schema is
    known. Raises RowRefused."""
    if fault := token_fault(planned):
        raise RowRefused(fault)
    temperature = float(planned.sampling.get("temperature", 1.0))
    if temperature < GREEDY_BELOW:
        raise RowRefused("greedy")
    if float(planned.sampling.get("top_p", 1.0)) < 1.0:
        raise RowRefused("nucleus")
    _, schema = grammar_of(planned)
    return TrainingRow(
        tuple(planned.prompt_token_ids),
        tuple(planned.plan_token_ids),
        tuple(planned.plan_logprobs),
        _rewarded(planned.decision_mask),
        schema,
        temperature,
        version=planned.policy_version or "",
        **more,
    )


def _rewarded(decisions: Sequence[bool]) -> tuple[bool, ...]:
    """The decisions that a reward speaks of: not that a task's text ends. Plans with a text are long, and mostly wrong
    at first; punished with them, the end of a text became unlikely in any plan, and texts ran on to the last token."""
    before = (True, *decisions)
    return tuple(decides and not_free for decides, not_free in zip(decisions, before, strict=False))


def grouped(rows: Sequence[TrainingRow]) -> tuple[list[int], list[int]]:
    """Two group numbers for each row: of the rows that answered the very same prompt, and of its episode's group, which
    is the one that its first round is in (its question's, where an episode has none)."""
    same: dict[tuple[int, ...], int] = {}
    groups = [same.setdefault(row.prompt_ids, len(same)) for row in rows]
    opening = {row.episode: group for row, group in zip(rows, groups, strict=True) if row.first}
    asked: dict[str, int] = {}
    for row, group in zip(rows, groups, strict=True):
        asked.setdefault(row.question, opening.get(row.episode, group))
    return groups, [opening.get(row.episode, asked[row.question]) for row in rows]


def require_outcomes(rewards: Sequence[float]) -> None:
    """Refuse rewards that teach nothing. Raises ConfigError."""
    if not rewards:
        raise ConfigError("no rollout is left to train on: collect traffic with outcomes first")
    if max(rewards) - min(rewards) < 1e-9:
        raise ConfigError(
            f"all {len(rewards)} rollouts have the same reward ({rewards[0]:.3g}), so none is better than another: "
            "collect more traffic, or check the grader"
        )


class MissingLogprobs(ValueError):
    """Rows without usable behaviour log-probs; the message names them and the fix."""


def require_logprobs(
    names: Sequence[str], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float] | None]
) -> None:
    """Check one stored log-prob for each sampled token of each row. Raises MissingLogprobs naming the rows."""
    bad = [name for name, ids, row in zip(names, tokens, logprobs, strict=True) if not _usable(ids, row)]
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise MissingLogprobs(
            f"no usable behaviour log-probs in {len(bad)} of {len(names)} rows ({shown}): leave them out, or serve the "
            "conductor with --logprobs-mode processed_logprobs and return_token_ids and collect anew"
        )


def _usable(ids: Sequence[int], row: Sequence[float] | None) -> bool:
    return bool(ids) and row is not None and len(row) == len(ids) and all(-math.inf < x <= LOGPROB_SLACK for x in row)
