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
from policy.evaluate.figures import USD_1K
from policy.gate.checks import Check, Thresholds, bounded, cannot_say, not_worse
from policy.statistics.stats import Interval, bootstrap_mean, bootstrap_ratios


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows of everybody on the same questions in the same order. `live` is `rule` where no version is live."""

    candidate: Sequence[QuestionResult]
    live: Sequence[QuestionResult]
    others: Mapping[str, Sequence[QuestionResult]]  # by name; every fixed worker among them
    oracle: Sequence[QuestionResult]
    models: Collection[str]  # names of the model workers
    live_name: str = "the live version"

    @property
    def best_single(self) -> str:
        """The fixed worker that is most often right, of equals the cheapest."""
        singles = [name for name in self.others if name.startswith(FIXED)]
        return max(singles, key=lambda name: (accuracy(self.others[name]), -usd_1k(self.others[name]), name))


def accuracy(rows: Sequence[QuestionResult]) -> float:
    """Mean outcome."""
    return fmean(row.outcome for row in rows)


def usd_1k(rows: Sequence[QuestionResult]) -> float:
    """Dollars per 1,000 questions."""
    return fmean(row.cost_nano for row in rows) * USD_1K


def gain(ours: Sequence[QuestionResult], theirs: Sequence[QuestionResult], seed: int) -> Interval:
    """Outcome of ours − theirs, paired by question."""
    return bootstrap_mean([a.outcome - b.outcome for a, b in zip(ours, theirs, strict=True)], seed=seed)


def checks(found: Comparison, thresholds: Thresholds, seed: int) -> list[Check]:
    """All checks of the held-out run. They are required: what they cannot tell is not yet a yes."""
    rows = len(found.candidate)
    if rows < thresholds.questions_min:
        few = f"ask at least {thresholds.questions_min} questions (--n), or lower questions_min knowingly"
        return [
            cannot_say("questions", f"{rows} questions", few, f"at least {thresholds.questions_min}", required=True)
        ]
    best, best_name = found.others[found.best_single], found.best_single
    over_live, over_best = gain(found.candidate, found.live, seed), gain(found.candidate, best, seed)
    beside = f"{found.live_name} is better: keep it, and train longer or on more"
    single = (
        f"always calling {best_name.removeprefix(FIXED)} is better: train longer, or check what the prompt shows of it"
    )
    return [
        not_worse("worse_than_live", over_live, thresholds.margin, rows, beside, required=True),
        not_worse("worse_than_best_single", over_best, thresholds.margin, rows, single, required=True),
        *_costlier(found, over_live, thresholds, seed),
        _collapsed(found, thresholds, seed),
        *_parseable(found, thresholds),
    ]


def _costlier(found: Comparison, over_live: Interval, thresholds: Thresholds, seed: int) -> list[Check]:
    ours, theirs = ([row.cost_nano * USD_1K for row in rows] for rows in (found.candidate, found.live))
    spent, was = fmean(ours), fmean(theirs)
    todo = "raise the price of a dollar in the reward, or lower the dial; or allow more: --set usd_ratio_max=…"
    if was > 0:
        [ratio] = bootstrap_ratios([[a] for a in ours], [[b] for b in theirs], seed=seed)
    else:
        ratio = Interval(*(3 * [math.inf if spent > 0 else 1.0]))
    better = over_live.low > 0
    figure = f"${spent:.4g} per 1,000, {ratio.value:.2f} × ${was:.4g}, 95 % from {ratio.low:.2f} to {ratio.high:.2f}"
    told = f"at most {thresholds.usd_ratio_max:.4g} × {found.live_name}'s, unless it is better"
    holds = better or ratio.value <= thresholds.usd_ratio_max
    made = [Check("costlier", "passed" if holds else "refused", figure, told, "" if holds else todo, required=True)]
    if thresholds.usd_per_1k_max < math.inf:
        bound, figure = thresholds.usd_per_1k_max, f"${spent:.4g} per 1,000"
        made.append(bounded("over_budget", spent, -math.inf, bound, figure, todo, required=True))
    return made


def concentration(rows: Sequence[QuestionResult], models: Collection[str]) -> tuple[str, float, float, float]:
    """(worker called most, its share of the steps on models, Σ share², share of questions with the commonest choice of
    workers)."""
    counts = Counter(worker for row in rows for worker in row.workers if worker in models)
    if not counts:
        return "nobody", 1.0, 1.0, 1.0
    total, plans = sum(counts.values()), Counter(row.workers for row in rows)
    worker, most = counts.most_common(1)[0]
    squares = sum((count / total) ** 2 for count in counts.values())
    return worker, most / total, squares, plans.most_common(1)[0][1] / len(rows)


def _collapsed(found: Comparison, thresholds: Thresholds, seed: int) -> Check:
    """Always the same answer to "who?", where somebody who knows more would not give it."""
    worker, share, squares, plans = concentration(found.candidate, found.models)
    figure = (
        f"{share:.1%} of calls go to {worker}, {plans:.1%} of questions get the commonest plan, Σ share² {squares:.2f}"
    )
    bounds = f"under {thresholds.worker_share_max:.0%} of calls and {thresholds.plan_share_max:.0%} of questions"
    told = f"{bounds}, unless that is right"
    if share < thresholds.worker_share_max and plans < thresholds.plan_share_max:
        return Check("collapsed", "passed", figure, told, required=True)
    if why := _justified(found, worker, thresholds, seed):
        return Check("collapsed", "passed", f"{figure}; {why}", told, required=True)
    todo = (
        "it no longer chooses: train with entropy, more exploration (BATON_EXPLORE_SHARE) and k-of-n pools, from live"
    )
    return Check("collapsed", "refused", figure, told, todo, required=True)


def _justified(found: Comparison, worker: str, thresholds: Thresholds, seed: int) -> str:
    """Why one worker for everything is right here; empty where it is not."""
    if gain(found.candidate, found.oracle, seed).low >= -thresholds.margin:
        return "the oracle is no better"
    top, share, _, _ = concentration(found.oracle, found.models)
    if top == worker and share >= thresholds.worker_share_max:
        return "the oracle calls it as often"
    if "table" in found.others:
        top, share, _, _ = concentration(found.others["table"], found.models)
        if top == worker and share >= thresholds.worker_share_max:
            return "the per-category table calls nobody else either"
    return ""


def _parseable(found: Comparison, thresholds: Thresholds) -> list[Check]:
    ours, theirs = (fmean(row.parsed for row in rows) for rows in (found.candidate, found.live))
    rows = len(found.candidate)
    why = Counter(reason for row in found.candidate for reason in row.refusals)
    reasons = ", ".join(f"{count} {name}" for name, count in why.most_common(3))
    figure = f"{ours:.3f} of {rows} questions" + (f" ({reasons})" if reasons else "")
    least = max(min(thresholds.parse_min, theirs), theirs - thresholds.parse_drop_max)
    todo = "its plans break off or break the caps: train with the grammar mask on, or from the live weights"
    return [bounded("less_parseable", ours, least, math.inf, figure, todo, required=True)]


def facts(found: Comparison, seed: int) -> dict[str, Any]:
    """For the report: who was compared, and the candidate's gain over each."""
    every = {**found.others, "live": found.live, "oracle": found.oracle}
    worker, share, squares, plans = concentration(found.candidate, found.models)
    return {
        "questions": len(found.candidate),
        "live": found.live_name,
        "best_single": found.best_single,
        "concentration": {"worker": worker, "share": share, "sum_of_squares": squares, "plan_share": plans},
        "gains": {name: _told(gain(found.candidate, rows, seed)) for name, rows in every.items()},
    }


def _told(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]
