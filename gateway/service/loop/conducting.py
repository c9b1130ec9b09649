"""The learned policy: the conductor decodes a plan under a schema, and steps start while it is still decoding."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Draw, Meter
from gateway.core.loop.plan import (
    Plan,
    decision_mask,
    read_plan,
    validate,
    validate_step,
)
from gateway.core.loop.prompt import (
    PROMPT_VERSION,
    PROMPTED,
    Grammar,
    Profile,
    grammar_of,
    prompt_hash,
    render,
    shows_quality,
)
from gateway.core.loop.reader import PlanReader
from gateway.core.loop.shown import PromptInput, ShownWarm
from gateway.core.money.amounts import Usage, cost_nano, input_tokens_bound, output_tokens_that_fit, worst_case_nano
from gateway.core.openai.vendors.usage import BYTES_PER_TOKEN
from gateway.core.pool.workers import MODEL_KINDS, Price, WorkerSpec
from gateway.errors import ConductorError
from gateway.service.loop.routers import USAGE_GUESS
from gateway.service.loop.spending.charges import CLIPPED, price_of
from gateway.service.loop.state import EarlyStart, Situation
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd, Sampling

PROMPTED_TOKENS_MAX, TRAINED_TOKENS_MAX, PLAN_TOKENS_MIN = (
    4096,
    512,
    512,
)  # of a plan: a model that plans by prompt may think first
TIMES_MIN, TIMES_MAX = 20, 200  # planning times that are known before the limit follows them, and that are remembered
USUAL_SHARE, PATIENCE_FACTOR = 0.95, 4
PLAN_GUESS = Usage(2_000, 150)  # a typical planning call
CHARS_PER_TOKEN_MAX = 16  # of a plan: no common token is longer
ROUNDS_MOST = 3  # plans of a request whose planner plans by prompt
WRONG_GUESS = 1 / 3  # of the replies of a worker that is not the dearest: what an unknown worker counts with
PROMPTED_VERSIONS = tuple(f"{profile}-{PROMPT_VERSION}" for profile in PROMPTED)


def worthwhile_rounds(plan_nano: int, call_nanos: Sequence[int], most: int) -> int:
    """The number of plans, 1 to `most`, with which a request is expected to cost least; of equals the fewest.

    A planner with one plan has to be safe at once: it pays itself and the dearest worker. One with more may begin with
    the cheapest, look at the reply, and go on to the next only where that is wrong: it pays a plan for each look, and
    the dearest worker seldom. `call_nanos`: the expected price of a call of each worker that may answer."""
    ladder = sorted(call_nanos)

    def expected_nano(rounds: int) -> float:
        plans, calls, reach = 1.0, 0.0, 1.0
        for nano in ladder[: rounds - 1]:
            plans, calls, reach = plans + reach, calls + reach * nano, reach * WRONG_GUESS
        return plans * plan_nano + calls + reach * ladder[-1]

    return min(range(1, min(most, len(ladder)) + 1), key=expected_nano, default=1)


def looks_worth(
    price: Price, workers: Sequence[WorkerSpec], conversation: Sequence[Mapping[str, Any]], most: int
) -> int:
    """The same of a planner with this price for a conversation that one of these workers answers."""
    tokens = max(USAGE_GUESS.prompt_tokens, input_tokens_bound(conversation) // BYTES_PER_TOKEN)
    usage = replace(USAGE_GUESS, prompt_tokens=tokens)
    calls = [cost_nano(price_of(spec), usage) for spec in workers if spec.kind in MODEL_KINDS]
    return worthwhile_rounds(cost_nano(price, PLAN_GUESS), calls, most)


class Patience:
    """How long a plan is waited for before the rule plans instead: `PATIENCE_FACTOR` times the time that 19 of 20 of
    the latest plans took, from `least_s` to `most_s`, and `most_s` until there are enough of them. A plan that took too
    long counts with the time it was waited for, so that a server that became slower is waited for again."""

    def __init__(self, most_s: float, least_s: float = 2.0) -> None:
        self._most_s, self._least_s = most_s, least_s
        self._times_s: deque[float] = deque(maxlen=TIMES_MAX)

    def limit_s(self) -> float:
        """The seconds that a plan is waited for now."""
        if len(self._times_s) < TIMES_MIN:
            return self._most_s
        usual_s = sorted(self._times_s)[math.ceil(USUAL_SHARE * len(self._times_s)) - 1]
        return min(self._most_s, max(self._least_s, PATIENCE_FACTOR * usual_s))

    def took(self, seconds: float) -> None:
        """Note how long a plan took."""
        self._times_s.append(seconds)


@dataclass(frozen=True, slots=True)
class ConductorSettings:
    """How this gateway calls its conductor. `timeout_s` bounds one planning call; `price` is the conductor's."""

    profile: Profile
    price: Price
    timeout_s: float
    tokens_max: int = TRAINED_TOKENS_MAX
    temperature: float = 0.0
    quality: int | None = None  # the dial where a request sets none
    patience: Patience | None = None  # None: `timeout_s` is the only limit
    trained: bool = False  # on prompts of this profile: it is shown no other


