"""Routers, the policies that plan without a model: fixed worker, rule, vote, checked and cascade. And `auto`, under
which the rule plans until the conductor has earned a kind of work (core/policies/earning.py)."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence

from numpy.random import Generator, default_rng

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.contract import Verify
from gateway.core.loop.experience.bandit import Arm, ArmChoice, decide, mean_success, order
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import question_text
from gateway.core.loop.experience.worth import Worth, by_prices, preferred
from gateway.core.loop.plan import Plan, Step
from gateway.core.loop.shown import UNKNOWN_AGREEMENT
from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.policies.earning import Bar, Rewards, has_earned
from gateway.core.pool.workers import JUDGE_URL, MODEL_KINDS, NANO_PER_USD, VOTE_URL, WorkerSpec
from gateway.errors import BatonError, PlanRefused
from gateway.service.loop.spending.charges import price_of
from gateway.service.loop.state import EarlyStart, Planner, Situation, Stakes, Warm

LATENCY_GUESS_S = 2.0
USAGE_GUESS = Usage(400, 300)  # a typical call, where there is no experience
VOTERS = 3
SHIP = Plan(())
LOOK_S = 60.0
Kind = tuple[str, str, str | None]  # organisation, pool, task type
log = logging.getLogger("gateway")


def models_of(situation: Situation) -> list[WorkerSpec]:
    """The model workers offered, without those that failed in this loop. Raises PlanRefused where none is left."""
    models = [spec for spec in situation.workers if spec.kind in MODEL_KINDS and spec.handle not in situation.avoid]
    if not models:
        raise PlanRefused("no_worker", "every model worker of this pool has failed")
    return models


def single(spec: WorkerSpec) -> Plan:
    """A plan of one step: the conversation to one worker."""
    return Plan((Step(spec.handle, None),))


def side_by_side(situation: Situation, specs: Sequence[WorkerSpec], last: WorkerSpec | None = None) -> Plan:
    """A plan that sends the conversation to all `specs` in parallel, and then to `last`, which sees all replies."""
    steps = [Step(spec.handle, None) for spec in specs]
    if last is not None:
        first = situation.allowed.first_index
        steps.append(Step(last.handle, None, tuple(range(first, first + len(specs)))))
    return Plan(tuple(steps))


def vote_plan(situation: Situation, voters: Sequence[WorkerSpec]) -> Plan:
    """A plan that asks the voters in parallel and takes the majority of their answers (ties go to the first). The caps
    may leave room for fewer voters; one voter needs no vote. Raises PlanRefused where the pool has no `vote`."""
    voters = voters[: max(1, situation.allowed.steps_max - 1)]
    if len(voters) == 1:
        return single(voters[0])
    tool = next((spec for spec in situation.workers if spec.url == VOTE_URL), None)
    if tool is None:
        raise PlanRefused("no_worker", "this pool has no vote")
    return side_by_side(situation, voters, tool)


def cascade_plan(situation: Situation, first: Sequence[WorkerSpec], then: WorkerSpec | None) -> Plan:
    """Round 1: `first` in parallel, or `then` alone where caps or pool allow no second opinion. Round 2: `then`, if the
    last of `first` is disputed. Where nothing says whether two replies agree, the pool's judge is asked first, and
    `then` where it finds that they do not. The last reply is shipped."""
    if situation.round == 1:
        asked = first[-1:] if situation.final else first[-situation.allowed.steps_max :]
        return single(then) if then is not None and len(asked) < 2 else side_by_side(situation, asked)
    if situation.round > 2 or then is None or len(situation.replies) < 2:
        return SHIP
    if disputed(situation):
        return single(then)
    judge = next((spec for spec in situation.workers if spec.url == JUDGE_URL), None)
    if judge is None or len(situation.replies) > 2 or not undecided(situation) or situation.allowed.steps_max < 2:
        return SHIP
    verdict = Step(judge.handle, None, (0, 1), verify=Verify(accept=None, escalate=3))
    return Plan((verdict, Step(then.handle, None)))


def disputed(situation: Situation) -> bool:
    """Whether the last reply, which an empty plan ships, agrees with none and is known to differ from an earlier one,
    or lacks the short answer that an earlier one marks. Two essays that differ are not disputed: both may be good."""
    last = situation.replies[-1]
    return bool(last.differs) and not any(flag.startswith("agrees:") for flag in last.flags)


def undecided(situation: Situation) -> bool:
    """Whether nothing says whether the last reply agrees with another, and both are there."""
    whole = not any("failed" in reply.flags for reply in situation.replies)
    return whole and UNKNOWN_AGREEMENT in situation.replies[-1].flags


class FixedPlanner:
    """`fixed:<worker>`: one step, the conversation as it is, always to the same worker."""

    def __init__(self, worker: str) -> None:
        self.name = f"fixed:{worker}"
        self._worker = worker

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where the worker is not among those offered."""
        spec = next((spec for spec in situation.workers if spec.name == self._worker), None)
        if spec is None:
            raise PlanRefused("unknown_worker", f"worker {self._worker} is not in this pool")
        return Plan((Step(spec.handle, None),))


