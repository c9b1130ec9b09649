"""Who plans a pool's requests now, the next rung, and how far away it is: one line for people. Pure.

The rungs: simulated workers with the shipped conductor; the rule without outcomes; the rule that knows its workers; a
planner on trial beside it; a conductor that earned a kind of work, or plans everything; training on its traffic.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.core.policies.earning import Bar, Rewards, lead
from gateway.core.pool.workers import MODEL_KINDS, PoolFile

APART = 0.5  # difference in success by which the rule is to tell two workers apart before it counts as knowing them
TRAIN_HINT = "`baton train status` says how far a retraining is"
Mode = Literal["simulated", "rule", "trial", "conductor"]
Rung = Literal["simulated", "alone", "learning", "knows", "trial", "compared", "earned", "conductor"]
Kinds = Mapping[str | None, Mapping[str, Rewards]]  # by task type, then by planner


@dataclass(frozen=True, slots=True)
class Charge:
    """Whom the model name `baton` stands for, as the settings say. `planner`: the conductor's name for people, if there
    is one. `share`: of the requests of a kind, those of the planner that is not in charge of it. `trained`: the pools
    that the conductor's weights were trained for, where it plans from the first request on."""

    mode: Mode
    planner: str = ""
    bar: Bar = field(default_factory=Bar)
    share: float = 0.0
    trained: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PoolStanding:
    """Who plans in a pool. `now`: a clause without a full stop. `next`: the next rung and how far away it is. `short`:
    the same for a header, `name=number`s; empty if no count leads further."""

    pool: str
    rung: Rung
    outcomes: int | None  # judged requests to `baton`, of the latest 10,000; None: nobody counted
    now: str
    next: str
    short: str = ""

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"`baton`: {self.now}. Next: {self.next}."

    def as_json(self) -> dict[str, Any]:
        """For the admin API."""
        facts = {"pool": self.pool, "rung": self.rung, "outcomes": self.outcomes, "now": self.now, "next": self.next}
        return {**facts, "line": self.line}


def outcomes_wanted(models: int, z: float) -> int:
    """About how many outcomes it takes to tell so many workers apart: for each as many as put a difference of `APART`
    `z` standard errors away from none, at a success of one half, where that takes most."""
    return models * math.ceil(2 * 0.25 * (z / APART) ** 2)


def standing_of(
    pools: PoolFile,
    pool: str,
    charge: Charge,
    rewards: Sequence[Rewards] | None,
    earned: Container[tuple[str, str, str | None]] = (),
    org: str | None = None,
) -> PoolStanding:
    """Who plans in a pool for an organisation, by default the one with the most judged requests. `rewards`: of judged
    requests; None: nobody counted them yet. `earned`: the kinds of work, by organisation, pool and task type, that are
    the conductor's."""
    org = _leading(rewards or (), pool) if org is None else org
    kinds: dict[str | None, dict[str, Rewards]] = {}
    for one in rewards or ():
        if (one.pool, one.org) == (pool, org):
            kinds.setdefault(one.task_type, {})[one.planner] = one
    counted = None if rewards is None else sum(one.n for arms in kinds.values() for one in arms.values())
    if charge.mode == "simulated":
        then = "workers of your own, `make serve POOL=…`"
        return PoolStanding(pool, "simulated", counted, f"{charge.planner} plans, for simulated workers", then)
    if charge.mode == "conductor" or (charge.mode == "trial" and pool in charge.trained):
        return PoolStanding(pool, "conductor", counted, f"{charge.planner} plans{_outcomes(counted)}", TRAIN_HINT)
    if charge.mode == "trial" and (own := [kind for kind in kinds if (org, pool, kind) in earned]):
        now = f"{charge.planner} plans {_kinds(own)}, the rule the rest{_outcomes(counted)}"
        return PoolStanding(pool, "earned", counted, now, TRAIN_HINT)
    models = sum(spec.answers and spec.kind in MODEL_KINDS for spec in pools.pool(pool))
    return _of_rule(pool, models, charge, kinds, counted)


def _leading(rewards: Sequence[Rewards], pool: str) -> str:
    """The organisation with the most judged requests in a pool; empty where there are none."""
    counts = Counter[str]()
    for one in rewards:
        if one.pool == pool:
            counts[one.org] += one.n
    return max(counts, key=lambda org: counts[org], default="")


def _of_rule(pool: str, models: int, charge: Charge, kinds: Kinds, counted: int | None) -> PoolStanding:
    """The standing of a pool with so many models that may answer, whose every kind is the rule's."""
    trial = charge.mode == "trial"
    beside = f", and {charge.planner} on trial in {100 * charge.share:g} % of the requests" if trial else ""
    now = f"the rule plans{beside}{_outcomes(counted)}"
    if trial and kinds and (missing := min(_missing(arms, charge.bar) for arms in kinds.values())) == 0:
        return PoolStanding(pool, "compared", counted, now, _lead_wanted(kinds, charge.bar))
    wanted = outcomes_wanted(models, charge.bar.z) - (counted or 0)
    least = charge.bar.outcomes_min
    if trial and (wanted <= 0 or models < 2):
        kind = min(kinds, key=lambda each: _missing(kinds[each], charge.bar), default=None)
        missing = _missing(kinds.get(kind, {}), charge.bar)
        then = f"{missing} judged requests more {_kind(kind)} until conductor and rule are compared there"
        return PoolStanding(pool, "trial", counted, now, then, f"judged={least * 2 - missing}/{least * 2}")
    after = f"; then {least} judged requests of a kind each until conductor and rule are compared" if trial else ""
    if models < 2:
        return PoolStanding(
            pool, "alone", counted, f"{now}; there is one model to choose", "a second model in the pool"
        )
    if wanted > 0:
        total = outcomes_wanted(models, charge.bar.z)
        then = (
            f"about {wanted} outcomes{' more' if counted else ''} until the rule routes {models} models by kind{after}"
        )
        return PoolStanding(pool, "learning", counted, now, then, f"outcomes={counted or 0}/{total}")
    then = "a planner on trial beside it, `CONDUCTOR=worker:NAME` or `smol`"
    return PoolStanding(pool, "knows", counted, f"the rule plans by kind{_outcomes(counted)}", then)


def _missing(arms: Mapping[str, Rewards], bar: Bar) -> int:
    """Judged requests of a kind that are missing, of both planners together, before they are compared."""
    return sum(max(0, bar.outcomes_min - (arms[name].n if name in arms else 0)) for name in ("conductor", "rule"))


def _lead_wanted(kinds: Kinds, bar: Bar) -> str:
    """How far the conductor is from the kind of work that it is nearest to earning."""
    both = {kind: arms for kind, arms in kinds.items() if _missing(arms, bar) == 0}
    leads = {kind: lead(arms["conductor"], arms["rule"], bar.z) for kind, arms in both.items()}
    kind = max(leads, key=lambda each: leads[each])
    arms = both[kind]
    means = f"mean reward {arms['conductor'].mean:.2f} against {arms['rule'].mean:.2f}"
    return f"the conductor's lead {_kind(kind)} must be surely above 0: {means}, the lead at least {leads[kind]:+.2f}"


def _outcomes(counted: int | None) -> str:
    return "" if counted is None else f" ({counted} outcome{'' if counted == 1 else 's'})"


def _kind(kind: str | None) -> str:
    return "without a task type" if kind is None else f"of `{kind}`"


def _kinds(kinds: Sequence[str | None]) -> str:
    first = "requests without a task type" if kinds[0] is None else f"`{kinds[0]}`"
    more = len(kinds) - 1
    return first if not more else f"{first} and {more} kind{'' if more == 1 else 's'} more"
