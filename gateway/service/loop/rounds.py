"""The loop: plan, run the steps as a graph, show the policy what came back; again, or ship (DESIGN §2).

One loop serves every published scheme. Steps start as soon as what they see has ended, the first ones while the plan
is still being decoded. A step on worker `self` is this same loop one level deeper, on the same meter and deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.core.log.ids import uuid7
from gateway.core.log.rollout import RolloutRecord, RoundRecord, StepRecord
from gateway.core.loop.digest import digest
from gateway.core.loop.plan import Allowed, Plan, Step
from gateway.core.loop.prompt import Seen, ShownReply, ShownWorker, price_tier
from gateway.core.loop.turns import asks
from gateway.core.openai.reply import reply_text
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import (
    BatonError,
    CapReached,
    ConductorError,
    DeadlineExceeded,
    MoneyUnavailable,
    PlanRefused,
    SpoolFull,
    UpstreamError,
)
from gateway.service.loop.attempts import Attempts
from gateway.service.loop.calls import NO_TOKENIZER, price_of
from gateway.service.loop.state import Job, Planner, Situation, StepRun
from gateway.service.loop.steps import StepRunner, replay
from gateway.service.ports.request import Clock, TokenCounter, WorkerExperience

SHOWN_MIN = 2  # outcomes before a conductor is told of them: it takes what it is shown at its word
FATAL = (MoneyUnavailable, SpoolFull)  # nothing may be done that cannot be paid for or written down


class Rounds:
    """Runs loops. Holds no state of its own: everything about one is in its Job."""

    def __init__(self, attempts: Attempts, clock: Clock, tokens: TokenCounter = NO_TOKENIZER) -> None:
        self._clock = clock
        self._steps = StepRunner(attempts, clock, self._child, tokens)

    async def run(self, job: Job) -> Mapping[str, Any]:
        """The body of the reply. Raises the error that left the request without any answer."""
        left_s = job.tree.deadline_s - self._clock.monotonic_s()
        try:
            async with asyncio.timeout(left_s):
                return await self._rounds(job)
        except TimeoutError:
            return await self._best_so_far(job, DeadlineExceeded(f"no answer within {job.caps.wall_s:g} s"), "wall_s")
        except CapReached as reached:
            return await self._best_so_far(job, reached, reached.cap)
        except UpstreamError as failed:
            return await self._best_so_far(job, failed, "worker")

    async def stick(self, job: Job, planner: Planner) -> Mapping[str, Any] | None:
        """The body of the worker that `planner` goes back to; None where it failed before it said anything, so that
        the request may be planned. Raises the error that ended the request."""
        record = self._planning(job, planner)
        graph = _Graph(self._steps, job, record, final=True)
        try:
            async with asyncio.timeout(job.tree.deadline_s - self._clock.monotonic_s()):
                last = await graph.run(planner, self.situation(job, 1), self._clock.now_us)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {job.caps.wall_s:g} s") from None
        finally:
            record.finished_us = record.finished_us or self._clock.now_us()
        if last is None or last.body is None or last.error is not None:
            error = (last.error if last is not None else None) or UpstreamError("the step ended without a reply")
            begun = last is not None and last.record.first_byte_us is not None
            if begun or not isinstance(error, UpstreamError):
                raise error
            job.record.fallback = f"worker_{error.kind}"
            return None
        return last.body

    async def _rounds(self, job: Job) -> Mapping[str, Any]:
        body: Mapping[str, Any] | None = None
        for number in range(1, job.rounds + 1):
            final = number == job.rounds
            ran = await self._round(job, number, final)
            if ran is None:  # an empty plan: ship what there is
                break
            body = await self._answer(job, ran, number, final)
            if final:
                return body  # it has been streamed already, if anybody listens
            if asks(body):  # for the client to do: no plan may go on over it
                break
        if body is None:
            raise PlanRefused("no_steps", "the plan had no steps")
        await replay(body, job)
        return body

    async def _round(self, job: Job, number: int, final: bool) -> StepRun | None:
        """Plan and run one round; the last step, or None for an empty plan."""
        situation = self.situation(job, number)
        record = self._planning(job, job.planner)
        graph = _Graph(self._steps, job, record, final)
        try:
            return await graph.run(job.planner, situation, self._clock.now_us)
        except (ConductorError, PlanRefused) as refused:
            record.refusal = refused.reason
            if job.fallback is None:
                raise
            job.record.fallback = f"{job.planner.name}_{refused.reason}"
            if refused.reason == "depth_cap":
                job.record.capped = "depth"
        finally:
            record.finished_us = record.finished_us or self._clock.now_us()
        return await self._fall_back(job, job.fallback, number, final)

    async def _fall_back(self, job: Job, router: Planner, number: int, final: bool) -> StepRun:
        """The configured router plans instead, within the same deadline."""
        record = self._planning(job, router)
        graph = _Graph(self._steps, job, record, final)
        try:
            last = await graph.run(router, self.situation(job, number), self._clock.now_us)
        except PlanRefused as refused:
            record.refusal = refused.reason
            raise UpstreamError(
                f"{refused.message}; try again later", code="no_worker", retryable=True, dispatched=False
            ) from None
        finally:
            record.finished_us = record.finished_us or self._clock.now_us()
        if last is None:
            raise UpstreamError(f"router {router.name} planned nothing", code="no_worker", dispatched=False)
        return last

    def _planning(self, job: Job, planner: Planner) -> RoundRecord:
        """The record of one planning call; a refused one and the router's that follows it are two."""
        record = RoundRecord(len(job.record.rounds) + 1, planner.name, started_us=self._clock.now_us())
        job.record.rounds.append(record)
        return record

    async def _answer(self, job: Job, last: StepRun, number: int, final: bool) -> Mapping[str, Any]:
        """The last step's body; where it failed, another worker's or an earlier answer. Raises its error."""
        while last.body is None or last.error is not None:
            error = last.error or ConductorError("unparseable", "the last step ended without a reply")
            streamed = final and last.record.first_byte_us is not None
            if streamed or job.fallback is None or not isinstance(error, UpstreamError) or not _others(job):
                return await self._best_so_far(job, error, error.cap if isinstance(error, CapReached) else "worker")
            job.record.fallback = f"worker_{error.kind}"
            last = await self._fall_back(job, job.fallback, number, final)
        return last.body

    async def _best_so_far(self, job: Job, error: BatonError, why: str) -> Mapping[str, Any]:
        """The latest answer any step gave, flagged; nothing fits where a stream has begun or nothing was answered."""
        begun = any(run.record.first_byte_us is not None and job.sink is not None for run in job.runs)
        done = [run.body for run in job.runs if run.body is not None and run.record.status == "done"]
        bodies = [body for body in done if job.shape is None or job.shape.kept(body)]
        if isinstance(error, FATAL) or begun or not bodies or not (reply_text(bodies[-1]) or asks(bodies[-1])):
            raise error
        body = bodies[-1]
        job.record.capped = job.record.capped or why
        await replay(body, job)
        return body

    # ------------------------------------------------------------ what the policy is shown

    def situation(self, job: Job, number: int) -> Situation:
        """What a policy plans round `number` of this loop from."""
        loops = job.depth < job.caps.depth
        offered = tuple(spec for spec in job.workers if spec.kind != "self" or loops)
        failed = frozenset(run.step.worker for run in job.runs if run.error is not None)
        allowed = Allowed(
            handles=tuple(spec.handle for spec in offered),
            steps_max=job.caps.steps,
            first_index=len(job.runs),
            depth_capped=frozenset(spec.handle for spec in job.workers if spec.kind == "self" and not loops),
        )
        return Situation(
            pool=job.record.pool_name,
            conversation=job.conversation,
            workers=offered,
            shown=tuple(shown_worker(spec, job.experience.get(spec.name)) for spec in offered),
            experience=job.experience,
            replies=_shown_replies(job),
            allowed=allowed,
            round=number,
            depth_left=job.caps.depth - job.depth,
            timeout_s=max(0.001, job.tree.deadline_s - self._clock.monotonic_s()),
            explore=job.explore,
            avoid=failed,
            task_type=job.record.task_type,
            before_spending=partial(self._steps.announce, job, f"plan.{number}", "conductor"),
            final=number == job.rounds,
            quality=job.quality,
            version=job.version,
            rollout_id=job.record.id if job.depth == 0 else None,
        )

    # ------------------------------------------------------------ child loops

    async def _child(
        self, job: Job, run: StepRun, messages: list[dict[str, Any]], answers: bool, streams: bool
    ) -> Mapping[str, Any]:
        """A step on `self`: the same policy on the step's own messages, one level deeper, on what money is left."""
        if job.depth >= job.caps.depth:
            raise CapReached("depth", f"no child loop below depth {job.caps.depth}")
        child = Job(
            record=_child_record(job, self._clock.now_us(), messages),
            tree=job.tree,
            conversation=tuple(messages),
            params=job.params if answers else {},
            workers=job.workers,
            experience=job.experience,
            planner=job.planner,
            fallback=job.fallback,
            caps=job.caps,
            rounds=job.rounds,
            explore=job.explore,
            quality=job.quality,
            version=job.version,
            sink=job.sink if streams else None,
            shape=job.shape if answers else None,
        )
        run.record.child_rollout_id = child.record.id
        job.tree.children.append(child.record)
        try:
            body = await self._rounds(child)
            child.record.status, child.record.reply = "done", dict(body)
            return body
        except BatonError as error:
            child.record.status, child.record.error = "failed", error.body()["error"]
            raise
        except asyncio.CancelledError:
            child.record.status = "aborted"
            raise
        finally:
            close_record(child.record, self._clock.now_us())
            job.record.capped = job.record.capped or child.record.capped
            job.record.fallback = job.record.fallback or child.record.fallback
            run.record.cost_nano, run.record.usage_estimated = child.record.cost_nano, False
            run.record.prompt_tokens = child.record.prompt_tokens
            run.record.completion_tokens = child.record.completion_tokens
            if child.runs and run.record.first_byte_us is None:
                run.record.first_byte_us = child.runs[-1].record.first_byte_us


