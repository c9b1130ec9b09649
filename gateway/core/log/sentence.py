"""Why a request went where it went, in one sentence of plain words and real numbers. Pure.

The sentence says who answered and what decided it, from the figures that the log has of the decision. What is not
logged is not said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.log.rollout import plan_probability

Tree = Mapping[str, Any]
NAMES_MAX = 6
NO_RECORD = 0.05  # of evidence: below it nothing is known
FAULTS = {
    "timeout": "did not answer in time",
    "rate_limited": "refused for its rate limit",
    "refused": "refused the request",
    "overloaded": "was overloaded",
    "invalid": "called the request invalid",
    "missed": "missed the contract",
    "protocol": "sent no valid reply",
    "failed": "failed",
}
REFUSALS = {
    "down": "it did not answer",
    "slow": "it took too long",
    "not_json": "it wrote no JSON",
    "unparseable": "its text was no plan",
    "cost": "what money was left paid for an answer alone",
    "refused": "it refused",
    "unknown_worker": "it named a worker that was not offered",
    "depth_cap": "it went deeper than the cap allows",
}
TURNS = {
    "failure": "its last answer failed",
    "tool_error": "a tool reported an error",
    "cap": "a cap was in sight",
    "intent": "the user asks for something else",
    "better": "another worker is better now",
    "worker_gone": "its worker is gone",
    "worker_failed": "its worker failed",
}
CAPS = {
    "cost": "dollars",
    "tokens": "tokens",
    "calls": "worker calls",
    "wall_s": "time",
    "depth": "depth",
    "worker": "workers that answer",
    "contract": "replies that keep the contract",
}


def dollars(usd: float) -> str:
    """An amount of money in two significant digits, such as `$0.00031`."""
    if not usd:
        return "$0"
    digits = max(2, 1 - math.floor(math.log10(abs(usd))))
    text = f"{usd:.{digits}f}"
    return f"${text.rstrip('0')}" if digits > 2 else f"${text}"


def evidence(weight: float) -> str:
    """A weight of evidence, in outcomes, which need not be a whole number."""
    return f"{weight:.1f}".removesuffix(".0")


def nano_dollars(nano: int) -> str:
    """`dollars` of nano-dollars."""
    return dollars(nano / 1e9)


def plans_of(tree: Tree) -> list[Tree]:
    """The rounds whose plans were used and named a worker."""
    return [each for each in tree["rounds"] if not each.get("refusal") and (each.get("plan") or {}).get("steps")]


def deciding_round(tree: Tree) -> Tree | None:
    """The round that decided who answered: the first plan, or the one after its worker failed."""
    planned = plans_of(tree)
    return None if not planned else planned[-1] if _failed(tree) else planned[0]


def sentence(tree: Tree) -> str:
    """The sentence. Names and errors are quoted as the log has them."""
    planned, deciding = plans_of(tree), deciding_round(tree)
    if deciding is None:
        return f"{_unplanned(tree)}."
    parts = [f"{_subject(tree, deciding)}, {_cause(tree, deciding)}"]
    if deciding is not planned[0]:
        parts.append(f"{_subject(tree, planned[0])} was asked first and {_fault(tree)}")
    parts += [*_not_the_conductor(tree), *_more(tree, planned)]
    return f"{'; '.join(parts)}."


def _subject(tree: Tree, planned: Tree) -> str:
    """Who answered by a plan: its workers in order; of a vote its voters, of a chain of checks the last one asked."""
    names = {str(one["handle"]): str(one["name"]) for one in tree.get("pool") or ()}
    steps = [step for step in planned["plan"]["steps"] if isinstance(step, Mapping)]
    planner, voters = str(planned["planner"]), [step for step in steps if not step.get("see")]
    steps = voters if planner == "vote" else steps
    workers = list(dict.fromkeys(names.get(str(step.get("worker")), str(step.get("worker"))) for step in steps))
    if planner.startswith("checked:"):
        done = [one["worker"] for one in tree["steps"] if one["status"] == "done"]
        return next((name for name in reversed(done) if not planner.endswith(f"@{name}")), workers[0])
    shown, more = workers[:NAMES_MAX], len(workers) - NAMES_MAX
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    if any(step.get("see") for step in steps):
        return ", then ".join(shown)
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else shown[0]


def _cause(tree: Tree, planned: Tree) -> str:
    planner, turn = str(planned["planner"]), tree.get("turn") or {}
    if planner == "sticky":
        what = "brings the results of its tools" if turn.get("why") == "tool_results" else "goes on"
        return f"again, because the conversation {what} and its prompt is cached there"
    if planner.startswith("fixed:"):
        return "because the request named it"
    if planner == "conductor":
        return _by_conductor(planned)
    if planner.startswith("checked:"):
        return _by_check(tree)
    decision = planned.get("decision") or {}
    arms = [arm for arm in decision.get("arms") or () if arm.get("worker")]
    if not arms:
        return f"by the {planner}; the log has no figures of that decision"
    if planner == "rule":
        return _by_rule(decision, arms)
    return _by_rank(planner, arms)


def _by_rule(decision: Tree, arms: Sequence[Tree]) -> str:
    """Why the rule drew a worker: by the figures of it and of the best of the others."""
    chosen = next((arm for arm in arms if arm["worker"] == decision.get("chosen")), arms[0])
    others = [arm for arm in arms if arm is not chosen]
    if not others:
        return "because no other worker could take the request"
    rival = max(others, key=_utility)
    if _utility(rival) > _utility(chosen):
        chance = f" (probability {_share(chosen['propensity'])})" if chosen.get("propensity") is not None else ""
        return (
            f"drawn to learn{chance}: {_record(chosen)}, where {_record(rival, named=True)}: {_against(chosen, rival)}"
        )
    if _known(rival) or _known(chosen):
        return f"because {_record(chosen, it=True)} where {_record(rival, named=True)}: {_against(chosen, rival)}"
    return (
        f"because nothing is known of tasks like this one yet, and at {dollars(chosen['usd'])} and "
        f"{chosen['latency_s']:.2g} s it is the best bet, before {rival['worker']}: {_against(chosen, rival)}"
    )


def _against(one: Tree, other: Tree) -> str:
    """Both workers' expected success, or their utility where price and time turned it round or settled it."""
    figures = [(each["success"], _utility(each)) for each in (one, other)]
    (right, worth), (other_right, other_worth) = figures
    same_way = (right - other_right) * (worth - other_worth) > 0
    if same_way and f"{right:.2f}" != f"{other_right:.2f}":
        return f"{right:.2f} against {other_right:.2f}"
    return f"worth {worth:.2f} against {other_worth:.2f} after dollars and seconds"


