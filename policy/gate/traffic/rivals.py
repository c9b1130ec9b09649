"""Contestants on the user's own work: self-consistency at the candidate's dollars, the oracle over single workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from gateway.core.loop.replies.agreement import majority
from gateway.errors import ConfigError
from policy.environments.base import Episode, Prompt, fraction
from policy.environments.sampling import CONCURRENCY, SamplingProgress, sample
from policy.evaluate.contest import PartialResults, ProgressPrinter, QuestionResult
from policy.evaluate.entrants import FIXED, ORACLE, Entrant
from policy.evaluate.figures import accuracy, affordable, best_of, usd_1k
from policy.evaluate.stages import digest_of
from policy.gate.traffic.asking import UNGRADED
from policy.gate.traffic.stage import OpenTraffic
from policy.statistics.baselines import fixed

SELF_CONSISTENCY = "self-consistency"
SAMPLES_MAX = 32
Results = Mapping[str, Sequence[QuestionResult]]


def samples_of(prompts: Sequence[Prompt], single_usd: float, candidate_usd: float, seed: int) -> list[int]:
    """How often each question is asked, so that all together cost what the candidate cost: the next whole numbers below
    and above the ratio, by a hash of the question. At least once, at most SAMPLES_MAX times."""
    ratio = candidate_usd / single_usd if single_usd else SAMPLES_MAX
    count = min(max(ratio, 1.0), float(SAMPLES_MAX))
    whole = math.floor(count)
    return [whole + (fraction(SELF_CONSISTENCY, seed, prompt.id) < count - whole) for prompt in prompts]


async def self_consistency(
    traffic: OpenTraffic, results: Results, seed: int, partial: PartialResults, say: ProgressPrinter
) -> list[QuestionResult]:
    """The best single worker that costs no more than the candidate, asked several times, and the majority of its
    answers. Raises CallsEnded in a group."""
    singles = {name: rows for name, rows in results.items() if name.startswith(FIXED)}
    name, prompts = best_of(affordable(singles, usd_1k(results["candidate"]))), traffic.stage.prompts
    counts = samples_of(prompts, usd_1k(results[name]), usd_1k(results["candidate"]), seed)
    ids = [prompt.id for prompt in prompts]
    key = digest_of([SELF_CONSISTENCY, name, counts, ids, traffic.stage.facts])[:32]
    if rows := partial.rows(key):
        return rows
    what = f"{SELF_CONSISTENCY} of {name.removeprefix(FIXED)}"

    def progress(now: SamplingProgress) -> None:
        say.progress(what, now)

    planner = fixed(name.removeprefix(FIXED))
    work = [(prompt, [planner] * count) for prompt, count in zip(prompts, counts, strict=True)]
    episodes = await sample(traffic.stage.environment, work, concurrency=CONCURRENCY, on_progress=progress)
    rows = [_voted(prompt, group) for prompt, group in zip(prompts, episodes.groups, strict=True)]
    partial.keep(key, rows)
    say.done(f"{what}: {fmean(counts):.2f} samples a question, right {accuracy(rows):.3f}")
    return rows


def _voted(prompt: Prompt, group: Sequence[Episode]) -> QuestionResult:
    """The result of the majority: its outcome, everybody's cost."""
    every = [QuestionResult.of(prompt, episode) for episode in group]
    row = every[majority([episode.reply for episode in group])]
    return replace(
        row,
        cost_nano=sum(one.cost_nano for one in every),
        latency_s=max(one.latency_s for one in every),
        calls=sum(one.calls for one in every),
        workers=tuple(worker for one in every for worker in one.workers),
        error=next((one.error for one in every if one.error == UNGRADED), row.error),
    )


def oracle_rows(results: Results) -> list[QuestionResult]:
    """Of each question the cheapest single worker of those that are most right: full information, for no policy."""
    singles = [results[name] for name in sorted(results) if name.startswith(FIXED)]
    return [max(rows, key=lambda row: (row.outcome, -row.cost_nano)) for rows in zip(*singles, strict=True)]


async def completed(
    traffic: OpenTraffic, results: Results, seed: int, partial: PartialResults, say: ProgressPrinter
) -> dict[str, list[QuestionResult]]:
    """The results with self-consistency and the oracle, without questions on which a contestant's reply could not be
    graded. Raises CallsEnded in a group, and ConfigError where no question is left."""
    sampled = await self_consistency(traffic, results, seed, partial, say)
    every: dict[str, list[QuestionResult]] = {name: list(rows) for name, rows in results.items()}
    every[SELF_CONSISTENCY] = sampled
    ungraded = {row.prompt_id for rows in every.values() for row in rows if row.error == UNGRADED}
    traffic.leave_out("ungraded", len(ungraded))
    left = {name: [row for row in rows if row.prompt_id not in ungraded] for name, rows in every.items()}
    if not left["candidate"]:
        raise ConfigError("no reply could be graded: see that the graders' references and the judge are right")
    return {**left, ORACLE: oracle_rows(left)}


def sampled_entrant() -> Entrant:
    """What the report calls self-consistency."""
    return Entrant(SELF_CONSISTENCY, "router", SELF_CONSISTENCY)
