"""Why a request went where it went: a logged rollout, assembled decision by decision. Pure.

Nothing is computed that the log does not hold; what it cannot say is `unknown`, with the reason. Texts of workers and
clients are quoted as data, never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.log.counterfactual import JudgedPlan, drawn_probability, had_it_gone_to
from gateway.core.log.rollout import plan_probability
from gateway.core.log.sentence import cut_short, deciding_round, sentence

FREE_BELOW = -1e-6  # the log-prob under which a token was a choice: what the grammar forces has 0
ROUTER = "a router planned without a draw: it takes what its rules say"
NO_LOGPROBS = "the log has no log-probs of this plan: the planner's server gave none, or the log mode or a redaction"
COUNTERFACTUALS_MAX = 32
Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known beside the rollout. `pool_workers`: the pool of its revision as the reader may see it, None where
    that revision is not stored. `key_workers`: the workers that the key names today; empty: all of its pools. `alike`:
    judged plans of requests like this one; `likeness`: what they have in common. `models`: the kinds of workers that
    are models; empty: all kinds."""

    pool_workers: Sequence[str] | None = None
    key_workers: Sequence[str] = ()
    alike: Sequence[JudgedPlan] = ()
    likeness: str = ""
    models: Sequence[str] = ()
    recomputed: Mapping[tuple[str, int, int], Mapping[str, float]] = field(default_factory=dict)


def explain(tree: Tree, about: Surroundings) -> dict[str, Any]:
    """The explanation of a rollout's tree, as JSON data. docs/explain.md says what each part means."""
    decisions = [decision(loop, each, about) for loop in loops(tree) for each in loop["rounds"]]
    return {
        "object": "baton.explanation",
        "rollout_id": tree["id"],
        "completion_id": tree["completion_id"],
        "created_at": tree["created_at"],
        "status": tree["status"],
        "log_mode": tree["log_mode"],
        "sentence": sentence(tree),
        "decided": _decided(tree),
        "policy": {name: tree.get(f"policy_{name}") for name in ("requested", "used", "version")},
        "fallback": tree.get("fallback"),
        "capped": tree.get("capped"),
        "turn": tree.get("turn"),
        "memory": tree.get("memory"),
        "outcomes": [_judged(one) for one in tree.get("outcomes") or ()],
        "decisions": decisions,
        "hidden": [hidden for loop in loops(tree) for hidden in _hidden(loop)],
        "forbidden": _forbidden(tree, about),
        "not_shown": _not_shown(tree, about),
        "counterfactual": _counterfactual(tree, about),
    }


def _decided(tree: Tree) -> dict[str, Any]:
    """The figures that decided: each worker's, as the router compared them, the best first; what the checkers said;
    and whether the experience was fresh. Without `arms`, the `steps` of that round's decision have probabilities."""
    planned = deciding_round(tree) or {}
    decision = planned.get("decision") or {}
    arms = [arm | {"chosen": arm["worker"] == decision.get("chosen")} for arm in decision.get("arms") or ()]
    return {
        "round": planned.get("round"),
        "planner": planned.get("planner"),
        "probability": drawn_probability(planned) if planned else None,
        "explored": bool(decision.get("explored")),
        "worth": decision.get("worth"),
        "arms": sorted(arms, key=lambda arm: arm.get("utility") or 0.0, reverse=True),
        "verdicts": [verdict for loop in loops(tree) for verdict in _verdicts(loop)],
        "memory": tree.get("memory"),
    }


def _verdicts(loop: Tree) -> Iterator[dict[str, Any]]:
    for step in loop["steps"]:
        for attempt in step.get("attempts") or ():
            if verdict := attempt.get("verdict"):
                said = {name: verdict.get(name) for name in ("by", "accept", "why")}
                yield {"rollout_id": loop["id"], "step": step["step"], "worker": step["worker"]} | said


def loops(tree: Tree) -> Iterator[Tree]:
    """The rollout and its child loops, outermost first."""
    yield tree
    for child in tree.get("children") or ():
        yield from loops(child)