def _record(arm: Tree, *, named: bool = False, it: bool = False) -> str:
    """What a worker did on tasks like this one, at which price."""
    who = f"{arm['worker']} " if named else "it " if it else ""
    price = f" at {dollars(arm['usd'])}" if arm.get("usd") is not None else ""
    if not _known(arm):
        return f"nothing is known of {arm['worker'] if named else 'it'} yet{price}"
    alike = "" if named else " alike"
    return f"{who}{'was ' if who else ''}right on {evidence(arm['right'])} of {evidence(arm['n'])}{alike}{price}"


def _by_rank(planner: str, arms: Sequence[Tree]) -> str:
    ranked = sorted(arms, key=_utility, reverse=True)[:NAMES_MAX]
    figures = ", ".join(f"{arm['worker']} {_utility(arm):.2f}" for arm in ranked)
    then = {"vote": "and takes the majority's answer", "cascade": "and one more if they differ"}.get(planner, "")
    return f"because the {planner} asks those of the highest expected worth {then}".rstrip() + f": {figures}"


def _by_conductor(planned: Tree) -> str:
    """As a learned planner planned: with which probability, and whether it was drawn or its likeliest plan."""
    version = planned.get("policy_version") or "the conductor"
    chance = plan_probability(planned["plan_logprobs"] or [], planned["decision_mask"] or [])
    if chance is None:
        return f"as {version} planned"
    drawn = "drawn with" if (planned.get("sampling") or {}).get("temperature") else "its likeliest plan, of"
    return f"as {version} planned: {drawn} probability {_share(chance)}"


