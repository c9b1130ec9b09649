"""Plans carried out by the gateway's own loop (`gateway.service.loop.rounds`), in this process, and graded.

What is left out is what surrounds a loop when it is served: HTTP, admission, the hold, streaming, the disk. Caps, the
meter, `see` gating, attempts, child loops, rounds and the digest are the served code itself.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any, Protocol

from gateway.core.log.events import Event, uuid7
from gateway.core.log.rollout import RolloutRecord, RoundRecord, StepRecord, close_record
from gateway.core.loop.caps import Caps, Meter
from gateway.core.loop.plan import REASONS, Plan, validate
from gateway.core.openai.reply import reply_text
from gateway.core.pool.workers import Price, pool_hash
from gateway.errors import BatonError, PlanRefused, UpstreamError
from gateway.service.loop.calls import Calls
from gateway.service.loop.checks import verdicts_of
from gateway.service.loop.conducting import prompt_input
from gateway.service.loop.health.retries import RetryBudget
from gateway.service.loop.rounds import Rounds
from gateway.service.loop.shown import pool_entry
from gateway.service.loop.state import EarlyStart, HoldRecord, Loop, Planner, Situation, Tree
from gateway.service.ports.request import Clock, WorkerCall, WorkerReply, Workers
from policy.environments.base import (
    Bill,
    Episode,
    PlanSource,
    PosedPrompt,
    Prompt,
    Spend,
    SpendCapped,
    Split,
    draw_pool,
)
from policy.environments.sampling import CONCURRENCY, sample
from policy.simulators import HANDLES

CAPS = Caps(cost_nano=2_000_000_000)
FREE = Price()  # of planning, where nobody is paid for it
UNHURRIED_S = 86_400.0  # a wall clock that ends no loop: workers are simulated, and a busy planner changes no figure
ROUNDS = 3
ATTEMPTS_MAX = 2
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)  # of the virtual clock
EPOCH_US = int(EPOCH.timestamp() * 1_000_000)
Seconds = Mapping[tuple[str, str], float]  # (rollout id, `round.step`) → seconds its calls took


class TimedWorkers(Workers, Protocol):
    """Workers of one episode that record how many (simulated or measured) seconds the calls of each step took."""

    @property
    def seconds(self) -> Seconds:
        """By (rollout id, `round.step`)."""
        ...


class VirtualClock(Clock):
    """Stands still while a plan runs; `stamp` writes the simulated times afterwards."""

    def now(self) -> datetime:
        return EPOCH

    def monotonic_s(self) -> float:
        return 0.0


@dataclass(slots=True)
class MemoryJournal:
    """One episode's journal. The caps bound it: one dispatch an attempt."""

    events: list[Event] = field(default_factory=list)

    async def append(self, *events: Event) -> None:
        self.events.extend(events)

    async def shipped(self) -> None:
        """Return at once: records go nowhere from here."""


