"""`ranks`, a policy to compare with: the programs by rank themselves, without the model that learns them."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.experience.likeness import question_text
from gateway.core.loop.plan import Plan
from gateway.core.loop.prompt import DIAL
from gateway.service.loop.routers import models_of
from gateway.service.loop.state import EarlyStart, Situation
from policy.start.recorded.lessons import ProgramPlanner
from policy.start.recorded.ranks import in_order, ranks
from policy.statistics.tuning import NEIGHBOURS, Nearest, Observation


class RankPlanner:
    """Asks the workers by their place in the list that the prompt `ranked` would show at one place of the dial: what a
    student of these programs can reach by reading alone."""

    name = "ranks"

    def __init__(self, observed: Sequence[Observation], usd_weight: float = 0.0) -> None:
        """`usd_weight`: what a dollar takes off a right answer; the place of the dial is the nearest. Raises ValueError
        on no question."""
        self._near = Nearest(observed, NEIGHBOURS)
        self._choices = ranks(observed, self._near, (1, max(len(each.results) for each in observed)), lambda _: None)
        self._place = min(range(len(DIAL)), key=lambda place: abs(DIAL[place] - usd_weight))

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises nothing."""
        names = [spec.name for spec in models_of(situation)]
        seen = self._near.of(question_text(situation.conversation))
        program = self._choices.best(self._place, "", in_order(names, seen, self._place))
        plan = await ProgramPlanner(program).plan(situation, record, meter, early)
        return Plan(plan.steps[: situation.allowed.steps_max])  # with less than it needs, the likeliest workers alone
