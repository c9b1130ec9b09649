"""One step: its messages, the calls that make its reply, the check of the reply, and its record.

The answering step's reply is checked before the client gets it. Where a worker breaks the promised shape
(`response_format`), the step asks once more and then refuses. A stream cannot be taken back, so only its end waits for
the check: no `finish_reason` is passed on before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gateway.core.loop.compose import (
    SeenStep,
    Shortened,
    selected,
    shortened,
    shortened_turns,
    step_messages,
    task_text,
)
from gateway.core.loop.summary import summary_message
from gateway.core.openai.parts import MEDIA_TYPES, parts_of_kinds, without_media
from gateway.core.openai.reply import TextChunk, chunks_of, merge, reply_text, with_one_call
from gateway.core.openai.vendor import without_state
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN
from gateway.core.pool.workers import MODEL_KINDS, TOOL_KINDS
from gateway.errors import BatonError, CapReached, DeadlineExceeded, MoneyUnavailable, SpoolFull, UpstreamInvalid
from gateway.service.loop.bodies import (
    fan_out,
    lowered_output,
    missing_choices,
    prompt_size,
    sendable,
    single_bodies,
    step_body,
    tokens_over,
    wanted_tokens,
)
from gateway.service.loop.calls import Calls, PassOn, Saw, StepCall
from gateway.service.loop.checks import Contracts, is_skipped
from gateway.service.loop.state import Loop, StepRun
from gateway.service.loop.summaries import NOBODY, Summaries, SummaryRules
from gateway.service.loop.tools import Fit, ToolCalls, kit_of

OWN = (CapReached, DeadlineExceeded, MoneyUnavailable, SpoolFull)  # why a step ends without a fault of its worker
FITS_MAX = 4  # times that a prompt is cut and counted again
T = TypeVar("T")
Messages = list[dict[str, Any]]
Child = Callable[[Loop, StepRun, list[dict[str, Any]], bool, bool], Awaitable[Mapping[str, Any]]]


class StepRunner:
    """Runs single steps over `calls`. `child` runs a step on worker `self` as a loop one level deeper."""

    def __init__(self, calls: Calls, child: Child, summaries: SummaryRules) -> None:
        self._shared = calls
        self._child = child
        self._summaries = Summaries(calls, summaries)
        self._tools = ToolCalls(calls, self._calls)
        self._contracts = Contracts(calls.clock, self._call, self._calls, self._fitted)

    async def run(self, loop: Loop, run: StepRun, *, answers: bool, streams: bool) -> None:
        """Wait for the steps it sees, call its worker, and keep the reply or the error. `answers`: the step gets the
        client's own parameters. `streams`: its stream is the reply. Raises only CancelledError."""
        points = loop.tree.checkpoints
        if points is None:
            return await self._run(loop, run, answers, streams)
        return await points.step(loop, run, lambda: self._run(loop, run, answers, streams))

    async def _run(self, loop: Loop, run: StepRun, answers: bool, streams: bool) -> None:
        try:
            for index in {*run.step.see, *run.gates}:
                await loop.runs[index].ended.wait()
            if is_skipped(loop, run):
                run.record.status = "skipped"
                return
            loop.tell("step_started", step=run.index, worker=run.spec.name)
            if run.step.verify is not None:
                await self._contracts.verify(loop, run)
            else:
                run.body = await self._call(loop, run, answers, streams)
            if run.step.expect is not None:
                run.body = await self._contracts.enforce(loop, run, run.step.expect, answers)
            run.record.status = "done"
        except BatonError as error:
            run.error = error
            run.record.status, run.record.error = "refused" if isinstance(error, OWN) else "failed", error.code
        except asyncio.CancelledError:
            run.record.status, run.record.error = "cancelled", "cancelled"
            raise
        finally:
            run.record.finished_us = self._shared.clock.now_us()
            self._keep_reply(run)
            run.ended.set()
            loop.tell("step_ended", step=run.index, worker=run.spec.name, status=run.record.status)

    async def _call(
        self, loop: Loop, run: StepRun, answers: bool, streams: bool, more: Sequence[dict[str, Any]] = ()
    ) -> Mapping[str, Any]:
        """The reply of the step's worker to its messages, and `more` of them."""
        seen = [_seen(loop.runs[index]) for index in run.step.see if loop.runs[index].body is not None]
        taken = frozenset() if run.spec.kind in TOOL_KINDS else MEDIA_TYPES.keys() - set(run.spec.cannot)
        messages = await self._fitted(loop, run, seen, taken, more)
        run.record.messages = without_state(without_media(messages))
        if run.spec.kind == "self":
            run.record.started_us = self._shared.clock.now_us()
            return await self._child(loop, run, messages, answers, streams)
        if run.spec.kind == "mcp":
            text = run.record.task or (seen[-1].reply if seen else task_text(messages))
            run.record.messages = [{"role": "user", "content": text}]
            return await self._tools.step(loop, run, text)
        saw = [(step.handle, step.task or "", step.reply) for step in seen]
        body = step_body(loop, run, messages, answers)
        run.wanted_tokens = wanted_tokens(loop, run, answers)
        checks = answers and loop.shape is not None

        async def fit(behind: Sequence[dict[str, Any]]) -> Messages:
            fitted = await self._fitted(loop, run, seen, taken, [*more, *behind])
            return list(step_body(loop, run, fitted, answers)["messages"])

        if kit := kit_of(self._shared, loop, run, answers):
            run.body = await self._tools.work(loop, run, body, saw, kit, fit)
            return await self._checked(loop, run, body, saw, fit, kit.seen) if checks else run.body
        if streams:
            return await self._streamed(loop, run, body, saw)
        replies = await self._calls(loop, run, fan_out(body, run.spec), saw)
        if run.spec.kind in MODEL_KINDS and (missing := missing_choices(body, merge(replies))):
            replies += await self._calls(loop, run, single_bodies(body, missing), saw)
        run.body = with_one_call(merge(replies), body)
        return await self._checked(loop, run, body, saw, fit) if checks else run.body

    async def _fitted(
        self,
        loop: Loop,
        run: StepRun,
        seen: Sequence[SeenStep],
        taken: Collection[str] = (),
        more: Sequence[dict[str, Any]] = (),
    ) -> Messages:
        """The messages of a step, and `more` behind them. Where they fill its worker's context, old outputs of tools in
        `more` are cut, then the conversation, with a summary of the turns that go, then the rest of `more`; the cut is
        noted."""
        task, before, run.cut = run.record.task, run.cut, None
        conversation = selected(loop.conversation, run.step.context, alone=task is not None)
        behind = list(more)

        def built(conversation: Sequence[Mapping[str, Any]]) -> Messages:
            return [*step_messages(conversation, task, seen, parts_of_kinds(conversation, taken)), *behind]

        messages = built(conversation)
        if run.spec.kind not in MODEL_KINDS or loop.endpoint != "chat":
            return messages
        if more and (over := await tokens_over(self._shared.tokens, run.spec, messages)):
            behind = _cut_more(run, behind, over, latest=False)
            messages = built(conversation)
        messages = await self._with_short_conversation(loop, run, conversation, messages, built)
        if more and (over := await tokens_over(self._shared.tokens, run.spec, messages)):
            messages[-len(more) :] = _cut_more(run, behind, over, latest=True)
        if run.cut is not None and run.cut != before:
            loop.tell("context_cut", step=run.index, worker=run.spec.name, **run.cut)
        return messages

    async def _with_short_conversation(
        self,
        loop: Loop,
        run: StepRun,
        conversation: Sequence[Mapping[str, Any]],
        messages: Messages,
        built: Callable[[Sequence[Mapping[str, Any]]], Messages],
    ) -> Messages:
        short, wanted = None, 0
        for _ in range(FITS_MAX):
            over = await tokens_over(self._shared.tokens, run.spec, messages)
            wanted += over * BYTES_PER_TOKEN
            shorter = shortened(conversation, wanted) if over else None
            if shorter is None or (short is not None and shorter.cut == short.cut):
                break
            short, messages = shorter, built(shorter.messages)
        if short is not None:
            _note_cut(run, short.cut)
            messages = await self._with_summary(loop, run, short, built) or messages
        return messages

    async def _with_summary(
        self, loop: Loop, run: StepRun, short: Shortened, built: Callable[[Sequence[Mapping[str, Any]]], Messages]
    ) -> Messages | None:
        """The messages with a summary where turns were dropped; None where there is none, and where it has no room
        either. The cut says which."""
        if not short.dropped or run.cut is None or self._summaries.rules.worker == NOBODY:
            return None
        run.cut["summary"] = "no_room"
        if await tokens_over(self._shared.tokens, run.spec, built(short.messages)):
            return None
        summary = await self._summaries.of(loop, run, short.dropped)
        run.cut["summary"] = summary.how
        if summary.text is None:
            return None
        messages = built(short.with_summary(summary_message(summary.text, len(short.dropped))))
        if await tokens_over(self._shared.tokens, run.spec, messages):
            run.cut["summary"] = "no_room"
            return None
        run.cut["summary_chars"] = len(summary.text)
        return messages

    async def _prepared(self, loop: Loop, run: StepRun, bodies: Sequence[dict[str, Any]], saw: Saw) -> list[StepCall]:
        """The calls of several bodies, each with an equal share of what is left. Lowers the output that they ask for
        where too little is left, and notes it."""
        calls: list[StepCall] = []
        share, spec, bodies = len(bodies), run.spec, [await sendable(run.spec, body) for body in bodies]
        for held in (False, True):  # the second time with what is held, if the hold did not grow as far as they ask
            sizes = [await prompt_size(self._shared.tokens, loop, spec, body, share, held=held) for body in bodies]
            calls = [
                StepCall(self._shared, loop, run, body, saw, share=share, counted=at == 0, size=size, held=held)
                for at, (body, size) in enumerate(zip(bodies, sizes, strict=True))
            ]
            if await loop.tree.meter.secure(sum(call.worst_nano for call in calls)):
                break
        if run.spec.kind in MODEL_KINDS:
            run.record.lowered = lowered_output(loop, run, bodies[0], calls[0].lowered_by) or run.record.lowered
        return calls

    async def _calls(
        self, loop: Loop, run: StepRun, bodies: Sequence[dict[str, Any]], saw: Saw
    ) -> list[Mapping[str, Any]]:
        """Call the worker with several bodies at once; each call may use an equal share of what is left."""
        calls = await self._prepared(loop, run, [dict(body) for body in bodies], saw)

        async def one(call: StepCall) -> Mapping[str, Any]:
            async with loop.tree.slots:
                run.record.started_us = run.record.started_us or self._shared.clock.now_us()
                return await call.complete()

        return await all_or_first_error([one(call) for call in calls])

    async def _checked(
        self,
        loop: Loop,
        run: StepRun,
        body: Mapping[str, Any],
        saw: Saw,
        fit: Fit,
        seen: Sequence[dict[str, Any]] = (),
    ) -> Mapping[str, Any]:
        """Return the reply when each choice has the promised shape. Choices without it are asked for once more, behind
        what tools answered (`seen`). Raises UpstreamInvalid where the second try breaks it too."""
        made = dict(run.body or {})
        wrong = _problems(loop, made)
        if not wrong:
            return made
        if run.spec.kind not in MODEL_KINDS:
            raise _invalid(run, wrong)
        asking = [_asking_again(loop, made["choices"][at], problem) for at, problem in wrong.items()]
        single = {name: value for name, value in body.items() if name != "n"}
        bodies = [{**single, "messages": await fit([*seen, *again])} for again in asking]
        try:
            again = merge(await self._calls(loop, run, bodies, saw))["choices"]
        except CapReached:
            raise _invalid(run, wrong) from None
        choices = list(made["choices"])
        for at, choice in zip(wrong, again, strict=False):
            choices[at] = {**choice, "index": choices[at].get("index", at)}
        run.body = made | {"choices": choices}
        if wrong := _problems(loop, run.body):
            raise _invalid(run, wrong)
        return run.body

    async def _streamed(self, loop: Loop, run: StepRun, body: dict[str, Any], saw: Saw) -> Mapping[str, Any]:
        """Stream the reply. Where a shape was promised, no choice ends before all choices are checked."""
        calls: list[StepCall] = []
        held: list[dict[str, Any]] = []

        async def one(number: int | None, call: StepCall) -> Mapping[str, Any]:
            async with loop.tree.slots:
                run.record.started_us = run.record.started_us or self._shared.clock.now_us()
                return await call.stream(self._passing_on(loop, run, body, number, held))

        async def stream(bodies: Sequence[dict[str, Any]], numbers: Sequence[int | None]) -> list[Mapping[str, Any]]:
            new = await self._prepared(loop, run, bodies, saw)
            calls.extend(new)
            return await all_or_first_error([one(number, call) for number, call in zip(numbers, new, strict=True)])

        try:
            bodies = fan_out(body, run.spec)
            replies = await stream(bodies, range(len(bodies)) if len(bodies) > 1 else [None])
            if run.spec.kind in MODEL_KINDS and (missing := missing_choices(body, merge(replies))):
                replies += await stream(single_bodies(body, missing), missing)
        except BaseException:  # boundary: the log keeps the beginning of a broken stream, whatever broke it
            begun = [call.collected.body() for call in calls if call.collected.started]
            run.body = merge(begun) if begun else None
            raise
        run.body = with_one_call(merge(replies), body)
        if wrong := _problems(loop, run.body):
            raise _invalid(run, wrong)
        if held and loop.sink is not None:
            await loop.sink.chunk(held)
        return run.body

    def _passing_on(
        self, loop: Loop, run: StepRun, body: Mapping[str, Any], shift: int | None, held: list[dict[str, Any]]
    ) -> PassOn:
        """The function that takes each chunk of one call. `shift` renumbers its choice; `held` collects the ends of
        choices that wait for the check."""

        async def pass_on(chunk: Mapping[str, Any]) -> None:
            run.record.first_byte_us = run.record.first_byte_us or self._shared.clock.now_us()
            if loop.sink is None:
                return
            choices: Any = chunk.choices if isinstance(chunk, TextChunk) else chunk["choices"]
            if isinstance(chunk, TextChunk) and shift is None and loop.shape is None:
                return await loop.sink.chunk(choices)
            if shift is not None:
                choices = [{**choice, "index": shift} for choice in choices]
            choices = with_one_call({"choices": choices}, body)["choices"]
            if loop.shape is not None:
                ends = [choice for choice in choices if choice.get("finish_reason")]
                held.extend({"index": end.get("index", 0), "finish_reason": end["finish_reason"]} for end in ends)
                choices = [{**choice, "finish_reason": None} for choice in choices]
            loop.sink.about(chunk)
            await loop.sink.chunk(choices)

        return pass_on

    def _keep_reply(self, run: StepRun) -> None:
        if run.body is None:
            return
        choice = (run.body.get("choices") or [{}])[0]
        run.record.reply = reply_text(run.body)
        run.record.tool_calls = without_state([choice.get("message") or {}])[0].get("tool_calls")
        run.record.finish_reason = choice.get("finish_reason")


