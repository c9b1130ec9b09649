"""A program as a policy: its plan for each round, from what the situation shows and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.plan import Plan, Step
from gateway.core.loop.prompt import most_agreeing
from gateway.core.pool.workers import MODEL_KINDS, VOTE_URL
from gateway.service.loop.routers import SHIP
from gateway.service.loop.state import EarlyStart, Situation
from policy.start.recorded.programs import Program


@dataclass(frozen=True, slots=True)
class Told:
    """A prompt's situation and the plan that the program has for it."""

    situation: Situation
    plan: Plan


class ProgramPlanner:
    """Carries one program out. `told`: every situation it was put in, with its plan, in order."""

    name = "teacher"

    def __init__(self, program: Program) -> None:
        self._program = program
        self.told: list[Told] = []

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises nothing: workers that are not offered are left out, and with nobody left it ships."""
        plan = self._plan(situation)
        self.told.append(Told(situation, plan))
        return plan

    def _plan(self, situation: Situation) -> Plan:
        program = self._program
        if situation.round == 1:
            first = self._handles(situation, program.first)
            polled = len(first) > 1 and (not program.enough or situation.final)
            return Plan((*_asked(first), *(_vote(situation, len(first)) if polled else ())))
        if situation.round > 2 or not program.enough:
            return SHIP
        if len(most_agreeing(situation.replies)) >= program.enough:
            return Plan(_vote(situation, 0))  # of those that agree the first asked one's reply, not the last one's
        then = self._handles(situation, program.then)
        return Plan((*_asked(then), *(_vote(situation, len(then)) if program.poll else ())))

    def _handles(self, situation: Situation, names: Sequence[str]) -> list[str]:
        offered = {spec.name: spec.handle for spec in situation.workers if spec.kind in MODEL_KINDS}
        return [offered[name] for name in names if name in offered]


def _asked(handles: Sequence[str]) -> tuple[Step, ...]:
    return tuple(Step(handle, None) for handle in handles)


def _vote(situation: Situation, asked: int) -> tuple[Step, ...]:
    """The step that gives the majority of all replies so far and of the `asked` steps before it; none without vote."""
    tool = next((spec.handle for spec in situation.workers if spec.url == VOTE_URL), None)
    return () if tool is None else (Step(tool, None, tuple(range(situation.allowed.first_index + asked))),)
