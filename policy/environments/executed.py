"""What all environments share that carry plans out: posing a prompt, one metered episode, and many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random

from gateway.service.loop.state import Planner
from policy.environments.base import Episode, PlanSource, PosedPrompt, Prompt, Split, drawn
from policy.environments.executor import Executor, LoopResult, TimedWorkers, episode_of
from policy.environments.sampling import CONCURRENCY, sample
from policy.environments.spend import Spend, SpendCapped
from policy.simulators.handles import HANDLES


class ExecutedEnvironment(ABC):
    """An environment over an Executor. Without a meter of its own it gets one that does not cap."""

    name: str

    def __init__(self, executor: Executor | None, spend: Spend | None, concurrency: int = CONCURRENCY) -> None:
        self.executor = executor or Executor()
        self.spend = spend or Spend(episode_nano_max=self.executor.caps.cost_nano)
        if self.spend.episode_nano_max < self.executor.caps.cost_nano:
            raise ValueError("the meter's `episode_nano_max` is below the executor's `caps.cost_nano`: make them equal")
        self._concurrency = concurrency

    @abstractmethod
    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """As in the port."""

    @abstractmethod
    def workers(self, prompt: Prompt, sample: int) -> TimedWorkers:
        """The workers of one episode."""

    @abstractmethod
    def grade(self, prompt: Prompt, reply: str) -> float:
        """Outcome of a reply, in [0, 1]."""

    def spent_nano(self, ran: LoopResult, workers: TimedWorkers) -> int:
        """What an episode takes from the meter."""
        return ran.loop.tree.meter.spent_nano

    def children(self, prompt: Prompt) -> Planner | None:
        """Who plans the child loops of a plan that was given as text; None: they are refused."""
        return None

    def situation(
        self, prompt: Prompt, rng: Random, k_of_n: int | None = None, redraw_handles: bool = False
    ) -> PosedPrompt:
        """As in the port."""
        return self.executor.posed(drawn(prompt, rng, k_of_n, HANDLES if redraw_handles else None))

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """As in the port."""
        self.spend.start()
        spent_nano = 0
        try:
            workers = self.workers(prompt, sample)
            ran = await self.executor.run(prompt, source, workers, self.children(prompt))
            spent_nano = self.spent_nano(ran, workers)
            outcome = self.grade(prompt, ran.reply) if ran.reply else 0.0
            return episode_of(prompt, ran, sample, outcome, workers.seconds)
        finally:
            self.spend.end(spent_nano)

    async def run(self, prompt: Prompt, plans: Sequence[PlanSource]) -> list[Episode]:
        """As in the port."""
        found = await sample(self, [(prompt, plans)], concurrency=min(self._concurrency, max(1, len(plans))))
        if found.capped:
            raise SpendCapped(self.spend, found.episodes)
        return found.episodes
