"""The learned policy: the conductor decodes a plan under a schema, and steps start while it is still decoding."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass

from gateway.core.log.rollout import RoundRecord
from gateway.core.loop.caps import Draw, Meter
from gateway.core.loop.plan import (
    Plan,
    PlanReader,
    decision_mask,
    plan_schema,
    read_plan,
    schema_hash,
    validate,
    validate_step,
)
from gateway.core.loop.prompt import PROMPT_VERSION, Profile, prompt_hash, render, shows_quality
from gateway.core.loop.shown import PromptInput
from gateway.core.money.amounts import Usage, cost_nano, input_tokens_bound, worst_case_nano
from gateway.core.pool.workers import Price
from gateway.errors import ConductorError
from gateway.service.loop.state import EarlyStart, Situation
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd, Sampling

PROMPTED_TOKENS_MAX, TRAINED_TOKENS_MAX = 4096, 512  # of a plan: a model that plans by prompt may think first
GUIDED_VERSION = f"guided-{PROMPT_VERSION}"


@dataclass(frozen=True, slots=True)
class ConductorSettings:
    """How this gateway calls its conductor. `timeout_s` bounds one planning call; `price` is the conductor's."""

    profile: Profile
    price: Price
    timeout_s: float
    tokens_max: int = TRAINED_TOKENS_MAX
    temperature: float = 0.0
    quality: int | None = None  # the dial where a request sets none


def prompt_input(situation: Situation, quality: int | None = None) -> PromptInput:
    """The part of a situation that the conductor's prompt shows, the same for the server and for the trainer.
    `quality`: the dial where the request sets none."""
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
    )


class ConductorPlanner:
    """`conductor`: one planning call a round. Every failure is a ConductorError or a PlanRefused."""

    name = "conductor"

    def __init__(self, conductor: Conductor, settings: ConductorSettings) -> None:
        self._conductor = conductor
        self._settings = settings

    async def plan(self, situation: Situation, record: RoundRecord, meter: Meter, early: EarlyStart) -> Plan:
        """Decode, log, validate. Raises ConductorError(down | slow | unparseable), PlanRefused, CapReached."""
        call = self._call(situation, record)
        bound = input_tokens_bound(call.messages, str(call.schema))
        draw = Draw(worst_case_nano(self._settings.price, bound, self._settings.tokens_max), 0)
        meter.draw(draw)
        if draw.nano:
            await situation.before_spending(draw.nano)
        usage: Usage | None = None
        reading = _Reading(situation, early)
        try:
            async with asyncio.timeout(call.timeout_s):
                async for item in self._conductor.decode(call):
                    if isinstance(item, ConductorChunk):
                        reading.take(item, record)
                    else:
                        usage = self._end(item, record)
        except TimeoutError:
            raise ConductorError("slow", f"no plan within {call.timeout_s:.1f} s") from None
        except ConductorError as error:
            usage = usage if error.billable or reading.reader.text else Usage()
            raise
        finally:
            record.plan_text = reading.reader.text
            record.decision_mask = decision_mask(reading.tokens)
            # a call that broke off is billed for its prompt and for what it had decoded
            usage = usage or Usage(bound, len(record.plan_token_ids) or len(reading.reader.text), estimated=True)
            record.prompt_tokens, record.completion_tokens = usage.prompt_tokens, usage.completion_tokens
            record.cost_nano = cost_nano(self._settings.price, usage)
            meter.settle(draw, record.cost_nano, 0)
        if record.prompt_version != GUIDED_VERSION:
            return validate(reading.reader.text, situation.allowed)
        plan, flags = read_plan(reading.reader.text, situation.allowed)
        record.flags += flags
        return plan

    def _call(self, situation: Situation, record: RoundRecord) -> ConductorCall:
        temperature = 1.0 if situation.explore else self._settings.temperature
        sampling = Sampling(temperature=temperature, tokens_max=self._settings.tokens_max)
        version = situation.version
        profile, quality = (version or self._settings).profile, (version or self._settings).quality
        schema = plan_schema(situation.allowed, why=profile == "guided")
        shown = prompt_input(situation, quality)
        messages = render(profile, shown)
        record.shown = shown.guidance() if profile == "guided" else None
        record.quality = shown.quality if shows_quality(profile) else None
        record.messages, record.sampling, record.schema_hash = messages, asdict(sampling), schema_hash(schema)
        record.prompt_version, record.prompt_hash = f"{profile}-{PROMPT_VERSION}", prompt_hash(profile)
        record.policy_version = version.version if version else None
        timeout_s = min(self._settings.timeout_s, situation.timeout_s)
        model = version.version if version and version.by_name else None
        return ConductorCall(messages, schema, sampling, timeout_s, model)

    def _end(self, end: ConductorEnd, record: RoundRecord) -> Usage:
        record.policy_version = end.model
        record.prompt_token_ids = list(end.prompt_token_ids)
        if end.finish_reason == "length":
            record.flags.append("cut_off")
        return end.usage


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
            step = validate_step(self._raw[self._handed], allowed, self._handed)
            self._handed += 1
            self._early(step)
