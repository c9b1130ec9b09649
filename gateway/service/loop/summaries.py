"""Summaries of the turns that a prompt has no room for, made by a cheap worker under the request's own hold.

A summary is a worker call beside the step that needs it: drawn from the meter, announced on disk, counted, settled and
logged with the step. It is made once: a request that needs the same turns again, and the next turn of the conversation,
get the same words, so that the prompt keeps its beginning and a provider's prompt cache hits. It is asked for only
where every step that has not ended keeps its own call; whatever goes wrong, the turns are dropped without it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.log.rollout import AttemptRecord
from gateway.core.loop.caps import Draw
from gateway.core.loop.summary import summary_of, summary_request
from gateway.core.money.amounts import cost_nano, input_tokens_bound, worst_case_nano
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import CapReached, DeadlineExceeded, UpstreamError, UpstreamTimeout
from gateway.service.loop.bodies import CUTS_OF_CONTEXT, PromptSize, prompt_size, step_body
from gateway.service.loop.calls import Calls, StepCall
from gateway.service.loop.checks import add_cost, side_call
from gateway.service.loop.routers import USAGE_GUESS
from gateway.service.loop.spending.charges import output_bound, price_of
from gateway.service.loop.state import Loop, StepRun

NOBODY, AUTO = "none", "auto"  # in place of a worker's name
TIME_SHARE_MAX = 0.5  # of the request's time that is left
KEPT_MAX, KEPT_S_MAX = 512, 3600.0  # summaries in memory, and how long each stays there unused
PURPOSE = "summary"


@dataclass(frozen=True, slots=True)
class SummaryRules:
    """Which worker summarises (its name, `none` or `auto`), the most tokens of a summary, and the time of its call."""

    worker: str = NOBODY
    tokens_max: int = 512
    timeout_s: float = 20.0

    def workers(self, asked: Sequence[WorkerSpec], able: Sequence[WorkerSpec]) -> tuple[WorkerSpec, ...]:
        """Who may summarise for a request, the cheapest first. `asked`: the workers that its key may use there; `able`:
        those that it may be planned with. Their replies have the length of a summary."""
        if self.worker == NOBODY:
            return ()
        found = able if self.worker == AUTO else [spec for spec in asked if spec.name == self.worker]
        models = [spec for spec in found if spec.kind in MODEL_KINDS and spec.task == "chat"]
        bounded = [
            spec.model_copy(update={"output_tokens_max": min(spec.output_tokens_max, self.tokens_max)})
            for spec in models
        ]
        return tuple(sorted(bounded, key=lambda spec: (cost_nano(price_of(spec), USAGE_GUESS), spec.name)))


NO_SUMMARIES = SummaryRules()


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a wish for a summary. `text` None: there is none. `how`: `made`, `reused`, or why there is none:
    `window`, `calls`, `cost` and `tokens` (too little is left), `timeout`, `failed`, `refused`, `empty`, `longer`,
    `no_worker`."""

    text: str | None
    how: str


@dataclass(slots=True)
class _Kept:
    summary: Summary
    used_s: float


