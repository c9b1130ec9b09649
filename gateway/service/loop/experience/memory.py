"""The memory of experience: the judged steps of each organisation that is active here, held in the process.

A look-up is arithmetic (core/loop/experience/recall.py), so no load on the database can make a request plan blind. An
organisation's steps are read once, at start or with its first request; from then on, what changed is read about once a
second for all of them, and right away for an outcome that this process stores. While the database is away the last
known steps are used, and every look-up says how old they are.

Rows that are deleted are noticed when an organisation is read anew, every `RELOAD_S`. Memory is bounded: at most
`bytes_max` together; the organisation that was asked for longest ago goes first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.past import STEP_BYTES, STEPS_MAX, Change, JudgedStep, Owner, Past, TaskQuestion
from gateway.core.loop.experience.recall import recall
from gateway.errors import BatonError
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway")
POLL_S = 1.0
OVERLAP_US = 10_000_000  # before the last change read: a transaction that began earlier may commit later
RELOAD_S = 600.0
RETRY_S = 1.0  # after a read of an organisation that failed
CHANGES_MAX = 2_000  # keys or rollouts a statement
PAGES_MAX = 100
RECENT_OWNERS_MAX = 64  # organisations read at start
WORKERS_MAX = 1_000  # of one owner
RECALLED_AT_ONCE = 16  # workers; then the event loop turns
State = Literal["fresh", "stale", "missing"]


class JudgedPast(Protocol):
    """Reads stored experience. Every method raises Unavailable."""

    async def recent(self, most: int) -> Sequence[Owner]:
        """Organisations whose experience changed last, the latest first."""
        ...

    async def begin(self, owner: Owner, most: int) -> tuple[int, Sequence[str]]:
        """The database's clock, in microseconds since the epoch, and the workers of which the owner has steps."""
        ...

    async def latest(self, owner: Owner, worker: str, most: int) -> Sequence[JudgedStep]:
        """The latest judged steps of a worker, the newest first."""
        ...

    async def changes(self, owners: Collection[Owner], since_us: int, most: int) -> Sequence[Change]:
        """Steps of these owners that changed after a time, the oldest change first."""
        ...

    async def of_rollouts(self, ids: Collection[str]) -> Sequence[JudgedStep]:
        """All judged steps of these rollouts."""
        ...


