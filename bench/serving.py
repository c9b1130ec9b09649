"""Questions through a running gateway, policy by policy, and the results. The two serving benches share it.

Every figure comes from outside the gateway (the reply and its headers) except worker calls and exploration, which its
log knows. Intervals are 95 % percentile bootstraps over questions (Efron 1979), 2,000 resamples, seeded.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx

from bench.database import Database
from gateway.files import write_atomic
from policy.recipes.stack import Gateway
from policy.recipes.traffic import PROGRESS_S, REQUEST_S, Answer, Question, bootstrap, read_answer

COLUMNS = (
    *("policy", "right", "95 %", "$ per 1,000", "steps", "calls", "overhead p50 / p95 ms", "wall p50 ms"),
    *("fallback", "capped", "errors"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on all questions."""

    policy: str
    n: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    usd_per_1000: float
    steps_mean: float
    calls_mean: float
    overhead_ms_p50: float
    overhead_ms_p95: float
    wall_ms_p50: float
    fallback_share: float
    capped_share: float
    explored_share: float
    errors: int


class Client:
    """Requests of one key, made for this run, at most `concurrency` at a time."""

    def __init__(self, served: Gateway, http: httpx.AsyncClient, key: str, key_id: str, concurrency: int) -> None:
        self.key_id = key_id
        self.sent = 0  # requests that became a rollout
        self._url = served.base_url
        self._http = http
        self._key = key
        self._concurrency = concurrency

    @classmethod
    async def open(cls, served: Gateway, http: httpx.AsyncClient, name: str, concurrency: int) -> Client:
        """With a new data key of that name, which identifies the rollouts of this run in the log."""
        headers = {"authorization": f"Bearer {served.admin_key}"}
        made = await http.post(f"{served.admin_url}/admin/keys", json={"name": name}, headers=headers)
        made.raise_for_status()
        return cls(served, http, made.json()["key"], made.json()["id"], concurrency)

    async def models(self) -> list[str]:
        """Every name the key may send as `model`."""
        reply = await self._http.get(f"{self._url}/models", headers=self._headers())
        reply.raise_for_status()
        return [model["id"] for model in reply.json()["data"]]

    async def ask_all(self, policy: str, questions: Sequence[Question], *, learn: bool = False) -> list[Answer]:
        """Ask each question once. `learn`: report how right each answer was as its outcome."""
        slots, progress = asyncio.Semaphore(self._concurrency), Progress(policy, len(questions))

        async def one(question: Question) -> Answer:
            async with slots:
                answer = await self._ask(policy, question)
                if learn and answer.rollout_id:
                    await self.judge(answer)
            progress.count(answer)
            return answer

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(question)) for question in questions]
        progress.end()
        return [task.result() for task in tasks]

    async def _ask(self, policy: str, question: Question) -> Answer:
        body: dict[str, Any] = {"model": policy, "messages": [{"role": "user", "content": question.text}]}
        if question.task_type:
            body["metadata"] = {"task_type": question.task_type}
        began_s = time.perf_counter()
        try:
            reply = await self._http.post(f"{self._url}/chat/completions", json=body, headers=self._headers())
        except httpx.HTTPError:
            return Answer(question.id, 0, 0.0)
        answer = read_answer(question, reply, (time.perf_counter() - began_s) * 1000)
        self.sent += bool(answer.rollout_id)
        return answer

    async def judge(self, answer: Answer) -> None:
        """Report how right an answer was as the outcome of its rollout."""
        body = {"rollout_id": answer.rollout_id, "value": answer.right, "source": "bench"}
        headers = self._headers() | {"idempotency-key": f"{answer.question}-{answer.rollout_id}"}
        (await self._http.post(f"{self._url}/outcomes", json=body, headers=headers)).raise_for_status()

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"}


