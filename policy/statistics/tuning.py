"""Parameters of the baselines, chosen on training prompts: what every single worker did on each, and what follows.

`observe` asks every model worker every prompt through an environment, so it works on recordings, in the arena and on
real workers alike. What a vote or a cascade would have given follows from that exactly, as they only recombine whole
replies; every choice maximises mean outcome less `usd_weight` times dollars a task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, permutations
from statistics import fmean

import numpy as np

from gateway.core.loop.experience.belief import WorkerExperience
from gateway.core.loop.experience.likeness import HASHED, Embedding, question_text
from gateway.core.loop.experience.meaning import TABLE_FILE, by_meaning
from gateway.core.loop.plan import Plan
from gateway.core.loop.replies.answers import extract_answer, normalise
from gateway.core.pool.workers import MODEL_KINDS, NANO_PER_USD
from gateway.files import shipped
from gateway.service.loop.routers import models_of, single
from gateway.service.loop.state import Planner, Situation
from policy.environments.base import Environment, Prompt
from policy.environments.sampling import SamplingProgress, sample
from policy.statistics import baselines
from policy.statistics.baselines import (
    CascadePlanner,
    Categories,
    FallbackPlanner,
    Ladder,
    OneRoundPlanner,
    by_name,
    fixed,
)

VOTERS = (3, 4)
NEIGHBOURS = 50  # training questions behind what is shown of each worker, unless a caller says otherwise
KNN_SIZES = (5, 10, 20, 50)  # neighbours to choose from


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """One worker on one prompt. `answer` is in the form answers are compared in; empty: none was given."""

    outcome: float
    cost_nano: int
    answer: str
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the tool `check` says of a worker's answer, and what that costs."""

    valid: bool
    cost_nano: int


@dataclass(frozen=True, slots=True)
class Observation:
    """One prompt with what each worker did, by name. `checks`: of the workers whose answer can be checked."""

    question: str
    category: str
    results: Mapping[str, WorkerResult]
    checks: Mapping[str, CheckResult] = field(default_factory=dict)


async def observe(
    environment: Environment, prompts: Sequence[Prompt], on_progress: Callable[[SamplingProgress], None] | None = None
) -> list[Observation]:
    """Every model worker of each prompt's pool on it. Prompts that the spending cap left incomplete are dropped."""
    names = [[spec.name for spec in prompt.pool if spec.kind in MODEL_KINDS] for prompt in prompts]
    work = [(prompt, [fixed(name) for name in own]) for prompt, own in zip(prompts, names, strict=True)]
    episodes = await sample(environment, work, on_progress=on_progress)
    return [
        Observation(
            question_text(prompt.messages),
            prompt.category or "",
            {
                name: WorkerResult(
                    episode.outcome, episode.cost_nano, normalise(extract_answer(episode.reply)), episode.latency_s
                )
                for name, episode in zip(own, group, strict=True)
            },
        )
        for prompt, own, group in zip(prompts, names, episodes.groups, strict=False)
        if len(group) == len(own)
    ]


def value(results: Iterable[WorkerResult], usd_weight: float) -> tuple[float, float]:
    """(mean outcome less `usd_weight` times mean dollars, less mean dollars): of equals the cheaper is worth more.
    Raises StatisticsError on none."""
    every = list(results)
    usd = fmean(result.cost_nano for result in every) / NANO_PER_USD
    return fmean(result.outcome for result in every) - usd_weight * usd, -usd


def workers_in(observed: Sequence[Observation]) -> list[str]:
    """Names that every prompt has, sorted. Raises ValueError where no name is common to all."""
    common = set.intersection(*(set(each.results) for each in observed)) if observed else set()
    if not common:
        raise ValueError("no worker was observed on every training prompt: give prompts of one pool")
    return sorted(common)


def ranked(observed: Sequence[Observation], usd_weight: float = 0.0) -> list[str]:
    """Workers by value as single picks, best first; ties to the later name."""
    worth = {name: value((each.results[name] for each in observed), usd_weight) for name in workers_in(observed)}
    return sorted(worth, key=lambda name: (worth[name], name), reverse=True)