class TextPlanner:
    """The plan of the only round as it was sampled. Child loops below it are planned by `children`."""

    name = "sampled"

    def __init__(self, text: str, depth_left: int, children: Planner | None) -> None:
        self._text = text
        self._depth_left = depth_left
        self._children = children

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Raises PlanRefused, as the conductor's planner does on the same text."""
        if situation.depth_left < self._depth_left:
            if self._children is None:
                raise PlanRefused("depth_cap", "no planner is given for child loops")
            record.planner = self._children.name
            return await self._children.plan(situation, record, meter, early)
        record.plan_text = self._text
        return validate(self._text, situation.allowed)


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The end of a loop: the loop itself, and the reply or the error."""

    loop: Loop
    body: Mapping[str, Any] | None
    error: BatonError | None

    @property
    def reply(self) -> str:
        """Return the text of the reply; empty without a reply."""
        return reply_text(self.body or {})


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs loops under `caps`. `fallback` plans where a policy cannot, as in serving; None: the episode then fails,
    which is what training wants to see. `rounds` is for planners; sampled text is the plan of one."""

    caps: Caps = CAPS
    rounds: int = ROUNDS
    fallback: Planner | None = None
    attempts_max: int = ATTEMPTS_MAX

    def pose(self, prompt: Prompt) -> PosedPrompt:
        """Return what a policy is shown of the prompt in round 1."""
        loop = self._loop(prompt, TextPlanner("", 0, None), 1)
        situation = self._rounds(_NoWorkers()).situation(loop, 1, loop.planner)
        return PosedPrompt(prompt, situation, prompt_input(situation))

    async def run(
        self, prompt: Prompt, source: PlanSource, workers: Workers, children: Planner | None = None
    ) -> LoopResult:
        """Run one loop to its end. An error of the tree is part of the result and is not raised."""
        if isinstance(source, str):
            loop = self._loop(prompt, TextPlanner(source, self.caps.depth, children), 1)
        else:
            loop = self._loop(prompt, source, min(self.rounds, self.caps.rounds))
        body, error = None, None
        try:
            body = await self._rounds(workers).run(loop)
            loop.record.status, loop.record.reply = "done", dict(body)
        except BatonError as raised:
            error = raised
            loop.record.status, loop.record.error = "failed", raised.body()["error"]
        close_record(loop.record, EPOCH_US)
        loop.record.cost_nano = loop.tree.meter.spent_nano
        return LoopResult(loop, body, error)

    def _rounds(self, workers: Workers) -> Rounds:
        budget = RetryBudget(start_retries=self.caps.calls, saved_retries_max=self.caps.calls)  # of this episode alone
        return Rounds(Calls(workers, budget, VirtualClock(), attempts_max=self.attempts_max, sleep=_no_wait))

    def _loop(self, prompt: Prompt, planner: Planner, rounds: int) -> Loop:
        record = _record(prompt, planner.name, self.caps)
        slots = asyncio.Semaphore(self.caps.parallel)
        hold = HoldRecord(MemoryJournal(), Event(record.id, "hold", EPOCH_US, {"hold_id": record.id}))
        tree = Tree(Meter(self.caps.cost_nano, self.caps), record.id, self.caps.wall_s, slots, hold)
        return Loop(
            record=record,
            tree=tree,
            conversation=prompt.messages,
            params=prompt.params,
            workers=prompt.pool,
            experience=prompt.experience,
            planner=planner,
            fallback=self.fallback,
            caps=self.caps,
            rounds=rounds,
            quality=prompt.quality,
        )


def episode_of(prompt: Prompt, result: LoopResult, sample: int, outcome: float, seconds: Seconds) -> Episode:
    """Return the episode of a loop that has ended, and write simulated times into the loop's records."""
    record, children = result.loop.record, tuple(result.loop.tree.children)
    latency_s = stamp(record, children, seconds)
    steps = [*record.steps, *(step for child in children for step in child.steps)]
    refusals = {planned.refusal for loop in (record, *children) for planned in loop.rounds} - {None}
    return Episode(
        prompt_id=prompt.id,
        sample=sample,
        plan=_plan_text(record),
        parsed=not refusals & (REASONS | {"unparseable"}),
        outcome=outcome,
        cost_nano=record.cost_nano,
        latency_s=latency_s,
        calls=result.loop.tree.meter.calls,
        steps=len(steps),
        workers=tuple(step.worker for step in steps),
        record=record,
        children=children,
        reply=result.reply,
        error=None if result.error is None else result.error.code,
        verdicts=verdicts_of((record, *children)),
    )


def _plan_text(record: RolloutRecord) -> str:
    if not record.rounds:
        return ""
    first = record.rounds[0]
    if first.plan_text is None and first.plan is not None:
        return json.dumps(first.plan, separators=(",", ":"), ensure_ascii=False)
    return first.plan_text or ""


