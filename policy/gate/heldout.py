"""The held-out run: the candidate on the same unseen questions as everything it has to beat. This part accepts.

`evaluate` does the asking; this says what its rows mean for a candidate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from policy.evaluate.contest import QuestionResult
from policy.evaluate.entrants import FIXED
from policy.evaluate.figures import USD_1K, accuracy, affordable, best_of, usd_1k
from policy.gate.checks import Check, ShareCount, Thresholds, bounded, cannot_say, more_words, not_worse, share_check
from policy.statistics.stats import Interval, bootstrap_mean, bootstrap_ratios

OTHER = "other"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of all policies on the same questions in the same order. `live` is `rule` where no version is live."""

    candidate: Sequence[QuestionResult]
    live: Sequence[QuestionResult]
    others: Mapping[str, Sequence[QuestionResult]]  # by name; every fixed worker among them
    oracle: Sequence[QuestionResult]
    models: Collection[str]  # names of the model workers
    live_name: str = "the live version"

    @property
    def best_single(self) -> str:
        """The fixed worker that is most often right, of equals the cheapest."""
        return best_of(self._singles)

    @property
    def best_affordable(self) -> str:
        """The same among the workers that cost no more than the candidate; the cheapest where none does."""
        return best_of(affordable(self._singles, usd_1k(self.candidate)))

    @property
    def _singles(self) -> dict[str, Sequence[QuestionResult]]:
        return {name: rows for name, rows in self.others.items() if name.startswith(FIXED)}


def gain(ours: Sequence[QuestionResult], theirs: Sequence[QuestionResult], seed: int) -> Interval:
    """Outcome of ours − theirs, paired by question."""
    return bootstrap_mean([a.outcome - b.outcome for a, b in zip(ours, theirs, strict=True)], seed=seed)


def checks(rivals: Comparison, thresholds: Thresholds, seed: int, *, real: bool = False) -> list[Check]:
    """All checks of the held-out run. They are required: what they cannot tell is not yet a yes. `real`: workers cost
    real money, so the candidate is held against the single workers that it could be replaced by for its dollars, and
    refused where it is shown to be worse."""
    rows = len(rivals.candidate)
    if rows < thresholds.questions_min:
        few = f"ask at least {thresholds.questions_min} questions (--n), or lower questions_min knowingly"
        return [
            cannot_say("questions", f"{rows} questions", few, f"at least {thresholds.questions_min}", required=True)
        ]
    best_name = rivals.best_affordable if real else rivals.best_single
    best = rivals.others[best_name]
    over_live, over_best = gain(rivals.candidate, rivals.live, seed), gain(rivals.candidate, best, seed)
    beside = f"{rivals.live_name} is better: keep it, and train longer or on more"
    single = (
        f"always calling {best_name.removeprefix(FIXED)} is better: train longer, or check what the prompt shows of it"
    )
    return [
        not_worse("worse_than_live", over_live, thresholds.margin, rows, beside, required=True),
        not_worse("worse_than_best_single", over_best, thresholds.margin, rows, single, required=not real),
        *_cost(rivals, over_live, thresholds, seed),
        _collapse(rivals, thresholds, seed),
        *_validity(rivals, thresholds, seed, real),
    ]


def pooled(rows: Sequence[QuestionResult], rows_min: int) -> list[str]:
    """The kind of each row; kinds with fewer than `rows_min` rows are OTHER."""
    counts = Counter(row.category for row in rows)
    return [row.category if counts[row.category] >= rows_min and row.category else OTHER for row in rows]


def kind_checks(rivals: Comparison, thresholds: Thresholds, seed: int) -> list[Check]:
    """Not worse than live in any kind of task that has enough rows. They are not required: the run as a whole is what
    accepts, and a kind alone refuses where it is shown to be worse."""
    kinds = pooled(rivals.candidate, thresholds.kind_rows_min)
    checks = []
    for kind in sorted(set(kinds)):
        ours, theirs = (_of_kind(rows, kinds, kind) for rows in (rivals.candidate, rivals.live))
        name, todo = f"worse_than_live[{kind}]", f"{rivals.live_name} is better at {kind}: keep it, or train on more"
        if len(ours) < thresholds.kind_rows_min:
            few = f"about {thresholds.kind_rows_min} requests would decide"
            checks.append(cannot_say(name, f"{len(ours)} questions", few, f"at least {thresholds.kind_rows_min}"))
        else:
            over = gain(ours, theirs, seed)
            checks.append(not_worse(name, over, thresholds.kind_margin, len(ours), todo))
    return checks


