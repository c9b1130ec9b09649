"""Off-policy triage: what logged rollouts say of a candidate. It may refuse; only the held-out run accepts.

The order is the measured one: is what it plans valid, does it stay where the log has seen anything (mean weight,
effective sample size, KL), and only then what it would have earned and cost (doubly robust, arXiv:1103.4601).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np

from gateway.core.loop.plan import Plan
from gateway.service.ports.request import ConductorCall, Sampling
from policy.engines.port import LoggedPlan, PlanEngine, SampledPlan, sampled
from policy.environments.executor import UNHURRIED_S
from policy.gate.checks import GOOD, Check, ShareCount, Thresholds, Verdict, bounded, cannot_say, not_worse, share_check
from policy.gate.injection import OnCount
from policy.gate.logged import Log, LoggedRequest, PlanningCall
from policy.statistics.ope import LoggedSample, OffPolicyReport, OpeSettings, RewardTable, estimate, fold_of, terms
from policy.statistics.stats import Floats, Interval, bootstrap_mean

FOLDS = 5
REPLAYED_MAX = 400  # planning calls that are planned anew at temperature 0
PART = 32  # of the work, kept together
PLAN_TOKENS_MAX = 512  # as the gateway's conductor settings
AFTER_VALIDITY = (
    "sampled_validity",
    "mean_weight",
    "effective_sample_size",
    "kl_to_behaviour",
    "doubly_robust",
    "price",
)
T = TypeVar("T")
Keep = Callable[[Sequence[object], Callable[[], Awaitable[Any]]], Awaitable[Any]]  # the value of a key, made once


@dataclass(frozen=True, slots=True)
class CandidateReply:
    """What the candidate made of one request: log π_new/π_logged over its decisions, and a plan of its own for the
    first round, sampled as the logged one was (None: refused)."""

    weight_log: float
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class ReplayCount:
    """How many of the candidate's own plans for logged prompts were within their caps. `alike`: whether it cuts every
    one of these prompts into the tokens that were logged: else no log-prob compares."""

    valid: int
    asked: int
    alike: bool = True


async def triage(
    engine: PlanEngine, log: Log, thresholds: Thresholds, seed: int, source: str, keep: Keep, count: OnCount
) -> tuple[list[Check], dict[str, Any]]:
    """The checks in their order, and the facts for the report. Raises EngineLost; what is finished is kept."""
    replayed = await replay(engine, log, thresholds, keep, count)
    sound = replayed.alike and not validity_of(replayed, thresholds).refuses
    answered = await ask(engine, log.requests, keep, count) if sound else []
    figures = estimates(log.requests, answered, thresholds, seed) if answered else None
    if not replayed.alike:
        log = replace(log, left_out={**log.left_out, "other_tokens": len(log.requests)})
    return checks(log, replayed, figures, thresholds), facts(log, figures, source)


# ---------------------------------------------------------------- asking the candidate


async def replay(engine: PlanEngine, log: Log, thresholds: Thresholds, keep: Keep, count: OnCount) -> ReplayCount:
    """One greedy plan for each of the first REPLAYED_MAX planning calls, those that cannot be reweighted included. Ends
    early where too few are shown to be valid: plans that run on to their last token take long."""
    calls = [call for call in log.calls if call.row.messages][:REPLAYED_MAX]

    async def plans(part: Sequence[PlanningCall]) -> list[Any]:
        replies = await at_once(engine, [_asked(call, 0.0, 0) for call in part])
        return [
            (call.read(plan.text) is not None, _alike(plan, call)) for call, plan in zip(part, replies, strict=True)
        ]

    results: list[Any] = []
    async for part in _parts("planning logged prompts anew", calls, plans, keep, count):
        results += part
        if ShareCount(sum(valid for valid, _ in results), len(results)).side(thresholds.valid_min) < 0:
            break
    return ReplayCount(sum(valid for valid, _ in results), len(results), all(alike for _, alike in results))


async def ask(
    engine: PlanEngine, requests: Sequence[LoggedRequest], keep: Keep, count: OnCount
) -> list[CandidateReply]:
    """Return the candidate's reply to each request."""

    async def replies(part: Sequence[tuple[int, LoggedRequest]]) -> list[Any]:
        calls = [call for _, request in part for call in request.calls]
        scores = iter(await engine.score([_logged(call) for call in calls]))
        weights = [sum(_log_weight(call, next(scores)) for call in request.calls) for _, request in part]
        firsts = [_asked(request.first, request.first.temperature, index) for index, request in part]
        return [(weight, plan.text) for weight, plan in zip(weights, await at_once(engine, firsts), strict=True)]

    work = list(enumerate(requests))
    scores = [one async for part in _parts("scoring logged plans", work, replies, keep, count) for one in part]
    return [
        CandidateReply(weight, request.first.read(text))
        for request, (weight, text) in zip(requests, scores, strict=True)
    ]


