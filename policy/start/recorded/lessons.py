"""Lessons: what a program plans in each prompt it meets, on training questions and at every place of the dial.

Episodes run through the environment, so a prompt is what the server would show in that state, later rounds included.
Now and then another good beginning than the best is taken: a model that strays has then been told how to go on, and
stays undecided enough for reinforcement learning to find out what search could not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.experience.likeness import question_text
from gateway.core.loop.plan import Plan, PlanLimits, Step
from gateway.core.loop.prompt import Profile, render
from gateway.core.loop.shown import ShownReply, most_agreeing
from gateway.core.pool.workers import MODEL_KINDS, VOTE_URL, WorkerSpec
from gateway.service.loop.conducting import prompt_input
from gateway.service.loop.routers import SHIP
from gateway.service.loop.state import EarlyStart, Situation
from policy.environments.base import Environment, Prompt, draw_pool
from policy.environments.sampling import SamplingProgress, sample
from policy.simulators import HANDLES
from policy.start.recorded.programs import Program
from policy.start.recorded.ranks import in_order
from policy.statistics.tuning import Nearest

PROFILE: Profile = "dial"
STRAY_SHARE = 0.2  # of episodes begin otherwise than the best program does
BEGINNINGS = 12
BARE_SHARE = 0.3  # of episodes are shown no experience
GOING_ON = 2  # times is a later round taught that asks more workers: it is the rarer case, and the one that pays
LAST_ROUND = 3
CHECK_TAG, VALID = "check", "valid"  # of the tool, and what it says of an answer that it accepts
LAST_ROUND_SHARE = 0.3  # of third rounds are taught: they only ever ship


@dataclass(frozen=True, slots=True)
class PlanLesson:
    """A rendered prompt and the plan that belongs under it. Lessons of one `posed` number are of one question with one
    pool as shown, so their prompts share a beginning."""

    messages: Sequence[Mapping[str, str]] = field(compare=False)
    prompt: str  # the text of the user message
    plan: Plan
    allowed: PlanLimits = field(compare=False)
    posed: int = 0

    @property
    def text(self) -> str:
        """The plan as the server's grammar lets it through: JSON without white space."""
        return json.dumps(self.plan.as_json(), separators=(",", ":"), ensure_ascii=False)


class Teacher(Protocol):
    """Which program is right at each of the `places` of the dial, by the names of the workers that are offered, the
    likeliest first."""

    places: int

    def best(self, place: int, category: str, names: Collection[str]) -> Program:
        """Raises KeyError where no program needs these workers alone. A teacher may do without the category."""
        ...

    def other(self, place: int, category: str, names: Collection[str], n: int, rng: Random) -> Program:
        """One of the `n` next best."""
        ...


@dataclass(frozen=True, slots=True)
class Posing:
    """How a question is posed to the teacher. `near`: where the shown experience comes from; a question never counts
    for itself. `k_of_n`, `redraw_handles`: as in training (`draw_pool`). `places`: of the dial, at which one posed
    question is taught. `bare_share` of the questions are shown no experience; `stray_share` of the episodes begin
    otherwise than the best program does."""

    profile: Profile = PROFILE
    near: Nearest | None = None
    k_of_n: tuple[int, int] | None = None
    redraw_handles: bool = False
    places: int = 1
    bare_share: float = BARE_SHARE
    stray_share: float = STRAY_SHARE