def by_category(observed: Sequence[Observation]) -> dict[str, list[Observation]]:
    """The prompts of each category."""
    groups: dict[str, list[Observation]] = {}
    for each in observed:
        groups.setdefault(each.category, []).append(each)
    return groups


def categories(observed: Sequence[Observation]) -> Categories:
    """Return a classifier of questions, fitted to the observed ones."""
    return Categories.fitted([(each.question, each.category) for each in observed])


def table(observed: Sequence[Observation], usd_weight: float = 0.0) -> Planner:
    """Return the table planner with workers by value in each category."""
    best = {category: ranked(group, usd_weight) for category, group in by_category(observed).items()}
    return baselines.table(categories(observed), best)


def vote_result(each: Observation, voters: Sequence[str]) -> WorkerResult:
    """What `voters` and a majority give on a prompt: the earliest reply with the most common answer."""
    results = [each.results[name] for name in voters]
    counts = Counter(result.answer for result in results if result.answer)
    result = max(results, key=lambda result: counts[result.answer])  # the first of equals
    return WorkerResult(result.outcome, sum(result.cost_nano for result in results), result.answer)


def vote(observed: Sequence[Observation], usd_weight: float = 0.0, sizes: Sequence[int] = VOTERS) -> Planner:
    """The voters of the best value, the best of them first, for it decides ties. Raises ValueError on a pool with fewer
    workers than the smallest size."""
    order = ranked(observed)
    sets = [voters for size in sizes for voters in combinations(order, size)]
    if not sets:
        raise ValueError(f"{len(order)} workers are too few for a vote of {min(sizes)}")
    return baselines.vote(
        max(sets, key=lambda voters: value((vote_result(each, voters) for each in observed), usd_weight))
    )


def cascade_result(each: Observation, ladder: Ladder) -> WorkerResult:
    """What a ladder gives on a prompt: the last of `first` where it agrees with an earlier one, else `then`."""
    results = [each.results[name] for name in ladder.first]
    last = results[-1]
    spent = sum(result.cost_nano for result in results)
    if ladder.then is None or (last.answer and any(result.answer == last.answer for result in results[:-1])):
        return WorkerResult(last.outcome, spent, last.answer)
    then = each.results[ladder.then]
    return WorkerResult(then.outcome, spent + then.cost_nano, then.answer)


def ladders_of(names: Sequence[str]) -> list[Ladder]:
    """One worker; or two that must agree, and a third where they do not."""
    pairs = permutations(names, 2)
    two = [Ladder(pair, then) for pair in pairs for then in names if then not in pair]
    return [*(Ladder((name,)) for name in names), *two]


def cascade(observed: Sequence[Observation], usd_weight: float = 0.0) -> CascadePlanner:
    """Return the cascade planner with the best ladder of each category."""
    options = ladders_of(workers_in(observed))
    best = {
        category: max(options, key=lambda ladder: value((cascade_result(each, ladder) for each in group), usd_weight))
        for category, group in by_category(observed).items()
    }
    return CascadePlanner(categories(observed), best)


def moa(observed: Sequence[Observation], usd_weight: float = 0.0, drafts: int = 3) -> Planner:
    """Return the mixture planner: the best worker aggregates, the next best draft."""
    best, *others = ranked(observed, usd_weight)
    return baselines.moa(others[:drafts] or [best], best)


def fallback(observed: Sequence[Observation], usd_weight: float = 0.0) -> Planner:
    """Return the planner of one worker and of another where its answer is empty: the pair of the best value."""
    pairs = list(permutations(workers_in(observed), 2))
    if not pairs:
        return fixed(workers_in(observed)[0])
    return FallbackPlanner(
        *max(pairs, key=lambda pair: value((fallback_result(each, *pair) for each in observed), usd_weight))
    )


def fallback_result(each: Observation, first: str, then: str) -> WorkerResult:
    """What `first` gives on a prompt, and `then` where that is empty."""
    one, other = each.results[first], each.results[then]
    return one if one.answer else WorkerResult(other.outcome, one.cost_nano + other.cost_nano, other.answer)


