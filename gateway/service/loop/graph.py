"""The steps of one round: they start while the plan is still being decoded, and run as what they see allows."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from gateway.core.log.rollout import RoundRecord, StepRecord
from gateway.core.loop.plan import Plan, Step
from gateway.errors import MoneyUnavailable, SpoolFull
from gateway.service.loop.state import EarlyStart, Loop, Planner, Situation, StepRun
from gateway.service.loop.steps import StepRunner

FATAL = (MoneyUnavailable, SpoolFull)  # without money or a log nothing may run, not even the fallback


@dataclass(slots=True)
class RoundGraph:
    """The steps of one round as tasks. Steps are added while the plan is still being decoded."""

    steps: StepRunner
    loop: Loop
    record: RoundRecord
    final: bool
    first: int = 0  # the index of the round's first step

    async def run(self, planner: Planner, situation: Situation, now_us: Any) -> StepRun | None:
        """Plan and run every step. Returns the last step when all have ended. A refused plan cancels the steps that
        have started."""
        self.first = len(self.loop.runs)
        tasks: list[asyncio.Task[None]] = []

        def early(step: Step) -> None:
            tasks.append(asyncio.create_task(self._start(step, answers=False, last=False)))

        self.record.allowed = situation.allowed.as_json()
        try:
            plan = await self._plan(planner, situation, early)
            self.record.plan, self.record.finished_us = plan.as_json(), self.record.finished_us or now_us()
            why = {"why": plan.why} if plan.why else {}
            self.loop.tell("planned", round=self.record.round, by=self.record.planner, steps=len(plan.steps), **why)
            if len(plan.steps) == 1 and not tasks:
                await self._start(plan.steps[0], answers=plan.may_answer(0, self.first), last=True)
            else:
                self._start_rest(plan, tasks)
                await asyncio.gather(*tasks)
        finally:
            if left := [task for task in tasks if not task.done()]:
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
        for run in self.loop.runs[self.first :]:
            if isinstance(run.error, FATAL):
                raise run.error
        return self._last() if plan.steps else None

    async def _plan(self, planner: Planner, situation: Situation, early: EarlyStart) -> Plan:
        """The plan of the round. Where plans are saved, no step starts before its plan is."""
        meter, points = self.loop.tree.meter, self.loop.tree.checkpoints
        if points is None:
            return await planner.plan(situation, self.record, meter, early)
        return await points.planned(
            self.loop, self.record, lambda: planner.plan(situation, self.record, meter, lambda step: None)
        )

    def _last(self) -> StepRun:
        """The step whose reply is the plan's answer: the candidate of the verdict that ended the plan, else the last
        step that ran."""
        runs = self.loop.runs[self.first :]
        end = next((run for run in runs if run.verdict is not None and run.taken is None), None)
        if end is not None:
            candidate = self.loop.runs[end.index - 1]
            candidate.accepted = end.verdict is not None and end.verdict.accept is True
            return candidate
        ran = [run for run in runs if run.step.verify is None and run.record.status != "skipped"]
        return ran[-1] if ran else runs[-1]

    def _start_rest(self, plan: Plan, tasks: list[asyncio.Task[None]]) -> None:
        started = len(tasks)
        for offset, step in enumerate(plan.steps[started:], start=started):
            answers = plan.may_answer(offset, self.first)
            last = offset == len(plan.steps) - 1
            tasks.append(asyncio.create_task(self._start(step, answers=answers, last=last)))

    def _start(self, step: Step, *, answers: bool, last: bool) -> Coroutine[Any, Any, None]:
        """Add a step. Returns what runs it."""
        spec = next(spec for spec in self.loop.workers if spec.handle == step.worker)
        index = len(self.loop.runs)
        record = StepRecord(
            self.record.round, index, spec.name, spec.handle, spec.kind, spec.version, step.task, list(step.see)
        )
        streams = answers and last and self.final and self.loop.sink is not None and step.is_plain
        gates = tuple(run.index for run in self.loop.runs[self.first :] if run.step.verify is not None)
        run = StepRun(index, step, spec, record, answers, streams, gates)
        self.loop.runs.append(run)
        self.loop.record.steps.append(record)
        return self.steps.run(self.loop, run, answers=answers, streams=streams)
