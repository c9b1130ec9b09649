"""The state of one loop: the request it serves, what it may use, and the tree of loops it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.core.log.events import Event, uuid7
from gateway.core.log.rollout import RolloutRecord, RoundRecord, StepRecord
from gateway.core.loop.caps import Caps, Meter
from gateway.core.loop.contract import Ruling
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.plan import Plan, PlanLimits, Step
from gateway.core.loop.shown import ShownPlan, ShownReply, ShownRequest, ShownWorker
from gateway.core.loop.turns.replanning import TurnFacts
from gateway.core.money.templates import Templates
from gateway.core.openai.chat import NOTHING_HOSTED, Endpoint, HostedTools
from gateway.core.openai.structured import ReplyShape
from gateway.core.openai.vendor import without_state
from gateway.core.policies.versions import Pick
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import BatonError
from gateway.service.ports.request import Journal


class Sink(Protocol):
    """Takes the last step's stream. A slow reader holds `chunk` back."""

    async def chunk(self, choices: Sequence[Mapping[str, Any]]) -> None:
        """Pass the choices of one chunk on to the client."""
        ...

    def about(self, reply: Mapping[str, Any]) -> None:
        """Take what a reply or chunk says about itself beside its choices."""
        ...


def no_listener(event: Mapping[str, Any]) -> None:
    """The `tell` of a request whose client did not ask for events."""


class HoldRecord:
    """The journal's record of a request's holds: of its money, and of its calls where its session counts them. It goes
    to disk with the first event under it, in one fsync: a hold under which no call has left costs nothing, even if this
    process dies."""

    def __init__(self, journal: Journal, *holds: Event) -> None:
        self._journal = journal
        self._holds = holds
        self._grown: tuple[Event, ...] = ()
        self._written: asyncio.Future[None] | None = None

    def grown(self, hold: Event) -> None:
        """The hold of the money has grown to this. It is on disk before the next call leaves, instead of what it was or
        behind it; the ledger goes by the largest."""
        if self._written is None:
            self._holds = (hold, *self._holds[1:])
        else:
            self._grown = (hold,)

    async def append(self, *events: Event) -> None:
        """Return once the holds and these events are on disk. Raises SpoolFull where one of them finds no room."""
        events, self._grown = (*self._grown, *events), ()
        if self._written is None:
            self._written = asyncio.ensure_future(self._journal.append(*self._holds, *events))
            await asyncio.shield(self._written)
        elif self._written.done():
            self._written.result()
            await self._journal.append(*events)
        else:
            await asyncio.gather(asyncio.shield(self._written), self._journal.append(*events))

    async def close(self, settles: Sequence[Event], *rest: Event) -> None:
        """Write the closing records. Skip `settles` if the holds were never written. Closing records find room even
        where the holds did not."""
        if self._written is None:
            await self.append(*settles, *rest)
            return
        if not self._written.done():
            await asyncio.wait({self._written})
        lost = self._written.cancelled() or self._written.exception() is not None
        if last := rest if lost else (*settles, *rest):
            await self._journal.append(*last)


class Checkpoints(Protocol):
    """Saves what a request has done, so that another gateway can go on with it. A plan that was saved is not planned
    again, and a step that ended is not run again."""

    @property
    def abandoned(self) -> bool:
        """Whether this process has left the request to another one: it must neither settle nor log it."""
        ...

    async def planned(self, loop: Loop, record: RoundRecord, plan: Callable[[], Awaitable[Plan]]) -> Plan:
        """The plan that was saved, else the one that `plan` returns. Raises as `plan`."""
        ...

    async def step(self, loop: Loop, run: StepRun, work: Callable[[], Awaitable[None]]) -> None:
        """Restore a step that has ended; run any other by `work`, unless it may have done what must not be done
        twice."""
        ...

    async def leaving(self, loop: Loop, step_id: str, worker: str, bound_nano: int) -> int:
        """Return once it is saved that a call is about to leave, with the number of calls that left for this step from
        gateways that died. Raises BatonError where it must not leave."""
        ...


