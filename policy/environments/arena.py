"""The arena as an environment: generated tasks, simulated workers. A simulator's figures (docs/arena.md).

`validation` tasks use phrasings that no `train` task has. Workers err as a pure function of (worker, question, seed):
all samples of a prompt meet the same errors, and what differs between them is what their plans did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Meter
from gateway.core.loop.experience.likeness import content_text
from gateway.core.loop.plan import Plan, validate
from gateway.core.pool.workers import WorkerSpec
from gateway.service.loop.state import EarlyStart, Planner, Situation
from policy.environments.base import Bill, Prompt, Spend, Split, rng_for
from policy.environments.executor import ExecutedEnvironment, Executor, TimedWorkers
from policy.environments.sampling import CONCURRENCY
from policy.environments.simulated import NOWHERE, SpeakerWorkers
from policy.simulators.arena.families.tasks import Task, grade, make_task
from policy.simulators.arena.oracle import oracle_plan
from policy.simulators.arena.server import ArenaSpeaker
from policy.simulators.arena.workers import (
    HELD_OUT,
    STANDARD,
    ArenaWorker,
    Pool,
    random_pool,
    with_builtins,
    worker_entry,
)
from policy.simulators.arena.world import Run, read_prompt, run_plan

Staff = Literal["standard", "held_out", "fresh", "untold"]
FRESH_MODELS = (4, 8)
CROSS_SALTS = ("cross 0", "cross 1", "cross 2", "cross 3")  # none is a seed's own salt


@dataclass(frozen=True, slots=True)
class Truth:
    """What only the arena and its oracle know of a prompt."""

    task: Task
    workers: Mapping[str, ArenaWorker]  # by name

    def pool(self, specs: tuple[WorkerSpec, ...]) -> Pool:
        """Return the workers behind these specs, under the handles that the specs have now."""
        return tuple(replace(self.workers[spec.name], handle=spec.handle) for spec in specs)


class ArenaEnvironment(ExecutedEnvironment):
    """`staff`: the arena's eight workers, the six held-out ones, a fresh random pool for every prompt, or the eight
    with nothing said of what they are good at. `seed` is the world's: which questions a worker errs on."""

    name = "arena"

    def __init__(
        self,
        *,
        staff: Staff = "standard",
        seed: int = 0,
        executor: Executor | None = None,
        spend: Spend | None = None,
        concurrency: int = CONCURRENCY,
    ) -> None:
        super().__init__(executor, spend, concurrency)
        self._staff: Staff = staff
        self._seed = seed

    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """Return `n` tasks; the arena never runs out of them."""
        rng = rng_for("arena prompts", split, seed)
        return [self._prompt(make_task(task, _phrasings(split)), seed) for task in rng.sample(range(2**40), n)]

    def _prompt(self, task: Task, seed: int) -> Prompt:
        rng = rng_for("arena pool", seed, task.id)
        staff = _staff(self._staff) or random_pool(rng, rng.randint(*FRESH_MODELS))
        pool = rng.sample([_spec(worker, self._staff != "untold") for worker in staff], len(staff))
        truth = Truth(task, {worker.name: worker for worker in staff})
        messages = ({"role": "user", "content": task.text},)
        return Prompt(task.id, messages, tuple(pool), task.answer, task.family, truth=truth)

    def workers(self, prompt: Prompt, sample: int) -> TimedWorkers:
        """Return the programs of the prompt's pool."""
        return SpeakerWorkers(ArenaSpeaker(tuple(truth_of(prompt).workers.values()), self._seed))

    async def graded(self, prompt: Prompt, reply: str, bill: Bill) -> float:
        """As `grade`; free."""
        return self.grade(prompt, reply)

    def grade(self, prompt: Prompt, reply: str) -> float:
        """Return 1.0 when the final answer is the task's, else 0.0."""
        return grade(truth_of(prompt).task, reply)

    def children(self, prompt: Prompt) -> Planner:
        """Return the arena's planner, which reads what the pool shows."""
        return ArenaPlanner(truth_of(prompt))

    def oracle(self, prompt: Prompt) -> Planner:
        """Return the planner of the best plan known for this task: see ArenaPlanner."""
        return ArenaPlanner(truth_of(prompt), cross_fitted=True)


class ArenaPlanner:
    """Plans any arena question by its kind. `cross_fitted`: the best of that plan and every single worker, each tried
    on *other* draws of the workers' errors than the episode will meet, so that no luck of the draw is in the choice."""

    name = "oracle"

    def __init__(self, truth: Truth, *, cross_fitted: bool = False) -> None:
        self._truth = truth
        self._cross_fitted = cross_fitted

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """One plan; later rounds ship what it gave. Raises PlanRefused where it does not fit the caps."""
        if situation.round > 1:
            return Plan(())
        texts = [content_text(message.get("content")) for message in situation.conversation]
        prompt = read_prompt(situation.conversation, texts)
        pool = self._truth.pool(situation.workers)
        plan = oracle_plan(prompt.question, prompt.task, pool)
        if self._cross_fitted and prompt.task is None:
            models = [worker.handle for worker in pool if worker.kind == "openai"]
            singles: list[dict[str, Any]] = [{"steps": [{"worker": one, "task": None, "see": []}]} for one in models]
            plan = max([plan, *singles], key=lambda candidate: self._value(candidate, pool))
        return validate(plan, situation.allowed)

    def _value(self, plan: Mapping[str, Any], pool: Pool) -> tuple[float, int]:
        task = self._truth.task
        runs: list[Run] = [run_plan(plan, task.text, pool, salt) for salt in CROSS_SALTS]
        return sum(grade(task, run.reply) for run in runs), -sum(run.cost_nano for run in runs)


def _phrasings(split: Split) -> Literal["train", "held_out"]:
    return "train" if split == "train" else "held_out"


def _staff(staff: Staff) -> Pool | None:
    workers = {"standard": STANDARD, "untold": STANDARD, "held_out": HELD_OUT}.get(staff)
    return None if workers is None else with_builtins(workers)


@lru_cache(maxsize=4096)
def _spec(worker: ArenaWorker, profile: bool) -> WorkerSpec:
    return WorkerSpec.model_validate(worker_entry(worker, NOWHERE, profile=profile))


def truth_of(prompt: Prompt) -> Truth:
    """What only the arena knows of one of its prompts. Raises ValueError for a prompt of another environment."""
    if not isinstance(prompt.truth, Truth):
        raise ValueError(f"prompt {prompt.id} is not one of the arena's")
    return prompt.truth
