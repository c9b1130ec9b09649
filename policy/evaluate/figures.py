"""From rows to the report: accuracy, dollars, calls, and what they are worth beside the best single worker. Pure.

Dollars are per 1,000 questions; intervals are 95 % percentile bootstrap over questions. JSON has no NaN: a figure that
does not exist is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from gateway.core.pool.workers import NANO_PER_USD
from gateway.errors import ConfigError
from policy.evaluate.contest import QuestionResult
from policy.evaluate.entrants import FIXED, ORACLE, Entrant
from policy.evaluate.options import EvaluationOptions
from policy.reward import is_right
from policy.statistics.stats import (
    aiq,
    apgr,
    bootstrap_mean,
    cost_at_quality,
    cpt,
    mcnemar,
    routerarena_score,
)

Results = Mapping[str, Sequence[QuestionResult]]
USD_1K = 1_000 / NANO_PER_USD  # nano-dollars a question → dollars per 1,000
GAP_SHARES = (0.5, 0.8)
ORACLES = {
    "replay": "full information: of each question the cheapest worker that is right; no policy can know it",
    "logged": "of each request the cheapest single worker that is most right; no policy can know it",
    "arena": "cross-fitted: the best plan known for each question, chosen on other draws of the workers' errors",
}
FORMULAS = {
    "accuracy_ci, usd_per_1k_ci": "percentile bootstrap over questions (Efron & Tibshirani 1993, ch. 13)",
    "vs_best_single.p": "McNemar's exact test, two-sided (McNemar 1947)",
    "aiq": "mean height of the non-decreasing concave hull of (dollars, accuracy) over the cost range, 0 below its "
    "cheapest point (RouterBench, arXiv:2403.12031; there the range ends at the dearest router compared)",
    "apgr, cpt_50, cpt_80": "over the share of questions that reach the strong worker; both ends added (RouteLLM, "
    "arXiv:2406.18665)",
    "routerarena": "(1 + β)·A·C / (β·A + C), β = 0.1, C the logarithmic cheapness between $0.0044 and $200 "
    "(RouterArena, arXiv:2510.00202)",
    "usd_per_1k_at_best_single": "least cost at which that hull reaches the best single worker's accuracy "
    "(LLMRouterBench's CostSave, arXiv:2601.07206); None: it never does",
    "parse_rate": "share of questions all of whose plans were within their caps; a refused plan counts as wrong",
    "calls_per_task": "attempts at workers and tools, child loops included",
    "worker_share": "of all steps, tools included",
}


def report(options: EvaluationOptions, policies: Sequence[Entrant], results: Results) -> dict[str, Any]:
    """Return the report's figures without its sources. Raises ConfigError on a --curve of an unknown policy."""
    singles = {entrant.name: entrant for entrant in policies if entrant.kind == "fixed"}
    best = best_of({name: results[name] for name in singles}) if singles else None
    weak, strong = _ends(options, results, singles)
    names = [entrant.name for entrant in policies if entrant.kind != "oracle" or ORACLE in options.policies]
    frame = _Frame(options, results, best, weak, strong)
    oracle = next(entrant.name for entrant in policies if entrant.kind == "oracle")
    return {
        "policies": {name: frame.policy(name) for name in names},
        "best_single": best,
        "oracle": {"kind": ORACLES[options.env], **frame.short(oracle)},
        "weak": weak,
        "strong": strong,
        "curves": {name: frame.curve(members) for name, members in curves(options, policies).items() if members},
        "formulas": FORMULAS,
    }


def curves(options: EvaluationOptions, policies: Sequence[Entrant]) -> dict[str, list[str]]:
    """Policies that belong together: all fixed workers, a tuned policy at several weights, a directory at several
    places of its dial, and those asked for."""
    families: dict[str, list[str]] = {
        "fixed workers": [entrant.name for entrant in policies if entrant.kind == "fixed"]
    }
    if len(options.usd_weights) > 1:
        for entrant in policies:
            if entrant.kind == "tuned":
                families.setdefault(entrant.name.rpartition("~")[0], []).append(entrant.name)
    if len(options.qualities) > 1:
        for entrant in policies:
            if entrant.quality is not None:
                families.setdefault(entrant.name.rpartition("~")[0], []).append(entrant.name)
    names = {entrant.name for entrant in policies}
    for name, members in options.curves.items():
        if missing := [member for member in members if member not in names]:
            raise ConfigError(f"--curve {name}: `{missing[0]}` is not among the policies: {', '.join(sorted(names))}")
        families[name] = list(members)
    return families


def check_ends(options: EvaluationOptions, policies: Sequence[Entrant]) -> None:
    """Raise ConfigError on a --weak or --strong that is not a worker."""
    workers = [entrant.worker for entrant in policies if entrant.kind == "fixed"]
    for option, name in (("weak", options.weak), ("strong", options.strong)):
        if name is not None and name not in workers:
            raise ConfigError(f"--{option} {name}: no such worker; there are {', '.join(workers)}")


def _ends(
    options: EvaluationOptions, results: Results, singles: Mapping[str, Entrant]
) -> tuple[str | None, str | None]:
    """The weak and the strong worker's names; None where each question has its own workers."""
    if not singles:
        return None, None
    by_cost = sorted(singles, key=lambda name: (usd_1k(results[name]), name))
    return options.weak or singles[by_cost[0]].worker, options.strong or singles[by_cost[-1]].worker