@dataclass(slots=True)
class SummaryCalls:
    """The summaries that a request may ask for. `workers`: who may make them, the cheapest first. `failed`: why the one
    before came to nothing, so that no other is asked for."""

    workers: tuple[WorkerSpec, ...] = ()
    failed: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time


@dataclass(slots=True)
class Tree:
    """The state that all loops of one request share."""

    meter: Meter
    hold_id: str
    deadline_s: float  # on the clock's monotonic scale
    slots: asyncio.Semaphore  # worker calls in flight
    held: HoldRecord  # on disk before any money is spent
    calls_hold_id: str | None = None  # of the hold on its session's calls
    tell: Callable[[Mapping[str, Any]], None] = no_listener  # takes events, for a client that asked for them
    children: list[RolloutRecord] = field(default_factory=list)
    checkpoints: Checkpoints | None = None  # of a request that another gateway may go on with
    summaries: SummaryCalls = field(default_factory=SummaryCalls)
    templates: Templates = field(default_factory=Templates)


@dataclass(slots=True)
class StepRun:
    """One step while it runs. `ended` is set when it ends, well or badly; `body` is its reply, if it has one."""

    index: int
    step: Step
    spec: WorkerSpec
    record: StepRecord
    answers: bool = False  # whether its reply may be the plan's answer; it has the client's parameters
    streams: bool = False  # whether its stream goes to the client as it comes
    gates: tuple[int, ...] = ()  # the verify steps before it in its plan, for whose verdicts it waits
    verdict: Ruling | None = None  # of a verify step that ran
    taken: int | None = None  # the edge that its verdict took; None: the plan ended there
    accepted: bool = False  # whether a verdict shipped its reply
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    body: Mapping[str, Any] | None = None
    error: BatonError | None = None
    left_out: list[str] = field(default_factory=list)  # parameters of the client that the worker's model refuses
    names: Mapping[str, str] = field(default_factory=dict)  # of tools, by those that the worker is told
    cut: dict[str, Any] | None = None  # what was cut of the conversation to fit the worker's context
    dispatches: int = 0  # calls that left, over all attempts
    wanted_tokens: int = 0  # the output that was asked for, before anything lowered it


@dataclass(frozen=True, slots=True)
class Stakes:
    """What the bandit decides by, beside experience. `explore_share`: of all requests like this one, the share that
    explores. `preferences`: what a right answer is worth, as (who says so, {usd, seconds}), the most special first."""

    explore_share: float = 0.0
    preferences: Sequence[tuple[str, Mapping[str, Any] | None]] = ()


NO_STAKES = Stakes()
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
    stakes: Stakes = NO_STAKES
    # awaited, with its bound in nano-dollars, before a planning call
    before_spending: BeforeSpending = nothing_to_write
    task_type: str | None = None  # the client's own name for the kind of task
    final: bool = False  # no round follows: the reply of this round is the answer
    quality: int | None = None  # the request's dial, see core/loop/prompt.py
    version: Pick | None = None  # the policy version that plans; None: the conductor has only one
    rollout_id: str | None = None  # of a request; None in a child loop
    request: ShownRequest | None = None
    examples: tuple[ShownPlan, ...] = ()
    warm: Warm | None = None


class EarlyStart(Protocol):
    """Takes each step that is certain to run, while the rest of the plan is still being decoded."""

    def __call__(self, step: Step) -> None: ...