async def all_or_first_error(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all of them. Raises the error of the first that fails; the others are cancelled and awaited."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        if left := [task for task in tasks if not task.done()]:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def _seen(run: StepRun) -> SeenStep:
    return SeenStep(run.index, run.step.worker, run.step.task, reply_text(run.body or {}))


def _problems(loop: Loop, body: Mapping[str, Any]) -> dict[int, str]:
    """The problem of each choice that breaks the shape, by the choice's position."""
    if loop.shape is None:
        return {}
    problems = {at: loop.shape.problem(choice) for at, choice in enumerate(body.get("choices") or ())}
    return {at: problem for at, problem in problems.items() if problem is not None}


def _invalid(run: StepRun, wrong: Mapping[int, str]) -> UpstreamInvalid:
    return UpstreamInvalid(
        f"worker {run.spec.name} did not keep to `response_format`: {next(iter(wrong.values()))}",
        param="response_format",
    )


def _asking_again(loop: Loop, choice: Mapping[str, Any], problem: str) -> Messages:
    """The messages that ask for one choice again and name its problem."""
    answer = (choice.get("message") or {}).get("content")
    wanted = loop.shape.description() if loop.shape else ""
    correction = (
        f"That is not what was asked for: {problem}. Answer again with {wanted}\nThat alone, and nothing around it."
    )
    return [
        {"role": "assistant", "content": answer if isinstance(answer, str) else ""},
        {"role": "user", "content": correction},
    ]


def _cut_more(run: StepRun, more: Sequence[dict[str, Any]], over: int, *, latest: bool) -> Messages:
    """The messages behind a step's own, shorter by about `over` tokens; the cut is noted."""
    shorter, cut = shortened_turns(more, over * BYTES_PER_TOKEN, latest=latest)
    if cut["chars"]:
        _note_cut(run, cut)
    return shorter


def _note_cut(run: StepRun, cut: Mapping[str, int]) -> None:
    """Add to what was cut of the prompt of a step's next call."""
    before = run.cut or {}
    run.cut = {**before, **{name: number + int(before.get(name, 0)) for name, number in cut.items()}}


async def replay(body: Mapping[str, Any], loop: Loop) -> None:
    """Stream a complete reply (of an earlier round, or of a child loop) to the client."""
    if loop.sink is None:
        return
    loop.sink.about(body)
    for choices in chunks_of(body):
        await loop.sink.chunk(choices)