def _of_kind(rows: Sequence[QuestionResult], kinds: Sequence[str], kind: str) -> list[QuestionResult]:
    return [row for row, its in zip(rows, kinds, strict=True) if its == kind]


def kind_facts(rivals: Comparison, thresholds: Thresholds, seed: int) -> dict[str, Any]:
    """For the report: the candidate by kind of task beside live and the baselines, and which kinds are in OTHER."""
    kinds = pooled(rivals.candidate, thresholds.kind_rows_min)
    beside = {"live": rivals.live, "best single": rivals.others[rivals.best_single]}
    beside |= {name: rows for name, rows in rivals.others.items() if not name.startswith(FIXED)}
    figures: dict[str, Any] = {}
    for kind in sorted(set(kinds)):
        ours = _of_kind(rivals.candidate, kinds, kind)
        gains = {name: _bounds(gain(ours, _of_kind(rows, kinds, kind), seed)) for name, rows in beside.items()}
        figures[kind] = {"n": len(ours), "accuracy": accuracy(ours), "usd_per_1k": usd_1k(ours), "gains": gains}
    names = Counter(row.category for row, kind in zip(rivals.candidate, kinds, strict=True) if kind == OTHER)
    return {"task_kinds": figures, "kinds_in_other": dict(names)}


def _cost(rivals: Comparison, over_live: Interval, thresholds: Thresholds, seed: int) -> list[Check]:
    ours, theirs = ([row.cost_nano * USD_1K for row in rows] for rows in (rivals.candidate, rivals.live))
    spent, was = fmean(ours), fmean(theirs)
    todo = "raise the price of a dollar in the reward, or lower the dial; or allow more: --set usd_ratio_max=…"
    if was > 0:
        [ratio] = bootstrap_ratios([[a] for a in ours], [[b] for b in theirs], seed=seed)
    else:
        ratio = Interval(*(3 * [math.inf if spent > 0 else 1.0]))
    better = over_live.low > 0
    figure = f"${spent:.4g} per 1,000, {ratio.value:.2f} × ${was:.4g}, 95 % from {ratio.low:.2f} to {ratio.high:.2f}"
    threshold = f"at most {thresholds.usd_ratio_max:.4g} × {rivals.live_name}'s, unless it is better"
    holds = better or ratio.value <= thresholds.usd_ratio_max
    checks = [
        Check("costlier", "passed" if holds else "refused", figure, threshold, "" if holds else todo, required=True)
    ]
    if thresholds.usd_per_1k_max < math.inf:
        bound, figure = thresholds.usd_per_1k_max, f"${spent:.4g} per 1,000"
        checks.append(bounded("over_budget", spent, -math.inf, bound, figure, todo, required=True))
    return checks


@dataclass(frozen=True, slots=True)
class Concentration:
    """How far calls and plans are the same: the worker called most with its share of the steps on models, Σ share², and
    the questions with the commonest choice of workers."""

    worker: str
    calls: ShareCount
    squares: float
    plans: ShareCount


def concentration(rows: Sequence[QuestionResult], models: Collection[str]) -> Concentration:
    """The concentration of a policy's plans; all of them alike where it calls no model."""
    counts = Counter(worker for row in rows for worker in row.workers if worker in models)
    if not counts:
        return Concentration("no worker", ShareCount(1, 1, "calls"), 1.0, ShareCount(1, 1, "questions"))
    total, plans = sum(counts.values()), Counter(row.workers for row in rows)
    worker, most = counts.most_common(1)[0]
    squares = sum((count / total) ** 2 for count in counts.values())
    commonest = ShareCount(plans.most_common(1)[0][1], len(rows), "questions")
    return Concentration(worker, ShareCount(most, total, "calls"), squares, commonest)