class Progress:
    """Progress on stderr."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done, self._right, self._said_s = 0, 0.0, time.monotonic()

    def count(self, answer: Answer) -> None:
        """Count one request, and print a line now and then."""
        self._done += 1
        self._right += answer.right
        if time.monotonic() - self._said_s > PROGRESS_S:
            self._said_s = time.monotonic()
            self._say()

    def end(self) -> None:
        """Print the last line."""
        self._say()

    def _say(self) -> None:
        share = self._right / max(1, self._done)
        print(f"  {self._what}: {self._done} of {self._total}, {share:.1%} right", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- figures


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; 0 if there are no values."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def summed_up(policy: str, answers: Sequence[Answer], calls: dict[str, dict[str, Any]]) -> Row:
    """The row of one policy. `calls` is what the log says by rollout (`Database.calls`). Raises ValueError on none."""
    rights = [answer.right for answer in answers]
    low, high = bootstrap(rights)
    n, ended = len(answers), [answer for answer in answers if answer.status == 200]
    logged = [calls[answer.rollout_id] for answer in answers if answer.rollout_id in calls]
    return Row(
        policy=policy,
        n=n,
        accuracy=sum(rights) / n,
        accuracy_low=low,
        accuracy_high=high,
        usd_per_1000=float(1000 * sum((answer.cost_usd for answer in answers), Decimal(0)) / n),
        steps_mean=statistics.fmean([answer.steps for answer in ended] or [0]),
        calls_mean=statistics.fmean([float(each["calls"]) for each in logged] or [0.0]),
        overhead_ms_p50=percentile([answer.overhead_ms for answer in ended], 0.5),
        overhead_ms_p95=percentile([answer.overhead_ms for answer in ended], 0.95),
        wall_ms_p50=percentile([answer.wall_ms for answer in ended], 0.5),
        fallback_share=sum(answer.fallback is not None for answer in answers) / n,
        capped_share=sum(answer.capped is not None for answer in answers) / n,
        explored_share=sum(bool(each["explored"]) for each in logged) / n,
        errors=n - len(ended),
    )


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    head = f"| {' | '.join(COLUMNS)} |"
    lines = [head, "|---|" + "---:|" * (len(COLUMNS) - 1)]
    for row in rows:
        lines.append(
            f"| `{row.policy}` | {row.accuracy:.1%} | {row.accuracy_low:.1%} to {row.accuracy_high:.1%} "
            f"| {row.usd_per_1000:.4f} | {row.steps_mean:.2f} | {row.calls_mean:.2f} "
            f"| {row.overhead_ms_p50:.1f} / {row.overhead_ms_p95:.1f} | {row.wall_ms_p50:.0f} "
            f"| {row.fallback_share:.1%} | {row.capped_share:.1%} | {row.errors} |"
        )
    return "\n".join(lines)


def report(rows: Sequence[Row], notes: Sequence[str], out: Path | None, about: dict[str, Any]) -> None:
    """Print the table with its notes; write the same as JSON where asked."""
    print("\n".join(["", markdown(rows), "", *notes]), flush=True)
    if out:
        body = {"about": about, "notes": list(notes), "rows": [asdict(row) for row in rows]}
        write_atomic(out, json.dumps(body, indent=2) + "\n")


# ---------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True)
class Run:
    """The questions of one bench: `learning` to `baton/rule`, with outcomes; then `questions` to every policy."""

    name: str
    learning: Sequence[Question]
    questions: Sequence[Question]
    policies: Sequence[str]  # empty: every fixed worker, rule and conductor
    concurrency: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a bench. `sent` and `stored` must be equal: every rollout is in PostgreSQL."""

    rows: list[Row]
    fallbacks: dict[str, int]
    sent: int
    stored: int

    def notes(self) -> list[str]:
        """Sentences under the table."""
        said = f"Rollouts of this run: {self.sent} answered with an id, {self.stored} of them in PostgreSQL."
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(self.fallbacks.items())) or "none"
        explored = max((row.explored_share for row in self.rows), default=0.0)
        greedy = f"Share of requests planned at random (BATON_EXPLORE_SHARE): {explored:.1%} at most."
        return [said, f"Fallbacks: {why}.", greedy]


async def run(served: Gateway, wanted: Run) -> Outcome:
    """Ask all questions, policy after policy, and read the results from the log."""
    limits = httpx.Limits(max_connections=wanted.concurrency, max_keepalive_connections=wanted.concurrency)
    async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits) as http:
        client = await Client.open(served, http, wanted.name, wanted.concurrency)
        policies = wanted.policies or default_policies(await client.models())
        if wanted.learning:
            print(f"learning from {len(wanted.learning)} judged answers of baton/rule", file=sys.stderr, flush=True)
            await client.ask_all("baton/rule", wanted.learning, learn=True)
        answers = {policy: await client.ask_all(policy, wanted.questions) for policy in policies}
    return await asyncio.to_thread(_look_up, served, client, answers)


def _look_up(served: Gateway, client: Client, answers: dict[str, list[Answer]]) -> Outcome:
    database = Database(served.database_url)
    try:
        stored = database.stored(client.key_id, client.sent)
        calls = database.calls(client.key_id)
    finally:
        database.close()
    fallbacks: dict[str, int] = {}
    for answer in (answer for each in answers.values() for answer in each if answer.fallback):
        fallbacks[str(answer.fallback)] = fallbacks.get(str(answer.fallback), 0) + 1
    rows = [summed_up(policy, each, calls) for policy, each in answers.items()]
    return Outcome(rows, fallbacks, client.sent, stored)


def default_policies(models: Sequence[str]) -> list[str]:
    """Every fixed worker, then the rule, then the conductor."""
    return [*(model for model in models if model.startswith("baton/fixed:")), "baton/rule", "baton/conductor"]
