"""How far this gateway's log is from a retraining: the countdown of `baton train status`, and what a job would lack."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.policies.holdout import HELD_OUT_SHARE
from gateway.core.policies.jobs import JobSpec
from gateway.core.policies.readiness import REQUESTS_MIN, JudgedRequest, Readiness, missing_text, needs_of, readiness
from gateway.core.policies.versions import Version
from gateway.errors import BatonError, Conflict
from gateway.service.ports.request import Clock

LOOK_S, LOOK_AGAIN_S = 10.0, 600.0  # while there are too few requests, and afterwards
TRAINABLE_ENOUGH = round(REQUESTS_MIN / (1 - HELD_OUT_SHARE))  # of them the latest are the gate's
LOGGED = JobSpec({"env": "logged"})
log = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """What is known of this gateway beside its log. `simulated`: its workers are the arena's; `ships`: it has weights
    to begin with before any version is live; `prompt_hash`: of the prompt that its conductor is asked with; `share`: of
    a new log's requests, those that can be trained on."""

    simulated: bool
    ships: bool
    prompt_hash: str | None
    share: float


class TrainingCheck:
    """Counts what a job needs. `judged`: the judged requests of the log, by prompt and filters; `live`: the version of
    a policy that plans. Every call raises Unavailable when PostgreSQL is away."""

    def __init__(
        self,
        judged: Callable[[str | None, Mapping[str, Any]], Awaitable[Sequence[JudgedRequest]]],
        live: Callable[[str], Awaitable[Version | None]],
        clock: Clock,
        facts: TrainingFacts,
    ) -> None:
        self._judged = judged
        self._live = live
        self._clock = clock
        self._facts = facts

    async def readiness(self, policy: str, spec: JobSpec = LOGGED) -> Readiness:
        """What the log has for a job of this spec, by default `--env logged`."""
        live, facts = await self._live(policy), self._facts
        needs = needs_of(spec, simulated=facts.simulated)
        prompt_hash = (live.manifest.get("prompt_hash") if live else None) or facts.prompt_hash
        judged: Sequence[JudgedRequest] = ()
        if needs.requests or needs.questions:
            judged = await self._judged(None if spec.train.get("init") else prompt_hash, needs.filters)
        weights = live is not None or facts.ships
        return readiness(judged, needs, self._clock.now(), share=facts.share, weights=weights)

    async def require(self, policy: str, spec: JobSpec) -> None:
        """Raises Conflict with all that a job of this spec lacks."""
        found = await self.readiness(policy, spec)
        if found.missing:
            raise Conflict(missing_text(found.missing, found.countdown), code="not_trainable")


class Shortage:
    """Whether the log has too few requests to train on. `short` is false before anything was judged, so that traffic
    without outcomes explores no more than its base share."""

    def __init__(self, trainable: Callable[[int], Awaitable[int | None]]) -> None:
        self._trainable = trainable
        self.short = False

    async def look(self) -> float:
        """Count again; the seconds until the next look. Raises Unavailable."""
        count = await self._trainable(TRAINABLE_ENOUGH)
        self.short = count is not None and count < TRAINABLE_ENOUGH
        return LOOK_AGAIN_S if count is not None and not self.short else LOOK_S

    async def run(self) -> None:
        """Look for ever. With the store away the last reading stands."""
        while True:
            pause_s = LOOK_S
            try:
                pause_s = await self.look()
            except BatonError as error:
                log.warning("requests to train on are not counted now: %s", error.message)
            await asyncio.sleep(pause_s)
