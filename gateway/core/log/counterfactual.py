"""What the log says of a plan that was not chosen: "had this request gone to worker X alone". Pure.

Only chance tells: a judged request counts where its plan was drawn at random, with a probability that the log has. The
rule logs the probability of every worker for every request. A conductor's plan is a draw at a temperature above 0, and
of the plans that it did not draw the log says nothing. What a router chose, and a plan at temperature 0, is no draw.

The estimate is inverse-propensity weighting, self-normalised within strata of requests in which X was about equally
likely (Rosenbaum & Rubin 1984; Swaminathan & Joachims 2015). Its interval is of the Bayesian bootstrap (Rubin 1981):
each request weighs an exponential draw, beside one more in each stratum, which is as the mean of all, and half right in
a stratum of few trials. If all weights are equal that is Jeffreys' interval of a binomial share; if they differ it is
widened by what simulations ask for. bench/simulated/counterfactuals.py measures how often
it holds the truth. An estimate stands only where the log supports it; otherwise the reason stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.core.log.rollout import plan_probability

CHANCE_MIN = 0.02  # requests in which a worker was less likely say nothing of it
UNCOVERED_MAX = 0.1  # the share of such requests
TRIED_MIN = 10  # requests that went to the worker alone
EFFECTIVE_MIN = 20.0  # requests at random that would tell as much
WEIGHT_Z = 3.29  # standard errors that the mean weight may be off 1: one log of a thousand with true probabilities
WEIGHT_HALF_MAX = 0.25  # half of the 95 % interval of the mean weight, where it alone says what the log covers
Z_95 = 1.96
STRATUM_TRIED_MIN = 5  # tried requests that a stratum has, but for the last one
STRATUM_RATIO = 2.0  # between the chances of two requests of a stratum, at most, where enough were tried
WIDENING = 0.8  # of an interval, times the root of (1 - effective / tried) / effective, and the share of few trials
DRAWS = 2_000
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class JudgedPlan:
    """A judged request and its plan. `alone`: the worker that it went to, None where the plan was another.
    `probability`: of that plan, None where it was not drawn, or the log has none. `chances`: of each worker alone, as
    it was drawn for this request; None: of the plan that was drawn alone. `value`: the judgement, 0 to 1."""

    alone: str | None
    probability: float | None
    value: float
    chances: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """What one planning call left in the log. `workers`: the handles of its steps replaced by names."""

    planner: str
    workers: Sequence[str]
    plain: bool  # each step has the conversation, and no contract
    probability: float | None
    chances: Mapping[str, float] | None = None


def drawn_probability(planned: Mapping[str, Any]) -> float | None:
    """The probability with which a logged plan was drawn; None where it was not drawn. `planned`: a row of `rounds`."""
    if decision := planned.get("decision"):
        chance = decision.get("propensity")
        return float(chance) if chance else None
    if planned["planner"] != "conductor" or not (planned.get("sampling") or {}).get("temperature"):
        return None
    return plan_probability(planned["plan_logprobs"] or [], planned["decision_mask"] or [])


def planned_round(planned: Mapping[str, Any], names: Mapping[str, str]) -> PlannedRound:
    """A row of `rounds`. `names`: worker by handle, of the pool that the plan was made for."""
    steps = [step for step in planned["plan"].get("steps") or () if isinstance(step, Mapping)]
    arms = (planned.get("decision") or {}).get("arms") or ()
    chances = {str(arm["worker"]): float(arm["propensity"]) for arm in arms if arm.get("propensity") is not None}
    return PlannedRound(
        str(planned["planner"]),
        [names.get(str(step.get("worker")), str(step.get("worker"))) for step in steps],
        all(step.get("task") is None and not step.keys() & {"expect", "kind"} for step in steps),
        drawn_probability(planned),
        chances or None,
    )


def judged_plan(rounds: Sequence[PlannedRound], fallback: str | None, value: float) -> JudgedPlan:
    """A judged request, from its rounds with plans that were used, one at least. A worker whose failure made another
    one answer (`fallback`) was wrong. Later rounds that ship what there is belong to the plan."""
    first, *later = rounds
    failed = bool(fallback) and str(fallback).startswith("worker_")
    shipped = all(not each.workers for each in later)
    alone = first.workers[0] if len(first.workers) == 1 and first.plain and (shipped or failed) else None
    chances = [each.probability for each in ([first] if failed else rounds)]
    probability = None if None in chances else math.prod(chance for chance in chances if chance is not None)
    known = first.chances if failed or not later else None
    return JudgedPlan(alone, probability, 0.0 if failed else value, known)


def had_it_gone_to(worker: str, plans: Sequence[JudgedPlan]) -> dict[str, Any]:
    """The mean judgement had requests like this gone to `worker` alone: {worker, estimate, low, high, tried, alike,
    effective, mean_weight}, or {worker, unknown: the reason, tried, alike}."""
    drawn = [plan for plan in plans if plan.probability]
    by_rule = [plan for plan in drawn if plan.chances is not None and worker in plan.chances]
    sampled = [plan for plan in drawn if plan.chances is None]
    tried = [sum(plan.alone == worker for plan in some) for some in (by_rule, sampled)]
    of_rule = bool(by_rule) and tried[0] >= tried[1]
    some = by_rule if of_rule else sampled
    counts = {"worker": worker, "tried": max(tried), "alike": len(some)}
    if not some:
        return counts | {"unknown": _nothing(len(drawn), len(plans))}
    tried_now = np.array([plan.alone == worker for plan in some])
    values = np.array([plan.value for plan in some])
    if of_rule:
        chances = np.array([plan.chances[worker] for plan in some if plan.chances is not None])
        return counts | _estimate(chances, tried_now, values)
    chances = np.array([plan.probability or 1.0 for plan in some])
    return counts | _estimate_of_tried(chances, tried_now, values)


def _nothing(drawn: int, judged: int) -> str:
    """Why no judged request counts."""
    if drawn:
        return f"it could not be drawn in any of {drawn} judged requests like this"
    without = f"; {judged} were planned without chance" if judged else ""
    return f"no judged request like this was drawn with a logged probability{without}"


def _estimate(chances: Vector, tried: NDArray[np.bool_], values: Vector) -> dict[str, Any]:
    """From requests that each have the worker's probability, or why there is none."""
    covered = chances >= CHANCE_MIN
    uncovered = 1 - float(covered.mean())
    if uncovered > UNCOVERED_MAX:
        return {
            "unknown": f"it had a chance under {CHANCE_MIN:g} in {uncovered:.0%} of them; the estimate "
            f"bears {UNCOVERED_MAX:.0%}"
        }
    tried = tried & covered
    weights = 1 / chances[covered]
    number, need = len(weights), float(weights.mean())
    if reason := _too_few(int(tried.sum()), number / need, need, number):
        return {"unknown": reason}
    mean_weight = float((tried[covered] * weights).sum()) / number
    if abs(mean_weight - 1) > WEIGHT_Z * math.sqrt(float((weights - 1).sum())) / number:
        return {"unknown": f"the weights' mean is {mean_weight:.2f}, surely not 1: the logged chances were not drawn"}
    strata = _strata(np.where(covered, chances, 0.0), tried)
    return _figures(_resampled(strata, chances, tried, values, number / need), number / need, mean_weight)