async def at_once(engine: PlanEngine, calls: Sequence[ConductorCall]) -> list[SampledPlan]:
    """The engine's plans for the calls, as many at once as it decodes."""
    slots = asyncio.Semaphore(engine.calls_max)

    async def one(call: ConductorCall) -> SampledPlan:
        async with slots:
            return await sampled(engine, call)

    return list(await asyncio.gather(*(one(call) for call in calls)))


async def _parts(
    what: str, work: Sequence[T], do: Callable[[Sequence[T]], Awaitable[list[Any]]], keep: Keep, count: OnCount
) -> AsyncGenerator[list[Any], None]:
    """The work in parts of PART; each is kept when it is done."""
    for start in range(0, len(work), PART):
        part = work[start : start + PART]
        yield await keep([what, start], lambda part=part: do(part))  # type: ignore[misc]
        count(what, start + len(part), len(work))


def _asked(call: PlanningCall, temperature: float, seed: int) -> ConductorCall:
    sampling = Sampling(temperature=temperature, tokens_max=PLAN_TOKENS_MAX, seed=seed)
    return ConductorCall(call.row.messages, call.schema, sampling, UNHURRIED_S)


def _alike(plan: SampledPlan, call: PlanningCall) -> bool:
    logged = list(call.row.prompt_token_ids)
    return not (logged and plan.prompt_ids) or list(plan.prompt_ids) == logged


def _logged(call: PlanningCall) -> LoggedPlan:
    row = call.row
    return LoggedPlan(
        row.prompt_token_ids, row.plan_token_ids, row.decision_mask, call.schema, call.temperature, call.top_p
    )


def _log_weight(call: PlanningCall, scores: Sequence[float]) -> float:
    """log π_new/π_logged of one planning call."""
    row = call.row
    return sum(a - b for a, b, decides in zip(scores, row.plan_logprobs, row.decision_mask, strict=True) if decides)


# ---------------------------------------------------------------- estimates


@dataclass(frozen=True, slots=True)
class Estimates:
    """`report`: all estimators of the outcome. Gains are candidate − log, paired by request, doubly robust."""

    report: OffPolicyReport
    gain: Interval  # outcome
    gains: dict[str, tuple[Interval, int]]  # of each category, with its requests
    usd: Interval  # dollars a request, of the log
    usd_gain: Interval
    valid: ShareCount  # the candidate's sampled first plans that may run
    valid_logged: float  # the share of the log's


def estimates(
    requests: Sequence[LoggedRequest], answered: Sequence[CandidateReply], thresholds: Thresholds, seed: int
) -> Estimates:
    """Doubly robust, with a table of (category, workers) as the reward model, fitted on other questions."""
    settings = OpeSettings(
        mean_weight_min=thresholds.mean_weight_min,
        mean_weight_max=thresholds.mean_weight_max,
        ess_min=thresholds.ess_min,
        ess_share_min=thresholds.ess_share_min,
    )
    outcomes = _sample_of(requests, answered, np.array([each.outcome for each in requests]), seed)
    dollars = _sample_of(requests, answered, np.array([each.usd for each in requests]), seed)
    gain, usd_gain = (terms(one, settings)["dr"][0] - one.rewards for one in (outcomes, dollars))
    questions = [each.question for each in requests]
    categories = np.array([each.category for each in requests])
    gains = {}
    for name in sorted(set(categories)):
        mine = np.flatnonzero(categories == name)
        gains[str(name)] = bootstrap_mean(gain[mine], [questions[n] for n in mine], seed=seed), len(mine)
    return Estimates(
        report=estimate(outcomes, settings, seed=seed),
        gain=bootstrap_mean(gain, questions, seed=seed),
        gains=gains,
        usd=bootstrap_mean(dollars.rewards, questions, seed=seed),
        usd_gain=bootstrap_mean(usd_gain, questions, seed=seed),
        valid=ShareCount(sum(own.plan is not None for own in answered), len(answered), "plans"),
        valid_logged=float(np.mean([each.first.row.parsed for each in requests])),
    )


