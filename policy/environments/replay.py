"""Recorded answers of real models as an environment: single picks, votes, cascades and stopping are scored exactly.

A task in other words has no recording: the step fails with 404 `no_recording`, as it does when served. A step that sees
other replies still gets the recorded answer to the question, which was given without them; so drafts gain nothing here.
Seconds are an assumption (the same rate for every model): the recording has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from gateway.core.loop.caps import Caps
from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.replies.answers import extract_answer, normalise
from gateway.core.money.amounts import Usage, cost_nano
from gateway.core.pool.workers import MODEL_KINDS, PoolFile, Price, WorkerSpec
from gateway.errors import UpstreamRefused
from gateway.service.ports.request import WorkerCall, WorkerReply
from policy.environments.base import Bill, Prompt, Spend, Split, fraction, rng_for, split_of
from policy.environments.executor import CAPS, ExecutedEnvironment, Executor, TimedWorkers
from policy.environments.sampling import CONCURRENCY
from policy.environments.simulated import NOWHERE, SpeakerWorkers, tool_reply
from policy.reward import is_right
from policy.simulators.recordings import BadRecording, RecordedCheck, Recording, Recordings, load
from policy.simulators.replay import ReplaySpeaker, check_entry, pool_file

VALIDATION_SHARE = 0.25
CHECK_URL = f"{NOWHERE}/check"
FIRST_S, TOKENS_PER_S = 0.5, 80.0  # assumed
Experience = Callable[[Prompt], Mapping[str, WorkerExperience]]


class ReplayEnvironment(ExecutedEnvironment):
    """Questions of a recording that can be graded. Where the models were named to `load`, a question offers those that
    answered it; else every model must have answered it. `left_out` counts by name what is not offered. `experience`:
    what is shown of the workers on questions like a prompt; it must come from the train split. `tell_domain`: as a
    client that names it."""

    name = "replay"

    def __init__(
        self,
        recordings: Recordings,
        prices: Mapping[str, Any],
        *,
        seed: int = 0,
        validation_share: float = VALIDATION_SHARE,
        experience: Experience | None = None,
        tell_domain: bool = False,
        executor: Executor | None = None,
        spend: Spend | None = None,
        concurrency: int = CONCURRENCY,
    ) -> None:
        super().__init__(executor, spend, concurrency)
        document = PoolFile.model_validate(pool_file(recordings.models, prices, NOWHERE, seed))
        self._pool = [*document.pool("replay"), *_check_tool(recordings)]
        self._recordings, self._seed = recordings, seed
        self._validation_share = validation_share
        self._experience = experience
        self._tell_domain = tell_domain
        self.left_out = _left_out(recordings)
        self._recorded = [entry for entry in recordings.by_question.values() if _reason(entry, recordings) is None]
        if not self._recorded:
            raise BadRecording(
                "no question was answered by every model and has a `gold` answer; give fewer --workers: a question "
                f"then offers those that answered it (left out: {self.left_out})"
            )

    @classmethod
    def open(cls, path: Path, prices: Mapping[str, Any], models: Sequence[str] = (), **more: Any) -> ReplayEnvironment:
        """From a file. Raises BadRecording."""
        return cls(load(path, models), prices, **more)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the model workers."""
        return tuple(spec.name for spec in self._pool if spec.kind in MODEL_KINDS)

    def prompts(self, split: Split, n: int, seed: int) -> list[Prompt]:
        """As in the port; which are chosen, and their order, is a hash of (seed, id)."""
        mine = [entry for entry in self._recorded if split_of(entry.id, self._validation_share) == split]
        if n > len(mine):
            raise ValueError(f"{n} {split} questions asked for, {len(mine)} are there: lower the number")
        ranked = sorted(mine, key=lambda entry: (fraction("prompts", seed, entry.id), entry.id))
        return [self._prompt(entry, seed) for entry in ranked[:n]]

    def count(self, split: Split) -> int:
        """Return the number of questions in the split."""
        return sum(split_of(entry.id, self._validation_share) == split for entry in self._recorded)

    def _prompt(self, entry: Recording, seed: int) -> Prompt:
        offered = [spec for spec in self._pool if _offers(entry, spec)]
        pool = rng_for("replay pool", seed, entry.id).sample(offered, len(offered))
        kind = entry.domain if self._tell_domain else None
        prompt = Prompt(entry.id, entry.messages, tuple(pool), entry.gold or "", entry.domain, kind, truth=entry)
        return prompt if self._experience is None else replace(prompt, experience=self._experience(prompt))

    def workers(self, prompt: Prompt, sample: int) -> TimedWorkers:
        """The recorded models, `vote` and `check`. An episode begins with the answers and goes on with samples."""
        return _RecordedWorkers(ReplaySpeaker(self._recordings, FIRST_S, TOKENS_PER_S, self._seed), prompt)

    def checks(self, prompt: Prompt) -> Mapping[str, RecordedCheck]:
        """What `check` says of each worker's answer to the question, where it was recorded."""
        entry = _truth(prompt)
        checks = {name: _check_of(entry, answer.text, name) for name, answer in entry.answers.items()}
        return {name: check for name, check in checks.items() if check is not None}

    async def graded(self, prompt: Prompt, reply: str, bill: Bill) -> float:
        """As `grade`; free."""
        return self.grade(prompt, reply)

    def grade(self, prompt: Prompt, reply: str) -> float:
        """The recording's own verdict where the reply is one of its answers, else the final answer against the gold."""
        for answer in _truth(prompt).answers.values():
            for draw in answer.draws:
                if draw.score is not None and draw.text == reply:
                    return draw.score
        return float(_final(reply) == normalise(prompt.reference))

    def oracle(self, prompt: Prompt) -> str:
        """The cheapest plan of one step that is right; the cheapest of all where none is. Full information: one greedy
        answer is recorded of each model, so there is no other draw to choose by."""
        entry = _truth(prompt)

        def loss(spec: Any) -> tuple[bool, int]:
            answer = entry.answers[spec.name]
            tokens_nano = cost_nano(spec.price or Price(), Usage(entry.input_tokens, answer.output_tokens))
            nano = tokens_nano if answer.cost_nano is None else answer.cost_nano
            return not is_right(self.grade(prompt, answer.text)), nano

        best = min((spec for spec in prompt.pool if spec.kind in MODEL_KINDS), key=loss)
        return f'{{"steps":[{{"worker":"{best.handle}","task":null,"see":[]}}]}}'


