"""What a search learns from: every worker's recorded or live answer to every training question, and its checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.errors import ConfigError
from policy.environments.base import Prompt
from policy.environments.executor import ExecutedEnvironment
from policy.environments.replay import ReplayEnvironment
from policy.environments.sampling import SamplingProgress
from policy.statistics.tuning import CheckResult, Observation, observe

Say = Callable[[str], None]


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
    joined = []
    for prompt, each in zip(prompts, observed, strict=True):
        checks = environment.checks(prompt)
        joined.append(replace(each, checks={n: CheckResult(c.valid, c.cost_nano) for n, c in checks.items()}))
    return joined


def progress_of(say: Say, what: str) -> Callable[[SamplingProgress], None]:
    """Say how far a sampling is, every thousand episodes."""

    def progress(now: SamplingProgress) -> None:
        if now.done == now.total or now.done % 1_000 == 0:
            say(f"{what}: {now.done}{f' of {now.total}' if now.total else ''}, {now.elapsed_s:.0f} s")

    return progress
