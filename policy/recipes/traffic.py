"""Applications that ask over the OpenAI API and name the grader of each request, and what came of it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import count, cycle
from random import Random
from typing import Any, TextIO

import httpx

from policy.recipes.stack import Gateway

BOOTSTRAPS = 2000
NO_COST = Decimal(0)
REQUEST_S = 180.0
PROGRESS_S = 2.0
BAR_CHARS, REDRAWN_S, LINE_S = 24, 0.1, 5.0
APPLICATIONS = 24  # keys
AT_ONCE = 12
OK = 200
GRADER = "exact"
FAILED_CHARS = 300
RETRIES_MAX, RETRY_S = 2, 0.5  # as OpenAI's own client has it, the pause doubling
RETRIED = (408, 409, 429)  # and 500 and above
NEVER_TRAINED = {"train": "false"}  # and so never planned to explore: the policy at its best


@dataclass(frozen=True, slots=True)
class Question:
    """The text of a question, and how a reply to it is graded (1.0 right, 0.0 wrong)."""

    id: str
    text: str
    grade: Callable[[str], float]
    task_type: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it. A failed one is wrong, and cost what its headers say."""

    question: str
    status: int
    right: float
    text: str = ""
    rollout_id: str = ""
    cost_usd: Decimal = NO_COST
    steps: int = 0
    overhead_ms: float = 0.0
    wall_ms: float = 0.0
    fallback: str | None = None
    capped: str | None = None


def read_answer(question: Question, reply: httpx.Response, wall_ms: float) -> Answer:
    """A reply as an Answer."""
    headers = reply.headers
    text = reply.json()["choices"][0]["message"]["content"] or "" if reply.status_code == 200 else ""
    return Answer(
        question.id,
        reply.status_code,
        question.grade(text) if reply.status_code == 200 else 0.0,
        text,
        headers.get("x-baton-rollout-id", ""),
        Decimal(headers.get("x-baton-cost-usd", "0")),
        int(headers.get("x-baton-steps", "0")),
        float(headers.get("x-baton-overhead-ms", "0")),
        wall_ms,
        headers.get("x-baton-fallback"),
        headers.get("x-baton-capped"),
    )


