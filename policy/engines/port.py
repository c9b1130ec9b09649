"""The port by which policies are judged: an engine samples plans, and scores plans that another policy sampled.

A plan's score is the log-prob that the engine's weights give to each token where the plan decides something: under the
grammar's mask, the temperature and the nucleus that the plan was sampled with, so it is the propensity that these
weights would have logged. What the grammar forces has log-prob 0, and free task text is no decision; neither is asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gateway.errors import ConductorError
from gateway.service.ports.request import Conductor, ConductorCall, ConductorChunk, ConductorEnd, Sampling
from policy.dataset.rules import SAMPLING_OFF
from policy.serve.sampling import GREEDY_BELOW, allowed_tokens, behaviour_logprobs
from policy.serve.shape import Array
from policy.serve.tokens import Tokens


@dataclass(frozen=True, slots=True)
class LoggedPlan:
    """A planning call as it was logged: prompt and plan tokens, which of these decide, and how they were sampled."""

    prompt_ids: Sequence[int]
    plan_ids: Sequence[int]
    decisions: Sequence[bool]
    schema: Any  # JSON schema
    temperature: float
    top_p: float = 1.0

    @property
    def heat(self) -> float:
        """The temperature of its log-probs: those of a greedy plan are reported at 1."""
        return self.temperature if self.temperature >= GREEDY_BELOW else 1.0


class PlanEngine(Conductor, Protocol):
    """The weights of one policy, loaded. `decode` samples a plan with its token ids and log-probs, under the schema and
    every sampling parameter of the call. `calls_max`: plans that it decodes at once. `plan_ms`: mean time of a plan so
    far; None where no plan was decoded."""

    calls_max: int

    @property
    def plan_ms(self) -> float | None:
        """See above."""
        ...

    async def close(self) -> None:
        """Let running plans end, and free what the engine holds."""
        ...

    async def score(self, plans: Sequence[LoggedPlan]) -> list[list[float]]:
        """Log-prob of each plan's tokens [plans, T]: 0 for what the grammar forces and for what is no decision, −inf
        from the first token on that it forbids. Raises EngineLost, or VersionRefused(engine) where these weights or
        this server cannot score."""
        ...


class Pace:
    """The mean time of a plan."""

    def __init__(self) -> None:
        self._plans = 0
        self._total_s = 0.0

    def add(self, plan_s: float) -> int:
        """Count a plan; return how many there are."""
        self._plans += 1
        self._total_s += plan_s
        return self._plans

    @property
    def mean_ms(self) -> float | None:
        """None before the first plan."""
        return 1000 * self._total_s / self._plans if self._plans else None


class EngineLost(Exception):
    """The engine is down, or refuses every call. No BatonError, so that no episode takes it for its own failure."""


# ---------------------------------------------------------------- what scoring asks for


@dataclass(frozen=True, slots=True)
class Decision:
    """A token of a plan that decides something. `allowed`: the tokens of the grammar there, [vocab] bool."""

    index: int
    allowed: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PlanReading:
    """A logged plan as the grammar reads it: where it decides, and the length up to the first forbidden token."""

    plan: LoggedPlan
    decisions: list[Decision]
    length: int

    def logprobs(self, decided: Iterable[float]) -> list[float]:
        """The score of the plan, given that of its decisions."""
        scores = [0.0] * self.length + [-np.inf] * (len(self.plan.plan_ids) - self.length)
        for decision, logprob in zip(self.decisions, decided, strict=True):
            scores[decision.index] = logprob
        return scores

    def of_logits(self, logits: Iterable[Array]) -> list[float]:
        """The score of the plan, given the logits [vocab] of each of its decisions."""
        plan = self.plan
        return self.logprobs(
            float(behaviour_logprobs(each, decision.allowed, plan.heat, plan.top_p)[plan.plan_ids[decision.index]])
            for decision, each in zip(self.decisions, logits, strict=True)
        )


def reading(tokens: Tokens, plan: LoggedPlan) -> PlanReading:
    """How the grammar reads a plan. Raises BadSchema."""
    matcher = tokens.matcher(plan.schema)
    decisions: list[Decision] = []
    for index, (token, decides) in enumerate(zip(plan.plan_ids, plan.decisions, strict=True)):
        allowed = allowed_tokens(matcher.compute_bitmask(), tokens.vocab)
        if not (0 <= token < len(allowed) and allowed[token]):
            return PlanReading(plan, decisions, index)
        if decides and np.count_nonzero(allowed) > 1:
            decisions.append(Decision(index, allowed))
        if token not in tokens.eos_ids:
            matcher.consume_token(token)
    return PlanReading(plan, decisions, len(plan.plan_ids))


# ---------------------------------------------------------------- what planning returns


@dataclass(frozen=True, slots=True)
class SampledPlan:
    """One plan with the tokens it was sampled as. `prompt_ids`: as the engine made them of the messages."""

    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


async def sampled(engine: Conductor, call: ConductorCall) -> SampledPlan:
    """The plan that the engine makes of a call; empty where the prompt leaves no room for one. Raises ConductorError
    for another failure."""
    text = ""
    prompt_ids: tuple[int, ...] = ()
    token_ids: list[int] = []
    logprobs: list[float] = []
    try:
        async for item in engine.decode(call):
            if isinstance(item, ConductorChunk):
                text += item.text
                token_ids += item.token_ids
                logprobs += item.logprobs
            elif isinstance(item, ConductorEnd):
                prompt_ids = item.prompt_token_ids
    except ConductorError as error:
        if error.reason != "refused":
            raise
    return SampledPlan(text, prompt_ids, tuple(token_ids), tuple(logprobs))


def check_sampling(sampling: Sampling, top_p: bool = True) -> None:
    """Raises ConductorError(refused) for a parameter that this engine lacks and that would change the plan. `top_p`:
    whether it samples from a nucleus."""
    odd = [name for name, off in SAMPLING_OFF.items() if getattr(sampling, name) not in off]
    odd += ["top_p"] if sampling.top_p < 1 and not top_p else []
    if odd:
        raise ConductorError("refused", f"{', '.join(odd)}: this engine samples without; serve the policy on vLLM")