class RulePlanner:
    """`rule`: one step on a model worker, drawn by the bandit of core/loop/experience/bandit.py from what past tasks
    like this one say of success, latency and dollars. A request that explores tries the worker whose trial is worth
    most. The round's record has the decision with its propensities."""

    name = "rule"

    def __init__(self, *, draws: bool = True) -> None:
        """`draws` False: what does not explore goes to the worker of the highest expected utility, for judging a rule
        whose choices nobody learns from."""
        self._draws = draws

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused if no model worker is left to try."""
        models = models_of(situation)
        arms, share = arms_of(models, situation.experience, situation.warm), situation.stakes.explore_share
        worth = worth_of(arms, situation.stakes, situation.quality)
        decision = ArmChoice(self.name, worth, tuple(arms), order(arms, worth)[0])
        if self._draws or situation.explore:
            decision = decide(arms, worth, seeded(situation), explores=situation.explore, explore_share=share)
        record.decision = decision.as_json()
        return single(models[decision.chosen])


def ranked(situation: Situation, planner: str) -> tuple[list[WorkerSpec], ArmChoice]:
    """The model workers by expected utility, best first, and what says so, for the record of the planner that takes
    some of them. Raises PlanRefused if none is left."""
    models = models_of(situation)
    arms = arms_of(models, situation.experience, situation.warm)
    worth = worth_of(arms, situation.stakes, situation.quality)
    places = order(arms, worth)
    return [models[at] for at in places], ArmChoice(planner, worth, tuple(arms), places[0])


def arms_of(models: Sequence[WorkerSpec], past: Mapping[str, WorkerExperience], warm: Warm | None) -> list[Arm]:
    """The models as arms, each with what its call is expected to cost and take; a warm prompt cache saves dollars.
    Raises Unpriced."""
    listed = {spec.name: cost_nano(price_of(spec), USAGE_GUESS) for spec in models}
    seen = [past[spec.name] for spec in models if spec.name in past]
    guessed = sum(listed[one.worker] for one in seen)
    # Requests like this one may be longer or shorter than the guess, for each worker by about the same factor.
    factor = sum(one.cost_nano_mean for one in seen) / guessed if guessed else 1.0
    fastest_s = min((one.latency_ms_mean / 1000 for one in seen), default=LATENCY_GUESS_S)
    arms = []
    for spec in models:
        one = past.get(spec.name)
        nano = one.cost_nano_mean if one else factor * listed[spec.name]
        nano -= warm.worth_nano if warm is not None and warm.worker == spec.name else 0
        latency_s = one.latency_ms_mean / 1000 if one else spec.latency_hint_s or fastest_s
        arms.append(Arm(spec.name, spec.handle, nano / NANO_PER_USD, latency_s, one))
    return arms


def worth_of(arms: Sequence[Arm], stakes: Stakes, quality: int | None) -> Worth:
    """What a right answer of a request is worth: as key or settings say, else by what its arms are expected to cost;
    both moved by the request's dial."""
    return preferred(by_prices(arm.usd for arm in arms), stakes.preferences).at(quality)


def listed_worth(workers: Sequence[WorkerSpec]) -> Worth:
    """What a right answer is worth by the listed prices of the models among these workers. Raises Unpriced."""
    models = [spec for spec in workers if spec.kind in MODEL_KINDS]
    return by_prices(cost_nano(price_of(spec), USAGE_GUESS) / NANO_PER_USD for spec in models)


def seeded(situation: Situation) -> Generator:
    """The source of a round's draws, the same for the same round of the same request."""
    seed = situation.rollout_id or question_text(situation.conversation)
    return default_rng([zlib.crc32(seed.encode("utf-8", "surrogatepass")), situation.round])


