"""Automatic rollback: compares the canary with the live version, and a new live version with the previous one.

Each comparison reads the latest requests of both versions from the log, and `core/policies/watch.py` judges them.
Several gateways may compare at once: the registry accepts the first rollback and rejects the others as illegal moves.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import timedelta

from gateway.core.policies.versions import Version
from gateway.core.policies.watch import Figures, Margins, Verdict, judge
from gateway.errors import BatonError, Conflict
from gateway.service.policies.versions import PolicyVersions
from gateway.service.ports.policies import PolicyMetrics, PolicyRegistry
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.versions")
WHO = "watcher"
SAME_CHANGE = timedelta(seconds=30)  # one transaction changes both versions


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """`look_s`: the seconds between comparisons. `window_s`: the age, in seconds, and `latest`: the number of requests
    of each version that a comparison reads. `probation_s`: the seconds for which a new live version is compared with
    the previous one."""

    look_s: float = 5.0
    window_s: float = 3600.0
    latest: int = 2_000
    probation_s: float = 3600.0
    margins: Margins = field(default_factory=Margins)


class Watcher:
    """Compares versions and rolls back the worse one. Call `run` in a task."""

    def __init__(
        self,
        versions: PolicyVersions,
        registry: PolicyRegistry,
        clock: Clock,
        metrics: PolicyMetrics,
        limits: WatchLimits,
    ) -> None:
        self._versions = versions
        self._registry = registry
        self._clock = clock
        self._metrics = metrics
        self._limits = limits

    async def run(self) -> None:
        """Compare for ever, every `look_s` seconds."""
        while True:
            await asyncio.sleep(self._limits.look_s)
            try:
                await self.look()
            except BatonError as error:
                log.warning("policy versions cannot be compared now: %s", error.message)
            except Exception as bug:  # boundary: a bug in one comparison must not end the later ones
                log.error("policy versions cannot be compared", exc_info=bug)

    async def look(self) -> Verdict | None:
        """Compare once, and roll back a version that is worse. Returns the verdict, or None without a rollback."""
        pair = self.pair()
        if pair is None:
            return None
        version, other = pair
        verdict = judge(*await self.figures(version, other), self._limits.margins)
        if verdict is None:
            return None
        reason = f"{verdict.cause}: {verdict.said} than {other.id}"
        try:
            await self._registry.rollback(version.id, by=WHO, why=reason, cause=verdict.cause)
        except Conflict:  # another gateway or an operator was faster
            return None
        log.error("%s was rolled back: %s", version.id, reason)
        self._metrics.policy_rolled_back(verdict.cause)
        await self._versions.sync()
        return verdict

    def pair(self) -> tuple[Version, Version] | None:
        """(the version on trial, the version to compare it with): the canary and the live version, or a live version on
        probation and the previous one. None if there is no such pair."""
        now = self._versions.standing
        if now.canary is not None and now.live is not None:
            return now.canary, now.live
        if now.live is not None and now.previous is not None and self._on_trial(now.live, now.previous):
            return now.live, now.previous
        return None

    async def figures(self, version: Version, other: Version) -> tuple[Figures, Figures]:
        """The figures of the version on trial since it got its state, and of the other version also from before that.
        So there is always something to compare with, even if a canary of 100 % or a new live version takes all
        requests."""
        window, latest = timedelta(seconds=self._limits.window_s), self._limits.latest
        began = version.created_at if version.state == "canary" else version.changed_at
        on_trial = await self._registry.figures(
            version.id, since=max(began, self._clock.now() - window), until=None, latest=latest
        )
        before = min(self._clock.now(), version.changed_at) - window
        return on_trial, await self._registry.figures(other.id, since=before, until=None, latest=latest)

    def _on_trial(self, live: Version, previous: Version) -> bool:
        """Whether `live` replaced `previous` and is still on probation. A version that a rollback restored is not."""
        replaced_it = previous.changed_at > live.changed_at - SAME_CHANGE
        return replaced_it and self._clock.now() < live.changed_at + timedelta(seconds=self._limits.probation_s)
