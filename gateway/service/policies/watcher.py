"""Automatic rollback: compares the canary with the live version, and a fresh live version with the one before it.

Each look takes the latest requests of both from the log and asks `core/policies/watch.py`. Several gateways may look
at once: the registry takes the first rollback and calls the others illegal moves.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import timedelta

from gateway.core.policies.versions import Version
from gateway.core.policies.watch import Figures, Margins, Verdict, judge
from gateway.errors import BatonError, Conflict
from gateway.service.policies.versions import Versions
from gateway.service.ports.policies import PolicyMetrics, PolicyRegistry
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.versions")
WHO = "watcher"
SAME_CHANGE = timedelta(seconds=30)  # one transaction writes both


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """`look_s`: pause between looks. `window_s`: how far back, and `latest`: how many requests of each version.
    `probation_s`: how long a version that became live is compared with the one before it."""

    look_s: float = 5.0
    window_s: float = 3600.0
    latest: int = 2_000
    probation_s: float = 3600.0
    margins: Margins = field(default_factory=Margins)


class Watcher:
    """`run` it beside the request path."""

    def __init__(
        self, versions: Versions, registry: PolicyRegistry, clock: Clock, metrics: PolicyMetrics, limits: WatchLimits
    ) -> None:
        self._versions = versions
        self._registry = registry
        self._clock = clock
        self._metrics = metrics
        self._limits = limits

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(self._limits.look_s)
            try:
                await self.look()
            except BatonError as error:
                log.warning("policy versions cannot be compared now: %s", error.message)
            except Exception as bug:  # boundary: a bug in a comparison must not end all later ones
                log.error("policy versions cannot be compared", exc_info=bug)

    async def look(self) -> Verdict | None:
        """Compare once; roll back what is worse. Returns why, None where nothing was done."""
        pair = self.pair()
        if pair is None:
            return None
        version, other = pair
        verdict = judge(*await self.figures(version, other), self._limits.margins)
        if verdict is None:
            return None
        said = f"{verdict.cause}: {verdict.said} than {other.id}"
        try:
            await self._registry.rollback(version.id, by=WHO, why=said, cause=verdict.cause)
        except Conflict:  # another gateway or a person was as quick
            return None
        log.error("%s was rolled back: %s", version.id, said)
        self._metrics.policy_rolled_back(verdict.cause)
        await self._versions.sync()
        return verdict

    def pair(self) -> tuple[Version, Version] | None:
        """(the version on trial, what it is compared with): the canary, else a live version in its probation."""
        now = self._versions.standing
        if now.canary is not None and now.live is not None:
            return now.canary, now.live
        if now.live is not None and now.previous is not None and self._on_trial(now.live, now.previous):
            return now.live, now.previous
        return None

    async def figures(self, version: Version, other: Version) -> tuple[Figures, Figures]:
        """Of the version on trial since it is in its state; of the other also before that, so that there is always
        something to compare with, a canary of 100 % or a new live version leaving it no requests."""
        window, latest = timedelta(seconds=self._limits.window_s), self._limits.latest
        began = version.created_at if version.state == "canary" else version.changed_at
        mine = await self._registry.figures(
            version.id, since=max(began, self._clock.now() - window), until=None, latest=latest
        )
        before = min(self._clock.now(), version.changed_at) - window
        return mine, await self._registry.figures(other.id, since=before, until=None, latest=latest)

    def _on_trial(self, live: Version, previous: Version) -> bool:
        """Within its probation, if it took the other's place then: what a rollback restored has been live before."""
        replaced_it = previous.changed_at > live.changed_at - SAME_CHANGE
        return replaced_it and self._clock.now() < live.changed_at + timedelta(seconds=self._limits.probation_s)