def _record(prompt: Prompt, policy: str, caps: Caps) -> RolloutRecord:
    rollout_id = uuid7(EPOCH_US // 1000)
    return RolloutRecord(
        id=rollout_id,
        key_id="environment",
        org="environment",
        created_us=EPOCH_US,
        policy_requested=policy,
        pool_name="environment",
        pool_hash=pool_hash(prompt.pool),
        pool=[pool_entry(spec, prompt.experience.get(spec.name)) for spec in prompt.pool],
        caps=caps.as_json() | ({} if prompt.quality is None else {"quality": prompt.quality}),
        request={"messages": [dict(message) for message in prompt.messages]},
        completion_id=f"chatcmpl-{rollout_id.replace('-', '')}",
        task_type=prompt.task_type,
    )


class _NoWorkers:
    """Workers of a loop that is only rendered, never run."""

    async def complete(self, call: WorkerCall) -> WorkerReply:
        raise UpstreamError("no worker is called while a prompt is posed", dispatched=False)

    async def stream(self, call: WorkerCall) -> AsyncIterator[Mapping[str, Any]]:
        yield (await self.complete(call)).body


async def _no_wait(_seconds: float) -> None:
    """Retries wait in simulated time only."""


# ---------------------------------------------------------------- simulated seconds


def stamp(record: RolloutRecord, children: Sequence[RolloutRecord], seconds: Seconds) -> float:
    """Write simulated times into a rollout's steps and its children's; return how many seconds it took.

    Seconds add up along the critical path: a step starts when all it sees has ended, a round when all steps of the
    round before have. Planning takes no time here, and there are places for all calls at once.
    """
    by_id = {child.id: child for child in children}
    return _stamp_loop(record, by_id, seconds, record.created_us, 0.0)


def _stamp_loop(
    record: RolloutRecord, children: Mapping[str, RolloutRecord], seconds: Seconds, zero_us: int, start_s: float
) -> float:
    now_s = start_s
    record.created_us = _us(zero_us, start_s)
    ended: dict[int, float] = {}
    for planned in record.rounds:
        planned.started_us = planned.finished_us = _us(zero_us, now_s)
        steps = [step for step in record.steps if step.round == planned.round]
        for step in steps:
            begin_s = max([now_s, *(ended[index] for index in step.see)])
            child = children.get(step.child_rollout_id or "")
            took_s = seconds.get((record.id, f"{step.round}.{step.step}"), 0.0)
            end_s = begin_s + took_s if child is None else _stamp_loop(child, children, seconds, zero_us, begin_s)
            ended[step.step] = end_s
            _stamp_step(step, _us(zero_us, begin_s), _us(zero_us, end_s))
        now_s = max([now_s, *(ended[step.step] for step in steps)])
    record.finished_us = _us(zero_us, now_s)
    return now_s


def _stamp_step(step: StepRecord, started_us: int, finished_us: int) -> None:
    step.started_us, step.finished_us = started_us, finished_us
    for attempt in step.attempts:
        attempt.started_us, attempt.finished_us = started_us, finished_us


def _us(zero_us: int, at_s: float) -> int:
    return zero_us + round(at_s * 1_000_000)


# ---------------------------------------------------------------- an environment over it


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
    async def graded(self, prompt: Prompt, reply: str, bill: Bill) -> float:
        """Outcome of a reply, in [0, 1]; what judging costs goes on `bill`. Raises Ungraded."""

    def executor_of(self, source: PlanSource) -> Executor:
        """Return the executor that carries out this source's plans."""
        return self.executor

    def spent_nano(self, result: LoopResult, workers: TimedWorkers) -> int:
        """Return what an episode takes from the meter, in nano-dollars."""
        return result.loop.tree.meter.spent_nano

    def risked_nano(self, workers: TimedWorkers) -> int:
        """Return what an episode that was cut off takes from the meter: nothing, where nobody is paid."""
        return 0

    def children(self, prompt: Prompt) -> Planner | None:
        """Return the planner of child loops below a plan that was given as text; None refuses them."""
        return None

    def situation(
        self, prompt: Prompt, rng: Random, k_of_n: int | None = None, redraw_handles: bool = False
    ) -> PosedPrompt:
        """As in the port."""
        return self.executor.pose(draw_pool(prompt, rng, k_of_n, HANDLES if redraw_handles else None))

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """As in the port."""
        workers, bill = self.workers(prompt, sample), Bill()
        self.spend.start()
        spent_nano: int | None = None  # not known of an episode that is cut off
        try:
            result = await self.executor_of(source).run(prompt, source, workers, self.children(prompt))
            spent_nano = self.spent_nano(result, workers)
            outcome = await self.graded(prompt, result.reply, bill) if result.reply else 0.0
            return episode_of(prompt, result, sample, outcome, workers.seconds)
        finally:
            self.spend.end((self.risked_nano(workers) if spent_nano is None else spent_nano) + bill.nano)

    async def run(self, prompt: Prompt, plans: Sequence[PlanSource]) -> list[Episode]:
        """As in the port."""
        groups = await sample(self, [(prompt, plans)], concurrency=min(self._concurrency, max(1, len(plans))))
        if groups.capped:
            raise SpendCapped(self.spend, groups.episodes)
        return groups.episodes
