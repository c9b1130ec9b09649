"""Lessons out of recorded answers: the programs that a search finds best teach any student with a tokenizer.

The search and the programs are those of the small conductor's warm start (policy/start/recorded). A student that is
given pools of k of the workers under new handles learns to plan by what is shown of a worker, not by its name.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from policy.dataset.refusals import RowRefused
from policy.evaluate.options import NEIGHBOURS
from policy.start.recorded.lessons import PlanLesson, Posing, lessons
from policy.start.recorded.observed import observed_of, progress_of
from policy.start.recorded.programs import Choices, search
from policy.statistics.tuning import Nearest
from policy.train.sources.scene import executor_of, open_replay
from policy.train.sources.taught import DEMONSTRATED, Tutor
from policy.train.spec import TrainSpec
from policy.train.step.rows import TrainingRow

PLACES = 4  # of the dial, at which a posed question is taught: the prompts share a beginning


@dataclass(frozen=True, slots=True)
class Searched:
    """`rows`: lessons; those of one question as posed have one `question`. `dial`: what a dollar costs at each place.
    `quality`: the highest place within the budget. `refused`: lessons left out, by reason."""

    rows: list[TrainingRow]
    refused: Counter[str]
    dial: tuple[float, ...]
    quality: int


def searched(spec: TrainSpec, tutor: Tutor, say: Callable[[str], None]) -> Searched:
    """Search programs on the training questions and write `lessons` about them. Raises ConfigError as `open_replay`
    does, and where every worker is right, or wrong, on every question. Call it outside an event loop."""
    settings = spec.settings
    environment = open_replay(spec, executor_of(spec))
    prompts = environment.prompts("train", min(settings.candidates, environment.count("train")), settings.seed)
    observed = observed_of(environment, prompts, say)
    worth = search(observed)
    say(f"searched {len(worth.programs)} programs on {len(observed)} questions")
    usd_max = settings.usd_per_1k_max / 1000
    prices = worth.prices(usd_max)
    tables = worth.dial(prices, usd_max)
    near = Nearest(observed, NEIGHBOURS) if settings.experience_share else None
    posing = Posing(tutor.profile, near, settings.k_of_n, settings.redraw_handles, PLACES)
    progress = progress_of(say, "writing lessons")
    choices = Choices(worth, tables, prices)
    episodes = asyncio.run(lessons(environment, prompts, choices, posing, settings.lessons, settings.seed, progress))
    rows, refused = _rows(tutor, episodes)
    return Searched(rows, refused, prices, worth.affordable(tables, usd_max))


def _rows(tutor: Tutor, episodes: list[PlanLesson]) -> tuple[list[TrainingRow], Counter[str]]:
    """Each lesson once: a repeated one counts for the small student alone, which needs it more often."""
    rows: list[TrainingRow] = []
    refused: Counter[str] = Counter()
    for lesson in dict.fromkeys(episodes):
        name = f"posed {lesson.posed}"
        try:
            rows.append(tutor.row(lesson.messages, lesson.plan, lesson.allowed, DEMONSTRATED, name, name, ""))
        except RowRefused as error:
            refused[error.reason] += 1
    return rows, refused
