"""One step: what it may see, the calls that make its reply, whether that is what was asked for, and what is logged.

The answering step's reply is checked before it is the client's: a promised shape (`response_format`) that a worker did
not keep to is asked for once more, and then refused. A stream cannot be taken back, so there only its end waits for the
check: no `finish_reason` is passed on before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gateway.core.log.events import Event
from gateway.core.loop.compose import SeenStep, step_messages
from gateway.core.openai.parts import without_media
from gateway.core.openai.reply import chunks_of, merged, one_call, reply_text
from gateway.core.pool.workers import MODEL_KINDS
from gateway.errors import BatonError, CapReached, UpstreamInvalid
from gateway.service.loop.attempts import Attempts
from gateway.service.loop.calls import PassOn, Saw, StepCall, all_or_first_error, fan_out, step_body
from gateway.service.loop.state import Job, StepRun
from gateway.service.ports.request import Clock, TokenCounter

Child = Callable[[Job, StepRun, list[dict[str, Any]], bool, bool], Awaitable[Mapping[str, Any]]]


class StepRunner:
    """Runs single steps. `child` runs a step on worker `self` as a loop one level deeper."""

    def __init__(self, attempts: Attempts, clock: Clock, child: Child, tokens: TokenCounter) -> None:
        self.attempts = attempts
        self.clock = clock
        self.tokens = tokens
        self._child = child

    async def run(self, job: Job, run: StepRun, *, answers: bool, streams: bool) -> None:
        """Wait for what the step sees, call its worker, keep reply or error. `answers`: it gets the client's own
        parameters; `streams`: its stream is the reply. Raises nothing but CancelledError."""
        try:
            await asyncio.gather(*(job.runs[index].ended.wait() for index in run.step.see))
            job.tell("step_started", step=run.index, worker=run.spec.name)
            run.body = await self._call(job, run, answers, streams)
            run.record.status = "done"
        except BatonError as error:
            run.error = error
            run.record.status, run.record.error = "failed", error.code
        except asyncio.CancelledError:
            run.record.status, run.record.error = "cancelled", "cancelled"
            raise
        finally:
            run.record.finished_us = self.clock.now_us()
            self._keep_reply(run)
            run.ended.set()
            job.tell("step_ended", step=run.index, worker=run.spec.name, status=run.record.status)

    async def _call(self, job: Job, run: StepRun, answers: bool, streams: bool) -> Mapping[str, Any]:
        seen = [_seen(job.runs[index]) for index in run.step.see if job.runs[index].body is not None]
        messages = step_messages(job.conversation, run.step.task, seen)
        run.record.messages = [dict(message) for message in without_media(messages)]
        if run.spec.kind == "self":
            run.record.started_us = self.clock.now_us()
            return await self._child(job, run, messages, answers, streams)
        saw = [(step.handle, step.task or "", step.reply) for step in seen]
        body = step_body(job, run.spec, messages, answers)
        if streams:
            return await self._streamed(job, run, body, saw)
        replies = await self._calls(job, run, fan_out(body, run.spec), saw)
        run.body = one_call(merged(replies), body)
        return await self._checked(job, run, body, saw) if answers and job.shape is not None else run.body

    # ------------------------------------------------------------ whole

    async def _calls(
        self, job: Job, run: StepRun, bodies: Sequence[dict[str, Any]], saw: Saw
    ) -> list[Mapping[str, Any]]:
        """The replies to several bodies at once, each from an equal share of what is left."""
        calls = [
            StepCall(self, job, run, body, share=len(bodies), counted=number == 0)
            for number, body in enumerate(map(dict, bodies))
        ]

        async def one(call: StepCall) -> Mapping[str, Any]:
            async with job.tree.slots:
                run.record.started_us = run.record.started_us or self.clock.now_us()
                return await call.whole(saw)

        return await all_or_first_error([one(call) for call in calls])

    async def _checked(self, job: Job, run: StepRun, body: Mapping[str, Any], saw: Saw) -> Mapping[str, Any]:
        """The reply once each of its choices has the promised shape; those that had not were asked for once more."""
        made = dict(run.body or {})
        wrong = _problems(job, made)
        if not wrong:
            return made
        if run.spec.kind not in MODEL_KINDS:
            raise _invalid(run, wrong)
        asked = [_asking_again(job, body, made["choices"][at], problem) for at, problem in wrong.items()]
        try:
            again = merged(await self._calls(job, run, asked, saw))["choices"]
        except CapReached:
            raise _invalid(run, wrong) from None
        choices = list(made["choices"])
        for at, choice in zip(wrong, again, strict=False):
            choices[at] = {**choice, "index": choices[at].get("index", at)}
        run.body = made | {"choices": choices}
        if wrong := _problems(job, run.body):
            raise _invalid(run, wrong)
        return run.body

    # ------------------------------------------------------------ streamed

    async def _streamed(self, job: Job, run: StepRun, body: dict[str, Any], saw: Saw) -> Mapping[str, Any]:
        """The reply as it comes. Where a shape was promised, no choice ends before all of them were checked."""
        bodies = fan_out(body, run.spec)
        calls = [
            StepCall(self, job, run, each, share=len(bodies), counted=number == 0) for number, each in enumerate(bodies)
        ]
        held: list[dict[str, Any]] = []

        async def one(number: int, call: StepCall) -> Mapping[str, Any]:
            async with job.tree.slots:
                run.record.started_us = run.record.started_us or self.clock.now_us()
                shift = number if len(calls) > 1 else None
                return await call.stream(saw, self._passing_on(job, run, body, shift, held))

        try:
            replies = await all_or_first_error([one(number, call) for number, call in enumerate(calls)])
        except BaseException:  # boundary: what came of a stream that broke off is kept for the log, whatever broke it
            begun = [call.collected.body() for call in calls if call.collected.started]
            run.body = merged(begun) if begun else None
            raise
        run.body = one_call(merged(replies), body)
        if wrong := _problems(job, run.body):
            raise _invalid(run, wrong)
        if held and job.sink is not None:
            await job.sink.chunk(held)
        return run.body

    def _passing_on(
        self, job: Job, run: StepRun, body: Mapping[str, Any], shift: int | None, held: list[dict[str, Any]]
    ) -> PassOn:
        """What is done with each chunk of one call: `shift` renumbers its choice, `held` takes back their ends."""

        async def pass_on(chunk: Mapping[str, Any]) -> None:
            run.record.first_byte_us = run.record.first_byte_us or self.clock.now_us()
            if job.sink is None:
                return
            choices = [choice if shift is None else {**choice, "index": shift} for choice in chunk["choices"]]
            choices = list(one_call({"choices": choices}, body)["choices"])
            if job.shape is not None:
                ends = [choice for choice in choices if choice.get("finish_reason")]
                held.extend({"index": end.get("index", 0), "finish_reason": end["finish_reason"]} for end in ends)
                choices = [{**choice, "finish_reason": None} for choice in choices]
            job.sink.about(chunk)
            await job.sink.chunk(choices)

        return pass_on

    # ------------------------------------------------------------ the log

    async def announce(self, job: Job, step_id: str, worker: str, bound_nano: int, attempt: int = 1) -> None:
        """Return once it is on disk that a call is about to leave which may cost so much. Raises SpoolFull."""
        payload = {
            "hold_id": job.tree.hold_id,
            "rollout_id": job.record.id,
            "step_id": step_id,
            "attempt": attempt,
            "worker": worker,
            "bound_nano": bound_nano,
        }
        await job.tree.held.append(Event.new("dispatch", self.clock.now_us(), payload))

    def _keep_reply(self, run: StepRun) -> None:
        if run.body is None:
            return
        choice = (run.body.get("choices") or [{}])[0]
        run.record.reply = reply_text(run.body)
        run.record.tool_calls = (choice.get("message") or {}).get("tool_calls")
        run.record.finish_reason = choice.get("finish_reason")


def _seen(run: StepRun) -> SeenStep:
    return SeenStep(run.index, run.step.worker, run.step.task, reply_text(run.body or {}))


def _problems(job: Job, body: Mapping[str, Any]) -> dict[int, str]:
    """What is wrong with which choice, by its place."""
    if job.shape is None:
        return {}
    found = {at: job.shape.problem(choice) for at, choice in enumerate(body.get("choices") or ())}
    return {at: problem for at, problem in found.items() if problem is not None}


def _invalid(run: StepRun, wrong: Mapping[int, str]) -> UpstreamInvalid:
    return UpstreamInvalid(
        f"worker {run.spec.name} did not keep to `response_format`: {next(iter(wrong.values()))}",
        param="response_format",
    )


def _asking_again(job: Job, body: Mapping[str, Any], choice: Mapping[str, Any], problem: str) -> dict[str, Any]:
    """The body that asks for one choice once more, told what was wrong with it."""
    said = (choice.get("message") or {}).get("content")
    wanted = job.shape.described() if job.shape else ""
    told = f"That is not what was asked for: {problem}. Answer again with {wanted}\nThat alone, and nothing around it."
    messages = [
        *body["messages"],
        {"role": "assistant", "content": said if isinstance(said, str) else ""},
        {"role": "user", "content": told},
    ]
    return {**{name: value for name, value in body.items() if name != "n"}, "messages": messages}


async def replay(body: Mapping[str, Any], job: Job) -> None:
    """Stream a reply that is already whole (an earlier round's, a child's) to the client."""
    if job.sink is None:
        return
    job.sink.about(body)
    for choices in chunks_of(body):
        await job.sink.chunk(choices)
