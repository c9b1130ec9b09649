"""Lessons out of recorded answers: the programs that a search finds best teach any student with a tokenizer.

The search and the programs are those of the small conductor's warm start (policy/start/recorded). A student that is
given pools of k of the workers under new handles learns to plan by what is shown of a worker, not by its name.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gateway.core.loop.prompt import DIAL
from gateway.errors import ConfigError
from policy.dataset.refusals import RowRefused
from policy.environments.base import Prompt
from policy.start.recorded.lessons import STRAY_SHARE, PlanLesson, Posing, lessons
from policy.start.recorded.observed import observed_of, progress_of
from policy.start.recorded.programs import Choices, ProgramWorth, search
from policy.start.recorded.ranks import ranks
from policy.statistics.tuning import NEIGHBOURS, Nearest, Observation
from policy.train.sources.scene import executor_of, open_replay
from policy.train.sources.taught import DEMONSTRATED, Tutor
from policy.train.spec import TrainSpec
from policy.train.step.rows import TrainingRow

STAFF_MIN = 20  # questions that the same workers answered: programs are not searched on fewer
PLACES = 4  # of the dial, at which a posed question is taught: the prompts share a beginning
ASKING_ON = 3  # times is a later round taught that asks one more worker: it is rare, and all that a fallback has


@dataclass(frozen=True, slots=True)
class Searched:
    """`rows`: lessons; those of one question as posed have one `question`. `dial`: what a dollar costs at each place.
    `quality`: the highest place within the budget. `refused`: lessons left out, by reason."""

    rows: list[TrainingRow]
    refused: Counter[str]
    dial: tuple[float, ...]
    quality: int


@dataclass(frozen=True, slots=True)
class _Staff:
    """Questions that the same workers answered, and what programs over those workers gave."""

    prompts: list[Prompt]
    observed: list[Observation]
    worth: ProgramWorth


def searched(spec: TrainSpec, tutor: Tutor, say: Callable[[str], None]) -> Searched:
    """Search programs on the training questions and write `lessons` about them, for each staff its share, which is that
    of its questions. Programs over names are a staff's own, those over ranks are of all staffs. Raises ConfigError as
    `open_replay` does, where every worker is right, or wrong, on every question, and where no staff has STAFF_MIN
    questions. Call it outside an event loop."""
    settings = spec.settings
    environment = open_replay(spec, executor_of(spec))
    prompts = environment.prompts("train", min(settings.candidates, environment.count("train")), settings.seed)
    observed = observed_of(environment, prompts, say)
    staffs = _staffs(prompts, observed, say)
    usd_max, total = settings.usd_per_1k_max / 1000, sum(len(staff.prompts) for staff in staffs)
    by_rank = tutor.profile == "ranked"
    prices = DIAL if by_rank else _prices(staffs, usd_max)
    near = Nearest(observed, NEIGHBOURS)
    posing = Posing(
        tutor.profile,
        near,
        settings.k_of_n,
        settings.redraw_handles,
        PLACES,
        bare_share=1 - settings.experience_share,
        stray_share=0.0 if by_rank else STRAY_SHARE,
    )
    progress = progress_of(say, "writing lessons")
    rows: list[TrainingRow] = []
    refused: Counter[str] = Counter()
    qualities: list[int] = []
    every = [each for staff in staffs for each in staff.observed]
    shared = ranks(every, near, settings.k_of_n, say) if by_rank else None
    for number, staff in enumerate(staffs):
        choices = shared or _by_name(staff, prices, usd_max)
        qualities.append(choices.affordable(usd_max))
        count = max(1, round(settings.lessons * len(staff.prompts) / total))
        episodes = asyncio.run(lessons(environment, staff.prompts, choices, posing, count, settings.seed, progress))
        taught = _in_proportion(dict.fromkeys(episodes)) if by_rank else list(dict.fromkeys(episodes))
        rows += _rows(tutor, taught, f"staff {number}", refused)
    return Searched(rows, refused, prices, min(qualities))


def _staffs(prompts: Sequence[Prompt], observed: Sequence[Observation], say: Callable[[str], None]) -> list[_Staff]:
    """The questions by who answered them, most questions first. Raises ConfigError where none has enough."""
    members: dict[frozenset[str], list[int]] = {}
    for index, each in enumerate(observed):
        members.setdefault(frozenset(each.results), []).append(index)
    staffs = []
    for names, own in sorted(members.items(), key=lambda item: (-len(item[1]), sorted(item[0]))):
        if len(own) < STAFF_MIN or len(names) < 2:
            say(f"left out: {len(own)} questions that only {len(names)} workers answered: {', '.join(sorted(names))}")
            continue
        theirs = [observed[index] for index in own]
        staffs.append(_Staff([prompts[index] for index in own], theirs, search(theirs)))
        say(f"searched {len(staffs[-1].worth.programs)} programs on {len(own)} questions")
    if not staffs:
        raise ConfigError(
            f"no {STAFF_MIN} training questions were answered by the same two workers or more; give more, or --workers"
        )
    return staffs


def _by_name(staff: _Staff, prices: Sequence[float], usd_max: float) -> Choices:
    return Choices(staff.worth, staff.worth.dial(prices, usd_max), prices)


def _prices(staffs: Sequence[_Staff], usd_max: float) -> tuple[float, ...]:
    """The dial: what a dollar costs at each place, the geometric mean over questions; nothing at the last."""
    weights = [len(staff.prompts) for staff in staffs]
    every = np.array([staff.worth.prices(usd_max)[:-1] for staff in staffs])
    return (*np.exp(np.average(np.log(every), axis=0, weights=weights)).tolist(), 0.0)


def _in_proportion(once: Iterable[PlanLesson]) -> list[PlanLesson]:
    """The lessons, those of later rounds that ask on `ASKING_ON` times."""
    lessons: list[PlanLesson] = []
    for lesson in once:
        asks_on = lesson.allowed.first_index > 0 and any(not step.see for step in lesson.plan.steps)
        lessons += [lesson] * (ASKING_ON if asks_on else 1)
    return lessons


def _rows(tutor: Tutor, lessons: Sequence[PlanLesson], staff: str, refused: Counter[str]) -> list[TrainingRow]:
    rows: list[TrainingRow] = []
    for lesson in lessons:
        name = f"{staff} posed {lesson.posed}"
        try:
            rows.append(tutor.row(lesson.messages, lesson.plan, lesson.allowed, DEMONSTRATED, name, name, ""))
        except RowRefused as error:
            refused[error.reason] += 1
    return rows