@dataclass(slots=True)
class _Graph:
    """The steps of one round as tasks. Steps may be added while the plan is still being decoded."""

    steps: StepRunner
    job: Job
    record: RoundRecord
    final: bool

    async def run(self, planner: Planner, situation: Situation, now_us: Any) -> StepRun | None:
        """Plan, and run every step; the last one when all have ended. A refused plan cancels what had started."""
        first = len(self.job.runs)
        tasks: list[asyncio.Task[None]] = []

        def early(step: Step) -> None:
            tasks.append(self._start(step, answers=False))

        try:
            plan = await planner.plan(situation, self.record, self.job.tree.meter, early)
            self.record.plan, self.record.finished_us = plan.as_json(), now_us()
            self.job.tell("planned", round=self.record.round, by=self.record.planner, steps=len(plan.steps))
            self._start_rest(plan, tasks)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for run in self.job.runs[first:]:
            if isinstance(run.error, FATAL):
                raise run.error
        return self.job.runs[-1] if plan.steps else None

    def _start_rest(self, plan: Plan, tasks: list[asyncio.Task[None]]) -> None:
        started = len(tasks)
        for offset, step in enumerate(plan.steps[started:], start=started):
            tasks.append(self._start(step, answers=offset == len(plan.steps) - 1))

    def _start(self, step: Step, *, answers: bool) -> asyncio.Task[None]:
        spec = next(spec for spec in self.job.workers if spec.handle == step.worker)
        index = len(self.job.runs)
        record = StepRecord(
            self.record.round, index, spec.name, spec.handle, spec.kind, spec.version, step.task, list(step.see)
        )
        run = StepRun(index, step, spec, record)
        self.job.runs.append(run)
        self.job.record.steps.append(record)
        streams = answers and self.final and self.job.sink is not None
        return asyncio.create_task(self.steps.run(self.job, run, answers=answers, streams=streams))


