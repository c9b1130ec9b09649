"""The label: the plan that the oracle would make, knowing nothing of a worker but what the prompt shows of it.

A worker is taken for as good as its tags and price promise, until experience says otherwise. Without experience the
dearer of two is taken for the better one, up to where its price outweighs that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.loop.shown import ShownWorker
from policy.simulators.arena.families.tasks import JOIN_SKILL, Problem, focus
from policy.simulators.arena.oracle import PRICE_WEIGHT_PER_USD, oracle_plan, step
from policy.simulators.arena.workers import HARD_SKILLS, ArenaWorker, Pool

Plan = dict[str, Any]

USD_PER_MTOK_OF_TIER = ("0", "0.4", "2", "6", "20")  # an output price of that tier (core.prompt.price_tier)
PROMISE = (0.78, 0.80, 0.86, 0.88, 0.885)  # success with the tag, by price tier, before any experience
HARD_PROMISE = (0.55, 0.57, 0.66, 0.74, 0.75)
PROMISE_WEIGHT = 0.2  # of the promise beside experience
UNTAGGED_FACTOR = 0.9  # experience without the tag counts a little less
UNTAGGED_MIN = 0.5  # and below this not at all
SLOW, MEDIUM = 0.03, 0.01  # taken off for a worker shown as slow or medium
MAJORITY, PLANNER = "majority", "planner"
VOTED_SKILL = "logic"
GENERAL_PROMISE, GENERAL_PRICE = 0.6, 0.02  # for questions that no skill is known for


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of what follows a lesson's text: to be learnt, or only given. `hint`: what decides its beginning."""

    text: str
    learnt: bool = True
    hint: str = ""


class Believed(ArenaWorker):
    """A worker as one must take it for: `skills` holds beliefs, and they are all that is shown."""

    def shown_success(self, skill: str) -> float:
        return self.skills.get(skill, 0.0)


def believed_pool(shown: Sequence[ShownWorker], needed: Collection[str]) -> Pool:
    """What the prompt shows, as workers, for a question that needs those skills."""
    return tuple(_believed(worker, frozenset(needed)) for worker in shown)


def _believed(shown: ShownWorker, needed: frozenset[str]) -> ArenaWorker:
    usd = USD_PER_MTOK_OF_TIER[shown.price_tier]
    if MAJORITY in shown.tags:
        return Believed(shown.handle, shown.handle, {}, kind="tool")
    if PLANNER in shown.tags:
        return Believed(shown.handle, shown.handle, {}, kind="self")
    skills = {tag: _belief(shown, tag, needed) for tag in shown.tags}
    if len(needed) == 1:  # only then does experience say which skill it is about
        (skill,) = needed
        if skill not in skills and right(shown) >= UNTAGGED_MIN:
            skills[skill] = UNTAGGED_FACTOR * right(shown)
    return Believed(shown.handle, shown.handle, skills, output_usd_per_mtok=usd)


def right(shown: ShownWorker) -> float:
    """Share right as the compact prompt shows it, in tenths; 0 without experience."""
    return round(shown.experience.success_mean * 10) / 10 if shown.experience else 0.0


def _belief(shown: ShownWorker, skill: str, needed: frozenset[str]) -> float:
    promise = (HARD_PROMISE if skill in HARD_SKILLS else PROMISE)[shown.price_tier]
    if shown.experience is not None and skill in needed:
        promise = PROMISE_WEIGHT * promise + (1 - PROMISE_WEIGHT) * right(shown)
    return max(0.01, promise - slowness(shown))


def slowness(shown: ShownWorker) -> float:
    """What a worker loses for the speed it is shown with."""
    if shown.latency_s is None or shown.latency_s < 1:
        return 0.0
    return MEDIUM if shown.latency_s < 6 else SLOW