def prompt_input(situation: Situation, quality: int | None = None) -> PromptInput:
    """The part of a situation that the conductor's prompt shows, the same for the server and for the trainer.
    `quality`: the dial where the request sets none."""
    warm = situation.warm
    return PromptInput(
        situation.conversation,
        situation.shown,
        situation.allowed.steps_max,
        situation.depth_left,
        situation.round,
        situation.replies,
        quality if situation.quality is None else situation.quality,
        situation.request,
        situation.examples,
        situation.allowed.checkers,
        situation.allowed.runs_tests,
        situation.allowed.toolboxes,
        None if warm is None else ShownWarm(warm.handle, warm.worth_nano, warm.why),
    )


def profile_for(situation: Situation, settings: ConductorSettings) -> Profile:
    """The profile of a prompt in this situation: the one that the weights were trained on; of a model that plans
    untrained, `checked` where it has checkers or tools to plan with."""
    asked = situation.version or settings
    more = situation.allowed.checkers or situation.allowed.toolboxes
    return "checked" if asked.profile == "guided" and more and not asked.trained else asked.profile


def without_toolboxes(situation: Situation) -> Situation:
    """The situation without workers of kind mcp."""
    away = set(situation.allowed.toolboxes)
    return replace(
        situation,
        workers=tuple(spec for spec in situation.workers if spec.handle not in away),
        shown=tuple(worker for worker in situation.shown if worker.handle not in away),
        allowed=situation.allowed.without_toolboxes(),
    )