def shown_worker(spec: WorkerSpec, past: WorkerExperience | None) -> ShownWorker:
    """One worker as the conductor is told of it."""
    if past is not None and past.n < SHOWN_MIN:
        past = None
    seen = Seen(past.n, past.success_mean, past.cost_nano_mean, past.latency_ms_mean) if past else None
    latency_s = seen.latency_ms_mean / 1000 if seen else spec.latency_hint_s
    return ShownWorker(
        spec.handle, spec.description, spec.tags, price_tier(price_of(spec)), spec.context_tokens, latency_s, seen
    )


def pool_entry(spec: WorkerSpec, past: WorkerExperience | None) -> dict[str, Any]:
    """One worker of the pool as the rollout's record keeps it."""
    price = price_of(spec)
    seen = None
    if past is not None:
        seen = {"n": past.n, "success": past.success_mean, "cost_nano": past.cost_nano_mean, "ms": past.latency_ms_mean}
    return {
        "name": spec.name,
        "handle": spec.handle,
        "kind": spec.kind,
        "version": spec.version,
        "tags": list(spec.tags),
        "tier": price_tier(price),
        "input_nano_per_mtok": price.input_nano_per_mtok,
        "output_nano_per_mtok": price.output_nano_per_mtok,
        "call_nano": price.call_nano,
        "experience": seen,
    }


