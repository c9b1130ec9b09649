"""Turns that go back to the worker that asked, without planning.

A turn with the results of tool calls goes to the worker that made the calls. A turn that continues a conversation
inside the window goes to the worker that answered last: the provider's prompt cache and the tools' state are warm
there. Where that worker has left the pool, is no longer allowed to the key, or fails before its first word, the
request is planned like any other. Nothing here can fail a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.log.rollout import RolloutRecord, RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.plan import Plan, Step
from gateway.core.loop.turns import Marker
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import BatonError
from gateway.service.loop.state import EarlyStart, Loop, Situation, StepRun
from gateway.service.ports.request import RequestMetrics
from gateway.service.ports.turns import Conversations, TurnMarks

NAME = "sticky"


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

    async def planner(self, loop: Loop) -> StickyPlanner | None:
        """A planner that only routes back to the worker of the previous turn; None where the turn must be planned."""
        if loop.fallback is None or not loop.sticky:  # a worker by name needs no way back
            return None
        record = loop.record
        conversation, model = record.request["messages"], record.policy_requested
        marks, has_results = self._marker(record).marks_of_last_turn(conversation, model)
        if not marks or not (self.tools_s if has_results else self.window_s):
            return None
        try:
            async with asyncio.timeout(self.timeout_s):
                name = await self.conversations.find(record.key_id, marks)
        except (TimeoutError, BatonError):
            self.metrics.degraded(NAME)
            return None
        spec = next((spec for spec in loop.workers if spec.name == name and spec.kind in MODEL_KINDS), None)
        return None if spec is None else StickyPlanner(spec)

    def mark(self, loop: Loop, body: Mapping[str, Any]) -> TurnMarks | None:
        """Note in the record which worker answered, and the marks by which the next turn finds it. None where no turn
        can go back: a tool's reply, or a worker that the client named."""
        record, worker = loop.record, _author(loop, body)
        if worker is None or loop.fallback is None:
            return None
        replies = [choice["message"] for choice in body.get("choices") or () if isinstance(choice.get("message"), dict)]
        turn_marks, call_marks = self._marker(record).mark_replies(
            record.request["messages"], record.policy_requested, replies
        )
        turn_s = self.tools_s if call_marks else self.window_s
        marks = dict.fromkeys(turn_marks, turn_s) | dict.fromkeys(call_marks, self.tools_s)
        marks = {mark: seconds for mark, seconds in marks.items() if seconds}
        record.answered_by, record.marks = worker, marks
        return TurnMarks(record.key_id, record.id, worker, marks)

    async def remember(self, answered: TurnMarks | None) -> None:
        """Store the answer for the next turn, in bounded time. The log has it too."""
        if answered is None:
            return
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.conversations.remember(answered)
        except (TimeoutError, BatonError):
            self.metrics.degraded(NAME)

    def _marker(self, record: RolloutRecord) -> Marker:
        return Marker(self.secret, record.key_id)


def _author(loop: Loop, body: Mapping[str, Any]) -> str | None:
    """The model worker that wrote the reply; in a child loop's reply, the worker inside it."""
    answered = [run for run in loop.runs if run.body is not None and run.error is None]
    run = next((run for run in reversed(answered) if run.body is body), answered[-1] if answered else None)
    return None if run is None else _worker_of(loop, run)


def _worker_of(loop: Loop, run: StepRun) -> str | None:
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
