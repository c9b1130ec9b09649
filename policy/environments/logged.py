"""Logged rollouts as an environment: no new samples, only what was really sampled, run and judged.

A prompt's only plan is the one in the log, with the log-probs its tokens were sampled with. Importance weights need
them, so a rollout without is refused by name: with guessed ones a single round of training destroyed a policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord
from gateway.core.loop.plan import REASONS
from gateway.core.openai.reply import reply_text
from policy.environments.base import Episode, PlanSource, Posed, Prompt, Split, fraction, split_of
from policy.environments.replay import VALIDATION_SHARE
from policy.environments.spend import Spend

REFUSALS: Mapping[str, str] = {
    "child_loop": "a child loop has no outcome of its own",
    "not_for_training": "its owner said `train: false`",
    "no_outcome": "nobody judged it, or not with a number from 0 to 1",
    "no_conductor": "a router planned it",
    "no_logprobs": "its plan was logged without token ids and log-probs: serve with --logprobs-mode processed_logprobs",
}


@dataclass(frozen=True, slots=True)
class Logged:
    """A rollout with its outcome (None: none came) and the records of its child loops."""

    record: RolloutRecord
    outcome: float | None
    children: tuple[RolloutRecord, ...] = ()


class LoggedEnvironment:
    """What can be trained on of some rollouts. `refused`: the others, rollout id → reason, a key of REFUSALS. Raises
    ValueError where nothing is left."""

    name = "logged"

    def __init__(self, rollouts: Sequence[Logged], *, validation_share: float = VALIDATION_SHARE) -> None:
        self.spend = Spend()  # nothing is spent here: all of it was, when it was served
        self._validation_share = validation_share
        reasons = {each.record.id: refusal(each) for each in rollouts}
        self.refused = {rollout: reason for rollout, reason in reasons.items() if reason is not None}
        self._usable = [each for each in rollouts if reasons[each.record.id] is None]
        if not self._usable:
            counts = Counter(self.refused.values())
            told = "; ".join(f"{count} × {name} ({REFUSALS[name]})" for name, count in sorted(counts.items()))
            raise ValueError(f"no rollout can be trained on: {told or 'none was given'}")

    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """As in the port. The pool is empty: who was in it, in which order, is in the record."""
        mine = [each for each in self._usable if split_of(each.record.id, self._validation_share) == split]
        if n > len(mine):
            raise ValueError(f"{n} {split} rollouts asked for, {len(mine)} are there: lower the number")
        ranked = sorted(mine, key=lambda each: fraction("prompts", seed, each.record.id))
        return [_prompt(each) for each in ranked[:n]]

    def situation(self, prompt: Prompt, rng: Random, k_of_n: int | None = None, redraw_handles: bool = False) -> Posed:
        """Raises ValueError, always: a logged prompt was put to a policy once, and `rounds` says how."""
        raise ValueError("a logged prompt cannot be posed anew; use `rounds`, or another environment to sample in")

    def rounds(self, prompt: Prompt) -> list[RoundRecord]:
        """The conductor's planning calls, in order: prompt, token ids, log-probs, decision mask, policy version."""
        return [planned for planned in _truth(prompt).record.rounds if planned.plan_token_ids]

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """The logged episode, for the logged plan. Raises ValueError for any other: nobody knows what it would give."""
        logged = _truth(prompt)
        first = self.rounds(prompt)[0]
        if source != first.plan_text:
            raise ValueError(f"rollout {prompt.id} was not logged with this plan, and `logged` runs none")
        record = logged.record
        steps = [*record.steps, *(step for child in logged.children for step in child.steps)]
        refusals = {planned.refusal for loop in (record, *logged.children) for planned in loop.rounds} - {None}
        return Episode(
            prompt_id=prompt.id,
            sample=sample,
            plan=first.plan_text or "",
            parsed=not refusals & (REASONS | {"unparseable"}),
            outcome=logged.outcome or 0.0,
            cost_nano=record.cost_nano,
            latency_s=(record.finished_us - record.created_us) / 1e6,
            calls=sum(len(step.attempts) for step in steps),
            steps=len(steps),
            workers=tuple(step.worker for step in steps),
            record=record,
            children=logged.children,
            reply=reply_text(record.reply or {}),
            error=None if record.error is None else record.error.get("code"),
        )

    async def run(self, prompt: Prompt, plans: Sequence[PlanSource]) -> list[Episode]:
        """As in the port; every plan must be the logged one."""
        return [await self.episode(prompt, plan, index) for index, plan in enumerate(plans)]


def refusal(logged: Logged) -> str | None:
    """Why a rollout cannot be trained on, by name; None where it can."""
    record = logged.record
    planned = [each for each in record.rounds if each.planner == "conductor"]
    checks = (
        ("child_loop", record.parent_id is None),
        ("not_for_training", record.train),
        ("no_outcome", logged.outcome is not None and 0 <= logged.outcome <= 1),
        ("no_conductor", bool(planned)),
        ("no_logprobs", all(_whole(each) for each in planned)),
    )
    return next((name for name, holds in checks if not holds), None)


def _whole(planned: RoundRecord) -> bool:
    tokens = len(planned.plan_token_ids)
    return tokens > 0 and len(planned.plan_logprobs) == len(planned.decision_mask) == tokens


def read_record(payload: Mapping[str, Any]) -> RolloutRecord:
    """The inverse of `core.log.rollout.as_payload`: a journal's payload → the record. Raises TypeError on other
    keys."""
    rounds = [RoundRecord(**planned) for planned in payload["rounds"]]
    steps = [
        StepRecord(**{**step, "attempts": [AttemptRecord(**attempt) for attempt in step["attempts"]]})
        for step in payload["steps"]
    ]
    return RolloutRecord(**{**payload, "rounds": rounds, "steps": steps})


def _prompt(logged: Logged) -> Prompt:
    record = logged.record
    messages = tuple(record.request.get("messages") or ())
    return Prompt(record.id, messages, (), "", record.task_type, record.task_type, truth=logged)


def _truth(prompt: Prompt) -> Logged:
    if not isinstance(prompt.truth, Logged):
        raise ValueError(f"prompt {prompt.id} is not a logged one")
    return prompt.truth