def decision(loop: Tree, each: Tree, about: Surroundings) -> dict[str, Any]:
    """One planning call: what was chosen, with which probability, among what, and what the planner was shown."""
    names = handles_of(loop)
    steps = (each.get("plan") or {}).get("steps") or []
    allowed = each.get("allowed") or {}
    first = int(allowed.get("first_index") or 0)
    chance = _plan_chance(each)
    return {
        "rollout_id": loop["id"],
        "depth": loop["depth"],
        "round": each["round"],
        "planner": each["planner"],
        "policy_version": each.get("policy_version"),
        "used": each.get("refusal") is None,
        "refusal": each.get("refusal"),
        "why": (each.get("plan") or {}).get("why"),
        "plan": chance,
        "steps": [
            _step(loop, each, chance, first + at, step, names, about)
            for at, step in enumerate(steps)
            if isinstance(step, Mapping)
        ],
        "shown": _shown(loop, each),
        "limits": {name: allowed.get(name) for name in ("steps_max", "depth_capped", "checkers") if allowed.get(name)},
    }


def handles_of(loop: Tree) -> dict[str, str]:
    """Worker by handle, of the pool that the loop's planner was shown."""
    return {str(one["handle"]): str(one["name"]) for one in loop.get("pool") or ()}


def _plan_chance(each: Tree) -> dict[str, Any]:
    """The probability of the plan as the log has it, under the mask and temperature that it was sampled with."""
    if each["planner"] != "conductor":
        drawn = drawn_probability(each) if each.get("plan") else None
        return {"probability": None, "unknown": ROUTER} if drawn is None else {"probability": drawn, "source": "logged"}
    logprobs, mask = each.get("plan_logprobs") or [], each.get("decision_mask") or []
    probability = plan_probability(logprobs, mask)
    if probability is None:
        return {"probability": None, "unknown": NO_LOGPROBS}
    decided = [logprob for logprob, decides in zip(logprobs, mask, strict=True) if decides]
    return {
        "probability": _rounded(probability),
        "source": "logged",
        "decisions": len(decided),
        "choices": sum(logprob < FREE_BELOW for logprob in decided),
        "least_likely": _rounded(math.exp(min(decided))) if decided else None,
        "temperature": (each.get("sampling") or {}).get("temperature"),
    }


def _step(
    loop: Tree,
    each: Tree,
    chance: Mapping[str, Any],
    index: int,
    step: Tree,
    names: Mapping[str, str],
    about: Surroundings,
) -> dict[str, Any]:
    """One step of the plan with its alternatives: every worker that the mask allowed there."""
    handles = (each.get("allowed") or {}).get("handles")
    worker = str(step.get("worker"))
    figures = about.recomputed.get((str(loop["id"]), int(each["round"]), index)) or _propensities(each)
    alternatives = [
        {"handle": handle, "worker": names.get(handle, handle), "chosen": handle == worker}
        | _alternative(handle == worker, len(handles or ()), chance["probability"], figures.get(handle))
        for handle in sorted(handles or (worker,))
    ]
    unknown = {} if handles else {"unknown": "the log does not say which workers the mask allowed"}
    return {
        "step": index,
        "worker": names.get(worker, worker),
        "task": step.get("task"),
        "see": step.get("see") or [],
        "alternatives": alternatives,
    } | unknown


def _propensities(each: Tree) -> dict[str, float]:
    """The probability of each worker of a router's draw, by handle."""
    arms = (each.get("decision") or {}).get("arms") or ()
    return {str(arm["handle"]): float(arm["propensity"]) for arm in arms if arm.get("propensity") is not None}


def _alternative(chosen: bool, number: int, plan: float | None, known: float | None) -> dict[str, Any]:
    """The probability of one worker at one step: as it was recomputed, or between the bounds that the log gives. A
    choice is at least as likely as the whole plan; the others share the rest."""
    if known is not None:
        return {"probability": _rounded(known), "source": "recomputed"}
    if plan is None:
        return {"probability": None}
    if number == 1:
        return {"probability": 1.0, "source": "logged"}
    bounds = {"at_least": plan, "at_most": 1.0} if chosen else {"at_least": 0.0, "at_most": _rounded(1 - plan)}
    return {"probability": bounds, "source": "logged"}


