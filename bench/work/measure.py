"""Asking a gateway, judging its replies with the graders, and reading what it credited to whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import httpx

from bench.database import Database
from bench.serving import Client
from bench.work.gateways import Arm
from bench.work.prose import is_faithful
from bench.work.tasks import WorkTask
from bench.work.workers import CRITIC
from policy.graders import Tools, grade
from policy.recipes.stack import Gateway
from policy.recipes.traffic import Answer, Question

AT_ONCE = 8
GRADED_AT_ONCE = 2  # jails
CREDITED_S = 120.0
LEARN = "baton/vote"  # asks every worker, so that each has a record
LEARNING = f"{LEARN}, to learn from"
RIGHT_MIN = 0.5  # a value above this says right
_CREDITS = """
SELECT s.rollout_id::text AS id, s.step, s.worker, s.reply, e.success
FROM steps AS s LEFT JOIN experience AS e
  ON (e.rollout_id, e.round, e.step) = (s.rollout_id, s.round, s.step)
WHERE s.rollout_id = ANY(CAST(:ids AS uuid[])) AND s.kind = 'openai' AND s.status = 'done'
ORDER BY s.rollout_id, s.step
"""
_CALLS = """
SELECT rollout_id::text AS id, sum(jsonb_array_length(attempts)) AS calls FROM steps
WHERE rollout_id = ANY(CAST(:ids AS uuid[])) AND worker NOT IN ('vote', 'python') AND status <> 'skipped'
GROUP BY rollout_id
"""
_OUTCOMES = "SELECT count(*) AS n FROM outcomes WHERE rollout_id = ANY(CAST(:ids AS uuid[]))"


@dataclass(frozen=True, slots=True)
class Judged:
    """One request. `value`: its outcome, as the grader has it. `right`: whether its reply is right. `calls`: of models,
    judges among them."""

    task: str
    right: bool
    value: float
    usd: float
    calls: int
    status: int


@dataclass(frozen=True, slots=True)
class Credit:
    """One finished step of a worker: what the gateway credited it with, None for nothing, and whether it was right."""

    worker: str
    credit: float | None
    right: bool

    @property
    def is_wrong(self) -> bool:
        return self.credit is not None and (self.credit > RIGHT_MIN) != self.right


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy of one arm on one kind of work."""

    arm: str
    kind: str
    policy: str
    requests: Sequence[Judged]
    credits: Sequence[Credit]


class Truth:
    """Whether replies are right, and what their graders say. Each pair of task and reply is graded once.

    Of prose the truth is read from the text, and the grader `judge` asks the critic, who errs. For all others the
    grader's verdict is the truth."""

    def __init__(self, http: httpx.AsyncClient, workers_url: str) -> None:
        self._http = http
        self._url = f"{workers_url}/w/{CRITIC}/v1/chat/completions"
        self._slots = asyncio.Semaphore(GRADED_AT_ONCE)
        self._known: dict[tuple[str, str], asyncio.Task[float]] = {}

    async def value(self, task: WorkTask, reply: str) -> float:
        """The outcome that the task's grader gives."""
        key = (task.id, reply)
        if key not in self._known:
            self._known[key] = asyncio.create_task(self._grade(task, reply))
        return await self._known[key]

    async def right(self, task: WorkTask, reply: str) -> bool:
        """Whether the reply is right."""
        return is_faithful(task.text, reply) if task.kind == "prose" else await self.value(task, reply) > RIGHT_MIN

    async def _grade(self, task: WorkTask, reply: str) -> float:
        if not reply:
            return 0.0
        async with self._slots:
            return (await grade(task.grader, task.reference, reply, tools=Tools(ask=self._ask))).value

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        answer = await self._http.post(self._url, json={"model": CRITIC, "messages": messages})
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


class Bench:
    """The requests of one arm: to learn from, then of every policy on the same tasks."""

    def __init__(self, arm: Arm, served: Gateway, http: httpx.AsyncClient, truth: Truth, database: Database) -> None:
        self._arm, self._served, self._http = arm, served, http
        self._truth, self._database = truth, database

    async def run(self, kind: str, learned: Sequence[WorkTask], tasks: Sequence[WorkTask]) -> list[Measured]:
        """All policies on one kind of work. Outcomes of what is learned from come before the first of them, and those
        of the policies after the last, so that all choose by the same experience."""
        client = await Client.open(self._served, self._http, f"bench work {kind}", AT_ONCE)
        answers = [await self._answers(client, kind, LEARN, learned)]
        await self._report(client, learned, answers)
        asked = [await self._answers(client, kind, policy, tasks) for policy in self._arm.policies(kind)]
        await self._report(client, tasks, asked)
        rows = [(LEARNING, learned, answers[0])]
        rows += [(policy, tasks, each) for policy, each in zip(self._arm.policies(kind), asked, strict=True)]
        return [await self._measured(kind, policy, of, answers) for policy, of, answers in rows]

    async def _answers(self, client: Client, kind: str, policy: str, tasks: Sequence[WorkTask]) -> list[Answer]:
        questions = [Question(task.id, task.text, lambda _: 0.0, kind) for task in tasks]
        answers = await client.ask_all(policy, questions)
        return [
            replace(each, right=await self._truth.value(task, each.text))
            for task, each in zip(tasks, answers, strict=True)
        ]

    async def _report(self, client: Client, tasks: Sequence[WorkTask], asked: Sequence[Sequence[Answer]]) -> None:
        """Send the outcomes, in the order of policies and tasks, and wait until all of them are counted."""
        await asyncio.to_thread(self._database.stored, client.key_id, client.sent)
        answers = [each for one in asked for each in one if each.rollout_id]
        for each in answers:
            await client.judge(each)
        ids, until_s = [each.rollout_id for each in answers], time.monotonic() + CREDITED_S
        while self._database.rows(_OUTCOMES, ids=ids)[0]["n"] < len(ids):
            if time.monotonic() > until_s:
                raise SystemExit("the outcomes do not reach PostgreSQL")
            await asyncio.sleep(0.1)

    async def _measured(self, kind: str, policy: str, tasks: Sequence[WorkTask], asked: Sequence[Answer]) -> Measured:
        ids = [each.rollout_id for each in asked if each.rollout_id]
        calls = {row["id"]: int(row["calls"]) for row in self._database.rows(_CALLS, ids=ids)}
        task_of = {each.rollout_id: task for task, each in zip(tasks, asked, strict=True)}
        credits = [
            Credit(row["worker"], row["success"], await self._truth.right(task_of[row["id"]], row["reply"] or ""))
            for row in self._database.rows(_CREDITS, ids=ids)
        ]
        requests = [
            Judged(
                *(task.id, await self._truth.right(task, each.text), each.right, float(each.cost_usd)),
                *(calls.get(each.rollout_id, 0), each.status),
            )
            for task, each in zip(tasks, asked, strict=True)
        ]
        return Measured(self._arm.name, kind, policy, requests, credits)