def bootstrap(values: Sequence[float], *, resamples: int = BOOTSTRAPS, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the mean. Raises ValueError on no values."""
    if not values:
        raise ValueError("no values to resample")
    draw, n = Random(seed), len(values)
    means = sorted(sum(draw.choices(values, k=n)) / n for _ in range(resamples))
    return means[int(0.025 * resamples)], means[min(resamples - 1, int(0.975 * resamples))]


@dataclass(frozen=True, slots=True)
class GradedQuestion:
    """A question with the answer that its client gives the grader."""

    question: Question
    reference: str

    @property
    def graded(self) -> dict[str, str]:
        """The request's metadata with which its outcome appears by itself."""
        return {"grader": GRADER, "reference": self.reference}


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """A policy on one set of questions: share right with its 95 % interval, dollars per 1,000."""

    n: int
    accuracy: float
    low: float
    high: float
    usd_per_1k: float

    @classmethod
    def of(cls, right: Sequence[float], usd: Sequence[float]) -> PolicyScore:
        """Raises ValueError on none."""
        low, high = bootstrap(right)
        return cls(len(right), sum(right) / len(right), low, high, 1000 * sum(usd) / len(usd))


@dataclass(slots=True)
class Tally:
    """Counts of all requests of a run, by outcome and version."""

    sent: int = 0
    failed: int = 0
    retried: int = 0
    fallbacks: int = 0
    graded: int = 0  # that named a grader, and were answered
    versions: Counter[str] = field(default_factory=Counter)  # which version planned

    def add(self, answer: Answer, version: str, *, graded: bool) -> None:
        """One more."""
        self.sent += 1
        self.failed += answer.status != OK
        self.fallbacks += answer.fallback is not None
        self.graded += graded and answer.status == OK
        self.versions[version] += 1


class Traffic:
    """The applications. Requests go round their keys."""

    def __init__(self, served: Gateway, http: httpx.AsyncClient, keys: Sequence[str]) -> None:
        self.tally = Tally()
        self._url = f"{served.base_url}/chat/completions"
        self._http = http
        self._keys = cycle(keys)

    @classmethod
    @asynccontextmanager
    async def open(cls, served: Gateway, applications: int = APPLICATIONS) -> AsyncIterator[Traffic]:
        """Yield the traffic of so many applications, each with a new key."""
        limits = httpx.Limits(max_connections=2 * AT_ONCE, max_keepalive_connections=2 * AT_ONCE)
        async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits) as http:
            admin = {"authorization": f"Bearer {served.admin_key}"}
            keys = []
            for index in range(applications):
                body = {"name": f"application {index + 1}"}
                reply = await http.post(f"{served.admin_url}/admin/keys", json=body, headers=admin)
                reply.raise_for_status()
                keys.append(reply.json()["key"])
            yield cls(served, http, keys)

    async def ask(
        self, request: GradedQuestion, metadata: Mapping[str, str], policy: str = "baton"
    ) -> tuple[Answer, str]:
        """One request, and which version planned it (empty: none did)."""
        body: dict[str, Any] = {"model": policy, "messages": [{"role": "user", "content": request.question.text}]}
        body["metadata"] = dict(metadata)
        headers = {"authorization": f"Bearer {next(self._keys)}"}
        answer, version, text = await self._once(request, body, headers)
        for attempt in range(RETRIES_MAX):
            if answer.status in (OK, *range(400, 500)) and answer.status not in RETRIED:
                break
            self.tally.retried += 1
            await asyncio.sleep(RETRY_S * 2**attempt)
            answer, version, text = await self._once(request, body, headers)
        if answer.status != OK:
            print(f"  failed: {answer.status} {text[:FAILED_CHARS]}", file=sys.stderr, flush=True)
        self.tally.add(answer, version, graded="grader" in metadata)
        return answer, version

    async def _once(
        self, request: GradedQuestion, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[Answer, str, str]:
        """One attempt: the answer, which version planned it, and the text of the reply."""
        began_s = time.perf_counter()
        try:
            reply = await self._http.post(self._url, json=body, headers=headers)
        except httpx.HTTPError as error:
            return Answer(request.question.id, 0, 0.0), "", repr(error)
        answer = read_answer(request.question, reply, 1000 * (time.perf_counter() - began_s))
        return answer, reply.headers.get("x-baton-policy", "").partition(" (")[2].rstrip(")"), reply.text

    async def ask_to_learn(self, what: str, questions: Sequence[GradedQuestion], policy: str = "baton") -> PolicyScore:
        """Everyday traffic: explored, logged, graded."""
        return await self._all(what, questions, policy, learn=True)

    async def score(self, what: str, questions: Sequence[GradedQuestion], policy: str = "baton") -> PolicyScore:
        """A policy at its best, on questions that never train."""
        return await self._all(what, questions, policy, learn=False)

    async def compare(
        self, what: str, questions: Sequence[GradedQuestion], policies: Sequence[str]
    ) -> dict[str, PolicyScore]:
        """Several policies at their best on the same questions, as one stage."""
        bar, scores = StageBar(what), dict[str, PolicyScore]()
        for policy in policies:
            scores[policy] = await self._all(policy, questions, f"baton/{policy}", learn=False, quiet=True)
            bar.at(len(scores) / len(policies), f"{policy}: {scores[policy].accuracy:.1%} right")
        bar.end(f"{len(policies)} policies, {len(questions)} questions each")
        return scores

    async def _all(
        self, what: str, questions: Sequence[GradedQuestion], policy: str, *, learn: bool, quiet: bool = False
    ) -> PolicyScore:
        slots, bar, right = asyncio.Semaphore(AT_ONCE), None if quiet else StageBar(what), list[float]()

        async def one(request: GradedQuestion) -> Answer:
            async with slots:
                answer, _ = await self.ask(request, request.graded if learn else NEVER_TRAINED, policy)
            right.append(answer.right)
            if bar is not None:
                bar.at(len(right) / len(questions), told())
            return answer

        def told() -> str:
            return f"{len(right)} of {len(questions)}, {sum(right) / len(right):.1%} right"

        answers = await asyncio.gather(*(one(request) for request in questions))
        if bar is not None:
            bar.end(told())
        return PolicyScore.of([each.right for each in answers], [float(each.cost_usd) for each in answers])

    @asynccontextmanager
    async def keep_asking(self, questions: Sequence[GradedQuestion], per_s: float) -> AsyncIterator[None]:
        """Send everyday traffic at that rate until the block ends."""
        flying: set[asyncio.Task[Any]] = set()

        async def go_on() -> None:
            for index in count():
                request = questions[index % len(questions)]
                task = asyncio.create_task(self.ask(request, request.graded))
                flying.add(task)
                task.add_done_callback(flying.discard)
                await asyncio.sleep(1 / per_s)

        going = asyncio.create_task(go_on())
        try:
            yield
        finally:
            going.cancel()
            with suppress(asyncio.CancelledError):
                await going
            await asyncio.gather(*flying)


class StageBar:
    """A stage of a run: how far it is, and how long it still takes. Redrawn in place on a terminal; elsewhere a line
    every LINE_S seconds, and one at its end."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name, self._stream = name, stream or sys.stderr
        self._live = self._stream.isatty()
        self._began_s = self._shown_s = time.monotonic()
        self._drawn = 0

    def at(self, share: float, note: str = "") -> None:
        """Show how far it is, as a share of the whole; no more often than people read."""
        if time.monotonic() - self._shown_s >= (REDRAWN_S if self._live else LINE_S):
            took_s = time.monotonic() - self._began_s
            left = f"{took_s * (1 - share) / share:.0f} s left" if share > 0 else ""
            self._show(share, note, left)

    def end(self, note: str = "") -> None:
        """Show that it is finished, and how long it took."""
        self._show(1.0, note, f"{time.monotonic() - self._began_s:.0f} s")
        if self._live:
            self._stream.write("\n")

    def _show(self, share: float, note: str, seconds: str) -> None:
        self._shown_s = time.monotonic()
        full = round(BAR_CHARS * min(1.0, share))
        text = f"  {self._name:<34} {'█' * full}{'░' * (BAR_CHARS - full)}  {note:<32} {seconds}".rstrip()
        self._stream.write(f"\r{text.ljust(self._drawn)}" if self._live else f"{text}\n")
        self._stream.flush()
        self._drawn = len(text)
