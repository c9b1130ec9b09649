"""When a policy is trained again by itself: after so many new outcomes, or after so long. Off where neither is set."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.adapters.postgres.jobs import JobStore
from gateway.core.policies.jobs import Job, JobSpec, read_spec
from gateway.errors import Conflict

log = logging.getLogger("policy.jobs")
BY = "schedule"


@dataclass(frozen=True, slots=True)
class Schedule:
    """`outcomes_min`: this many judged outcomes since the last job; `every_s`: so long since it, if anything was judged
    meanwhile. 0: not by that. `spec`: what is then submitted."""

    policy: str
    outcomes_min: int
    every_s: float
    spec: JobSpec

    @property
    def on(self) -> bool:
        """Whether it is ever due."""
        return self.outcomes_min > 0 or self.every_s > 0


def due(schedule: Schedule, last: datetime | None, outcomes: int, now: datetime) -> bool:
    """Whether to train now. `last`: when the last job was submitted, None: never; `outcomes`: since then."""
    if outcomes == 0:
        return False
    enough = schedule.outcomes_min > 0 and outcomes >= schedule.outcomes_min
    long_ago = last is None or (now - last).total_seconds() >= schedule.every_s
    return enough or (schedule.every_s > 0 and long_ago)


async def check(schedule: Schedule, store: JobStore) -> Job | None:
    """Submit a job when one is due; None when it is not, or the policy has one. Raises Unavailable."""
    last, outcomes = await store.news(schedule.policy)
    if not schedule.on or not due(schedule, last, outcomes, datetime.now(UTC)):
        return None
    try:
        job = await store.submit(schedule.policy, schedule.spec, BY)
    except Conflict:
        return None
    log.info("job %s of %s submitted: %d new outcomes", job.id, schedule.policy, outcomes)
    return job


def schedule_of(policy: str, outcomes_min: int, every_s: float, arguments: list[str], auto: bool) -> Schedule:
    """Raises BadRequest for arguments that no job could have."""
    return Schedule(policy, outcomes_min, every_s, read_spec({"arguments": arguments, "auto": auto}))
