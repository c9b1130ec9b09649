"""The calls: each question to each worker, as often as wanted, under a dollar cap, and each answer graded.

The order is the promise of money. The worst case of a call is on file before the call leaves, and calls wait until it
fits under the cap beside all that are in flight; where it does not fit with none in flight, the recording ends there.
A failure that may pass is asked again. What a worker refuses is recorded as it was; a worker that cannot be asked at
all is left out, and named.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.money.amounts import cost_nano, input_tokens_bound, worst_case_nano
from gateway.core.openai.finish import finish_reason
from gateway.core.openai.reply import reply_text
from gateway.core.pool.workers import Price, WorkerSpec
from gateway.errors import UpstreamError, UpstreamRefused
from gateway.service.ports.request import WorkerCall, WorkerReply, Workers
from policy import graders
from policy.graders.base import GraderError, GraderFailed, Tools
from policy.record.journal import RecordedDraw, RecordedVerdict, RecordJournal
from policy.record.questions import RecordQuestion

ATTEMPTS_MAX = 3
WAIT_FIRST_S = 0.5  # before the second attempt; then twice as long
WAIT_S_MAX = 30.0
JUDGE_TOKENS_MAX = 512
KEY_STATUSES = (401, 403)
TIMEOUT_STATUS, LOST_STATUS = 504, 502  # of failures without a status of their own


class RecordCapReached(Exception):
    """The next call does not fit under the cap."""


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """How workers are asked. `cap_nano` bounds what the journal counts, of all its runs together."""

    cap_nano: int
    samples: int = 1  # answers of each worker to each question
    concurrency: int = 16
    temperature: float | None = None  # None: the worker's own
    output_tokens: int | None = None  # None: the worker's `output_tokens_max`


@dataclass(slots=True)
class RecordProgress:
    """What was done so far. `away`: workers that could not be asked, with the reason."""

    total: int
    done: int = 0
    failed: int = 0  # answers that are errors
    ungraded: int = 0  # answers that no grader could judge
    capped: bool = False
    stopped: bool = False
    away: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Asks `specs` through `workers` and writes to `journal`. `judge`: the worker behind the grader `judge`."""

    def __init__(
        self,
        workers: Workers,
        specs: Sequence[WorkerSpec],
        journal: RecordJournal,
        settings: RecordSettings,
        *,
        judge: WorkerSpec | None = None,
        on_progress: Callable[[RecordProgress], None] = lambda _: None,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._workers = workers
        self._specs = specs
        self._journal = journal
        self._settings = settings
        self._judge = judge
        self._on_progress = on_progress
        self._sleep = sleep
        self._settled = asyncio.Condition()
        self._places = {spec.name: asyncio.Semaphore(spec.concurrency_max) for spec in specs}
        self.stop = asyncio.Event()  # set: no new call begins
        self.progress = RecordProgress(0)

    async def run(self, questions: Sequence[RecordQuestion]) -> RecordProgress:
        """Record what is not on file yet. Raises ConfigError where a worker was asked otherwise before, Unavailable
        where the journal cannot be written."""
        for spec in self._specs:
            self._journal.add_worker(spec.name, digest_of(spec, self._settings))
        for question in questions:
            self._journal.add_question(question)
        all_questions = list(self._journal.questions.values())
        self.progress = RecordProgress(len(all_questions) * len(self._specs) * self._settings.samples)
        draws = self._draws(all_questions)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._settings.concurrency):
                    group.create_task(self._lane(draws))
        except ExceptionGroup as errors:  # boundary: a journal that cannot be written fails every lane, and one says it
            raise errors.exceptions[0] from None
        self.progress.stopped = self.stop.is_set()
        return self.progress

    def _draws(self, questions: Sequence[RecordQuestion]) -> Iterator[tuple[RecordQuestion, WorkerSpec, RecordedDraw]]:
        """RecordQuestion by question, so that what a cap leaves is complete as far as it goes."""
        for question in questions:
            for sample in range(self._settings.samples):
                for spec in self._specs:
                    yield question, spec, RecordedDraw(question.key, spec.name, sample)

    async def _lane(self, draws: Iterator[tuple[RecordQuestion, WorkerSpec, RecordedDraw]]) -> None:
        for question, spec, draw in draws:
            if self.stop.is_set() or self.progress.capped:
                return
            try:
                await self._record(question, spec, draw)
            except RecordCapReached:  # the other lanes end their calls
                self.progress.capped = True
                return
            self._on_progress(self.progress)

    async def _record(self, question: RecordQuestion, spec: WorkerSpec, draw: RecordedDraw) -> None:
        """Ask and grade, as far as that is not on file."""
        if draw not in self._journal.answers:
            if spec.name in self.progress.away:
                return
            await self._ask(question, spec, draw)
        answer = self._journal.answers.get(draw)
        if answer is None:
            return
        self.progress.done += 1
        self.progress.failed += "error" in answer
        if question.grader is not None and "error" not in answer and draw not in self._journal.verdicts:
            await self._grade(question, draw, str(answer["output"]))

    # ------------------------------------------------------------ one answer

    async def _ask(self, question: RecordQuestion, spec: WorkerSpec, draw: RecordedDraw) -> None:
        body = body_of(spec, question.messages, self._settings)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            hold, worst_nano = await self._held(spec, body)
            try:
                async with self._places[spec.name]:
                    reply = await self._workers.complete(_call(spec, body, draw, attempt))
            except UpstreamError as error:
                nano = 0 if error.upstream_status is not None or not error.dispatched else worst_nano
                if error.retryable and attempt < ATTEMPTS_MAX:
                    await self._settle(hold, nano)
                    await self._sleep(_pause_s(attempt, error.retry_after_s))
                elif _is_away(error):
                    await self._settle(hold, nano)
                    self.progress.away[spec.name] = error.message
                    return
                else:
                    return await self._settle(hold, nano, draw, _error_answer(error, nano))
            else:
                nano = _cost(spec, reply)
                return await self._settle(hold, nano, draw, _answer(spec, reply, nano))

    async def _held(self, spec: WorkerSpec, body: Mapping[str, Any]) -> tuple[int, int]:
        """(hold, worst case in nano-dollars) once it fits the cap. Raises RecordCapReached where it never does."""
        rest = {name: value for name, value in body.items() if name != "messages"}
        bound = input_tokens_bound(body["messages"], str(rest) + str(spec.params))
        worst_nano = worst_case_nano(spec.price or Price(), bound, output_bound(body))
        async with self._settled:
            while self._journal.spent_nano + worst_nano > self._settings.cap_nano:
                if not self._journal.open_nano:
                    raise RecordCapReached
                await self._settled.wait()
            return self._journal.hold(worst_nano), worst_nano

    async def _settle(
        self, hold: int, nano: int, draw: RecordedDraw | None = None, answer: Mapping[str, Any] | None = None
    ) -> None:
        async with self._settled:
            self._journal.settle(hold, nano, draw, answer)
            self._settled.notify_all()

    # ------------------------------------------------------------ its grade

    async def _grade(self, question: RecordQuestion, draw: RecordedDraw, output: str) -> None:
        name, _, version = str(question.grader).partition("@")
        tools = Tools(ask=self._asked_judge)
        try:
            grade = await graders.grade(name, question.reference, output, version=version or None, tools=tools)
        except GraderError:
            self.progress.ungraded += 1
        else:
            self._journal.grade(draw, RecordedVerdict(grade.value, grade.detail))

    async def _asked_judge(self, messages: list[dict[str, str]]) -> str:
        """What the judge says. Raises GraderFailed, RecordCapReached."""
        spec = self._judge
        if spec is None:
            raise GraderFailed("there is no judge")
        body = {"messages": messages, limit_name(spec): min(JUDGE_TOKENS_MAX, spec.output_tokens_max)}
        body |= {} if "temperature" in spec.cannot else {"temperature": 0}
        hold, worst_nano = await self._held(spec, body)
        try:
            reply = await self._workers.complete(_call(spec, body, RecordedDraw("judge", spec.name, hold), 1))
        except UpstreamError as error:
            await self._settle(hold, 0 if error.upstream_status is not None or not error.dispatched else worst_nano)
            raise GraderFailed(f"the judge did not answer: {error.message}") from None
        await self._settle(hold, _cost(spec, reply))
        return reply_text(reply.body)


