"""Which gateways run, and which of them can serve a version: a swap waits until all of them can.

Every gateway writes a heartbeat with the versions that it holds. A gateway whose last heartbeat is older than `SEEN_S`
counts as stopped. Each one also shares the weights it holds, so that another host can fetch them (`PolicyRegistry`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from gateway.core.policies.versions import Holder
from gateway.errors import BatonError, Conflict
from gateway.service.policies.versions import PolicyVersions
from gateway.service.ports.policies import PolicyGateways, PolicyRegistry
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.versions")
BEAT_S = 1.0
SEEN_S = 10.0
LOOK_S = 0.25
SHARED_S = 60.0  # after which a host looks again whether what it shared is still there
UNREAD = "has not read of it yet"


class Attendance:
    """The heartbeat of this gateway and its view of the others. `wait_s`: the seconds that a swap waits for them; 0: it
    does not wait. Call `run` in a task."""

    def __init__(
        self,
        gateways: PolicyGateways,
        registry: PolicyRegistry,
        versions: PolicyVersions,
        clock: Clock,
        *,
        gateway: str,
        host: str,
        wait_s: float,
    ) -> None:
        self._gateways = gateways
        self._registry = registry
        self._versions = versions
        self._clock = clock
        self._gateway = gateway
        self._host = host
        self._wait_s = wait_s
        self._shared_s: dict[str, float] = {}  # when a version was shared last

    async def run(self) -> None:
        """Beat and share for ever, each in a task: an upload may take longer than SEEN_S. No error ends it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_repeat(self.beat, "the heartbeat of this gateway"), name="heartbeat")
            group.create_task(_repeat(self.share, "the copy of weights for other hosts"), name="share weights")

    async def beat(self) -> None:
        """Write one heartbeat. Raises Unavailable."""
        await self._gateways.attend(self._holder())

    async def share(self) -> None:
        """Share the weights that are held here, unless that was done less than SHARED_S ago. Raises Unavailable."""
        held, now_s = self._versions.report(), self._clock.monotonic_s()
        self._shared_s = {name: at_s for name, at_s in self._shared_s.items() if now_s - at_s < SHARED_S}
        for version in self._versions.standing.held:
            if held.get(version.id) == "" and version.id not in self._shared_s:
                await self._registry.share(version)
                self._shared_s[version.id] = self._clock.monotonic_s()

    async def running(self) -> Sequence[Holder]:
        """The gateways that run, this one as it stands now and the others as of their last heartbeats. Raises
        Unavailable."""
        seen = [one for one in await self._gateways.attending(SEEN_S) if one.id != self._gateway]
        return sorted([self._holder(), *seen], key=lambda one: (one.host, one.id))

    async def everywhere(self, version: str) -> None:
        """Wait until every other running gateway can serve the version. Raises Conflict(gateways_lack), which names
        those that cannot and why, Unavailable."""
        until_s = self._clock.monotonic_s() + self._wait_s
        while self._wait_s and (lacking := await self._lacking(version)):
            if self._clock.monotonic_s() >= until_s:
                hosts = "; ".join(f"{one.host}: {one.held.get(version, UNREAD)}" for one in lacking)
                problem = f"{version} is not held by {len(lacking)} gateway(s) after {self._wait_s:g} s ({hosts})"
                raise Conflict(f"{problem}; stop them, or mend it and try again", code="gateways_lack")
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Take this gateway off the list."""
        with suppress(BatonError):
            await self._gateways.leave(self._gateway)

    def _holder(self) -> Holder:
        return Holder(self._gateway, self._host, self._versions.report())

    async def _lacking(self, version: str) -> list[Holder]:
        return [one for one in await self.running() if one.id != self._gateway and one.held.get(version) != ""]


async def _repeat(work: Callable[[], Awaitable[None]], what: str) -> None:
    while True:
        try:
            await work()
        except BatonError as error:
            log.info("%s is not written: %s", what, error.message)
        except Exception:  # boundary: no error may end the heartbeat, or swaps would not wait for this gateway
            log.exception("%s failed", what)
        await asyncio.sleep(BEAT_S)