class _Frame:
    """The policies that every other is compared with, and the options of the report."""

    def __init__(
        self, options: EvaluationOptions, results: Results, best: str | None, weak: str | None, strong: str | None
    ) -> None:
        self._options = options
        self._results = results
        self._best = best
        self._strong = strong
        self._ends = [accuracy(results[f"{FIXED}{name}"]) for name in (weak, strong) if name is not None]

    def short(self, name: str) -> dict[str, Any]:
        """Return accuracy and dollars with their intervals."""
        rows = self._results[name]
        right = bootstrap_mean([row.outcome for row in rows], seed=self._options.seed)
        usd = bootstrap_mean([row.cost_nano * USD_1K for row in rows], seed=self._options.seed)
        return {
            "n": len(rows),
            "accuracy": right.value,
            "accuracy_ci": [right.low, right.high],
            "usd_per_1k": usd.value,
            "usd_per_1k_ci": [usd.low, usd.high],
        }

    def policy(self, name: str) -> dict[str, Any]:
        """All figures of one policy."""
        rows = self._results[name]
        return {
            **self.short(name),
            "calls_per_task": fmean(row.calls for row in rows),
            "rounds_per_task": fmean(row.rounds for row in rows),
            "planning_tokens_per_task": fmean(row.planning_tokens for row in rows),
            "latency_s_per_task": fmean(row.latency_s for row in rows),
            "parse_rate": fmean(row.parsed for row in rows),
            "errors": dict(Counter(row.error for row in rows if row.error is not None)),
            "refusals": dict(Counter(reason for row in rows for reason in row.refusals)),
            "worker_share": _shares(rows),
            "vs_best_single": None if self._best is None else self._paired(name, self._best),
            **self._worth([name]),
            "by_category": _split(rows, [row.category for row in rows]),
            "by_shape": _split(rows, [_shape(row) for row in rows]),
        }

    def _paired(self, name: str, best: str) -> dict[str, Any]:
        """Compare with the best single worker on the same questions."""
        mine = [row.outcome for row in self._results[name]]
        other = [row.outcome for row in self._results[best]]
        gain = bootstrap_mean([a - b for a, b in zip(mine, other, strict=True)], seed=self._options.seed)
        test = mcnemar([*map(is_right, mine)], [*map(is_right, other)])
        return {
            "accuracy_gain": gain.value,
            "accuracy_gain_ci": [gain.low, gain.high],
            "only_this": test.only_first,
            "only_best_single": test.only_second,
            "p": test.p,
        }

    def _worth(self, names: Sequence[str]) -> dict[str, Any]:
        """Scores of one policy, or of several that are one dial."""
        usd = [usd_1k(self._results[name]) for name in names]
        right = [accuracy(self._results[name]) for name in names]
        best = self._best
        reach = None if best is None else cost_at_quality(usd, right, accuracy(self._results[best]))
        score = max(routerarena_score(accuracy, cost) for accuracy, cost in zip(right, usd, strict=True))
        scores = {"aiq": aiq(usd, right, *self._options.cost_range), "routerarena": score}
        return {**scores, "usd_per_1k_at_best_single": reach, **self._recovered(names, right)}

    def _recovered(self, names: Sequence[str], right: Sequence[float]) -> dict[str, float | None]:
        """RouteLLM's scores; None where the strong worker is not better than the weak one."""
        keys = ("apgr", *(f"cpt_{round(100 * share)}" for share in GAP_SHARES))
        if not self._ends or self._ends[1] <= self._ends[0]:
            return dict.fromkeys(keys)
        weak, strong = self._ends
        shares = [fmean(self._strong in row.workers for row in self._results[name]) for name in names]
        reached = [cpt(shares, right, weak, strong, share) for share in GAP_SHARES]
        return dict(zip(keys, (apgr(shares, right, weak, strong), *reached), strict=True))

    def curve(self, names: Sequence[str]) -> dict[str, Any]:
        """A dial: its points by cost, and its scores."""
        points = [{"policy": name, "usd_per_1k": usd_1k(self._results[name]), "accuracy": accuracy(self._results[name])}
                  for name in names]  # fmt: skip
        return {"points": sorted(points, key=lambda point: point["usd_per_1k"]), **self._worth(names)}


def accuracy(rows: Sequence[QuestionResult]) -> float:
    """Mean outcome."""
    return fmean(row.outcome for row in rows)


def usd_1k(rows: Sequence[QuestionResult]) -> float:
    """Dollars per 1,000 questions."""
    return sum(row.cost_nano for row in rows) / len(rows) * USD_1K


def best_of(policies: Results) -> str:
    """The name of the policy that is most often right, of equals the cheapest."""
    return max(policies, key=lambda name: (accuracy(policies[name]), -usd_1k(policies[name]), name))


def affordable(policies: Results, usd_1k_max: float) -> Results:
    """The policies that cost no more dollars per 1,000 questions; the cheapest where none does."""
    least = min(usd_1k(rows) for rows in policies.values())
    return {name: rows for name, rows in policies.items() if usd_1k(rows) <= max(usd_1k_max, least)}


def _shares(rows: Sequence[QuestionResult]) -> dict[str, float]:
    """Share of steps by worker, largest first."""
    counts = Counter(worker for row in rows for worker in row.workers)
    total = sum(counts.values())
    return {worker: count / total for worker, count in counts.most_common()}


def _shape(row: QuestionResult) -> str:
    """Return the kind of work done for a question."""
    if row.rounds > 1:
        return "several rounds"
    return "one call" if len(row.workers) <= 1 else "several calls"


def _split(rows: Sequence[QuestionResult], keys: Sequence[str]) -> dict[str, dict[str, float]]:
    groups: dict[str, list[QuestionResult]] = {}
    for row, key in zip(rows, keys, strict=True):
        groups.setdefault(key, []).append(row)
    return {
        key: {"n": len(group), "accuracy": accuracy(group), "usd_per_1k": usd_1k(group)}
        for key, group in sorted(groups.items())
    }
