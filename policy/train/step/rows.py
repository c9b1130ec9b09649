"""Planning calls as rows to train on: the same path for calls that were sampled here and for calls out of the log.

Pure. A row is one plan: the prompt's tokens, the plan's tokens with the log-probs they were drawn with, and the schema
whose grammar masked them. The schema is made anew from the record and must have the hash that was logged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from gateway.core.log.rollout import RolloutRecord, RoundRecord
from gateway.core.loop.plan import Allowed, plan_schema, schema_hash
from gateway.errors import ConfigError
from policy.environments.base import Episode

LOGPROB_SLACK = 1e-3  # as policy.train.step.grpo has it; this module loads no torch
GREEDY_BELOW = 1e-5  # temperatures that draw nothing
STEPS_TRIED = 16  # values of `steps_max` tried where a log does not say it

REFUSALS: Mapping[str, str] = {
    "no_logprobs": "logged without token ids and log-probs: serve with --logprobs-mode processed_logprobs and "
    "return_token_ids, or leave them out",
    "greedy": "sampled at temperature 0, which explores nothing: serve a share of the traffic at temperature 1",
    "nucleus": "sampled with top_p < 1, whose log-probs cannot be had again: serve with top_p 1",
    "other_schema": "its pool and caps do not give the schema hash that was logged: it was changed, or made by other "
    "code",
    "other_prompt": "planned from another version of the prompt than these weights know",
    "no_outcome": "nobody judged it",
}


@dataclass(frozen=True, slots=True)
class Row:
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


class RowRefused(ValueError):
    """A planning call that cannot be trained on. `reason`: a key of REFUSALS."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: {REFUSALS[reason]}")
        self.reason = reason


def rows_of(episode: Episode, reward: float, question: str, category: str) -> list[Row]:
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
) -> Row:
    """One planning call of a record. Raises RowRefused."""
    first_index = sum(step.round < planned.round for step in record.steps)
    return checked(
        planned,
        schema_of(record.pool, planned.schema_hash, first_index, record.caps.get("steps"), record.depth),
        reward=reward,
        episode=episode,
        question=question,
        category=category,
        first=planned.round == 1 and record.parent_id is None,
    )


def checked(planned: Any, schema: Mapping[str, Any], **more: Any) -> Row:
    """A row of a planning call, with token arrays that are whole and a sampling that can be had again. `planned`: a
    RoundRecord, or a row of policy.dataset. Raises RowRefused."""
    ids, logprobs = planned.plan_token_ids, planned.plan_logprobs
    whole = bool(ids) and len(ids) == len(logprobs) == len(planned.decision_mask) and bool(planned.prompt_token_ids)
    if not whole or not all(-float("inf") < each <= LOGPROB_SLACK for each in logprobs):
        raise RowRefused("no_logprobs")
    temperature = float(planned.sampling.get("temperature", 1.0))
    if temperature < GREEDY_BELOW:
        raise RowRefused("greedy")
    if float(planned.sampling.get("top_p", 1.0)) < 1.0:
        raise RowRefused("nucleus")
    return Row(
        tuple(planned.prompt_token_ids),
        tuple(ids),
        tuple(logprobs),
        tuple(planned.decision_mask),
        schema,
        temperature,
        version=planned.policy_version or "",
        **more,
    )


def schema_of(
    pool: Sequence[Mapping[str, Any]], hashed: str | None, first_index: int | None, steps_max: int | None, depth: int
) -> Mapping[str, Any]:
    """The schema with that hash, made from the pool as it was shown. What the log does not say (None) is tried out.
    Raises RowRefused(other_schema) where nothing gives the hash."""
    every = tuple(str(entry["handle"]) for entry in pool)
    without = tuple(str(entry["handle"]) for entry in pool if entry["kind"] != "self")
    firsts = range(STEPS_TRIED) if first_index is None else (first_index,)
    for handles, first, most in product(
        dict.fromkeys((without, every) if depth else (every, without)),
        firsts,
        (steps_max,) if steps_max else range(1, STEPS_TRIED + 1),
    ):
        schema = plan_schema(Allowed(handles, most, first))
        if schema_hash(schema) == hashed:
            return schema
    raise RowRefused("other_schema")


def grouped(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Two group numbers for each row: of the rows that answered the very same prompt, and of its episode's group, which
    is the one that its first round is in (its question's, where an episode has none)."""
    same: dict[tuple[int, ...], int] = {}
    groups = [same.setdefault(row.prompt_ids, len(same)) for row in rows]
    opening = {row.episode: group for row, group in zip(rows, groups, strict=True) if row.first}
    asked: dict[str, int] = {}
    for row, group in zip(rows, groups, strict=True):
        asked.setdefault(row.question, opening.get(row.episode, group))
    return groups, [opening.get(row.episode, asked[row.question]) for row in rows]


def told(refused: Iterable[str]) -> str:
    """How many were refused and why, in one line."""
    counts = sorted(Counter(refused).items())
    return "; ".join(f"{count} × {name} ({REFUSALS[name]})" for name, count in counts)


def require_outcomes(rewards: Sequence[float]) -> None:
    """Refuse rewards that teach nothing. Raises ConfigError."""
    if not rewards:
        raise ConfigError("no rollout is left to train on: collect traffic with outcomes first")
    if max(rewards) - min(rewards) < 1e-9:
        raise ConfigError(
            f"all {len(rewards)} rollouts have the same reward ({rewards[0]:.3g}), so none is better than another: "
            "collect more traffic, or check the grader"
        )
