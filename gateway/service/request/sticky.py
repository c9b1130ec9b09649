"""Turns that go back to the worker that asked, without planning, and those that are planned anew.

A turn with the results of tool calls goes to the worker that made the calls. A turn that continues a conversation
inside the window goes to the worker that answered last: the provider's prompt cache and the tools' state are warm
there. What speaks against it is in core/loop/turns/replanning.py; then the planner is shown which worker is warm, and
what leaving it costs. Where that worker has left the pool, is no longer allowed to the key, or fails before its first
word, the request is planned like any other. The record says which it was, and why. Nothing here can fail a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.log.rollout import RolloutRecord, RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.experience.bandit import mean_success
from gateway.core.loop.experience.likeness import content_text, question_text
from gateway.core.loop.plan import Plan, Step
from gateway.core.loop.turns.marks import Marker
from gateway.core.loop.turns.replanning import (
    Expected,
    Left,
    Replanning,
    TurnFacts,
    better_worker,
    cache_worth_nano,
    cap_in_sight,
    distance,
    fault_of,
    has_intent,
    has_tool_error,
)
from gateway.core.money.amounts import input_tokens_bound
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import BatonError, DeadlineExceeded, UpstreamError
from gateway.service.loop.routers import arms_of, worth_of
from gateway.service.loop.spending.charges import price_of
from gateway.service.loop.state import EarlyStart, LastAnswer, Loop, Situation, StepRun, Warm
from gateway.service.ports.request import RequestMetrics
from gateway.service.ports.turns import Conversations, TurnMarks

NAME = "sticky"
Embed = Callable[[str], Awaitable[Sequence[float]]]
LookUp = Callable[[], Awaitable[None]]
Grounds = dict[str, Any]  # why a turn is planned anew, for the record: `why`, and what that rests on


class StickyPlanner:
    """Plans one step: the conversation goes to the worker that asked."""

    name = NAME

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Always the same one step."""
        return Plan((Step(self.spec.handle, None),))


