"""The record of a rollout: what training and audit need (DESIGN §6), as plain frozen data. Pure.

`as_payload` turns it into the journal's JSON. Field names equal the column names of `adapters/postgres/tables.py`.
Times are microseconds since the epoch (`_us`), durations milliseconds (`_ms`), money nano-dollars (`_nano`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any

from gateway.errors import BatonError


@dataclass(slots=True)
class AttemptRecord:
    """One try at a worker."""

    started_us: int
    finished_us: int
    error: str | None = None  # error code, None when it worked
    upstream_status: int | None = None
    dispatched: bool = True  # False: it never left this host, so it cannot have cost anything
    counted_by: str | None = None  # what stands in for a usage that did not come: tokenizer | bytes | bound
    left_out: list[str] = field(default_factory=list)  # parameters of the client that the worker's model refuses
    worker: str | None = None  # where it is not the step's: a judge of the reply, or who missed the contract before
    verdict: dict[str, Any] | None = None  # of a contract or of a verify step: by, accept (None: unreadable), why
    # of the conversation, to fit the context: tool_outputs, messages, chars; summary: what came of a summary of them
    cut: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None  # that this call was for: messages (summed up), tokens, cost_nano
    tool: dict[str, Any] | None = None  # that was called: name, arguments, chars (of its answer; None: it failed)
    named: dict[str, str] | None = None  # by the reply: model, where another than was asked for; system_fingerprint


@dataclass(slots=True)
class StepRecord:
    """One worker call of a plan. `saw` is exactly what its prompt held of earlier steps: (step index, handle)."""

    round: int
    step: int
    worker: str
    handle: str
    kind: str
    worker_version: str
    task: str | None
    see: list[int]
    messages: list[dict[str, Any]] = field(default_factory=list)  # the prompt as sent
    reply: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    status: str = "pending"  # done | failed | cancelled | refused (no fault of the worker) | skipped
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usage_estimated: bool = False
    lowered: dict[str, Any] | None = None  # the reply's bound, where it is below what was asked: asked, max_tokens, by
    usage_details: dict[str, int] | None = None  # of prompt and reply, as the worker reported them: cached_tokens, …
    cost_nano: int = 0
    started_us: int = 0
    first_byte_us: int | None = None
    finished_us: int = 0
    attempts: list[AttemptRecord] = field(default_factory=list)
    child_rollout_id: str | None = None


@dataclass(slots=True)
class RoundRecord:
    """One planning call and the plan that came of it. Token fields are empty when a router planned."""

    round: int
    planner: str  # conductor | rule | fixed
    policy_version: str | None = None
    prompt_version: str | None = None
    prompt_hash: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    plan_token_ids: list[int] = field(default_factory=list)
    plan_logprobs: list[float] = field(default_factory=list)
    decision_mask: list[bool] = field(default_factory=list)  # true: a decision; false: task text
    plan_text: str | None = None
    plan: dict[str, Any] | None = None
    flags: list[str] = field(default_factory=list)  # what was odd about the planner's text: prose, why_cut, cut_off
    sampling: dict[str, Any] = field(default_factory=dict)
    schema_hash: str | None = None
    allowed: dict[str, Any] | None = None  # `core.loop.plan.PlanLimits` of this round; `schema_hash` is of its schema
    shown: dict[str, Any] | None = None  # `PromptInput.guidance`, for a prompt that showed it
    quality: int | None = None  # the dial as this round's prompt showed it; None: it showed none
    decision: dict[str, Any] | None = None  # `core.loop.bandit.ArmChoice.as_json`, where a router decided
    refusal: str | None = None  # why the conductor's plan was not used, by name
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_nano: int = 0
    started_us: int = 0
    finished_us: int = 0


@dataclass(slots=True)
class RolloutRecord:
    """All that was done for one request (or for one child loop: then `parent_id` and `depth` say of whom)."""

    id: str
    key_id: str
    org: str
    created_us: int
    policy_requested: str
    pool_name: str
    pool_hash: str
    pool: list[dict[str, Any]]  # as shown, in order: name, handle, version, price, tags, experience
    caps: dict[str, Any]
    request: dict[str, Any]  # the client's body, after the key's log mode
    completion_id: str
    request_id: str | None = None  # the `x-request-id` of the reply; None for child loops
    parent_id: str | None = None
    pool_revision: str | None = None  # of the whole pool file; `pool_hash` is of the workers that it might use
    depth: int = 0
    end_user: str | None = None
    task_type: str | None = None
    task_embedding: list[float] | None = None  # None: the shipper computes it from the text; empty: there is none
    task_embedder: str | None = None  # the name of the embedder that computed `task_embedding`
    policy_used: str = ""
    policy_version: str | None = None
    policy_assigned: str | None = None  # the policy version asked for the first plan, whatever came of it
    fallback: str | None = None  # why a router planned instead of the conductor
    memory: dict[str, Any] | None = None  # of the experience: state (fresh, stale, missing), age_s
    turn: dict[str, Any] | None = None  # of a conversation that went on: worker, kept, why, and what that rests on
    capped: str | None = None  # the cap that ended it early
    status: str = "running"  # done | failed | aborted
    error: dict[str, Any] | None = None
    reply: dict[str, Any] | None = None
    hold_nano: int = 0
    cost_nano: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    overhead_ms: float = 0.0
    finished_us: int = 0
    stream: bool = False
    log_mode: str = "full"
    train: bool = True
    tags: dict[str, str] = field(default_factory=dict)
    answered_by: str | None = None  # the worker that the conversation goes back to
    marks: dict[str, float] = field(
        default_factory=dict
    )  # by which its next turn is known (core/loop/turns/marks.py) -> seconds
    facts: dict[str, Any] | None = None  # what its next turn is judged by (core/loop/turns/replanning.py)
    # steps that failed by their worker's own fault: round, step, weight of the evidence
    failures: list[tuple[int, int, float]] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)


def close_record(record: RolloutRecord, now_us: int) -> None:
    """Complete a loop's record from its rounds and steps."""
    parts: list[RoundRecord | StepRecord] = [*record.rounds, *record.steps]
    record.cost_nano = sum(part.cost_nano for part in parts)
    record.prompt_tokens = sum(step.prompt_tokens for step in record.steps)
    record.completion_tokens = sum(step.completion_tokens for step in record.steps)
    record.finished_us = now_us
    planners = [planned for planned in record.rounds if planned.refusal is None]
    record.policy_used = planners[-1].planner if planners else record.policy_requested
    record.policy_version = next((p.policy_version for p in reversed(planners) if p.policy_version), None)
    record.policy_assigned = next((p.policy_version for p in record.rounds if p.policy_version), None)