# ---------------------------------------------------------------- experience


@cache
def served_embedding() -> Embedding:
    """The embedding that a gateway has by default. Raises ConfigError if its table is damaged, OSError if missing."""
    return by_meaning(shipped(TABLE_FILE))


class Nearest:
    """What every worker did on the `k` most similar of the observed questions, by the gateway's embedding.

    Every worker was observed on every question, at no time of its own: so nothing is forgotten, and nearness is rank.

    A client's task type, which the store looks at first, is not used: replayed questions come without one.
    """

    def __init__(self, observed: Sequence[Observation], k: int, embedding: Embedding | None = None) -> None:
        """`embedding`: None for the default of a gateway. Raises ValueError on no questions, or a `k` below 1."""
        if not observed or k < 1:
            raise ValueError(f"needs questions to be near to and k ≥ 1, not {len(observed)} and {k}")
        self._observed = observed
        self._k = k
        self._embed = (embedding or served_embedding()).embed
        self._vectors = np.array([self._embed(each.question) for each in observed])

    def of(self, question: str, without: str | None = None) -> Mapping[str, WorkerExperience]:
        """By worker name. Of equally near questions the first observed count; those that read `without` do not."""
        order = np.argsort(-(self._vectors @ np.array(self._embed(question))), kind="stable")[: 2 * self._k].tolist()
        near = [index for index in order if self._observed[index].question != without][: self._k]
        results: dict[str, list[tuple[float, int, float]]] = {}
        for index in near:
            for name, result in self._observed[index].results.items():
                results.setdefault(name, []).append((result.outcome, result.cost_nano, result.latency_s * 1000))
        return {name: _mean(name, results_of) for name, results_of in results.items()}


def _mean(name: str, results: Sequence[tuple[float, int, float]]) -> WorkerExperience:
    success, cost, latency_ms = (sum(column) / len(results) for column in zip(*results, strict=True))
    return WorkerExperience(name, len(results), success, round(cost), round(latency_ms))


def knn(observed: Sequence[Observation], usd_weight: float = 0.0) -> Planner:
    """Return the planner of the worker that was worth most on the most similar questions, by meaning."""
    return _nearest_planner("knn", observed, usd_weight, served_embedding())


def knn_words(observed: Sequence[Observation], usd_weight: float = 0.0) -> Planner:
    """The same by words: the hashed embedding."""
    return _nearest_planner("knn-words", observed, usd_weight, HASHED)


def _nearest_planner(name: str, observed: Sequence[Observation], usd_weight: float, embedding: Embedding) -> Planner:
    """k nearest neighbours (Hu et al., arXiv:2403.12031), with the `k` of the best value on the observed questions,
    each left out of its own neighbours."""
    by_k = {k: Nearest(observed, k, embedding) for k in KNN_SIZES}

    def worth(k: int) -> tuple[float, float]:
        near = ((each, by_k[k].of(each.question, without=each.question)) for each in observed)
        return value(
            (each.results[_worthiest(experience, each.results, usd_weight)] for each, experience in near), usd_weight
        )

    near = by_k[max(KNN_SIZES, key=worth)]

    def choose(situation: Situation) -> Plan:
        experience = near.of(question_text(situation.conversation))
        offered = [spec.name for spec in models_of(situation)]
        return single(by_name(situation, [_worthiest(experience, offered, usd_weight)])[0])

    return OneRoundPlanner(name, choose)


def _worthiest(experience: Mapping[str, WorkerExperience], names: Iterable[str], usd_weight: float) -> str:
    """The worker of the best value by experience; one without any is worth nothing. Ties to the later name."""

    def worth(name: str) -> tuple[float, float, str]:
        if name not in experience:
            return -math.inf, 0.0, name
        usd = experience[name].cost_nano_mean / NANO_PER_USD
        return experience[name].success_mean - usd_weight * usd, -usd, name

    return max(names, key=worth)