@dataclass(frozen=True, slots=True)
class Sticky:
    """Finds and remembers the worker of a conversation.

    `window_s`: seconds after a reply in which a conversation goes back to its worker; 0: never. `tools_s`: the same for
    tool results, which take longer. `secret` signs the marks.
    """

    conversations: Conversations
    metrics: RequestMetrics
    secret: bytes
    window_s: float
    tools_s: float
    timeout_s: float
    rules: Replanning = field(default_factory=Replanning)

    async def planner(self, loop: Loop, embed: Embed, look_up: LookUp) -> StickyPlanner | None:
        """A planner that only routes back to the worker of the previous turn; None where the turn must be planned.

        `embed` makes the vector of a text; `look_up` reads the loop's experience. Both may raise BatonError, or let the
        time run out; then the turn goes back as if they had said nothing."""
        if loop.fallback is None or not loop.sticky:  # a worker by name needs no way back
            return None
        record = loop.record
        conversation, model = record.request["messages"], record.policy_requested
        marks, has_results = self._marker(record).marks_of_last_turn(conversation, model)
        if not marks or not (self.tools_s if has_results else self.window_s):
            return None
        try:
            async with asyncio.timeout(self.timeout_s):
                last = await self.conversations.find(record.key_id, marks)
        except (TimeoutError, BatonError):
            self.metrics.degraded(NAME)
            return None
        if last is None:
            return None
        known = (*loop.workers, *loop.pool_workers)  # it need not be a candidate of a large pool
        spec = next((spec for spec in known if spec.name == last.worker and spec.kind in MODEL_KINDS), None)
        if spec is None:
            record.turn = {"worker": last.worker, "kept": False, "why": "worker_gone"}
            return None
        if spec not in loop.workers:
            loop.workers = (*loop.workers, spec)
        times = dict.fromkeys(marks, self.tools_s if has_results else self.window_s)
        loop.last = LastAnswer(spec.name, last.facts, times)
        return await self._decide(loop, spec, last.facts, has_results, embed, look_up)

    # ------------------------------------------------------------ back, or planned anew

    async def _decide(
        self, loop: Loop, spec: WorkerSpec, facts: TurnFacts, has_results: bool, embed: Embed, look_up: LookUp
    ) -> StickyPlanner | None:
        worth = cache_worth_nano(price_of(spec), facts.prefix_tokens)
        kept: Grounds = {"why": "tool_results" if has_results else "conversation"}
        against = await self._against(loop, spec, facts, worth, kept, embed, look_up)
        cache = {"prefix_tokens": facts.prefix_tokens, "worth_nano": worth}
        loop.record.turn = {"worker": spec.name, "kept": against is None, **(against or kept), **cache}
        if against is None:
            return StickyPlanner(spec)
        loop.warm = Warm(spec.name, spec.handle, worth, str(against["why"]))
        return None

    async def _against(
        self,
        loop: Loop,
        spec: WorkerSpec,
        facts: TurnFacts,
        worth: int,
        kept: Grounds,
        embed: Embed,
        look_up: LookUp,
    ) -> Grounds | None:
        """What speaks against going back; None: nothing. What was measured all the same is added to `kept`."""
        triggers, rules = self.rules.triggers, self.rules
        if "failure" in triggers and facts.fault is not None:
            return {"why": "failure", "fault": facts.fault}
        if "tool_error" in triggers and has_tool_error(loop.record.request["messages"]):
            return {"why": "tool_error"}
        if "cap" in triggers and (cap := cap_in_sight(facts, _left(loop, spec), rules.turns_left)):
            return {"why": "cap", "cap": cap}
        if "intent" in triggers and rules.distance_max is not None:
            far = await self._distance(loop, facts, embed)
            kept |= {} if far is None else {"distance": round(far, 3)}
            if far is not None and far > rules.distance_max:
                return {"why": "intent", "distance": round(far, 3)}
        if "better" in triggers:
            await look_up()
            models = [spec for spec in loop.workers if spec.kind in MODEL_KINDS]
            right = worth_of(arms_of(models, loop.experience, None), loop.stakes, loop.quality)
            if better := better_worker(_expected(loop), spec.name, worth, rules, right):
                return {"why": "better", "better": better}
        return None

    async def _distance(self, loop: Loop, facts: TurnFacts, embed: Embed) -> float | None:
        """How far the last user message is from the one that was planned for last. None where they are one message, the
        client no longer sends the earlier one, the new one is too short to say what it wants, or the embedder is
        away."""
        conversation, marker = loop.record.request["messages"], self._marker(loop.record)
        text = question_text(conversation)
        if facts.planned is None or facts.planned == marker.mark_question(conversation) or not has_intent(text):
            return None
        planned = marker.find_question(conversation, facts.planned)
        if planned is None:
            return None
        try:
            async with asyncio.timeout(self.timeout_s):
                return distance(await embed(content_text(planned.get("content"))), await embed(text))
        except (TimeoutError, BatonError):
            self.metrics.degraded(NAME)
            return None

    # ------------------------------------------------------------ for the next turn

    def mark(self, loop: Loop, body: Mapping[str, Any]) -> TurnMarks | None:
        """Note in the record which worker answered, the marks by which the next turn finds it, and what that turn is
        judged by. None where no turn can go back: a tool's reply, or a worker that the client named."""
        record, run = loop.record, _last_answer(loop, body)
        worker = None if run is None else _worker_of(loop, run)
        if run is None or worker is None or loop.fallback is None:
            return None
        replies = [choice["message"] for choice in body.get("choices") or () if isinstance(choice.get("message"), dict)]
        turn_marks, call_marks = self._marker(record).mark_replies(
            record.request["messages"], record.policy_requested, replies
        )
        turn_s = self.tools_s if call_marks else self.window_s
        marks = dict.fromkeys(turn_marks, turn_s) | dict.fromkeys(call_marks, self.tools_s)
        marks = {mark: seconds for mark, seconds in marks.items() if seconds}
        return self._noted(record, worker, marks, self._facts(loop, run, body))

    def mark_failure(self, loop: Loop, error: BatonError | None) -> TurnMarks | None:
        """The same for a turn that went back to a worker and failed there: when the client asks again, it is planned.
        None for any other."""
        if loop.last is None or not (loop.record.turn or {}).get("kept"):
            return None
        if not isinstance(error, UpstreamError | DeadlineExceeded):
            return None
        facts = replace(loop.last.facts, fault=error.code)
        return self._noted(loop.record, loop.last.worker, loop.last.marks, facts)

    def _noted(self, record: RolloutRecord, worker: str, marks: Mapping[str, float], facts: TurnFacts) -> TurnMarks:
        record.answered_by, record.marks, record.facts = worker, dict(marks), facts.as_json()
        return TurnMarks(record.key_id, record.id, worker, marks, facts)

    def _facts(self, loop: Loop, run: StepRun, body: Mapping[str, Any]) -> TurnFacts:
        record, conversation = loop.record, loop.record.request["messages"]
        kept = loop.last is not None and (record.turn or {}).get("kept")
        planned = loop.last.facts.planned if loop.last is not None and kept else None
        return TurnFacts(
            planned=planned or self._marker(record).mark_question(conversation),
            fault=fault_of(body, record.capped),
            prefix_tokens=_prefix_tokens(run, input_tokens_bound(conversation)),
            completion_tokens=run.record.completion_tokens,
            cost_nano=run.record.cost_nano,
            calls=max(1, run.dispatches),
        )

    async def remember(self, answered: TurnMarks) -> None:
        """Store the answer for the next turn, in bounded time. The log has it too."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.conversations.remember(answered)
        except (TimeoutError, BatonError):
            self.metrics.degraded(NAME)

    def _marker(self, record: RolloutRecord) -> Marker:
        return Marker(self.secret, record.key_id)


def _left(loop: Loop, spec: WorkerSpec) -> Left:
    """What is left for a turn that goes back to this worker."""
    room = spec.context_tokens - input_tokens_bound(loop.conversation) // BYTES_PER_TOKEN
    return Left(
        nano=loop.tree.meter.known_nano,
        calls=loop.caps.calls if loop.tree.calls_hold_id is not None else None,
        tokens=room if "context_tokens" in spec.model_fields_set else None,
    )


def _expected(loop: Loop) -> dict[str, Expected]:
    """What experience expects of the loop's model workers."""
    models = {spec.name for spec in loop.workers if spec.kind in MODEL_KINDS}
    return {
        name: Expected(past.n, mean_success(past), past.cost_nano_mean, past.latency_ms_mean / 1000)
        for name, past in loop.experience.items()
        if name in models
    }


