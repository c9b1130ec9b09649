"""The warm start for recorded questions, whole: observe, search, write lessons, teach, seal a policy directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from policy.environments.base import Prompt
from policy.environments.executor import ExecutedEnvironment
from policy.start.recorded.lessons import PROFILE, Posing, lessons
from policy.start.recorded.observed import Say, observed_of, progress_of
from policy.start.recorded.programs import Choices, ProgramWorth, search
from policy.start.recorded.school import SHAPE, Schooling, SchoolReport, teach
from policy.start.synthetic.export import About, export
from policy.statistics.tuning import NEIGHBOURS, Nearest, Observation

ROUNDS = 3  # ask, escalate or settle, ship
EPISODES_A_QUESTION = 7
EPISODES_MIN, EPISODES_MAX = 4_000, 12_000


@dataclass(frozen=True, slots=True)
class StartSettings:
    """`usd_per_1k_max`: the dial's place where a request sets none is the highest that costs no more."""

    seed: int = 0
    episodes: int | None = None  # None: by the number of questions
    neighbours: int = NEIGHBOURS
    usd_per_1k_max: float = 5.0
    school: Schooling = field(default_factory=Schooling)


@dataclass(frozen=True, slots=True)
class Start:
    """What a warm start found out: GRPO goes on with it."""

    observed: Sequence[Observation]
    worth: ProgramWorth
    quality: int


def warm_start(
    environment: ExecutedEnvironment, prompts: Sequence[Prompt], settings: StartSettings, out: Path, say: Say
) -> Start:
    """Write a policy directory at `out` that plans as the best programs do. Raises ConfigError."""
    observed = observed_of(environment, prompts, say)
    worth = search(observed)
    say(f"searched {len(worth.programs)} programs on {len(observed)} questions")
    prices = worth.prices(settings.usd_per_1k_max / 1000)
    dial = worth.dial(prices, settings.usd_per_1k_max / 1000)
    near = Nearest(observed, settings.neighbours) if settings.neighbours else None
    episodes = settings.episodes or min(max(EPISODES_A_QUESTION * len(prompts), EPISODES_MIN), EPISODES_MAX)
    choices, posing = Choices(worth, dial, prices), Posing(near=near)
    plan_lessons = asyncio.run(
        lessons(environment, prompts, choices, posing, episodes, settings.seed, progress_of(say, "writing lessons"))
    )
    model, tokenizer = teach(plan_lessons, settings.school, lambda report: say(_line(report)))
    quality = worth.affordable(dial, settings.usd_per_1k_max / 1000)
    about = About(
        name="conductor",
        version="0",
        seed=settings.seed,
        data=f"{len(plan_lessons)} lessons from programs searched on {len(observed)} questions",
        command="baton train --env replay (its warm start)",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        profile=PROFILE,
        rounds=ROUNDS,
        quality=quality,
        rollouts=len(observed) * len(observed[0].results) + episodes,
        config={"start": {**asdict(settings), "episodes": episodes}, "settings": {"dial": list(prices)}},
    )
    export(out, {name: tensor.numpy() for name, tensor in model.state_dict().items()}, tokenizer, SHAPE, about)
    return Start(observed, worth, quality)


def _line(report: SchoolReport) -> str:
    exact = "" if report.exact is None else f", {report.exact:.0%} of held-out plans exactly as taught"
    return f"teaching: step {report.step} of {report.steps}, loss {report.loss:.3f}, {report.elapsed_s:.0f} s{exact}"