class VoteRouter:
    """`vote`: the workers that the rule ranks highest answer in parallel; the majority answer is the reply."""

    name = "vote"

    def __init__(self, voters: int = VOTERS) -> None:
        self._voters = voters

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left, or the pool has no `vote`."""
        if situation.round > 1:
            return SHIP
        models, choice = ranked(situation, self.name)
        record.decision = choice.as_json()
        return vote_plan(situation, models[: self._voters])


class CheckedRouter:
    """`checked:CHEAP>MIDDLE>BEST@CHECKER`: the first worker answers and the checker looks at its reply; the next one
    answers where the checker does not accept it, and so on. The last one's reply is not checked. A cap on steps leaves
    out workers from the middle."""

    def __init__(self, workers: Sequence[str], checker: str) -> None:
        """`workers`: names, in the order in which they are asked, two at least. `checker`: a name."""
        self.name = f"checked:{'>'.join(workers)}@{checker}"
        self.workers = tuple(workers)
        self.checker = checker

    @property
    def names(self) -> tuple[str, ...]:
        """All names: the workers, then the checker."""
        return (*self.workers, self.checker)

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where one of the names is not offered."""
        if situation.round > 1:
            return SHIP
        by_name = {spec.name: spec.handle for spec in situation.workers}
        if missing := [name for name in self.names if name not in by_name]:
            raise PlanRefused("unknown_worker", f"worker {missing[0]} is not in this pool")
        asked = (situation.allowed.steps_max + 1) // 2
        chain = (*self.workers[: asked - 1], self.workers[-1]) if asked < len(self.workers) else self.workers
        return checked_plan([by_name[name] for name in chain], by_name[self.checker], situation.allowed.first_index)

    @classmethod
    def read(cls, text: str) -> CheckedRouter | None:
        """The router that `CHEAP>MIDDLE>BEST@CHECKER` names; None where the text has another form."""
        chain, _, checker = text.rpartition("@")
        workers = chain.split(">")
        valid = checker and len(workers) > 1 and all(workers) and len(set(workers)) == len(workers)
        return cls(workers, checker) if valid else None


def checked_plan(chain: Sequence[str], checker: str, first: int) -> Plan:
    """A plan over handles: each of the chain answers, and all but the last are checked; an accepted reply ships."""
    steps: list[Step] = []
    for handle in chain[:-1]:
        steps.append(Step(handle, None))
        index = first + len(steps)
        steps.append(Step(checker, None, (index - 1,), verify=Verify(accept=None, escalate=index + 1)))
    return Plan((*steps, Step(chain[-1], None)))


class CascadeRouter:
    """`cascade`: two workers that are good for their price answer in parallel. Where they differ, the most successful
    of the others answers; where they agree, or nothing says whether they do, the pool's judge included, the better
    one's is the reply. Without experience the dearest worker counts as the most successful."""

    name = "cascade"

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused where no model worker is left."""
        models, choice = ranked(situation, self.name)
        record.decision = choice.as_json()
        first = models[1::-1]  # the best is last, because agreement ships the last reply
        asked = {reply.handle for reply in situation.replies} or {spec.handle for spec in first}
        rest = [spec for spec in models_of(situation) if spec.handle not in asked]
        arms = arms_of(rest, situation.experience, situation.warm)
        then = max(arms, key=lambda arm: (mean_success(arm.past), arm.usd, arm.worker), default=None)
        return cascade_plan(situation, first, None if then is None else rest[arms.index(then)])


# ---------------------------------------------------------------- auto


class Earnings:
    """The kinds of work that the conductor has earned, read from the log once a minute, beside the requests. With the
    store away the last reading stands; before the first there is none."""

    def __init__(self, rewards: Callable[[], Awaitable[Sequence[Rewards]]], bar: Bar) -> None:
        self._rewards = rewards
        self._bar = bar
        self._earned: frozenset[Kind] = frozenset()

    def __contains__(self, kind: object) -> bool:
        return kind in self._earned

    async def look(self) -> None:
        """Compare both planners again. A kind without recent outcomes is the rule's. Raises Unavailable."""
        arms: dict[Kind, dict[str, Rewards]] = {}
        for one in await self._rewards():
            arms.setdefault((one.org, one.pool, one.task_type), {})[one.planner] = one
        both = {kind: arm for kind, arm in arms.items() if {"conductor", "rule"} <= set(arm)}
        self._earned = frozenset(
            kind
            for kind, arm in both.items()
            if has_earned(arm["conductor"], arm["rule"], self._bar, in_charge=kind in self._earned)
        )

    async def run(self) -> None:
        """Look once a minute, for ever."""
        while True:
            try:
                await self.look()
            except BatonError as error:
                log.warning("the outcomes of rule and conductor are not compared now: %s", error.message)
            await asyncio.sleep(LOOK_S)


class AutoPlanner:
    """Chooses between rule and conductor, once for each request. `trained`: the pools that the conductor's weights were
    trained for, where it plans from the first request on."""

    name = "auto"

    def __init__(self, rule: Planner, learned: Planner, earnings: Container[Kind], trained: Container[str]) -> None:
        self._rule = rule
        self._learned = learned
        self._earnings = earnings
        self._trained = trained

    def choose(self, org: str, pool: str, task_type: str | None, *, trial: bool) -> Planner:
        """The planner of a request. `trial`: the request goes to the planner that is not in charge, for comparison."""
        if pool in self._trained:
            return self._learned
        return self._learned if ((org, pool, task_type) in self._earnings) != trial else self._rule
