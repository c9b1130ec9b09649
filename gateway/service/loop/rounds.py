"""The loop: plan, run the steps as a graph, show the policy what came back; then plan again, or ship.

One loop serves every published scheme. A step starts as soon as the steps it sees have ended; the first steps start
while the plan is still being decoded. A step on `self` is the same loop one level deeper, on the same meter and clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gateway.core.log.rollout import RoundRecord, close_record
from gateway.core.loop.plan import PlanLimits
from gateway.core.loop.replies.errors import NO_ERRORS, CheckerErrors
from gateway.core.loop.turns.marks import asks_client
from gateway.core.money.details import sum_details
from gateway.core.openai.chat import NOTHING_HOSTED
from gateway.core.openai.parts import media_kinds
from gateway.core.openai.reply import reply_text
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import (
    BatonError,
    CapReached,
    ConductorError,
    ContractMissed,
    DeadlineExceeded,
    PlanRefused,
    UpstreamError,
)
from gateway.service.loop.calls import Calls, step_id
from gateway.service.loop.checks import check_limits
from gateway.service.loop.graph import FATAL, RoundGraph
from gateway.service.loop.health.breakers import sooner
from gateway.service.loop.routers import CheckedRouter, FixedPlanner, RulePlanner
from gateway.service.loop.shown import replies_of, shown_request, shown_worker
from gateway.service.loop.state import Loop, Planner, Situation, StepRun, child_record
from gateway.service.loop.steps import StepRunner, replay
from gateway.service.loop.summaries import NO_SUMMARIES, SummaryRules
from gateway.service.loop.tools import boxes_of

RESTORE_S = 5.0


class Rounds:
    """Runs loops. It has no state of its own; all state of a loop is in its `Loop`."""

    def __init__(
        self, calls: Calls, errors: Mapping[str, CheckerErrors] = NO_ERRORS, summaries: SummaryRules = NO_SUMMARIES
    ) -> None:
        """`errors`: how often checkers err, by worker name, as it is known now."""
        self._errors, self._clock, self._boxes, self.rests = errors, calls.clock, calls.toolboxes, calls.rests
        self.tokens = calls.tokens  # counts the prompt of a request before it is admitted
        self.summaries = summaries  # who makes them for a request is chosen when it is admitted
        self._steps = StepRunner(calls, self._child, summaries)

    async def run(self, loop: Loop) -> Mapping[str, Any]:
        """Run the loop and return the body of the reply. Raises the error that left the request without an answer."""
        left_s = loop.tree.deadline_s - self._clock.monotonic_s()
        if loop.tree.checkpoints is not None:  # what was saved is restored even where no time is left for calls
            left_s = max(left_s, RESTORE_S)
        try:
            async with asyncio.timeout(left_s):
                return await self._rounds(loop)
        except TimeoutError:
            return await self.best_so_far(loop, DeadlineExceeded(f"no answer within {loop.caps.wall_s:g} s"), "wall_s")
        except CapReached as reached:
            return await self._within_what_is_left(loop, reached)
        except UpstreamError as failed:
            return await self.best_so_far(loop, failed, "worker")

    async def _within_what_is_left(self, loop: Loop, reached: CapReached) -> Mapping[str, Any]:
        """The best answer so far; where a plan has spent all that it might and answered nothing, what the fallback
        answers with what was kept back from it. Raises `reached` where neither is possible."""
        try:
            return await self.best_so_far(loop, reached, reached.cap)
        except CapReached:
            begun = loop.sink is not None and any(run.record.first_byte_us is not None for run in loop.runs)
            if loop.fallback is None or loop.fallback is loop.planner or begun or not loop.tree.children:
                raise
        loop.record.fallback, loop.record.capped = f"{loop.planner.name}_capped", reached.cap
        loop.rounds = len(loop.record.rounds)
        try:
            async with asyncio.timeout(loop.tree.deadline_s - self._clock.monotonic_s()):
                last = await self._fall_back(loop, loop.fallback, loop.rounds, True)
                return await self._answer(loop, last, loop.rounds, True)
        except (TimeoutError, BatonError):
            raise reached from None

    async def stick(self, loop: Loop, planner: Planner) -> Mapping[str, Any] | None:
        """Return the reply of the worker that `planner` goes back to; None where the worker failed before its first
        word, so that the request can be planned. Raises the error that ended the request."""
        record = self._planning(loop, planner)
        graph = RoundGraph(self._steps, loop, record, final=True)
        try:
            async with asyncio.timeout(loop.tree.deadline_s - self._clock.monotonic_s()):
                last = await graph.run(planner, self.situation(loop, 1, planner), self._clock.now_us)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {loop.caps.wall_s:g} s") from None
        finally:
            record.finished_us = record.finished_us or self._clock.now_us()
        if last is None or last.body is None or last.error is not None:
            error = (last.error if last is not None else None) or UpstreamError("the step ended without a reply")
            begun = last is not None and last.record.first_byte_us is not None
            if begun or not isinstance(error, UpstreamError):
                raise error
            loop.record.fallback = f"worker_{error.kind}"
            return None
        return last.body

    async def _rounds(self, loop: Loop) -> Mapping[str, Any]:
        body: Mapping[str, Any] | None = None
        missed: ContractMissed | None = None
        for number in range(1, loop.rounds + 1):
            final = number == loop.rounds
            try:
                ran = await self._round(loop, loop.planner, number, final)
            except (ConductorError, PlanRefused) as refused:
                return await self._without_planner(loop, number, refused, body)
            if ran is None:  # an empty plan: ship the previous answer
                break
            if isinstance(ran.error, ContractMissed) and not final:
                missed = ran.error  # the next round learns it
                continue
            body = await self._answer(loop, ran, number, final)
            if final:
                return body  # a streaming client has received it already
            if ran.accepted or asks_client(body):  # no further round may run over tool calls: they are the client's
                break
        if body is None:
            raise missed or PlanRefused("no_steps", "the plan had no steps")
        await replay(body, loop)
        return body

    async def _round(self, loop: Loop, planner: Planner, number: int, final: bool) -> StepRun | None:
        """Plan and run one round. Returns the last step, or None for an empty plan. Raises ConductorError or
        PlanRefused if the planner makes no plan that can be used."""
        record = self._planning(loop, planner)
        graph = RoundGraph(self._steps, loop, record, final)
        try:
            return await graph.run(planner, self.situation(loop, number, planner), self._clock.now_us)
        except (ConductorError, PlanRefused) as refused:
            record.refusal = refused.reason
            raise
        finally:
            record.finished_us = record.finished_us or self._clock.now_us()

    async def _without_planner(
        self, loop: Loop, number: int, refused: ConductorError | PlanRefused, body: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        """The answer of a loop whose planner failed: `body` of an earlier round, else what the fallback plans. No round
        follows: a planner that is away costs no second answer. Raises `refused` if there is no fallback."""
        if loop.fallback is None:
            raise refused
        loop.record.fallback = f"{loop.planner.name}_{refused.reason}"
        if refused.reason == "depth_cap":
            loop.record.capped = "depth"
        loop.rounds = number
        if body is not None and _stands(loop, body):
            await replay(body, loop)
            return body
        return await self._answer(loop, await self._fall_back(loop, loop.fallback, number, True), number, True)

    async def _fall_back(self, loop: Loop, router: Planner, number: int, final: bool) -> StepRun:
        """Let the fallback router plan instead, within the same deadline."""
        try:
            last = await self._round(loop, router, number, final)
        except PlanRefused as refused:
            what = f"{refused.message}; try again later"
            raise UpstreamError(what, code="no_worker", retryable=True, dispatched=False) from None
        if last is None:
            raise UpstreamError(f"router {router.name} planned nothing", code="no_worker", dispatched=False)
        return last

    def _planning(self, loop: Loop, planner: Planner) -> RoundRecord:
        """Add the record of one planning call. A refused call and the router's plan after it have two records."""
        record = RoundRecord(len(loop.record.rounds) + 1, planner.name, started_us=self._clock.now_us())
        loop.record.rounds.append(record)
        return record

    async def _answer(self, loop: Loop, last: StepRun, number: int, final: bool) -> Mapping[str, Any]:
        """Return the last step's body. Where the step failed, another worker answers, or an earlier answer is shipped.
        Raises the step's error where neither is possible, a worker's rather than a cap's."""
        fault: UpstreamError | None = None
        while last.body is None or last.error is not None:
            error = last.error or ConductorError("unparseable", "the last step ended without a reply")
            fault = sooner(fault, error)
            if isinstance(error, ContractMissed):
                return await self.best_so_far(loop, error, "contract")
            if (
                (final and last.record.first_byte_us is not None and last.streams)
                or loop.fallback is None
                or not isinstance(error, UpstreamError)
                or not (_has_other_workers(loop) or _calls_up(loop))
            ):
                why = error.cap if isinstance(error, CapReached) else "worker"
                told = fault if isinstance(error, CapReached | UpstreamError) else None
                return await self.best_so_far(loop, told or error, why)
            loop.record.fallback = f"worker_{error.kind}"
            last = await self._fall_back(loop, loop.fallback, number, final)
        if final and not last.streams:
            await replay(last.body, loop)
        return last.body

    async def best_so_far(self, loop: Loop, error: BatonError, why: str) -> Mapping[str, Any]:
        """Ship the latest answer and flag the rollout: the reply of a plan's last step, or of a step that was asked the
        whole question, never that of a sub-task. Raises `error` where a stream has begun, or there is none."""
        begun = any(run.record.first_byte_us is not None and loop.sink is not None for run in loop.runs)
        answers = [run for run in loop.runs if run.answers or (run.step.task is None and run.step.verify is None)]
        done = [run.body for run in answers if run.body is not None and run.record.status == "done"]
        if why == "contract" and not done:  # a reply that missed the planner's contract is better than none
            done = [run.body for run in answers if run.body is not None and isinstance(run.error, ContractMissed)]
        body: Mapping[str, Any] | None = next((each for each in reversed(done) if _stands(loop, each)), None)
        if isinstance(error, FATAL) or begun or body is None:
            raise error
        loop.record.capped = loop.record.capped or why
        await replay(body, loop)
        return body

    # ------------------------------------------------------------ what the policy is shown

    def situation(self, loop: Loop, number: int, planner: Planner) -> Situation:
        """The situation from which a policy plans round `number`. One that reads no prompt is shown nothing."""
        loops, boxes = loop.depth < loop.caps.depth, boxes_of(self._boxes, loop)
        named, avoid = isinstance(planner, FixedPlanner | CheckedRouter), loop.failed
        workers = loop.workers if named else self.rests.without(loop.workers, avoid)
        offered = tuple(spec for spec in workers if (spec.kind != "self" or loops) and boxes.get(spec.name) != ())
        past, errors, unseen = loop.experience, self._errors, isinstance(planner, FixedPlanner | RulePlanner)
        allowed = PlanLimits(
            handles=tuple(spec.handle for spec in offered),
            steps_max=loop.caps.steps,
            first_index=len(loop.runs),
            depth_capped=frozenset(spec.handle for spec in loop.workers if spec.kind == "self" and not loops),
            **check_limits(offered),
        )
        return Situation(
            pool=loop.record.pool_name,
            conversation=loop.conversation,
            workers=offered,
            shown=()
            if unseen
            else tuple(shown_worker(x, past.get(x.name), boxes.get(x.name, ()), errors.get(x.name)) for x in offered),
            experience=loop.experience,
            replies=() if unseen else replies_of(loop),
            allowed=allowed,
            round=number,
            depth_left=loop.caps.depth - loop.depth,
            timeout_s=max(0.001, loop.tree.deadline_s - self._clock.monotonic_s()),
            explore=loop.explore,
            stakes=loop.stakes,
            avoid=avoid,
            task_type=loop.record.task_type,
            before_spending=lambda nano: loop.announce(self._clock.now_us(), f"plan.{number}", "conductor", nano),
            final=number == loop.rounds,
            quality=loop.quality,
            version=loop.version,
            rollout_id=loop.record.id if loop.depth == 0 else None,
            request=None if unseen else shown_request(loop, self._clock.monotonic_s()),
            examples=loop.examples,
            warm=loop.warm,
        )

    # ------------------------------------------------------------ child loops

    async def _child(
        self, loop: Loop, run: StepRun, messages: list[dict[str, Any]], answers: bool, streams: bool
    ) -> Mapping[str, Any]:
        """Run a step on `self`: the same policy on the step's messages, one level deeper, with the money that is
        left."""
        if loop.depth >= loop.caps.depth:
            raise CapReached("depth", f"no child loop below depth {loop.caps.depth}")
        child = Loop(
            record=child_record(loop, self._clock.now_us(), messages),
            tree=loop.tree,
            conversation=tuple(messages),
            params=loop.params if answers else {},
            workers=loop.workers,
            experience=loop.experience,
            planner=loop.planner,
            fallback=loop.fallback,
            caps=loop.caps,
            rounds=loop.rounds,
            explore=loop.explore,
            stakes=loop.stakes,
            quality=loop.quality,
            version=loop.version,
            sink=loop.sink if streams else None,
            shape=loop.shape if answers else None,
            hosted=loop.hosted if answers else NOTHING_HOSTED,
            needs=loop.needs if answers else media_kinds(messages),
            examples=loop.examples,
            path=f"{loop.path}{step_id(run)}/",
        )
        run.record.child_rollout_id = child.record.id
        loop.tree.children.append(child.record)
        try:
            with loop.tree.meter.kept_back():
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
            loop.record.capped = loop.record.capped or child.record.capped
            loop.record.fallback = loop.record.fallback or child.record.fallback
            run.record.cost_nano, run.record.usage_estimated = child.record.cost_nano, False
            run.record.lowered = child.record.steps[-1].lowered if child.record.steps else None
            run.record.usage_details = sum_details(step.usage_details for step in child.record.steps) or None
            run.record.prompt_tokens = child.record.prompt_tokens
            run.record.completion_tokens = child.record.completion_tokens
            if child.runs and run.record.first_byte_us is None:
                run.record.first_byte_us = child.runs[-1].record.first_byte_us


def _stands(loop: Loop, body: Mapping[str, Any]) -> bool:
    """Whether a reply may be shipped as it is: it says something, in the promised shape."""
    return bool(reply_text(body) or asks_client(body)) and (loop.shape is None or loop.shape.fits(body))


def _has_other_workers(loop: Loop) -> bool:
    """Whether the pool has a model worker that has not failed in this loop."""
    return any(spec.handle not in loop.failed and spec.kind in MODEL_KINDS for spec in loop.workers)


def _calls_up(loop: Loop) -> bool:
    """Add the workers in reserve, where there are any: every other one has failed."""
    loop.workers, loop.reserve, added = (*loop.workers, *loop.reserve), (), bool(loop.reserve)
    return added