async def lessons(
    environment: Environment,
    prompts: Sequence[Prompt],
    choices: Teacher,
    posing: Posing,
    episodes: int,
    seed: int,
    on_progress: Callable[[SamplingProgress], None] | None = None,
) -> list[PlanLesson]:
    """About two lessons an episode. Raises ValueError on no prompts."""
    if not prompts:
        raise ValueError("no training question")
    work: list[tuple[Prompt, list[ProgramPlanner]]] = []
    for number in range(-(-episodes // posing.places)):
        rng = Random(f"lesson {seed} {number}")
        prompt = _posed(rng, prompts[number % len(prompts)], posing)
        for place in rng.sample(range(choices.places), posing.places):
            planner = ProgramPlanner(_program(rng, choices, place, prompt, posing.stray_share))
            work.append((replace(prompt, quality=place), [planner]))
    await sample(environment, work, on_progress=on_progress)
    rng = Random(f"lessons {seed}")
    planners = [planner for _, (planner,) in work]
    return [
        lesson
        for number, planner in enumerate(planners)
        for lesson in _lessons_of(rng, planner, posing, number // posing.places)
    ]


def _program(rng: Random, choices: Teacher, place: int, prompt: Prompt, stray_share: float) -> Program:
    names = in_order([spec.name for spec in prompt.pool if spec.kind in MODEL_KINDS], prompt.experience, place)
    if rng.random() >= stray_share:
        return choices.best(place, prompt.category or "", names)
    return choices.other(place, prompt.category or "", names, BEGINNINGS, rng)


def _posed(rng: Random, prompt: Prompt, posing: Posing) -> Prompt:
    k = rng.randint(*posing.k_of_n) if posing.k_of_n else None
    draw = draw_pool(prompt, rng, k, HANDLES if posing.redraw_handles else None)
    near = posing.near
    if near is None or rng.random() < posing.bare_share:
        return draw
    text = question_text(prompt.messages)
    return replace(draw, experience=near.of(text, without=text))


def _lessons_of(rng: Random, planner: ProgramPlanner, posing: Posing, posed: int) -> list[PlanLesson]:
    lessons: list[PlanLesson] = []
    for example in planner.told:
        if example.situation.round >= LAST_ROUND and rng.random() >= LAST_ROUND_SHARE:
            continue
        asks = example.situation.round > 1 and any(not step.see for step in example.plan.steps)
        messages = render(posing.profile, prompt_input(example.situation))
        lesson = PlanLesson(messages, messages[-1]["content"], example.plan, example.situation.allowed, posed)
        lessons += [lesson] * (GOING_ON if asks else 1)
    return lessons


# ---------------------------------------------------------------- a program as a policy


@dataclass(frozen=True, slots=True)
class TaughtRound:
    """A prompt's situation and the plan that the program has for it."""

    situation: Situation
    plan: Plan


class ProgramPlanner:
    """Carries one program out. `told`: every situation it was put in, with its plan, in order."""

    name = "teacher"

    def __init__(self, program: Program) -> None:
        self._program = program
        self.told: list[TaughtRound] = []

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises nothing: workers that are not offered are left out, and with nobody left it ships."""
        plan = self._plan(situation)
        self.told.append(TaughtRound(situation, plan))
        return plan

    def _plan(self, situation: Situation) -> Plan:
        program = self._program
        if program.check:
            return self._checked_plan(situation)
        if situation.round == 1:
            first = self._handles(situation, program.first)
            polled = len(first) > 1 and (not program.enough or situation.final)
            return Plan((*_asked(first), *(_vote(situation, len(first)) if polled else ())))
        if situation.round > 2 or not program.enough:
            return SHIP
        if _votes(situation.replies) >= program.enough:  # the first of those that agree ships, not the last one
            return SHIP if len(program.first) == 1 else Plan(_vote(situation, 0))
        then = self._handles(situation, program.then)
        return Plan((*_asked(then), *(_vote(situation, len(then)) if program.poll else ())))

    def _checked_plan(self, situation: Situation) -> Plan:
        """Round 1 asks and checks. Round 2 ships the checked reply, by a vote of that one alone, or asks the other.
        Where no check is offered, or no further round, that other one is asked at once."""
        program, check = self._program, _tool(situation, lambda spec: CHECK_TAG in spec.tags)
        first, then = self._handles(situation, program.first), self._handles(situation, program.then)
        if situation.round == 1:
            checked = (Step(check, None, (situation.allowed.first_index,)),) if check and not situation.final else ()
            return Plan((*_asked(first if checked or not then else then), *checked))
        if situation.round > 2 or not _is_checked(situation.replies):
            return SHIP
        if situation.replies[-1].answer == VALID:
            vote = _tool(situation, lambda spec: spec.url == VOTE_URL)
            return SHIP if vote is None else Plan((Step(vote, None, (situation.replies[0].index,)),))
        return Plan(_asked(then)) if then else SHIP

    def _handles(self, situation: Situation, names: Sequence[str]) -> list[str]:
        offered = {spec.name: spec.handle for spec in situation.workers if spec.kind in MODEL_KINDS}
        return [offered[name] for name in names if name in offered]


def _votes(replies: Sequence[ShownReply]) -> int:
    """How many give the most common answer; 0 where no reply has one."""
    return len(most_agreeing([reply for reply in replies if reply.answer]))


def _asked(handles: Sequence[str]) -> tuple[Step, ...]:
    return tuple(Step(handle, None) for handle in handles)


def _tool(situation: Situation, accepts: Callable[[WorkerSpec], bool]) -> str | None:
    """The handle of the tool that is offered."""
    return next((spec.handle for spec in situation.workers if spec.kind == "tool" and accepts(spec)), None)


def _is_checked(replies: Sequence[ShownReply]) -> bool:
    return len(replies) == 2


def _vote(situation: Situation, count: int) -> tuple[Step, ...]:
    """The step that gives the majority of all replies so far and of the `asked` steps before it; none without vote."""
    tool = _tool(situation, lambda spec: spec.url == VOTE_URL)
    return () if tool is None else (Step(tool, None, tuple(range(situation.allowed.first_index + count))),)