def _prefix_tokens(run: StepRun, most: int) -> int:
    """The tokens of a call's prompt that the worker has cached after it: those that it reports as read from its cache
    or written to it where it reports writing, else all of them; `most` at most, since a step may have made several
    calls."""
    details = run.record.usage_details or {}
    written = details.get("cache_write_tokens")
    tokens = run.record.prompt_tokens if written is None else written + details.get("cached_tokens", 0)
    return min(tokens, most)


def _last_answer(loop: Loop, body: Mapping[str, Any]) -> StepRun | None:
    """The step whose reply the client gets."""
    answered = [run for run in loop.runs if run.body is not None and run.error is None]
    return next((run for run in reversed(answered) if run.body is body), answered[-1] if answered else None)


def _worker_of(loop: Loop, run: StepRun) -> str | None:
    """The model worker that wrote a step's reply; of a child loop's reply, the worker inside it."""
    if run.spec.kind != "self":
        return run.spec.name if run.spec.kind in MODEL_KINDS else None
    child_id: str | None = run.record.child_rollout_id
    while child_id is not None:
        child = next((one for one in loop.tree.children if one.id == child_id), None)
        done = [step for step in child.steps if step.status == "done"] if child is not None else []
        if not done:
            return None
        child_id = done[-1].child_rollout_id
        if child_id is None:
            return done[-1].worker if done[-1].kind in MODEL_KINDS else None
    return None