def as_payload(record: RolloutRecord) -> Mapping[str, Any]:
    """The journal's payload of a rollout: nested plain dicts and lists, sharing what is plain already."""
    payload = _plain(record)
    payload["rounds"] = [_plain(one) for one in record.rounds]
    payload["steps"] = steps = [_plain(step) for step in record.steps]
    for plain, step in zip(steps, record.steps, strict=True):
        plain["attempts"] = [_attempt(one) for one in step.attempts]
    return payload


def _attempt(record: AttemptRecord) -> dict[str, Any]:
    """An attempt; `worker`, `verdict`, `cut`, `summary`, `tool` and `named` only where it has them."""
    plain = _plain(record)
    for name in _RARE:
        if plain[name] is None:
            del plain[name]
    return plain


_RARE = ("worker", "verdict", "cut", "summary", "tool", "named")


def _plain(record: RolloutRecord | RoundRecord | StepRecord | AttemptRecord) -> dict[str, Any]:
    names, values = _FIELDS[type(record)]
    return dict(zip(names, values(record), strict=True))


_FIELDS = {  # of each kind of record: the names of its fields, and what reads all of them at once
    kind: (names, attrgetter(*names))
    for kind in (RolloutRecord, RoundRecord, StepRecord, AttemptRecord)
    for names in [tuple(one.name for one in fields(kind))]
}


def plan_probability(logprobs: Sequence[float | None], mask: Sequence[bool]) -> float | None:
    """The probability of a sampled plan: over its decision tokens, under the grammar's mask. None where the log has no
    log-prob for each of them, or a plan that could not be sampled."""
    if not logprobs or len(logprobs) != len(mask):
        return None
    total = 0.0
    for logprob, decides in zip(logprobs, mask, strict=True):
        if not decides:
            continue
        if logprob is None or not math.isfinite(logprob) or logprob > 0:
            return None
        total += logprob
    return math.exp(total)


@cache
def own_codes() -> frozenset[str]:
    """The codes of all errors. A worker's error may carry another code, which the worker chose."""
    codes, classes = {"cancelled"}, [BatonError]
    for one in classes:
        codes |= {one.code} if one.code else set()
        classes += one.__subclasses__()
    return frozenset(codes)
