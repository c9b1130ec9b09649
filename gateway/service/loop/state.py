"""The state of one loop: the request it serves, what it may use, and the tree of loops it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.core.log.events import Event
from gateway.core.log.rollout import RolloutRecord, RoundRecord, StepRecord
from gateway.core.loop.caps import Caps, Meter
from gateway.core.loop.plan import Plan, PlanLimits, Step
from gateway.core.loop.shown import ShownPlan, ShownReply, ShownRequest, ShownWorker
from gateway.core.openai.chat import Endpoint
from gateway.core.openai.structured import ReplyShape
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BatonError
from gateway.service.ports.request import Journal, WorkerExperience


class Sink(Protocol):
    """Takes the last step's stream. A slow reader holds `chunk` back."""

    async def chunk(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Pass the choices of one chunk on to the client."""
        ...

    def about(self, reply: Mapping[str, Any]) -> None:
        """Take what a reply or chunk says about itself beside its choices: `service_tier`, `system_fingerprint`."""
        ...


def no_listener(event: Mapping[str, Any]) -> None:
    """The `tell` of a request whose client did not ask for events."""


class HoldRecord:
    """The journal's record of a hold. It goes to disk with the first event under it, in one fsync: a hold under which
    no call has left costs nothing, even if this process dies."""

    def __init__(self, journal: Journal, event: Event) -> None:
        self._journal = journal
        self._event = event
        self._written: asyncio.Future[None] | None = None

    async def append(self, *events: Event) -> None:
        """Return once the hold and these events are on disk. Raises SpoolFull where one of them finds no room."""
        if self._written is None:
            self._written = asyncio.ensure_future(self._journal.append(self._event, *events))
            await asyncio.shield(self._written)
        elif self._written.done():
            self._written.result()
            await self._journal.append(*events)
        else:
            await asyncio.gather(asyncio.shield(self._written), self._journal.append(*events))

    async def close(self, settle: Event, *rest: Event) -> None:
        """Write the closing records. Skip `settle` if the hold itself was never written. Closing records find room even
        where the hold did not."""
        if self._written is None:
            await self.append(settle, *rest)
            return
        await asyncio.wait({self._written})
        lost = self._written.cancelled() or self._written.exception() is not None
        if last := rest if lost else (settle, *rest):
            await self._journal.append(*last)


@dataclass(slots=True)
class Tree:
    """The state that all loops of one request share."""

    meter: Meter
    hold_id: str
    deadline_s: float  # on the clock's monotonic scale
    slots: asyncio.Semaphore  # worker calls in flight
    held: HoldRecord  # on disk before any money is spent
    tell: Callable[[Mapping[str, Any]], None] = no_listener  # takes events, for a client that asked for them
    children: list[RolloutRecord] = field(default_factory=list)


@dataclass(slots=True)
class StepRun:
    """One step while it runs. `ended` is set when it ends, well or badly; `body` is its reply, if it has one."""

    index: int
    step: Step
    spec: WorkerSpec
    record: StepRecord
    answers: bool = False  # whether it is the last step of its plan, whose reply is the plan's answer
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    body: Mapping[str, Any] | None = None
    error: BatonError | None = None
    left_out: list[str] = field(default_factory=list)  # parameters of the client that the worker's model refuses
    dispatches: int = 0  # calls that left, over all attempts
    wanted_tokens: int = 0  # the output that was asked for, before anything lowered it


BeforeSpending = Callable[[int], Awaitable[None]]


async def nothing_to_write(nano: int) -> None:
    """The `before_spending` of a situation without a request."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy plans from. `shown` and `allowed.handles` have the order of the prompt."""

    pool: str
    conversation: Sequence[Mapping[str, Any]]
    workers: tuple[WorkerSpec, ...]
    shown: tuple[ShownWorker, ...]
    experience: Mapping[str, WorkerExperience]  # by worker name
    replies: tuple[ShownReply, ...]
    allowed: PlanLimits
    round: int
    depth_left: int
    timeout_s: float
    explore: bool  # decode at temperature 1, so that the log has alternatives to learn from
    avoid: frozenset[str] = frozenset()  # handles that failed in this loop
    # awaited, with its bound in nano-dollars, before a planning call
    before_spending: BeforeSpending = nothing_to_write
    task_type: str | None = None  # the client's own name for the kind of task
    final: bool = False  # no round follows: the reply of this round is the answer
    quality: int | None = None  # the request's dial, see core/loop/prompt.py
    version: Pick | None = None  # the policy version that plans; None: the conductor has only one
    rollout_id: str | None = None  # of a request; None in a child loop
    request: ShownRequest | None = None
    examples: tuple[ShownPlan, ...] = ()


class EarlyStart(Protocol):
    """Takes each step that is certain to run, while the rest of the plan is still being decoded."""

    def __call__(self, step: Step) -> None: ...


class Planner(Protocol):
    """A policy: turns a situation into a plan and fills in the round's record."""

    name: str

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Return a plan within `situation.allowed`. Raises ConductorError, PlanRefused or CapReached."""
        ...


@dataclass(slots=True)
class Loop:
    """One loop: the request's own, or a child's one level deeper."""

    record: RolloutRecord
    tree: Tree
    conversation: tuple[Mapping[str, Any], ...]
    params: Mapping[str, Any]  # the client's parameters, for the step that answers
    workers: tuple[WorkerSpec, ...]  # in the order of the prompt
    experience: Mapping[str, WorkerExperience]
    planner: Planner
    fallback: Planner | None
    caps: Caps
    rounds: int
    explore: bool = False
    quality: int | None = None
    version: Pick | None = None
    needs: frozenset[str] = frozenset()  # what the request asks of a worker, as in a pool file's `cannot`
    examples: tuple[ShownPlan, ...] = ()  # plans that did well on similar requests of the key
    sticky: bool = True  # whether the turn may go back to the worker that asked
    endpoint: Endpoint = "chat"
    sink: Sink | None = None
    shape: ReplyShape | None = None  # the shape that `params` promise of the reply
    runs: list[StepRun] = field(default_factory=list)  # over all rounds, by index

    @property
    def depth(self) -> int:
        """The number of loops above this one."""
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
        """Pass an event to a client that asked for events."""
        self.tree.tell({"event": event, "depth": self.depth, **facts})