def _estimate_of_tried(chances: Vector, tried: NDArray[np.bool_], values: Vector) -> dict[str, Any]:
    """From sampled plans, each with its own probability alone, or why there is none. What the log may not cover, by the
    mean of the weights, may have been right or wrong."""
    weights = np.where(tried, 1 / chances, 0.0)
    number, total = len(weights), float(weights.sum())
    effective = total**2 / float((weights**2).sum()) if total else 0.0
    if reason := _too_few(int(tried.sum()), effective, number / max(effective, 1.0), number):
        return {"unknown": reason}
    mean_weight, error = total / number, float(weights.std()) / math.sqrt(number)
    if Z_95 * error > WEIGHT_HALF_MAX or mean_weight + Z_95 * error < 1 or mean_weight - WEIGHT_Z * error > 1:
        off = f"{mean_weight:.2f} ± {Z_95 * error:.2f}"
        more = math.ceil(number * (Z_95 * error / WEIGHT_HALF_MAX) ** 2) - number
        return {"unknown": f"the weights' mean is {off}, not surely about 1" + (f"; {more} more" if more > 0 else "")}
    means = _resampled(np.zeros(number, int), chances, tried, values, effective)
    missing = max(0.0, 1 - mean_weight + Z_95 * error)
    figures = _figures(means, effective, mean_weight)
    return figures | {
        "low": round(figures["low"] * (1 - missing), 4),
        "high": round(figures["high"] * (1 - missing) + missing, 4),
    }


