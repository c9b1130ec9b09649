"""Batches that are sampled: questions by the curriculum, posed anew, G episodes each through the served executor."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.core.loop.prompt import Profile
from gateway.errors import BatonError, EngineDown
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.state import Planner
from gateway.service.ports.request import Conductor
from policy.environments.base import Episode, Prompt, rng_for
from policy.environments.executor import FREE
from policy.environments.sampling import EpisodeGroups, sample
from policy.reward import RewardSettings, at_quality, faults_of, reward
from policy.train import metrics
from policy.train.metrics import Value
from policy.train.settings import Settings
from policy.train.sources.curriculum import Curriculum
from policy.train.sources.scene import Scene
from policy.train.step.rows import TrainingRow, rows_of

LOST = "the steps before are in the checkpoint: start the server again, and the same command with --resume goes on"
PLAN_TIMEOUT_S = 3_600.0  # a batch is decoded together, so the wait for a plan is long


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step, and what to tell of them. `capped`: money has run out, and no step follows."""

    rows: list[TrainingRow]
    rollouts: int
    metrics: dict[str, Value] = field(default_factory=dict)
    capped: bool = False


class RolloutsLost(Exception):
    """What samples the plans is gone. No BatonError, so that no episode takes it for its own failure."""


class Conductors(Protocol):
    """What samples the plans of a step."""

    @property
    def decoding_s(self) -> float | None:
        """The seconds that this process decoded since the last `refresh`; None where another one decodes."""
        ...

    async def refresh(self) -> None:
        """Sample from the weights as they are from here on. Raises EngineDown, VersionRefused."""
        ...

    def of(self, *key: object) -> Conductor:
        """The conductor of one episode; equal keys draw equal numbers. It may raise RolloutsLost."""
        ...

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """A prompt in tokens. Raises ConductorError(refused)."""
        ...


class Source(Protocol):
    """Where batches come from."""

    async def batch(self, step: int) -> Batch:
        """The rows of a step (from 0): a function of the settings, the step, and what was learnt before it."""
        ...

    def state(self) -> dict[str, Any]:
        """What it has learnt, for the checkpoint."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        ...


class SampledSource:
    """Samples from the weights as they are."""

    def __init__(
        self,
        scene: Scene,
        conductor: Conductors,
        settings: Settings,
        profile: Profile,
    ) -> None:
        self._scene = scene
        self._conductor = conductor
        self._settings = settings
        self._asking = ConductorSettings(
            profile,
            FREE,
            PLAN_TIMEOUT_S,
            tokens_max=settings.plan_tokens,
            temperature=settings.temperature,
            trained=True,
        )
        self._prompts = {prompt.id: prompt for prompt in scene.prompts}
        self._curriculum = Curriculum(
            {prompt.id: prompt.category or "" for prompt in scene.prompts},
            settings.explore_share,
            settings.learning_value_floor,
            scene.agreeing,
            settings.agreeing_weight,
        )

    async def batch(self, step: int) -> Batch:
        """As the interface says."""
        settings, began_s = self._settings, time.perf_counter()
        await self._conductor.refresh()
        refreshed_s = time.perf_counter()
        chosen = self._curriculum.chosen(settings.prompts, rng_for(settings.seed, "curriculum", step))
        posed = [self._scene.posed(self._prompts[one], settings, step).prompt for one in chosen]
        work = [(prompt, [self._planner(step, prompt, index) for index in range(settings.samples)]) for prompt in posed]
        found = await self._sampled(work)
        rows, rewards = self._judged(posed, found)
        figures = metrics.of_episodes(found.episodes, rewards)
        figures["sync_s"], figures["sampling_s"] = refreshed_s - began_s, time.perf_counter() - refreshed_s
        if self._conductor.decoding_s is not None:
            figures["decoding_s"] = self._conductor.decoding_s
        return Batch(rows, len(found.episodes), figures, found.capped)

    def _planner(self, step: int, prompt: Prompt, index: int) -> Planner:
        return ConductorPlanner(self._conductor.of(self._settings.seed, step, prompt.id, index), self._asking)

    async def _sampled(self, work: Sequence[tuple[Prompt, Sequence[Planner]]]) -> EpisodeGroups:
        """All of it at once. Raises the first error that was raised on purpose as itself, not in a group; EngineDown
        where what samples is lost."""
        at_once = self._settings.prompts * self._settings.samples
        try:
            return await sample(self._scene.environment, work, concurrency=at_once)
        except ExceptionGroup as group:  # boundary: raised again, an error of ours as itself
            known: BaseException | None = group.subgroup((BatonError, RolloutsLost))
            while isinstance(known, ExceptionGroup):
                known = known.exceptions[0]
            if isinstance(known, RolloutsLost):
                raise EngineDown(f"{known}; {LOST}") from None
            raise known or group from None

    def _judged(self, posed: Sequence[Prompt], found: EpisodeGroups) -> tuple[list[TrainingRow], list[float]]:
        rows: list[TrainingRow] = []
        rewards: list[float] = []
        for prompt, group in zip(posed, found.groups, strict=False):
            weights = at_quality(self._settings.reward, prompt.quality)
            for episode in group:
                self._complete(episode)
                rewards.append(reward_of(episode, weights))
                rows += rows_of(episode, rewards[-1], prompt.id, prompt.category or "")
            self._curriculum.learn(prompt.id, [episode.outcome for episode in group])
        return rows, rewards

    def _complete(self, episode: Episode) -> None:
        """A plan that was refused while it was being read ends before its prompt's tokens are in the record."""
        for loop in (episode.record, *episode.children):
            for planned in loop.rounds:
                if planned.plan_token_ids and not planned.prompt_token_ids:
                    planned.prompt_token_ids = list(self._conductor.prompt_ids(planned.messages))

    def state(self) -> dict[str, Any]:
        """As the interface says."""
        return self._curriculum.state()

    def restore(self, state: dict[str, Any]) -> None:
        """As the interface says."""
        self._curriculum.restore(state)


def reward_of(episode: Episode, weights: RewardSettings) -> float:
    """The reward of an episode."""
    faults = faults_of(episode.verdicts)
    return reward(episode.parsed, episode.outcome, episode.cost_nano, episode.latency_s, weights, faults)
