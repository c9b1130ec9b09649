"""What the log says of a plan that was not chosen: "had this request gone to worker X alone". Pure.

The estimate is self-normalised inverse-propensity weighting (Swaminathan & Joachims 2015): each judged request like
this one whose sampled plan was X alone counts with 1 / probability of that plan, as the log has it. Its interval is
normal, by the delta method. An estimate stands only where the log supports it; otherwise the reason stands in its
place. Random choice makes it causal: what a router chose has no probability and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Z_95 = 1.959963984540054
ALIKE_MIN = 30  # sampled plans of requests like this one
TRIED_MIN = 10  # of these, plans of the worker alone
EFFECTIVE_MIN = 5.0  # Kish's effective number of those
MEAN_WEIGHT_MIN, MEAN_WEIGHT_MAX = 0.5, 1.5  # of all weights; the mean is 1 where the log holds what the worker does


@dataclass(frozen=True, slots=True)
class JudgedPlan:
    """The first plan of a judged request. `workers`: those it names, in order; `alone`: it is one plain call.
    `probability`: with which it was sampled, None where the log has none. `value`: the judgement, 0 to 1."""

    workers: tuple[str, ...]
    alone: bool
    probability: float | None
    value: float


def plan_probability(logprobs: Sequence[float | None], mask: Sequence[bool]) -> float | None:
    """The probability of a sampled plan: over its decision tokens, under the grammar's mask. None where the log has no
    log-prob for each of them, or a plan that could not be sampled."""
    if not logprobs or len(logprobs) != len(mask):
        return None
    total = 0.0
    for logprob, decides in zip(logprobs, mask, strict=True):
        if not decides:
            continue
        if logprob is None or not math.isfinite(logprob) or logprob > 0:
            return None
        total += logprob
    return math.exp(total)


def judged_plan(
    plan: Mapping[str, Any], names: Mapping[str, str], probability: float | None, value: float
) -> JudgedPlan:
    """A logged plan with its judgement. `names`: worker by handle, of the pool that the plan was made for."""
    steps = [step for step in plan.get("steps") or () if isinstance(step, Mapping)]
    workers = tuple(names.get(str(step.get("worker")), str(step.get("worker"))) for step in steps)
    plain = len(steps) == 1 and steps[0].get("task") is None and not steps[0].keys() & {"expect", "kind"}
    return JudgedPlan(workers, plain, probability, value)


def had_it_gone_to(worker: str, plans: Sequence[JudgedPlan]) -> dict[str, Any]:
    """The mean judgement had requests like this gone to `worker` alone: {worker, estimate, low, high, tried, alike,
    effective, mean_weight}, or {worker, unknown: the reason, tried, alike}."""
    sampled = [(plan, plan.probability) for plan in plans if plan.probability]
    tried = [(1 / p, plan.value) for plan, p in sampled if plan.alone and plan.workers == (worker,)]
    counts = {"worker": worker, "tried": len(tried), "alike": len(sampled)}
    if len(sampled) < ALIKE_MIN:
        return counts | {"unknown": f"{len(sampled)} judged requests like this have a sampled plan; {ALIKE_MIN} needed"}
    if len(tried) < TRIED_MIN:
        return counts | {"unknown": f"{len(tried)} of them went to {worker} alone; {TRIED_MIN} needed"}
    weights = [weight for weight, _ in tried]
    total = sum(weights)
    effective = total**2 / sum(weight**2 for weight in weights)
    if effective < EFFECTIVE_MIN:
        return counts | {"unknown": f"a few plans weigh all: {effective:.1f} effective ones; {EFFECTIVE_MIN:g} needed"}
    mean_weight = total / len(sampled)
    if not MEAN_WEIGHT_MIN <= mean_weight <= MEAN_WEIGHT_MAX:
        return counts | {"unknown": f"the weights' mean is {mean_weight:.2f}, not about 1: the log does not cover it"}
    estimate = sum(weight * value for weight, value in tried) / total
    half = Z_95 * _deviation(tried, estimate, total)
    figures = {"estimate": estimate, "low": max(0.0, estimate - half), "high": min(1.0, estimate + half)}
    figures |= {"effective": effective, "mean_weight": mean_weight}
    return counts | {name: round(figure, 4) for name, figure in figures.items()}


def _deviation(tried: Sequence[tuple[float, float]], estimate: float, total: float) -> float:
    """The standard deviation of the estimate, with one success and one failure of mean weight added: equal judgements
    of a few are no certainty."""
    mean = total / len(tried)
    padded = [*tried, (mean, 0.0), (mean, 1.0)]
    return math.sqrt(sum((w * (value - estimate)) ** 2 for w, value in padded)) / (total + 2 * mean)