def _shown(loop: Tree, each: Tree) -> dict[str, Any]:
    """What the planner's prompt held beside the conversation."""
    guidance = each.get("shown") or {}
    seen = [{"worker": one["name"], **one["experience"]} for one in loop.get("pool") or () if one.get("experience")]
    return {
        "experience": seen if each["planner"] == "conductor" else [],  # routers read no prompt
        "examples": guidance.get("examples") or [],
        "request": guidance.get("request"),
        "warm": guidance.get("warm"),
        "quality": each.get("quality"),
    }


def _hidden(loop: Tree) -> Iterator[dict[str, Any]]:
    """For each step, the earlier replies of its loop that its prompt held, and those that were hidden from it."""
    for one in loop["steps"]:
        saw = list(one["see"])
        hidden = [other["step"] for other in loop["steps"] if other["step"] < one["step"] and other["step"] not in saw]
        yield {
            "rollout_id": loop["id"],
            "step": one["step"],
            "worker": one["worker"],
            "saw": saw,
            "hidden": hidden,
            "conversation": None if loop["log_mode"] == "metadata" else one.get("task") is None,
        } | _cut(one)


def _cut(step: Tree) -> dict[str, Any]:
    """What was cut of the conversation in a step's prompt; nothing where all of it was there."""
    cuts = [attempt["cut"] for attempt in step.get("attempts") or () if attempt.get("cut")]
    return {"cut": cuts[-1]} if cuts else {}


def _forbidden(tree: Tree, about: Surroundings) -> list[dict[str, Any]]:
    """What a cap, the key, quarantine, rests and the pool ruled out. Caps that bounded nothing are not among it."""
    handles = {
        handle
        for loop in loops(tree)
        for each in loop["rounds"]
        for handle in (each.get("allowed") or {}).get("depth_capped") or ()
    }
    rules = [{"by": "cap depth", "what": f"a step on `{handle}`"} for handle in sorted(handles)]
    if cap := tree.get("capped"):
        rules.append({"by": f"cap {cap}", "what": f"the rest of the request: {cut_short(tree)}"})
    if about.key_workers:
        rules.append(
            {"by": "key", "what": f"workers other than {', '.join(sorted(about.key_workers))} (as it is today)"}
        )
    if held := (tree["caps"] or {}).get("quarantined"):
        rules.append({"by": "quarantine", "what": f"workers {', '.join(held)}, unless every other one failed"})
    for name, why in ((tree["caps"] or {}).get("resting") or {}).items():
        rules.append({"by": "rest", "what": f"worker {name} ({why}), unless every other one failed"})
    return rules


def _not_shown(tree: Tree, about: Surroundings) -> dict[str, Any]:
    """The workers of the pool that were no candidates, and which candidates of a large pool were drawn at random."""
    shown = {str(one["name"]) for one in tree.get("pool") or ()}
    draws = {str(one["name"]): one["drawn"] for one in tree.get("pool") or () if one.get("drawn") is not None}
    if about.pool_workers is None:
        return {"workers": None, "drawn": draws, "unknown": "the pool's revision is not stored"}
    left_out = [name for name in about.pool_workers if name not in shown]
    forbidden = [name for name in left_out if about.key_workers and name not in about.key_workers]
    held = [name for name in (tree["caps"] or {}).get("quarantined") or () if name in left_out]
    resting = {name: why for name, why in ((tree["caps"] or {}).get("resting") or {}).items() if name in left_out}
    rest = [name for name in left_out if name not in (*forbidden, *held, *resting)]
    reason = "less likely than the candidates" if draws else "not fit for the request: its size, media or parameters"
    return {"workers": rest, "reason": reason if rest else None, "by_key": forbidden, "drawn": draws} | (
        ({"in_quarantine": held} if held else {}) | ({"resting": resting} if resting else {})
    )


def _counterfactual(tree: Tree, about: Surroundings) -> dict[str, Any]:
    """Had the request gone to each model alone: an estimate with its 95 % interval, or why there is none."""
    kinds = (None, *about.models)
    workers = [str(one["name"]) for one in tree.get("pool") or () if not about.models or one.get("kind") in kinds]
    return {
        "method": "inverse propensity over strata, 95 % interval",
        "likeness": about.likeness,
        "workers": [had_it_gone_to(worker, about.alike) for worker in sorted(workers)[:COUNTERFACTUALS_MAX]],
    }


def _judged(outcome: Tree) -> dict[str, Any]:
    return {name: outcome.get(name) for name in ("kind", "value", "label", "source", "step")}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