@dataclass(frozen=True, slots=True)
class Recalled:
    """What was remembered for one request. `age_s`: how long ago the memory was last seen to be up to date; `stale`
    above the bound. `missing`: nothing was there in time, so nothing is known of the workers."""

    state: State
    age_s: float = 0.0
    experience: Mapping[str, WorkerExperience] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the log."""
        return {"state": self.state, "age_s": round(self.age_s, 1)}


@dataclass(slots=True)
class _Held:
    """What is remembered of one owner. `since_us`: changes up to then were read. `read_s`, `loaded_s`: when that was
    last so, and when all was read, on the monotonic clock."""

    past: Past
    since_us: int
    read_s: float
    loaded_s: float


class ExperienceMemory:
    """`run` follows the changes, for ever; without it, and without `refresh`, the memory grows stale."""

    def __init__(
        self,
        source: JudgedPast,
        clock: Clock,
        *,
        bytes_max: int,
        stale_s: float,
        timeout_s: float,
        reload_s: float = RELOAD_S,
    ) -> None:
        """`stale_s`: the age above which the memory is stale. `timeout_s`: how long the first request of an
        organisation waits for it."""
        self._source, self._clock = source, clock
        self._steps_max = max(1, bytes_max // STEP_BYTES)
        self._stale_s, self._timeout_s, self._reload_s = stale_s, timeout_s, reload_s
        self._held: dict[Owner, _Held] = {}  # the one that was asked for longest ago first
        self._loads: dict[Owner, asyncio.Task[None]] = {}
        self._failed_s: dict[Owner, float] = {}  # when a read failed
        self._following: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    @property
    def steps(self) -> int:
        """The number of steps in memory."""
        return sum(len(held.past) for held in self._held.values())

    async def near(
        self, org: str, question: TaskQuestion, workers: Mapping[str, str], k: int, shared: str | None = None
    ) -> Recalled:
        """Per worker, over at most its latest `k` judged steps on tasks like this one. `workers` maps names to
        versions. `shared`: the pool whose other organisations' steps count too. Waits only where the organisation is
        not in memory yet, and then in bounded time."""
        own = await self._of(Owner("org", org))
        pool = None if shared is None else await self._of(Owner("pool", shared))
        if own is None:
            return Recalled("missing")
        past = None if pool is None else pool.past
        experience = {one.worker: one for one in recall(question, workers, k, own.past, past, org)}
        read_s = min(own.read_s, own.read_s if pool is None else pool.read_s)
        age_s = max(0.0, self._clock.monotonic_s() - read_s)
        if shared is not None and pool is None:
            return Recalled("missing", age_s, experience)
        return Recalled("stale" if age_s > self._stale_s else "fresh", age_s, experience)

    async def records(
        self, org: str, task_type: str | None, workers: Mapping[str, str], k: int
    ) -> Mapping[str, WorkerExperience] | None:
        """The same of any number of workers by type of task alone, without keeping others waiting; None where the
        organisation is not in memory."""
        own = await self._of(Owner("org", org))
        if own is None:
            return None
        found = {}
        for number, one in enumerate(recall(TaskQuestion(task_type, None, ""), workers, k, own.past)):
            found[one.worker] = one
            if number % RECALLED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return found

    async def _of(self, owner: Owner) -> _Held | None:
        held = self._held.pop(owner, None)
        if held is None:
            if not await self._loaded(owner):
                return None
            held = self._held.pop(owner, None)
        if held is not None:
            self._held[owner] = held
        return held

    async def _loaded(self, owner: Owner) -> bool:
        """Wait for an owner to be read, for `timeout_s`. Returns whether it was."""
        failed_s = self._failed_s.get(owner)
        if failed_s is not None and self._clock.monotonic_s() - failed_s < RETRY_S:
            return False
        await asyncio.wait([self._load_soon(owner)], timeout=self._timeout_s)
        return owner in self._held

    def learn(self, rollout_id: str, steps: Sequence[JudgedStep]) -> None:
        """Remember steps of a rollout of which nothing is stored yet."""
        for owner in (Owner("org", steps[0].org), Owner("pool", steps[0].pool)):
            if owner in self._held:
                self._held[owner].past.replace(rollout_id, steps)

    # ------------------------------------------------------------ reading whole owners

    def _load_soon(self, owner: Owner) -> asyncio.Task[None]:
        """The task that reads an owner; it goes on when nobody waits for it any more."""
        if owner not in self._loads:
            self._loads[owner] = task = asyncio.create_task(self._load(owner))
            task.add_done_callback(lambda _: self._loads.pop(owner, None))
        return self._loads[owner]

    async def _load(self, owner: Owner) -> None:
        began_s = self._clock.monotonic_s()
        try:
            since_us, workers = await self._source.begin(owner, WORKERS_MAX)
            most = max(1, min(STEPS_MAX, self._steps_max // max(1, len(workers))))
            past = Past(most)
            for worker in workers:
                past.put(await self._source.latest(owner, worker, most))
        except BatonError as error:
            if len(self._failed_s) >= RECENT_OWNERS_MAX:
                self._failed_s.clear()
            self._failed_s[owner] = self._clock.monotonic_s()
            log.warning("the experience of %s %s cannot be read now: %s", *owner, error.message)
            return
        self._failed_s.pop(owner, None)
        self._held.pop(owner, None)
        self._held[owner] = _Held(past, since_us, began_s, began_s)
        self._make_room(owner)

    def _make_room(self, but: Owner) -> None:
        """Forget the owners that were asked for longest ago, until the rest is within the bound."""
        steps = self.steps
        for owner in [each for each in self._held if each != but]:
            if steps <= self._steps_max:
                return
            steps -= len(self._held.pop(owner).past)

    # ------------------------------------------------------------ following changes

    async def refresh(self) -> None:
        """Read what changed up to now. Those who ask at the same time share one reading, which begins after they asked.
        Raises Unavailable."""
        if self._next is None:
            self._next = asyncio.create_task(self._follow_after(self._following))
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting
        await asyncio.shield(self._next)

    async def _follow_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._following, self._next = self._next, None
        await self._follow()

    async def _follow(self) -> None:
        """Read the changes of every owner in memory. Raises Unavailable."""
        held = dict(self._held)
        if not held:
            return
        began_s = self._clock.monotonic_s()
        since_us = min(one.since_us for one in held.values()) - OVERLAP_US
        for _ in range(PAGES_MAX):
            changes = await self._source.changes(held, since_us, CHANGES_MAX)
            await self._learn(changes, held)
            if changes:
                since_us = changes[-1].changed_us
            if len(changes) < CHANGES_MAX:
                break
        else:
            return  # what is left is read next, and until then the memory's age grows
        for one in held.values():
            one.since_us, one.read_s = max(one.since_us, since_us), began_s

    async def _learn(self, changes: Sequence[Change], held: Mapping[Owner, _Held]) -> None:
        of: dict[str, set[Owner]] = defaultdict(set)  # who has to learn a rollout
        for one in changes:
            for owner in one.owners:
                if owner in held and not held[owner].past.knows(*one[:3]):
                    of[one.rollout_id].add(owner)
        if not of:
            return
        steps: dict[str, list[JudgedStep]] = defaultdict(list)
        for step in await self._source.of_rollouts(of):
            steps[step.rollout_id].append(step)
        for rollout_id, owners in of.items():
            for owner in owners:
                held[owner].past.replace(rollout_id, steps[rollout_id])

    async def run(self) -> None:
        """Read the organisations that were active last, then follow the changes and read each anew now and then, for
        ever. No error ends it."""
        await self._warm()
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.refresh()
            except BatonError as error:
                log.warning("what changed of experience cannot be read now: %s", error.message)
            old_s = self._clock.monotonic_s() - self._reload_s
            if not self._loads and (old := {one.loaded_s: owner for owner, one in self._held.items()}):
                oldest_s = min(old)
                if oldest_s < old_s:
                    self._load_soon(old[oldest_s])

    async def _warm(self) -> None:
        try:
            owners = await self._source.recent(RECENT_OWNERS_MAX)
        except BatonError as error:
            log.warning("the experience of no organisation is read at start: %s", error.message)
            return
        for owner in owners[::-1]:  # the latest last, which then goes last
            await self._load_soon(owner)

    async def close(self) -> None:
        """End the reads that are under way."""
        tasks = [*self._loads.values(), *(task for task in (self._following, self._next) if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