def _sample_of(
    requests: Sequence[LoggedRequest], answered: Sequence[CandidateReply], paid: Floats, seed: int
) -> LoggedSample:
    questions = [each.question for each in requests]
    was = [_keys(each, each.first.read(each.first.row.plan_text or "")) for each in requests]
    would = [_keys(each, own.plan) for each, own in zip(requests, answered, strict=True)]
    q_logged, q_new = np.zeros(len(requests)), np.zeros(len(requests))
    fold = fold_of(questions, FOLDS, seed)
    for held_out in range(FOLDS):
        validation, fit = np.flatnonzero(fold == held_out), np.flatnonzero(fold != held_out)
        if len(validation):
            fit = fit if len(fit) else validation  # a single question: nothing else to learn from
            table = RewardTable([was[n] for n in fit], paid[fit])
            q_logged[validation] = [table.value(was[n]) for n in validation]
            q_new[validation] = [table.value(would[n]) for n in validation]
    weights_log = np.array([own.weight_log for own in answered])
    return LoggedSample(paid, weights_log, q_logged, q_new, questions)


def _keys(request: LoggedRequest, plan: Plan | None) -> tuple[Hashable, ...]:
    """What the reward model knows of a plan, the most specific first. A refused plan is a plan of its own kind."""
    if plan is None:
        return ("refused",)
    workers, category = request.first.workers(plan), request.category
    access = tuple(step.see for step in plan.steps)
    return (category, workers, access), (category, workers), (category, workers[-1:]), workers[-1:]


# ---------------------------------------------------------------- the verdict


def checks(log: Log, replayed: ReplayCount, figures: Estimates | None, thresholds: Thresholds) -> list[Check]:
    """The checks in their order. `figures` None: no request was reweighted."""
    validity = validity_of(replayed, thresholds)
    if figures is None:
        why = f"no request of the log can be reweighted: {log.reasons() or 'none is there'}"
        todo = "collect logs that can be reweighted"
        if validity.verdict == "refused":
            why, todo = "not asked: too few of its plans are valid", "see the check above"
        return [validity, *(cannot_say(name, why, todo) for name in AFTER_VALIDITY)]
    support = [_sampled_validity(figures, thresholds), *_support(figures.report, thresholds)]
    trusted = [check.verdict in GOOD for check in support[1:]]
    if support[0].verdict == "refused" or not all(trusted):
        why = "no estimate can be trusted before the checks above pass"
        values = [cannot_say(name, why, "see the checks above") for name in AFTER_VALIDITY[-2:]]
        return [validity, *support, *values]
    return [validity, *support, *_values(figures, thresholds)]


def validity_of(replayed: ReplayCount, thresholds: Thresholds) -> Check:
    """Share of the candidate's own plans for logged prompts that may run."""
    name = "plan_validity"
    if not replayed.asked:
        return cannot_say(name, "no logged prompt can be replayed", "collect logs under today's prompt and grammar")
    todo = "look at the refused plans; train with the grammar mask on, for fewer steps, or from the live weights"
    return share_check(name, ShareCount(replayed.valid, replayed.asked, "plans"), thresholds.valid_min, todo=todo)


def _sampled_validity(figures: Estimates, thresholds: Thresholds) -> Check:
    """The same of plans sampled as the log's were, beside the log's own: exploring must stay possible."""
    least = min(thresholds.valid_min, figures.valid_logged) - thresholds.parse_drop_max
    todo = "its plans break off once they are sampled: train at temperature 1 with the grammar mask on"
    note = f" (the log's {figures.valid_logged:.3f})"
    return share_check("sampled_validity", figures.valid, least, note=note, todo=todo)