def _too_few(tried: int, effective: float, need: float, number: int) -> str | None:
    """Why so few say nothing, and about how many more requests would do. `need`: requests for one effective one."""
    if tried >= TRIED_MIN and effective >= EFFECTIVE_MIN:
        return None
    short = max(EFFECTIVE_MIN * need - number, (TRIED_MIN - tried) * need, 1)
    have = f"{tried} tries that tell as much as {effective:.1f} at random; {TRIED_MIN} and {EFFECTIVE_MIN:g} needed"
    return f"{have}, about {math.ceil(short)} more judged requests like this"


def _strata(chances: Vector, tried: NDArray[np.bool_]) -> NDArray[np.int_]:
    """The stratum of each request: those in which the worker was about equally likely, the likeliest first. Requests
    whose chance is 0 are the last one."""
    with np.errstate(divide="ignore"):
        rank = np.floor(-np.log(chances) / math.log(STRATUM_RATIO))
    stratum, at, held = np.zeros(len(chances), int), 0, 0
    for each in np.unique(rank):
        if held >= STRATUM_TRIED_MIN or math.isinf(each):
            at, held = at + 1, 0
        stratum[rank == each] = at
        held += int(tried[rank == each].sum())
    return stratum


def _resampled(
    stratum: NDArray[np.int_], chances: Vector, tried: NDArray[np.bool_], values: Vector, effective: float
) -> Vector:
    """Draws of the mean judgement from its posterior."""
    draw = np.random.default_rng(0)
    sizes = np.bincount(stratum)
    shares = draw.dirichlet(sizes, DRAWS).T
    weights, means = 1 / chances[tried], np.zeros(DRAWS)
    one = float(weights.mean())
    centre = (float(weights @ values[tried]) + one / 2) / (float(weights.sum()) + one)
    uneven = max(0.0, 1 - effective / len(weights))
    held = np.bincount(stratum[tried], minlength=len(sizes))
    few = float(sizes[held < STRATUM_TRIED_MIN].sum() / sizes.sum())
    narrow = (1 + WIDENING * (math.sqrt(uneven / effective) + few)) ** -2
    half, rest = 0.5 / len(sizes), 1 - 1 / len(sizes)
    for at, share in enumerate(shares):
        here = stratum[tried] == at
        one = float(weights[here].mean()) if here.any() else 1.0
        believed = centre if held[at] >= STRATUM_TRIED_MIN else 0.5
        prior = (half + rest * (1 - believed), half + rest * believed)
        pairs, counts = np.unique(np.stack([weights[here], values[tried][here]]), axis=1, return_counts=True)
        drawn = draw.gamma(narrow * np.array([*counts, *prior])[:, None], size=(len(counts) + 2, DRAWS))
        drawn *= np.array([*pairs[0], one, one])[:, None]
        means += share * (np.array([*pairs[1], 0.0, 1.0]) @ drawn) / drawn.sum(0)
    return means


def _figures(means: Vector, effective: float, mean_weight: float) -> dict[str, Any]:
    low, high = np.quantile(means, [0.025, 0.975])
    figures = {"estimate": float(means.mean()), "low": float(low), "high": float(high)}
    figures |= {"effective": round(effective, 1), "mean_weight": mean_weight}
    return {name: round(figure, 4) for name, figure in figures.items()}
