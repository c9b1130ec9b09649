"""The warm start for recorded questions, whole: observe, search, write lessons, teach, seal a policy directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from gateway.errors import ConfigError
from policy.environments.base import Prompt
from policy.environments.executor import ExecutedEnvironment
from policy.environments.replay import ReplayEnvironment
from policy.environments.sampling import SamplingProgress
from policy.evaluate.options import NEIGHBOURS
from policy.start.recorded.lessons import PROFILE, Posing, lessons
from policy.start.recorded.programs import Choices, Worth, search
from policy.start.recorded.school import SHAPE, Schooling, SchoolReport, teach
from policy.start.synthetic.export import About, export
from policy.statistics.tuning import CheckResult, Nearest, Observation, observe

ROUNDS = 3  # ask, escalate or settle, ship
EPISODES_A_QUESTION = 7
EPISODES_MIN, EPISODES_MAX = 4_000, 12_000
Say = Callable[[str], None]


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
    worth: Worth
    quality: int


def observed_of(environment: ExecutedEnvironment, prompts: Sequence[Prompt], say: Say) -> list[Observation]:
    """Every worker on every question, with what checks say of it. Raises ConfigError where that leaves nothing to
    learn."""
    observed = asyncio.run(observe(environment, prompts, progress_of(say, "asking every worker")))
    if isinstance(environment, ReplayEnvironment):
        observed = with_checks(environment, prompts, observed)
    rights = {result.outcome for each in observed for result in each.results.values()}
    if len(rights) < 2:
        kind = "right" if rights == {1.0} else "wrong"
        raise ConfigError(
            f"every worker is {kind} on every training question: nothing can be learnt from {len(observed)} such "
            "questions; give harder or other ones"
        )
    return observed


def with_checks(
    environment: ReplayEnvironment, prompts: Sequence[Prompt], observed: Sequence[Observation]
) -> list[Observation]:
    """The same with the recorded checks of each question."""
    found = []
    for prompt, each in zip(prompts, observed, strict=True):
        checks = environment.checks(prompt)
        found.append(replace(each, checks={n: CheckResult(c.valid, c.cost_nano) for n, c in checks.items()}))
    return found


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
    told = asyncio.run(
        lessons(environment, prompts, choices, posing, episodes, settings.seed, progress_of(say, "writing lessons"))
    )
    model, tokenizer = teach(told, settings.school, lambda report: say(_line(report)))
    quality = worth.affordable(dial, settings.usd_per_1k_max / 1000)
    about = About(
        name="conductor",
        version="0",
        seed=settings.seed,
        data=f"{len(told)} lessons from programs searched on {len(observed)} questions",
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


def progress_of(say: Say, what: str) -> Callable[[SamplingProgress], None]:
    """Say how far a sampling is, every thousand episodes."""

    def progress(now: SamplingProgress) -> None:
        if now.done == now.total or now.done % 1_000 == 0:
            say(f"{what}: {now.done}{f' of {now.total}' if now.total else ''}, {now.elapsed_s:.0f} s")

    return progress


def _line(report: SchoolReport) -> str:
    exact = "" if report.exact is None else f", {report.exact:.0%} of held-out plans exactly as taught"
    return f"teaching: step {report.step} of {report.steps}, loss {report.loss:.3f}, {report.elapsed_s:.0f} s{exact}"