def _support(report: OffPolicyReport, thresholds: Thresholds) -> list[Check]:
    weight, rows = report.mean_weight, report.rows
    mean = f"{weight.value:.3f}, 95 % from {weight.low:.3f} to {weight.high:.3f}, n {rows}"
    nearer = "it does what the log has none of: collect logs of versions nearer to it, or train for fewer steps"
    low, high = thresholds.mean_weight_min, thresholds.mean_weight_max
    if rows < thresholds.ess_min and not low <= weight.value <= high and weight.low <= high and weight.high >= low:
        few = f"too few rows to tell: log about {math.ceil(thresholds.ess_min):,} requests and more at temperature 1"
        first = cannot_say("mean_weight", mean, few, f"at least {low:.4g} and at most {high:.4g}")
    else:
        first = bounded("mean_weight", weight.value, low, high, mean, nearer)
    kl = f"{report.kl:.3f} nats a request"
    nats = bounded("kl_to_behaviour", report.kl, -math.inf, thresholds.kl_max, kl, nearer)
    return [first, _sample_size(report, thresholds, nearer), nats]


def _sample_size(report: OffPolicyReport, thresholds: Thresholds, nearer: str) -> Check:
    """A small share of the rows says that the candidate is far from the log; a small number alone, that the log is."""
    name, rows, share = "effective_sample_size", report.rows, report.ess / report.rows
    figure = f"{report.ess:.0f} of {rows} requests ({share:.0%})"
    threshold = f"at least {thresholds.ess_min:.0f}, and {thresholds.ess_share_min:.0%} of the requests"
    if report.ess >= thresholds.ess_min and share >= thresholds.ess_share_min:
        return Check(name, "passed", figure, threshold)
    if share < thresholds.ess_share_min and rows >= thresholds.ess_min:
        return Check(name, "refused", figure, threshold, nearer)
    more = max(1, math.ceil(thresholds.ess_min / max(share, thresholds.ess_share_min)) - rows)
    return Check(
        name, "undecided", figure, threshold, f"about {more:,} more requests at temperature 1 would decide", more=more
    )


def _values(figures: Estimates, thresholds: Thresholds) -> list[Check]:
    todo = "it would have earned less on this traffic: train longer, or on more of it"
    rows = figures.report.rows
    verdicts = [not_worse("doubly_robust", figures.gain, thresholds.logged_margin, rows, todo)]
    if set(figures.gains) != {""}:
        verdicts += _categories(figures, thresholds)
    return [*verdicts, _price(figures, thresholds)]


def _categories(figures: Estimates, thresholds: Thresholds) -> list[Check]:
    """One check for each category with enough requests, and one for all the others together."""
    least, margin = thresholds.category_rows_min, thresholds.category_margin
    todo = "it would have earned less on these: look at who was called for them, and put more of them in training"
    verdicts = [
        not_worse(f"doubly_robust[{name or 'no task type'}]", gain, margin, rows, todo)
        for name, (gain, rows) in figures.gains.items()
        if rows >= least
    ]
    if few := [rows for _, rows in figures.gains.values() if rows < least]:
        what = f"{len(few)} categories with {sum(few)} requests"
        verdicts.append(cannot_say("doubly_robust[small categories]", what, f"too few rows: {least} of each would do"))
    return verdicts


def _price(figures: Estimates, thresholds: Thresholds) -> Check:
    """Refuse a candidate that is surely dearer than allowed and not better."""
    was, gain = figures.usd.value, figures.usd_gain
    threshold = f"at most {thresholds.usd_ratio_max:.4g} × the log's dollars, unless it is better"
    figure = f"${1000 * (was + gain.value):.4g} per 1,000 beside the log's ${1000 * was:.4g}"
    dearer = was + gain.low > was * thresholds.usd_ratio_max
    better = figures.gain.low > 0
    verdict: Verdict = "refused" if dearer and not better else "passed"
    todo = "raise the price of a dollar in the reward, or lower the dial" if verdict == "refused" else ""
    return Check("price", verdict, figure, threshold, todo)


def facts(log: Log, figures: Estimates | None, source: str) -> dict[str, Any]:
    """Return for the report what was read, what was left out, and every estimate."""
    report: dict[str, Any] = {
        "source": source,
        "policy_versions": list(log.versions),
        "requests": len(log.requests),
        "planning_calls": len(log.calls),
        "left_out": dict(log.left_out),
    }
    if figures is None:
        return report
    return report | {
        "report": asdict(figures.report),
        "gain": asdict(figures.gain),
        "gain_by_category": {name: {**asdict(gain), "n": n} for name, (gain, n) in figures.gains.items()},
        "usd_per_1k": 1000 * figures.usd.value,
        "usd_per_1k_gain": 1000 * figures.usd_gain.value,
    }