def close_record(record: RolloutRecord, now_us: int) -> None:
    """Sum up a loop's record from its rounds and steps."""
    parts: list[RoundRecord | StepRecord] = [*record.rounds, *record.steps]
    record.cost_nano = sum(part.cost_nano for part in parts)
    record.prompt_tokens = sum(step.prompt_tokens for step in record.steps)
    record.completion_tokens = sum(step.completion_tokens for step in record.steps)
    record.finished_us = now_us
    planners = [planned for planned in record.rounds if planned.refusal is None]
    record.policy_used = planners[-1].planner if planners else record.policy_requested
    record.policy_version = next((p.policy_version for p in reversed(planners) if p.policy_version), None)
    record.policy_assigned = next((p.policy_version for p in record.rounds if p.policy_version), None)


def _child_record(job: Job, now_us: int, messages: list[dict[str, Any]]) -> RolloutRecord:
    parent = job.record
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
        request={"messages": messages},
        completion_id=f"chatcmpl-{child_id.replace('-', '')}",
        parent_id=parent.id,
        depth=parent.depth + 1,
        end_user=parent.end_user,
        task_type=parent.task_type,
        log_mode=parent.log_mode,
        train=parent.train,
        tags=parent.tags,
    )


def _shown_replies(job: Job) -> tuple[ShownReply, ...]:
    """Digest of every step so far, made in code."""
    texts = [reply_text(run.body) if run.body is not None else "" for run in job.runs]
    facts = digest(texts, [run.record.finish_reason for run in job.runs])
    flags: list[list[str]] = [[] if run.body is not None else ["failed"] for run in job.runs]
    for group in facts["agree"]:
        for index in group[1:]:
            flags[index].append(f"agrees:{group[0]}")
    for name in ("refused", "truncated"):
        for index in facts[name]:
            flags[index].append(name)
    return tuple(
        ShownReply(run.index, run.step.worker, facts["answers"][run.index] or None, tuple(flags[run.index]))
        for run in job.runs
    )


def _others(job: Job) -> bool:
    """Whether a worker is left that has not failed in this loop."""
    failed = {run.step.worker for run in job.runs if run.error is not None}
    return any(spec.handle not in failed and spec.kind in ("openai", "litellm") for spec in job.workers)
