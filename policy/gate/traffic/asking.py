"""Logged requests as an environment: workers are asked through a gateway, replies graded as the request wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import question_text
from gateway.core.openai.reply import reply_text
from gateway.core.pool.workers import WorkerSpec
from gateway.errors import UpstreamError
from gateway.service.loop.state import Planner
from gateway.service.ports.request import WorkerCall
from policy import graders
from policy.environments.base import Bill, Episode, PlanSource, Prompt, Split
from policy.environments.cached import CachedWorkers, PaidCalls
from policy.environments.executor import ExecutedEnvironment, Executor
from policy.gate.traffic.requests import HeldOutRequest
from policy.graders.base import Ask, GraderError, GraderFailed, Tools
from policy.statistics.baselines import PriceCascade

JUDGE = "judge"
JUDGE_TOKENS_MAX = 512
LADDER_ROUNDS = 64  # of a cascade over the whole pool
UNGRADED = "ungraded"  # the error of an episode whose reply could not be graded


@dataclass(frozen=True, slots=True)
class Judge:
    """The worker that grades what names no grader of its own, and by what rubric."""

    worker: WorkerSpec
    rubric: str


def fault_of(request: HeldOutRequest, judge: Judge | None) -> str | None:
    """Why replies to a request cannot be graded, a key of `heldout.REASONS`."""
    if not request.grader:
        return "no_grader" if judge is None else None
    name = request.grader.partition("@")[0]  # at today's version: every reply is graded anew
    if name == JUDGE and judge is None:
        return "needs_judge"
    try:
        graders.check_reference(name, request.reference)
    except GraderError:
        return "bad_reference"
    return None


def prompt_of(request: HeldOutRequest, pool: Sequence[WorkerSpec]) -> Prompt:
    """The request as a question to today's pool, with what was known of the workers when it was asked."""
    names = {spec.name for spec in pool}
    return Prompt(
        id=request.id,
        messages=request.messages,
        pool=tuple(pool),
        reference=request.reference,
        category=request.kind or None,
        task_type=request.kind or None,
        experience={past.worker: past for past in map(_experience, request.pool) if past and past.worker in names},
        truth=request,
        quality=request.quality,
        params=request.params,
    )


def _experience(fields: Mapping[str, object]) -> WorkerExperience | None:
    past = fields.get("experience")
    if not isinstance(past, Mapping):
        return None
    return WorkerExperience(str(fields["name"]), past["n"], past["success"], past["cost_nano"], past["ms"])


class TrafficEnvironment(ExecutedEnvironment):
    """Prompts made by `prompt_of`. Its meter does not cap: the allowance of `calls` does, call by call."""

    name = "logged"

    def __init__(
        self, prompts: Sequence[Prompt], calls: PaidCalls, executor: Executor, judge: Judge | None = None
    ) -> None:
        super().__init__(executor, None)
        self._prompts = list(prompts)
        self._calls = calls
        self._judge = judge
        self._ungraded: dict[tuple[str, str], str] = {}

    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """The latest `n`; there is no other split."""
        return self._prompts[-n:]

    def workers(self, prompt: Prompt, sample: int) -> CachedWorkers:
        """The gateway's workers, with replies from the store. `sample`: the number of the first of equal calls."""
        return CachedWorkers(self._calls, sample)

    def executor_of(self, source: PlanSource) -> Executor:
        """As elsewhere; a cascade over the pool may take as many rounds as there are workers."""
        if not isinstance(source, PriceCascade):
            return self.executor
        return replace(self.executor, rounds=LADDER_ROUNDS, caps=replace(self.executor.caps, rounds=LADDER_ROUNDS))

    def children(self, prompt: Prompt) -> Planner | None:
        """Nobody: plans come from planners."""
        return None

    async def graded(self, prompt: Prompt, reply: str, bill: Bill) -> float:
        """By the request's own grader, else by the judge; 0 where no grade could be made, and `episode` says so."""
        grader, reference = self._grader(prompt)
        name = grader.partition("@")[0]
        tools = Tools(ask=None if self._judge is None else self._ask(self._judge))
        try:
            grade = await graders.grade(name, reference, reply, tools=tools)
        except GraderError as error:
            self._ungraded[prompt.id, reply] = str(error)
            return 0.0
        return grade.value

    async def episode(self, prompt: Prompt, source: PlanSource, sample: int = 0) -> Episode:
        """As in the port. Its error is UNGRADED where the reply could not be graded."""
        episode = await super().episode(prompt, source, sample)
        return replace(episode, error=UNGRADED) if (prompt.id, episode.reply) in self._ungraded else episode

    def _grader(self, prompt: Prompt) -> tuple[str, object]:
        """Who grades replies to a prompt, and against what. Raises ValueError for a prompt of another environment."""
        request = prompt.truth
        if not isinstance(request, HeldOutRequest):
            raise ValueError(f"prompt {prompt.id} is no logged request")
        if request.grader or self._judge is None:
            return request.grader, request.reference
        return JUDGE, {"question": question_text(prompt.messages), "rubric": self._judge.rubric}

    def _ask(self, judge: Judge) -> Ask:
        """The judge's reply, stored like a worker's and paid out of the same allowance. It raises GraderFailed."""

        async def ask(messages: list[dict[str, str]]) -> str:
            body = {"messages": messages, "temperature": 0, "max_completion_tokens": JUDGE_TOKENS_MAX}
            call = WorkerCall(judge.worker, body, judge.worker.timeout_s, rollout_id=JUDGE, step_id="")
            try:
                paid = await self._calls.reply(call, 0)
            except UpstreamError as error:
                raise GraderFailed(f"the judge failed: {error.message}") from None
            if paid.refusal is not None:
                raise GraderFailed(f"the judge refused: {paid.refusal[0]}")
            return reply_text(paid.body)

        return ask
