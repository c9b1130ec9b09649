"""One planning call as training data: what was asked, sampled and run, and what came of the request.

Money in nano-dollars, durations in milliseconds, times in UTC. A request is a root rollout with its child loops: they
share its outcome, cost and latency, since nobody judges a child loop by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from gateway.core.loop.evidence.sources import CLIENT, JUDGE, PERSON, is_explicit
from gateway.core.loop.replies.verdicts import StepVerdict

Side = Literal["train", "validation"]
RULE = "rule"
Call = tuple[str, int]  # (rollout id, round): the key of a planning call


@dataclass(frozen=True, slots=True)
class Rating:
    """One outcome with a value in [0, 1]."""

    value: float
    source: str
    grader_version: str | None = None
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class OutcomeValue:
    """All judgements of a request as one number, see `settle`. `value` is None where `n` is 0."""

    value: float | None = None
    n: int = 0  # judgements behind the value
    sources: tuple[str, ...] = ()  # theirs, sorted
    grader_versions: tuple[str, ...] = ()  # theirs, sorted
    metadata: Mapping[str, str] = field(default_factory=dict)  # theirs; where two name the same pair, the latest


def settle(judgements: Sequence[Rating], sources: Sequence[str] = ()) -> OutcomeValue:
    """The mean of the judgements, oldest first, of the first source that has any. With `sources`, those alone count, in
    that order; without, people come first, then the client, then all others that post outcomes (graders) together, then
    judges. A signal counts only where it is named."""
    others = {one.source for one in judgements} - {PERSON, CLIENT}
    posted = sorted(name for name in others if is_explicit(name))
    judges = sorted(name for name in others if name.startswith(JUDGE))
    ranks: Sequence[Sequence[str]] = [(name,) for name in sources] or [(PERSON,), (CLIENT,), posted, judges]
    for rank in ranks:
        decisive = [one for one in judgements if one.source in rank]
        if decisive:
            return OutcomeValue(
                sum(one.value for one in decisive) / len(decisive),
                len(decisive),
                tuple(sorted({one.source for one in decisive})),
                tuple(sorted({one.grader_version for one in decisive if one.grader_version})),
                {name: text for one in decisive for name, text in (one.metadata or {}).items()},
            )
    return OutcomeValue()


@dataclass(frozen=True, slots=True)
class StepRow:
    """One worker call of the plan. `latency_ms` is None where it never ended."""

    step: int
    worker: str
    handle: str
    kind: str
    worker_version: str
    task: str | None
    see: tuple[int, ...]
    status: str
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    cost_nano: int
    latency_ms: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One planning call. Token arrays have one element a token and are empty where the log has none."""

    rollout_id: str
    round: int
    root_id: str  # the request's own rollout; equal to rollout_id at depth 0
    parent_id: str | None
    depth: int
    created_at: datetime
    key_id: str
    log_mode: str
    pool_name: str
    pool: Sequence[Mapping[str, Any]]  # as shown, in order
    caps: Mapping[str, Any]  # of the request, with the dial where it set one
    workers_used: tuple[tuple[str, str], ...]  # (worker, version) of the whole request, sorted
    task_type: str | None
    tags: Mapping[str, str]
    group: str  # equal for requests with the same question
    request_messages: Sequence[Mapping[str, Any]]  # the client's conversation; of a child loop its task
    messages: Sequence[Mapping[str, str]]  # the conductor's prompt
    prompt_token_ids: Sequence[int]
    plan_token_ids: Sequence[int]
    plan_logprobs: Sequence[float]
    decision_mask: Sequence[bool]
    plan_text: str | None
    plan: Mapping[str, Any] | None
    sampling: Mapping[str, Any]
    schema_hash: str | None
    allowed: Mapping[str, Any] | None  # `core.loop.plan.PlanLimits` as JSON; None: logged before the log had it
    quality: int | None  # the dial as the prompt showed it; None: it showed none
    prompt_version: str | None
    prompt_hash: str | None
    planner: str
    policy_version: str | None
    steps: tuple[StepRow, ...]  # of this plan
    outcome: float | None  # of the request, in [0, 1]
    outcome_n: int
    outcome_sources: tuple[str, ...]
    grader_versions: tuple[str, ...]
    outcome_metadata: Mapping[str, str]
    cost_nano: int  # of the request
    latency_ms: float | None  # of the request; None where it never ended
    status: str
    fallback: str | None
    capped: str | None
    refusal: str | None  # why this plan was not used
    split: Side = "train"
    replies: Sequence[Mapping[str, Any]] = ()  # `ShownReply` of every step up to this plan's last, as JSON
    demonstration: str | None = None  # what a person says the request should have given: an answer, or a plan
    verdicts: tuple[StepVerdict, ...] | None = None  # of the request; None: exported before exports had them
    turn: Mapping[str, Any] | None = None  # of a conversation that went on, else empty; None: exported before
    shown: Mapping[str, Any] | None = None  # `PromptInput.guidance` of this round; None: its prompt showed none of it
    decision: Mapping[str, Any] | None = None  # of a router, with the propensities of its arms; None: there is none

    @property
    def call(self) -> Call:
        """Its key."""
        return self.rollout_id, self.round

    @property
    def propensity(self) -> float | None:
        """The probability with which the rule drew this plan, as the only one of its request; None of any other
        plan."""
        alone = self.planner == RULE and self.round == 1 and self.depth == 0 and self.fallback is None and self.parsed
        drawn = (self.decision or {}).get("propensity") if alone and self.plan is not None else None
        return float(drawn) if drawn and 0 < drawn <= 1 else None

    @property
    def parsed(self) -> bool:
        """Whether the plan was well-formed and within its caps."""
        return self.refusal is None
