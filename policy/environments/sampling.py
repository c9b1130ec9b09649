"""Many episodes at once: lanes that draw from one iterator, with progress, and a clean end at the spending cap."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from policy.environments.base import Episode, PlanSource, Prompt, Spend, Ungraded

CONCURRENCY = 32
YOUNG_OBJECTS = 20_000  # an episode makes some thousand, hardly any in cycles
UNGRADED_MAX = 16  # in a row: then nothing judges, and sampling on would only spend
Work = Iterable[tuple[Prompt, Sequence[PlanSource]]]


class Episodes(Protocol):
    """The part of an environment that runs a plan source on a prompt, under its meter."""

    spend: Spend

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """As `Environment.episode`."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingProgress:
    """The progress of a sampling. `total` None: the number of episodes is not known."""

    done: int
    total: int | None
    outcome_mean: float
    spent_nano: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class EpisodeGroups:
    """Episodes by prompt, in the order of the work and of each prompt's sources. `capped`: the cap ended it, and
    some groups are short or missing."""

    groups: list[list[Episode]]
    capped: bool
    ungraded: int = 0  # episodes left out because nothing could judge them

    @property
    def episodes(self) -> list[Episode]:
        """Return the episodes of all groups."""
        return [episode for group in self.groups for episode in group]


async def sample(
    environment: Episodes,
    work: Work,
    *,
    concurrency: int = CONCURRENCY,
    on_progress: Callable[[SamplingProgress], None] | None = None,
) -> EpisodeGroups:
    """Run every source on its prompt. Near the cap lanes end one by one; no running episode is cut off. Raises
    Ungraded where `UNGRADED_MAX` episodes in a row could not be judged."""
    lanes = _Lanes(environment, work, on_progress)
    with _calm_garbage():
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(lanes.run())
    left = next(lanes.items, None)
    groups = [[episode for _, episode in sorted(by_sample.items())] for by_sample in lanes.groups]
    return EpisodeGroups(groups, left is not None, lanes.ungraded)


@contextmanager
def _calm_garbage() -> Iterator[None]:
    """Exempt what is there now from garbage collection meanwhile: where torch is loaded, a full collection takes 0.2 s,
    and the objects of episodes bring about many. What stands exempt already is left so."""
    threshold, is_free = gc.get_threshold(), not gc.get_freeze_count()
    if is_free:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, *threshold[1:])
    try:
        yield
    finally:
        if is_free:
            gc.set_threshold(*threshold)
            gc.unfreeze()


class _Lanes:
    def __init__(
        self, environment: Episodes, work: Work, on_progress: Callable[[SamplingProgress], None] | None
    ) -> None:
        self.groups: list[dict[int, Episode]] = []
        self.items = self._items(work)
        self._environment = environment
        self._on_progress = on_progress
        self._total = sum(len(sources) for _, sources in work) if isinstance(work, Sequence) else None
        self._done, self._right = 0, 0.0
        self.ungraded, self._ungraded_in_a_row = 0, 0
        self._began_s = time.perf_counter()

    def _items(self, work: Work) -> Iterator[tuple[dict[int, Episode], Prompt, int, PlanSource]]:
        for prompt, sources in work:
            episodes: dict[int, Episode] = {}
            self.groups.append(episodes)
            for index, source in enumerate(sources):
                yield episodes, prompt, index, source

    async def run(self) -> None:
        """Take the next item while one is left and the meter has room for it."""
        while self._environment.spend.fits() and (item := next(self.items, None)) is not None:
            episodes, prompt, index, source = item
            try:
                episodes[index] = await self._environment.episode(prompt, source, index)
            except Ungraded:
                self.ungraded, self._ungraded_in_a_row = self.ungraded + 1, self._ungraded_in_a_row + 1
                if self._ungraded_in_a_row >= UNGRADED_MAX:
                    raise
            else:
                self._ungraded_in_a_row = 0
                self._count(episodes[index])

    def _count(self, episode: Episode) -> None:
        self._done += 1
        self._right += episode.outcome
        if self._on_progress is not None:
            spent, elapsed_s = self._environment.spend.spent_nano, time.perf_counter() - self._began_s
            self._on_progress(SamplingProgress(self._done, self._total, self._right / self._done, spent, elapsed_s))