def _by_check(tree: Tree) -> str:
    """What the checks of a chain said of the replies before the one that shipped, and of that one."""
    replies, said = "", []
    for step in tree["steps"]:
        verdicts = [attempt["verdict"] for attempt in step.get("attempts") or () if _said(attempt)]
        said += [
            f"{step['worker']} {'accepted' if one['accept'] else 'rejected'} that of {replies}" for one in verdicts
        ]
        replies = replies if verdicts else step["worker"]
    return f"because the request named this chain, and of the replies {', '.join(said) or 'none was judged'}"


def _said(attempt: Tree) -> bool:
    return (attempt.get("verdict") or {}).get("accept") is not None


def _not_the_conductor(tree: Tree) -> list[str]:
    """Why a router planned instead of the conductor."""
    refused = next((each for each in tree["rounds"] if each.get("refusal") and each["planner"] == "conductor"), None)
    if refused is None:
        return []
    reason = str(refused["refusal"])
    version = refused.get("policy_version") or "the conductor"
    return [f"{version} made no plan that could be used, because {REFUSALS.get(reason, f'of `{reason}`')}"]


def _more(tree: Tree, planned: Sequence[Tree]) -> list[str]:
    """What else shaped the request: its turn, its cap, what was known, further rounds, and a bad end."""
    turn, cap, memory = tree.get("turn") or {}, tree.get("capped"), tree.get("memory") or {}
    parts = []
    if len(planned) > 1 and not _failed(tree):
        cascade = planned[0]["planner"] == "cascade"
        parts = [
            f"they differed, and {_subject(tree, planned[1])} decided" if cascade else f"planned {len(planned)} times"
        ]
    if turn and not turn.get("kept"):
        parts.append(f"not {turn['worker']} again, because {TURNS.get(turn['why'], turn['why'])}")
    if memory.get("state") == "missing":
        parts.append("planned blind: no experience could be read")
    elif memory.get("state") == "stale":
        parts.append(f"by experience that was {_seconds(memory.get('age_s'))} old")
    if cap:
        parts.append(cut_short(tree))
    if tree["status"] != "done":
        parts.append(f"no answer: {_error(tree)}")
    return parts


def cut_short(tree: Tree) -> str:
    """Which cap ended the request, what it allowed, and who set it. Empty where none did."""
    cap, caps = tree.get("capped"), tree.get("caps") or {}
    if not cap:
        return ""
    what = f"it ran out of {CAPS.get(cap, cap)}"
    if cap != "cost" and not caps.get("capped_by"):
        limit = caps.get(cap)
        return f"{what} (at most {limit:g})" if isinstance(limit, int | float) else what
    if by := caps.get("capped_by"):
        return f"{what}: {str(by).rstrip('.')}"
    most, held = int(caps.get("cost_nano") or 0), int(tree.get("hold_nano") or 0)
    spent = f"{what}: it spent {nano_dollars(int(tree.get('cost_nano') or 0))}"
    if 0 < held < most:
        return f"{spent} of the {nano_dollars(held)} that were held for it (its cap is {nano_dollars(most)})"
    return f"{spent} of its cap of {nano_dollars(most)}"


def _unplanned(tree: Tree) -> str:
    refused = [f"{each['planner']} ({each['refusal']})" for each in tree["rounds"] if each.get("refusal")]
    tries = f" Its planners made no usable plan: {', '.join(refused)}" if refused else ""
    return f"nobody, because the request ended before anything was planned: {_error(tree)}.{tries}".rstrip(".")


def _failed(tree: Tree) -> bool:
    return str(tree.get("fallback") or "").startswith("worker_")


def _fault(tree: Tree) -> str:
    kind = str(tree["fallback"]).removeprefix("worker_")
    return FAULTS.get(kind, f"failed ({kind})")


def _error(tree: Tree) -> str:
    error = tree.get("error") or {}
    return str(error.get("message") or error.get("code") or tree["status"]).rstrip(".")


def _utility(arm: Tree) -> float:
    return float(arm.get("utility") or 0.0)


def _known(arm: Tree) -> bool:
    return float(arm.get("n") or 0.0) >= NO_RECORD


def _share(chance: float) -> str:
    return f"{chance:.2f}" if 0.01 <= chance <= 0.99 else f"{chance:.3f}" if chance >= 0.01 else f"{chance:.1g}"


def _seconds(age_s: float | None) -> str:
    return "some time" if age_s is None else f"{age_s:.0f} s" if age_s < 120 else f"{age_s / 60:.0f} min"