def _collapse(rivals: Comparison, thresholds: Thresholds, seed: int) -> Check:
    """Check that calls do not all go to one worker where the oracle would call others."""
    seen = concentration(rivals.candidate, rivals.models)
    figure = (
        f"{seen.calls.share:.1%} of calls go to {seen.worker}, {seen.plans.share:.1%} of questions get the commonest "
        f"plan, Σ share² {seen.squares:.2f}"
    )
    bounds = f"under {thresholds.worker_share_max:.0%} of calls and {thresholds.plan_share_max:.0%} of questions"
    threshold = f"{bounds}, unless that is right"
    held = (seen.calls, thresholds.worker_share_max), (seen.plans, thresholds.plan_share_max)
    sides = [count.side(most=most) for count, most in held]
    if min(sides) > 0:
        return Check("collapsed", "passed", figure, threshold, required=True)
    if why := _justification(rivals, seen.worker, thresholds, seed):
        return Check("collapsed", "passed", f"{figure}; {why}", threshold, required=True)
    if min(sides) == 0:
        more = max(count.more(most=most) for count, most in held if count.side(most=most) == 0)
        return Check("collapsed", "undecided", figure, threshold, more_words(more, "questions"), True, more)
    todo = (
        "it no longer chooses: train with entropy, more exploration (BATON_EXPLORE_SHARE) and k-of-n pools, from live"
    )
    return Check("collapsed", "refused", figure, threshold, todo, required=True)


def _justification(rivals: Comparison, worker: str, thresholds: Thresholds, seed: int) -> str:
    """Why one worker for everything is right here; empty where it is not."""
    if gain(rivals.candidate, rivals.oracle, seed).low >= -thresholds.margin:
        return "the oracle is no better"
    if _calls_as_often(rivals.oracle, worker, rivals.models, thresholds):
        return "the oracle calls it as often"
    if "table" in rivals.others and _calls_as_often(rivals.others["table"], worker, rivals.models, thresholds):
        return "the per-category table calls no other worker either"
    return ""


def _calls_as_often(
    rows: Sequence[QuestionResult], worker: str, models: Collection[str], thresholds: Thresholds
) -> bool:
    seen = concentration(rows, models)
    return seen.worker == worker and seen.calls.share >= thresholds.worker_share_max


def _validity(rivals: Comparison, thresholds: Thresholds, seed: int, real: bool) -> list[Check]:
    """Enough plans are valid, and no fewer than live's. Real requests are few, and the rule plans those whose plan is
    not valid: there an undecided share refuses only where it is below the bound itself."""
    ours, theirs = ([row.parsed for row in rows] for rows in (rivals.candidate, rivals.live))
    valid = ShareCount(sum(ours), len(ours), "questions")
    fewer = bootstrap_mean([float(a) - float(b) for a, b in zip(ours, theirs, strict=True)], seed=seed)
    why = Counter(reason for row in rivals.candidate for reason in row.refusals)
    reasons = ", ".join(f"{count} {name}" for name, count in why.most_common(3))
    least = min(thresholds.parse_min, fmean(theirs) - thresholds.parse_drop_max)
    todo = "its plans break off or break the caps: train with the grammar mask on, or from the live weights"
    note, required = f" ({reasons})" if reasons else "", not real or valid.share < least
    return [
        share_check("parseable", valid, least, note=note, todo=todo, required=required),
        not_worse("less_parseable", fewer, thresholds.parse_drop_max, len(ours), todo, required=True),
    ]


def facts(rivals: Comparison, seed: int) -> dict[str, Any]:
    """For the report: who was compared, and the candidate's gain over each."""
    every = {**rivals.others, "live": rivals.live, "oracle": rivals.oracle}
    seen = concentration(rivals.candidate, rivals.models)
    return {
        "questions": len(rivals.candidate),
        "live": rivals.live_name,
        "best_single": rivals.best_single,
        "concentration": {
            "worker": seen.worker,
            "share": seen.calls.share,
            "sum_of_squares": seen.squares,
            "plan_share": seen.plans.share,
        },
        "gains": {name: _bounds(gain(rivals.candidate, rows, seed)) for name, rows in every.items()},
    }


def _bounds(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]