# ---------------------------------------------------------------- a call


def limit_name(spec: WorkerSpec) -> str:
    """The property that bounds the output of this worker."""
    newer = "max_completion_tokens" in spec.params or "max_tokens" in spec.cannot
    return "max_completion_tokens" if newer and "max_completion_tokens" not in spec.cannot else "max_tokens"


def output_bound(body: Mapping[str, Any]) -> int:
    """The most tokens that a reply can have."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)


def body_of(spec: WorkerSpec, messages: Sequence[Mapping[str, Any]], settings: RecordSettings) -> dict[str, Any]:
    """What a worker is sent."""
    tokens = min(settings.output_tokens or spec.output_tokens_max, spec.output_tokens_max)
    body = {"messages": [dict(message) for message in messages], limit_name(spec): tokens}
    if settings.temperature is not None and "temperature" not in spec.cannot:
        body["temperature"] = settings.temperature
    return body


def digest_of(spec: WorkerSpec, settings: RecordSettings) -> str:
    """Of all that decides what a worker answers: answers of another digest do not belong into one recording."""
    parts = [spec.kind, spec.model, spec.url, spec.version, spec.params, settings.temperature]
    tokens = min(settings.output_tokens or spec.output_tokens_max, spec.output_tokens_max)
    return hashlib.sha256(json.dumps([*parts, tokens], sort_keys=True, default=str).encode()).hexdigest()[:32]


def _call(spec: WorkerSpec, body: Mapping[str, Any], draw: RecordedDraw, attempt: int) -> WorkerCall:
    return WorkerCall(spec, body, spec.timeout_s, f"record-{draw.key}", f"{draw.worker}.{draw.sample}.{attempt}")


def _is_away(error: UpstreamError) -> bool:
    """Whether no call of this worker can work: it cannot be reached, or its key is refused."""
    if error.upstream_status in KEY_STATUSES:
        return True
    return not error.dispatched and not isinstance(error, UpstreamRefused)


def _cost(spec: WorkerSpec, reply: WorkerReply) -> int:
    return cost_nano(spec.price or Price(), reply.usage) if reply.cost_nano is None else reply.cost_nano


def _pause_s(attempt: int, wished_s: float | None) -> float:
    return min(max(WAIT_FIRST_S * (1 << (attempt - 1)), wished_s or 0.0), WAIT_S_MAX)


def _answer(spec: WorkerSpec, reply: WorkerReply, nano: int) -> dict[str, Any]:
    choice = reply.body["choices"][0]
    text, refusal = reply_text(reply.body), choice["message"].get("refusal")
    refused = not text and isinstance(refusal, str) and bool(refusal)
    answer = {
        "output": refusal if refused else text,
        "input_tokens": reply.usage.prompt_tokens,
        "output_tokens": reply.usage.completion_tokens,
        "nano": nano,
        "finish_reason": finish_reason(choice.get("finish_reason")) or "stop",
        "version": spec.version,
    }
    flags = {"refusal": refused, "estimated": reply.usage.estimated}
    return answer | {name: True for name, flag in flags.items() if flag}


def _error_answer(error: UpstreamError, nano: int) -> dict[str, Any]:
    status = error.upstream_status or (TIMEOUT_STATUS if "timeout" in error.code else LOST_STATUS)
    details = {"status": status, "code": error.code, "message": error.message}
    return {"output": "", "input_tokens": 0, "output_tokens": 0, "nano": nano, "error": details}