class Planner(Protocol):
    """A policy: turns a situation into a plan and fills in the round's record."""

    name: str

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Return a plan within `situation.allowed`. Raises ConductorError, PlanRefused or CapReached."""
        ...


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """How a conversation's last turn was found: its worker, what it left, and the marks with the seconds for which each
    counts."""

    worker: str
    facts: TurnFacts
    marks: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Warm:
    """The worker that answered a conversation's last turn, of a turn that is planned all the same. `worth_nano`: what
    its prompt cache saves on this conversation, which leaving it costs. `why`: a trigger of
    core/loop/turns/replanning.py."""

    worker: str
    handle: str
    worth_nano: int
    why: str


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
    stakes: Stakes = NO_STAKES
    quality: int | None = None
    version: Pick | None = None
    needs: frozenset[str] = frozenset()  # what the request asks of a worker, as in a pool file's `cannot`
    examples: tuple[ShownPlan, ...] = ()  # plans that did well on similar requests of the key
    sticky: bool = True  # whether the turn may go back to the worker that asked
    last: LastAnswer | None = None  # of a conversation that goes on
    warm: Warm | None = None  # of a conversation that is planned anew
    vector: Sequence[float] | None = None  # of the question, where experience was looked up by it
    looked_up: bool = False  # whether `experience` and `examples` were read
    endpoint: Endpoint = "chat"
    sink: Sink | None = None
    shape: ReplyShape | None = None  # the shape that `params` promise of the reply
    hosted: HostedTools = NOTHING_HOSTED  # for the step that answers
    pool_workers: tuple[WorkerSpec, ...] = ()  # all of the pool, where `workers` are some
    drawn: Mapping[str, float] = field(default_factory=dict)  # of those, the ones at random: the probability
    reserve: tuple[WorkerSpec, ...] = ()  # in quarantine or at rest: asked only where every other worker failed
    runs: list[StepRun] = field(default_factory=list)  # over all rounds, by index
    path: str = ""  # of a child loop: the ids of the steps above it, each with a slash

    @property
    def depth(self) -> int:
        """The number of loops above this one."""
        return self.record.depth

    @property
    def failed(self) -> frozenset[str]:
        """The handles of workers that failed in this loop."""
        return frozenset(run.step.worker for run in self.runs if run.error is not None)

    async def announce(
        self, now_us: int, step_id: str, worker: str, bound_nano: int, attempt: int = 1, *, calls: int = 0
    ) -> None:
        """Return once it is on disk that a call is about to leave that may cost `bound_nano`, and counts as `calls`
        worker calls of its session. Raises SpoolFull."""
        if self.tree.checkpoints is not None:
            attempt += await self.tree.checkpoints.leaving(self, step_id, worker, bound_nano)
        payload = {
            "hold_id": self.tree.hold_id,
            "rollout_id": self.record.id,
            "step_id": step_id,
            "attempt": attempt,
            "worker": worker,
            "bound_nano": bound_nano,
        }
        events = [Event.new("dispatch", now_us, payload)]
        if calls and self.tree.calls_hold_id is not None:
            counted = payload | {"hold_id": self.tree.calls_hold_id, "rollout_id": None, "bound_nano": calls}
            events.append(Event.new("dispatch", now_us, counted))
        await self.tree.held.append(*events)

    def tell(self, event: str, **facts: Any) -> None:
        """Pass an event to a client that asked for events."""
        self.tree.tell({"event": event, "depth": self.depth, **facts})


def child_record(loop: Loop, now_us: int, messages: Sequence[Mapping[str, Any]]) -> RolloutRecord:
    """The record of a child loop of `loop` that begins now with these messages."""
    parent = loop.record
    child_id = uuid7(now_us // 1000)
    return RolloutRecord(
        id=child_id,
        key_id=parent.key_id,
        org=parent.org,
        created_us=now_us,
        policy_requested=parent.policy_requested,
        pool_name=parent.pool_name,
        pool_hash=parent.pool_hash,
        pool_revision=parent.pool_revision,
        pool=parent.pool,
        caps=parent.caps,
        request={"messages": without_state(messages)},
        completion_id=f"chatcmpl-{child_id.replace('-', '')}",
        parent_id=parent.id,
        depth=parent.depth + 1,
        end_user=parent.end_user,
        task_type=parent.task_type,
        log_mode=parent.log_mode,
        train=parent.train,
        tags=parent.tags,
    )
