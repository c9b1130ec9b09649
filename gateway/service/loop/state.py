"""What one loop works on: the request it serves, what it may use, and the tree of loops it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.core.log.events import Event
from gateway.core.log.rollout import RolloutRecord, RoundRecord, StepRecord
from gateway.core.loop.caps import Caps
from gateway.core.loop.meter import Meter
from gateway.core.loop.plan import Allowed, Plan, Step
from gateway.core.loop.prompt import ShownReply, ShownWorker
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.structured import Shape
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BatonError
from gateway.service.ports.request import Journal, WorkerExperience


class Sink(Protocol):
    """Where the last step's stream goes. Awaiting it is the back-pressure of a slow reader."""

    async def chunk(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Pass the choices of one chunk on to the client."""
        ...

    def about(self, reply: Mapping[str, Any]) -> None:
        """What a completion or chunk says of itself beside its choices: `service_tier`, `system_fingerprint`."""
        ...


def no_listener(event: Mapping[str, Any]) -> None:
    """The `tell` of a request that no_listener watches."""


class HoldRecord:
    """The journal's record of a hold. It goes to disk with the first thing that is written under it, in one fsync: a
    hold under which nothing has left yet costs nothing, whatever becomes of this process."""

    def __init__(self, journal: Journal, event: Event) -> None:
        self._journal = journal
        self._event = event
        self._written: asyncio.Future[None] | None = None

    async def append(self, *events: Event) -> None:
        """Return once the hold and these are on disk. Raises SpoolFull, whichever of them found no room."""
        if self._written is None:
            self._written = asyncio.ensure_future(self._journal.append(self._event, *events))
            await asyncio.shield(self._written)
        elif self._written.done():
            self._written.result()
            await self._journal.append(*events)
        else:
            await asyncio.gather(asyncio.shield(self._written), self._journal.append(*events))

    async def close(self, settle: Event, *rest: Event) -> None:
        """The last records of the request, which find room also where the hold's own did not. A hold that is in no
        journal has no end there either."""
        if self._written is None:
            await self.append(settle, *rest)
            return
        await asyncio.wait({self._written})
        lost = self._written.cancelled() or self._written.exception() is not None
        if last := rest if lost else (settle, *rest):
            await self._journal.append(*last)


@dataclass(slots=True)
class Tree:
    """What all loops of one request share."""

    meter: Meter
    hold_id: str
    deadline_s: float  # monotonic
    slots: asyncio.Semaphore  # worker calls in flight
    held: HoldRecord  # on disk before anything is spent
    tell: Callable[[Mapping[str, Any]], None] = no_listener  # told of what happens, for a client that asked to be
    children: list[RolloutRecord] = field(default_factory=list)


@dataclass(slots=True)
class StepRun:
    """One step while it runs. `ended` is set whatever became of it; `body` is there only when it worked."""

    index: int
    step: Step
    spec: WorkerSpec
    record: StepRecord
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    body: Mapping[str, Any] | None = None
    error: BatonError | None = None
    dispatches: int = 0  # calls that left, over all of its attempts


BeforeSpending = Callable[[int], Awaitable[None]]


async def nothing_to_write(nano: int) -> None:
    """The `before_spending` of a situation that no request stands behind."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy plans from. `shown` and `allowed.handles` are in the order shown."""

    pool: str
    conversation: Sequence[Mapping[str, Any]]
    workers: tuple[WorkerSpec, ...]
    shown: tuple[ShownWorker, ...]
    experience: Mapping[str, WorkerExperience]  # by worker name
    replies: tuple[ShownReply, ...]
    allowed: Allowed
    round: int
    depth_left: int
    timeout_s: float
    explore: bool  # decode at temperature 1, so that the log holds alternatives to learn from
    avoid: frozenset[str] = frozenset()  # handles that failed in this loop
    before_spending: BeforeSpending = nothing_to_write  # awaited before a planning call that may cost so many nano
    task_type: str | None = None  # as the client names it
    final: bool = False  # no round follows: this one's reply is the answer
    quality: int | None = None  # the request's dial, see core/loop/prompt.py
    version: Pick | None = None  # the policy version that plans; None: the conductor's only one
    rollout_id: str | None = None  # of a request; None in a child loop


class EarlyStart(Protocol):
    """Told of each step that is certain to run, while the rest of the plan is still being written."""

    def __call__(self, step: Step) -> None: ...


class Planner(Protocol):
    """A policy: turns a situation into a plan, and fills in the round's record as it goes."""

    name: str

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """One plan within `situation.allowed`. Raises ConductorError, PlanRefused or CapReached."""
        ...


@dataclass(slots=True)
class Loop:
    """One loop: the root's, or a child's one level deeper."""

    record: RolloutRecord
    tree: Tree
    conversation: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]  # the client's own, for the step whose reply is the answer
    workers: tuple[WorkerSpec, ...]  # in the order shown
    experience: Mapping[str, WorkerExperience]
    planner: Planner
    fallback: Planner | None
    caps: Caps
    rounds: int
    explore: bool = False
    quality: int | None = None
    version: Pick | None = None
    sticky: bool = True  # whether the turn may go back to the worker that asked
    endpoint: Endpoint = "chat"
    sink: Sink | None = None
    shape: Shape | None = None  # what `params` promise the client its reply will be
    runs: list[StepRun] = field(default_factory=list)  # over all rounds, by index

    @property
    def depth(self) -> int:
        """How many loops are above this one."""
        return self.record.depth

    async def announce(self, now_us: int, step_id: str, worker: str, bound_nano: int, attempt: int = 1) -> None:
        """Return once it is on disk that a call is about to leave that may cost `bound_nano`. Raises SpoolFull."""
        payload = {
            "hold_id": self.tree.hold_id,
            "rollout_id": self.record.id,
            "step_id": step_id,
            "attempt": attempt,
            "worker": worker,
            "bound_nano": bound_nano,
        }
        await self.tree.held.append(Event.new("dispatch", now_us, payload))

    def tell(self, event: str, **facts: Any) -> None:
        """Say what happens to a client that asked for it."""
        self.tree.tell({"event": event, "depth": self.depth, **facts})