class _RecordedWorkers(SpeakerWorkers):
    """The workers of an episode, with the recorded check of one question."""

    def __init__(self, speaker: ReplaySpeaker, prompt: Prompt) -> None:
        super().__init__(speaker)
        self._entry = _truth(prompt)
        self._names = {spec.handle: spec.name for spec in prompt.pool}

    def tool(self, call: WorkerCall) -> WorkerReply:
        """Return `valid` or `not valid` for the last reply that `check` sees, at its recorded cost; else what `vote`
        says. Raises UpstreamRefused where nothing is recorded of that reply."""
        if call.worker.url != CHECK_URL:
            return super().tool(call)
        if not call.saw:
            raise UpstreamRefused("check sees no replies; let its step see the one to check", dispatched=False)
        handle, _, reply = call.saw[-1]
        check = _check_of(self._entry, reply, self._names.get(handle))
        if check is None:
            message = "no check of this reply was recorded: it must be a worker's recorded answer, word for word"
            raise UpstreamRefused(message, upstream_status=404, code="no_recording")
        return tool_reply(check.says, check.cost_nano)


@lru_cache(maxsize=4096)
def _final(reply: str) -> str:
    """The final answer of a reply: the same recorded one ends many episodes of a question."""
    return normalise(extract_answer(reply))


def _check_of(entry: Recording, reply: str, name: str | None) -> RecordedCheck | None:
    """The recorded check of a reply: of the worker `name` where it gave it, else of another that said the same."""
    peers = [worker for worker in entry.checks if entry.answers[worker].text == reply]
    return entry.checks[name if name in peers else peers[0]] if peers else None


def _check_tool(recordings: Recordings) -> list[WorkerSpec]:
    """The tool `check`, where anything was checked."""
    every = [check.cost_nano for entry in recordings.by_question.values() for check in entry.checks.values()]
    return [WorkerSpec.model_validate(check_entry(CHECK_URL, max(every)))] if every else []


def _offers(entry: Recording, spec: WorkerSpec) -> bool:
    """Whether a question offers the worker: a model that answered it, `check` where an answer was checked, `vote`."""
    if spec.kind in MODEL_KINDS:
        return spec.name in entry.answers
    return spec.url != CHECK_URL or bool(entry.checks)


def caps_above(recordings: Recordings) -> Caps:
    """Caps that no recorded cost reaches: recorded dollars may be above what tokens × price let a call draw."""
    entries = recordings.by_question.values()
    answers = (draw.cost_nano or 0 for entry in entries for answer in entry.answers.values() for draw in answer.draws)
    checks = (check.cost_nano for entry in entries for check in entry.checks.values())
    every = chain(answers, checks)
    return replace(CAPS, cost_nano=max(CAPS.cost_nano, CAPS.calls * max(every, default=0)))


def _reason(entry: Recording, recordings: Recordings) -> str | None:
    """Why a question is not offered; None: it is."""
    if not entry.id:
        return "questions without `id`"
    if not entry.graded:
        return "questions without `gold` or a verdict on each answer"
    if not entry.answers:
        return "questions that no worker answered"
    if not recordings.chosen and len(entry.answers) < len(recordings.models):
        return "questions that not every worker answered"
    return None


def _left_out(recordings: Recordings) -> dict[str, int]:
    """Counts of what is not offered: questions by reason, and each worker's missing answers."""
    reasons = Counter(_reason(entry, recordings) for entry in recordings.by_question.values())
    questions = {reason: n for reason, n in reasons.items() if reason is not None}
    checks = {"checks of answers that are not there": recordings.checks_unused} if recordings.checks_unused else {}
    return questions | {f"answers of {model}": n for model, n in recordings.gaps().items()} | checks


def _truth(prompt: Prompt) -> Recording:
    if not isinstance(prompt.truth, Recording):
        raise ValueError(f"prompt {prompt.id} is not a recorded one")
    return prompt.truth