class Summaries:
    """Makes summaries, and remembers the latest. One object serves the whole process."""

    def __init__(self, calls: Calls, rules: SummaryRules) -> None:
        self.rules = rules
        self._calls = copy(calls)
        self._calls.attempts_max = 1  # a summary that fails is not worth a second try
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def of(self, loop: Loop, run: StepRun, dropped: Sequence[Mapping[str, Any]]) -> Summary:
        """A summary of these messages for the worker of `run`. One call at a time for a request; after one that failed
        there is none. Raises what ends the request: MoneyUnavailable, SpoolFull, and what a checkpoint raises."""
        asked = loop.tree.summaries
        tokens_max = min(self.rules.tokens_max, run.spec.context_tokens // CUTS_OF_CONTEXT)
        messages = summary_request(dropped, tokens_max)
        async with asked.lock:
            if asked.failed is not None:
                return Summary(None, asked.failed)
            chosen = await self._worker(loop, run, messages, tokens_max)
            if isinstance(chosen, Summary):
                return chosen
            key = _key(loop, chosen.spec, messages, tokens_max)
            if (kept := self._recall(key)) is not None:
                return kept
            if why := _too_little(loop, chosen):
                return Summary(None, why)
            summary = await self._ask(loop, run, chosen, dropped)
            if summary.how in ("timeout", "failed"):
                asked.failed = summary.how
            else:
                self._keep(key, replace(summary, how="reused") if summary.text is not None else summary)
            return summary

    async def _worker(
        self, loop: Loop, run: StepRun, messages: Sequence[dict[str, Any]], tokens_max: int
    ) -> _Asked | Summary:
        """The cheapest worker whose context has room for the turns and their summary."""
        why = "no_worker"
        for spec in loop.tree.summaries.workers:
            beside, _ = side_call(run, spec, PURPOSE)
            body = step_body(loop, beside, messages, False)
            name = next(name for name in ("max_completion_tokens", "max_tokens") if name in body)
            body[name] = min(body[name], tokens_max)
            size = await prompt_size(self._calls.tokens, loop, spec, body, 1)
            prompt = size.tokens_max // BYTES_PER_TOKEN if size.context_tokens is None else size.context_tokens
            if prompt + output_bound(body) <= spec.context_tokens:
                return _Asked(spec, beside, body, size)
            why = "window"
        return Summary(None, why)

    async def _ask(self, loop: Loop, run: StepRun, chosen: _Asked, dropped: Sequence[Mapping[str, Any]]) -> Summary:
        """Call the worker, once. What the call cost is the step's, and its attempt says what it was for."""
        left_s = loop.tree.deadline_s - self._calls.clock.monotonic_s()
        try:
            async with asyncio.timeout(min(self.rules.timeout_s, TIME_SHARE_MAX * left_s)), loop.tree.slots:
                call = StepCall(self._calls, loop, chosen.beside, chosen.body, (), size=chosen.size)
                text, how = summary_of(await call.complete(), dropped)
        except (TimeoutError, UpstreamTimeout):
            text, how = None, "timeout"
        except (UpstreamError, CapReached, DeadlineExceeded):
            text, how = None, "failed"
        finally:
            _note(chosen.beside.record.attempts, chosen, dropped)
            add_cost(run, chosen.beside)
        return Summary(text, how)

    def _recall(self, key: str) -> Summary | None:
        now_s = self._calls.clock.monotonic_s()
        kept = self._kept.get(key)
        if kept is None or now_s - kept.used_s > KEPT_S_MAX:
            return None
        kept.used_s = now_s
        self._kept.move_to_end(key)
        return kept.summary

    def _keep(self, key: str, summary: Summary) -> None:
        self._kept[key] = _Kept(summary, self._calls.clock.monotonic_s())
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call that may be made: its worker, the run that it is logged in, its body, and the size of its prompt."""

    spec: WorkerSpec
    beside: StepRun
    body: dict[str, Any]
    size: PromptSize

    @property
    def worst(self) -> Draw:
        """The worst case of the call."""
        reply = output_bound(self.body)
        return Draw(worst_case_nano(price_of(self.spec), self.size.tokens_max, reply), self.size.tokens + reply)


def _key(loop: Loop, spec: WorkerSpec, messages: Sequence[Mapping[str, Any]], tokens_max: int) -> str:
    """Names what was asked of whom, and for which key: no key ever gets words of another one."""
    asked = [loop.record.org, loop.record.key_id, spec.name, spec.identity, tokens_max, messages]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _too_little(loop: Loop, chosen: _Asked) -> str | None:
    """Which cap would leave too little for the steps that have not ended, were this call made; None where none
    would."""
    meter, worst = loop.tree.meter, chosen.worst
    waiting = [one for one in loop.runs if not one.ended.is_set()]
    if loop.caps.calls - meter.calls <= len(waiting):
        return "calls"
    kept = [_worst_of(loop, one.spec) for one in waiting if one.spec.kind in MODEL_KINDS]
    if worst.nano + sum(draw.nano for draw in kept) > meter.known_nano:
        return "cost"
    return "tokens" if worst.tokens + sum(draw.tokens for draw in kept) > meter.left_tokens else None


def _worst_of(loop: Loop, spec: WorkerSpec) -> Draw:
    """About the worst case of a step's call: its context full, or a prompt as long as the conversation."""
    prompt = min(spec.context_tokens, input_tokens_bound(loop.conversation))
    return Draw(worst_case_nano(price_of(spec), prompt, spec.output_tokens_max), prompt + spec.output_tokens_max)


def _note(attempts: Sequence[AttemptRecord], chosen: _Asked, dropped: Sequence[Mapping[str, Any]]) -> None:
    """Log with the attempt of a summary what it was for, and what it cost."""
    record = chosen.beside.record
    for attempt in attempts:
        attempt.summary = {
            "messages": len(dropped),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cost_nano": record.cost_nano,
        }
