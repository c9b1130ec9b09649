"""When a policy is trained again by itself: after so many new outcomes, or after so long. Off where neither is set."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.adapters.postgres.policies.jobs import JobStore
from gateway.core.policies.jobs import Job, JobSpec
from gateway.errors import BatonError, ConfigError, Conflict

log = logging.getLogger("policy.jobs")
BY = "schedule"


@dataclass(frozen=True, slots=True)
class Schedule:
    """`outcomes_min`: this many judged outcomes since the last job; `every_s`: so long since it, if anything was judged
    meanwhile. 0: not by that. `arguments`, `auto`: what is then submitted."""

    policy: str
    outcomes_min: int = 0
    every_s: float = 0.0
    arguments: tuple[str, ...] = ("--env", "logged")
    auto: bool = False

    @property
    def on(self) -> bool:
        """Whether it is ever due."""
        return self.outcomes_min > 0 or self.every_s > 0

    def spec(self) -> JobSpec:
        """The spec of a job submitted now: what the arguments name, such as a pool file, is read anew. Raises
        ConfigError naming the setting."""
        from policy.jobs.spec import job_spec  # here: a worker without a schedule loads no gate

        try:
            return job_spec(self.arguments, auto=self.auto)
        except BatonError as error:
            raise ConfigError(f"BATON_RETRAIN_ARGUMENTS: {error.message}") from None


def due(schedule: Schedule, last: datetime | None, outcomes: int, now: datetime) -> bool:
    """Whether to train now. `last`: when the last job was submitted, None: never; `outcomes`: since then."""
    if outcomes == 0:
        return False
    enough = schedule.outcomes_min > 0 and outcomes >= schedule.outcomes_min
    long_ago = last is None or (now - last).total_seconds() >= schedule.every_s
    return enough or (schedule.every_s > 0 and long_ago)


async def check(schedule: Schedule, store: JobStore) -> Job | None:
    """Submit a job when one is due; None when it is not, or the policy has one. Raises Unavailable, and ConfigError as
    `Schedule.spec`."""
    last, outcomes = await store.news(schedule.policy)
    if not schedule.on or not due(schedule, last, outcomes, datetime.now(UTC)):
        return None
    try:
        job = await store.submit(schedule.policy, await asyncio.to_thread(schedule.spec), BY)
    except Conflict:
        return None
    log.info("job %s of %s submitted: %d new outcomes", job.id, schedule.policy, outcomes)
    return job