def needed_skills(question: str, task: str | None) -> frozenset[str]:
    """The skills that the question, or the part of it that `task` names, takes; none for an unknown kind."""
    problem = focus(question, task)
    if problem is None:
        return frozenset()
    families = [part.family for part in problem.parts or (problem,)]
    return frozenset(skill for family in families if family is not None for skill in family.skills)


def arena_label(question: str, task: str | None, shown: Sequence[ShownWorker], steps_max: int) -> Plan:
    """The plan for an arena question."""
    pool = believed_pool(shown, needed_skills(question, task))
    return fit(oracle_plan(question, task, pool), pool, steps_max)


def purposes(question: str, task: str | None, plan: Plan, shown: Sequence[ShownWorker]) -> list[str]:
    """The tag for which each step's worker was chosen; empty where it was chosen for none."""
    tags = {worker.handle: worker.tags for worker in shown}
    own = [tags[step["worker"]] for step in plan["steps"]]
    builtin = [next((tag for tag in (MAJORITY, PLANNER) if tag in of), "") for of in own]
    order = _skill_order(focus(question, task), builtin.count(""), PLANNER in builtin)
    names: list[str] = []
    for of, tag in zip(own, builtin, strict=True):
        skill = "" if tag or not order else order.pop(0)
        names.append(tag or (skill if skill in of else ""))
    return names


def _skill_order(problem: Problem | None, models: int, loops: bool) -> list[str]:
    """The skill of each model step of a label, in order; empty where the steps do not follow the skills."""
    if problem is None:
        return []
    if loops:
        return [JOIN_SKILL]
    families = [part.family for part in problem.parts or (problem,) if part.family is not None]
    if families[0].shape == "vote" and len(families) == 1:
        return [families[0].parts[0].skill] * models
    skills = [skill for family in families for skill in family.skills] + [JOIN_SKILL] * bool(problem.parts)
    return skills if len(skills) == models else []


def ranked(pool: Pool, skill: str) -> list[ArenaWorker]:
    """Workers of a believed pool with that skill, best first, as the oracle picks them: for a skill that is put to the
    vote by success, for any other by success less price."""
    able = [worker for worker in pool if worker.shown_success(skill) > 0]
    by_utility = sorted(able, key=lambda w: PRICE_WEIGHT_PER_USD * w.typical_usd() - w.shown_success(skill))
    return sorted(by_utility, key=lambda w: -w.shown_success(skill)) if skill == VOTED_SKILL else by_utility


def general_label(shown: Sequence[ShownWorker]) -> Plan:
    """One step on the worker with the best experience; without any, on the cheapest model."""
    models = [worker for worker in shown if not {MAJORITY, PLANNER} & set(worker.tags)]

    def utility(worker: ShownWorker) -> float:
        success = right(worker) if worker.experience else GENERAL_PROMISE
        return success - GENERAL_PRICE * worker.price_tier - slowness(worker)

    best = max(models, key=utility)
    return {"steps": [{"worker": best.handle, "task": None, "see": []}]}


def fit(plan: Plan, pool: Pool, steps_max: int) -> Plan:
    """A plan cut to `steps_max`: a vote loses its last voters; any other keeps its last step, which sees nothing."""
    steps = plan["steps"]
    if len(steps) <= steps_max:
        return plan
    tool = {worker.handle for worker in pool if worker.kind == "tool"}
    if steps[-1]["worker"] in tool:
        voters = steps[: steps_max - 1] if steps_max > 3 else steps[:1]
        vote = [{**steps[-1], "see": list(range(len(voters)))}] if len(voters) > 1 else []
        return {"steps": [*voters, *vote]}
    last = next((worker for worker in pool if worker.handle == steps[-1]["worker"]), pool[0])
    return {"steps": [step(last, [])]}


def offset(plan: Plan, first_index: int) -> Plan:
    """The same plan where `first_index` steps came before it."""
    return {"steps": [{**s, "see": [first_index + index for index in s["see"]]} for s in plan["steps"]]}