class ConductorPlanner:
    """`conductor`: one planning call a round. Every failure is a ConductorError or a PlanRefused."""

    name = "conductor"

    def __init__(self, conductor: Conductor, settings: ConductorSettings) -> None:
        self._conductor = conductor
        self._settings = settings

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Decode, log, validate. Raises ConductorError(down | slow | unparseable | cost), PlanRefused."""
        profile = profile_for(situation, self._settings)
        if profile != "checked" and situation.allowed.toolboxes:
            situation = without_toolboxes(situation)
            record.allowed = situation.allowed.as_json()
        grammar = grammar_of(profile, situation.allowed)
        call = self._call(situation, record, profile, grammar)
        bound = input_tokens_bound(call.messages, grammar.text)
        draw, call = await self._drawn(call, bound, meter)
        record.sampling = call.sampling.as_json()
        if draw.nano:
            await situation.before_spending(draw.nano)
        usage: Usage | None = None
        reading, began_s = _Reading(situation, early), time.monotonic()
        try:
            async with asyncio.timeout(call.timeout_s):
                async for item in self._conductor.decode(call):
                    if isinstance(item, ConductorChunk):
                        reading.take(item, record)
                        _check_length(reading, record, call.sampling.tokens_max)
                    else:
                        usage = self._end(item, record)
            self._took(time.monotonic() - began_s)
        except TimeoutError:
            self._waited(call)
            raise ConductorError("slow", f"no plan within {call.timeout_s:.1f} s") from None
        except ConductorError as error:
            if error.reason == "slow":
                self._waited(call)
            usage = usage if error.billable or reading.reader.text else Usage()
            raise
        finally:
            record.plan_text = reading.reader.text
            record.decision_mask = decision_mask(reading.tokens)
            # a call that broke off is billed for its prompt and for what it had decoded, as far as it could be asked
            decoded = len(record.plan_token_ids) or -(-len(reading.reader.text.encode()) // BYTES_PER_TOKEN)
            usage = usage or Usage(bound, min(decoded, call.sampling.tokens_max), estimated=True)
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.cost_nano = min(nano := cost_nano(self._settings.price, usage), draw.nano)
            record.flags += [CLIPPED] if nano > draw.nano else []
            meter.settle(draw, record.cost_nano, 0)
        if record.prompt_version not in PROMPTED_VERSIONS:
            return validate(reading.reader.text, situation.allowed)
        plan, flags = read_plan(reading.reader.text, situation.allowed)
        record.flags += flags
        return plan

    def _call(self, situation: Situation, record: RoundRecord, profile: Profile, grammar: Grammar) -> ConductorCall:
        temperature = 1.0 if situation.explore else self._settings.temperature
        sampling = Sampling(temperature=temperature, tokens_max=self._settings.tokens_max)
        version = situation.version
        quality = (version or self._settings).quality
        shown = prompt_input(situation, quality)
        messages = render(profile, shown)
        record.shown = shown.guidance() if profile in PROMPTED else None
        record.quality = shown.quality if shows_quality(profile) else None
        record.messages, record.sampling, record.schema_hash = messages, sampling.as_json(), grammar.hash
        record.prompt_version, record.prompt_hash = f"{profile}-{PROMPT_VERSION}", prompt_hash(profile)
        record.policy_version = version.version if version else None
        patience = self._settings.patience
        limit_s = self._settings.timeout_s if patience is None else patience.limit_s()
        timeout_s, hasty = min(limit_s, situation.timeout_s), situation.timeout_s < limit_s
        model = version.version if version and version.by_name else None
        return ConductorCall(messages, grammar.schema, sampling, timeout_s, model, hasty=hasty)

    async def _drawn(self, call: ConductorCall, bound: int, meter: Meter) -> tuple[Draw, ConductorCall]:
        """Draw the worst case of the call, whose prompt has `bound` tokens at most. Where money is short, the plan is
        shorter. Raises ConductorError(cost) where it would leave nothing for an answer."""
        price, most, kept = self._settings.price, call.sampling.tokens_max, meter.answer_nano
        meter.plan_tokens = bound
        nano = worst_case_nano(price, bound, most)
        if nano and not await meter.secure(nano + kept):
            most = min(most, output_tokens_that_fit(price, bound, max(0, meter.left_nano - kept)))
            if most < min(PLAN_TOKENS_MIN, call.sampling.tokens_max):
                raise ConductorError("cost", "what is left pays for an answer, and not for a plan too", billable=False)
            call = replace(call, sampling=replace(call.sampling, tokens_max=most))
        draw = Draw(worst_case_nano(price, bound, most), 0)
        meter.draw(draw)
        return draw, call

    def _waited(self, call: ConductorCall) -> None:
        """Note that no plan came within the call's time, unless the request left it less than a plan may take."""
        if not call.hasty:
            self._took(call.timeout_s)

    def _took(self, seconds: float) -> None:
        if self._settings.patience is not None:
            self._settings.patience.took(seconds)

    def _end(self, end: ConductorEnd, record: RoundRecord) -> Usage:
        record.policy_version = end.model
        record.prompt_token_ids = list(end.prompt_token_ids)
        if end.finish_reason == "length":
            record.flags.append("cut_off")
        return end.usage


def _check_length(reading: _Reading, record: RoundRecord, most: int) -> None:
    """Raises ConductorError for a plan that goes on behind the tokens that were asked for."""
    if len(record.plan_token_ids) > most or len(reading.reader.text) > CHARS_PER_TOKEN_MAX * most:
        raise ConductorError("unparseable", f"the planner goes on behind the {most} tokens that it was asked for")


class _Reading:
    """The plan while it is decoded. Passes each step on as soon as another step follows it: then it is not the step
    that answers, and may start."""

    def __init__(self, situation: Situation, early: EarlyStart) -> None:
        self.reader = PlanReader()
        self.tokens: list[str] = []
        self._situation = situation
        self._early = early
        self._raw: list[object] = []
        self._handed = 0

    def take(self, chunk: ConductorChunk, record: RoundRecord) -> None:
        record.plan_token_ids += chunk.token_ids
        record.plan_logprobs += chunk.logprobs
        self.tokens += chunk.tokens
        self._raw += self.reader.feed(chunk.text)
        allowed = self._situation.allowed
        while self._handed < min(len(self._raw), self.reader.opened - 1, allowed.steps_max - 1):
            if allowed.checkers and not self._is_plain(self._handed):
                break
            step = validate_step(self._raw[self._handed], allowed, self._handed)
            self._handed += 1
            self._early(step)

    def _is_plain(self, offset: int) -> bool:
        """Whether neither this step nor the one after it, which must be complete, nor any before is a verify step: the
        reply of a candidate may be the answer, and what comes after a verdict may never run."""
        raw = self._raw[: offset + 2]
        return len(raw) == offset + 2 and not any(isinstance(one, dict) and "kind" in one for one in raw)
