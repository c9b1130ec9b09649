"""Policy versions as the request path sees them: which one plans this request, and are the engines holding it.

State is read from the registry every `poll_s`, by every gateway, and kept while the registry is away. A request asks
nobody: it reads what the last look found. A version counts only while the engines hold it, proven; so a swap is the
flip of one reference. Loading runs beside the following, never in front of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from gateway.core.policies.versions import SERVED, Pick, Standing, Version, pick, picked
from gateway.errors import BatonError, Conflict, EngineDown, VersionRefused
from gateway.service.ports.policies import PolicyEngine, PolicyMetrics, PolicyRegistry
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.versions")
WHO = "gateway"
LOCAL_REASONS = ("missing",)  # of this host, not of the version: the registry is left alone


@dataclass(frozen=True, slots=True)
class VersionLimits:
    """`poll_s`: how late a change made elsewhere may be seen. `check_s`: how late a restart of an engine may be. What
    nobody asks for any more is unloaded `unload_s` later. `exclusive`: the engine holds one version at a time."""

    poll_s: float = 0.5
    check_s: float = 1.0
    unload_s: float = 180.0
    exclusive: bool = False


class Versions:
    """The versions of one policy `name`, followed. One for the whole process; `run` it beside the request path."""

    def __init__(
        self,
        registry: PolicyRegistry,
        engine: PolicyEngine,
        clock: Clock,
        metrics: PolicyMetrics,
        *,
        name: str = "conductor",
        limits: VersionLimits | None = None,
    ) -> None:
        self.name = name
        self._registry = registry
        self._engine = engine
        self._clock = clock
        self._metrics = metrics
        self._limits = limits or VersionLimits()
        self._now = Standing()
        self._usable: Mapping[str, Pick] = {}
        self._refused: dict[str, str] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._unwanted_s: dict[str, float] = {}
        self._read = False
        self._engine_up = False
        self._checked_s = float("-inf")

    # ------------------------------------------------------------ for a request: no waiting

    def pick(self, request_id: str) -> Pick | None:
        """The version that plans this request; None where no version can."""
        return pick(self._now, self._usable, request_id)

    def asked(self, version: str) -> Pick | None:
        """A version asked for by its number (`conductor@7`): the live one, the canary, or the one before the live."""
        known = {one.id for one in self._now.asked_for}
        return self._usable.get(version) if version in known else None

    def names(self) -> list[str]:
        """What may be asked for by number now."""
        return [one.id for one in self._now.asked_for if one.id in self._usable]

    @property
    def shadow(self) -> Pick | None:
        """The version that plans beside the others, where there is one and the engines hold it."""
        return self._usable.get(self._now.shadow.id) if self._now.shadow else None

    @property
    def standing(self) -> Standing:
        """Who serves, as last read."""
        return self._now

    def held(self, version: str) -> bool:
        """Whether every engine holds it, proven."""
        return version in self._usable

    async def ready(self) -> bool:
        """Whether everything that serves is held or refused. An engine that does not answer does not count against it:
        then a router plans."""
        settled = all(one.id in self._usable or one.id in self._refused for one in self._wanted())
        return self._read and (settled or not self._engine_up)

    async def serving(self) -> bool:
        """Whether the engines answered when last asked, and some version plans."""
        return self._engine_up and (self.pick("") is not None or self._now.live is None)

    # ------------------------------------------------------------ for an operator

    async def admit(self, version: Version) -> None:
        """Load a version into every engine before it is given anything to do. Raises VersionRefused, EngineDown,
        Conflict where this gateway renders another prompt or the engine holds one version only."""
        if picked(version) is None:
            trained = version.manifest.get("prompt_version")
            raise Conflict(f"{version.id} was trained on prompt {trained}, which is not rendered here", code="prompt")
        if self._limits.exclusive:
            return  # loading is the swap itself; it follows the registry
        self._refused.pop(version.id, None)
        await self._engine.load(version.id, self._registry.directory(version))

    def check_share(self, percent: int) -> None:
        """Raises Conflict where the engine cannot serve two versions at once."""
        if self._limits.exclusive and percent != 100:
            said = "this engine holds one version at a time: make it the canary of 100 %, or use a second engine"
            raise Conflict(said, code="one_version")

    # ------------------------------------------------------------ following

    async def run(self) -> None:
        """Follow for ever, whatever goes away meanwhile."""
        while True:
            try:
                await self.sync()
            except Exception as bug:  # boundary: nothing may stop the following; the last state goes on serving
                log.error("policy versions cannot be followed: %s", bug, exc_info=not isinstance(bug, BatonError))
            await asyncio.sleep(self._limits.poll_s)

    async def start(self, limit_s: float) -> None:
        """Follow until everything that serves is settled, at most so long; `run` goes on from there."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not await self._settled():  # noqa: ASYNC110 - neither registry nor engine tells us
                    await asyncio.sleep(self._limits.poll_s / 10)

    async def sync(self) -> None:
        """Look at the registry, and at the engine when it is time; load and unload what follows."""
        try:
            now = await self._registry.standing(self.name)
        except BatonError as error:
            if not self._read:
                raise
            log.warning("the registry of versions is away (%s); what was live stays live", error.message)
            now = self._now
        changed = {(one.id, one.state, one.percent) for one in now.held} != {
            (one.id, one.state, one.percent) for one in self._now.held
        }
        self._now, self._read = now, True
        if changed or self._clock.monotonic_s() - self._checked_s >= self._limits.check_s:
            await self._look_at_engine()
        self._metrics.policy_standing(self._now, self._usable.keys())

    async def close(self) -> None:
        """Stop loading."""
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    async def _settled(self) -> bool:
        self._checked_s = float("-inf")
        try:
            await self.sync()
        except BatonError as error:
            log.warning("policy versions are not known yet: %s", error.message)
            return False
        return not self._loading and await self.ready()

    def _wanted(self) -> tuple[Version, ...]:
        """What the engines should hold."""
        now = self._now
        if self._limits.exclusive:
            only = now.canary if now.canary is not None and now.canary.percent == 100 else now.live
            return () if only is None else (only,)
        return now.held

    async def _look_at_engine(self) -> None:
        self._checked_s = self._clock.monotonic_s()
        wanted = {one.id: one for one in self._wanted()}
        try:
            loaded = await self._engine.loaded()
            self._engine_up = True
        except EngineDown as error:
            if self._engine_up:
                log.warning("%s", error.message)
            self._engine_up = False
            return
        self._refused = {one: said for one, said in self._refused.items() if one in wanted}
        self._usable = {one: how for one, how in self._usable.items() if one in wanted and one in loaded}
        for one, version in wanted.items():
            if one not in self._usable and one not in self._refused and one not in self._loading:
                self._loading[one] = asyncio.create_task(self._load(version), name=f"load {one}")
        if not self._limits.exclusive:
            await self._unload(loaded, wanted)

    async def _load(self, version: Version) -> None:
        """Make a version usable, or refuse it and let what was before it go on."""
        try:
            how = picked(version)
            if how is None:
                raise VersionRefused("prompt", f"{version.id}: the prompt it was trained on is not rendered here")
            await self._engine.load(version.id, self._registry.directory(version))
            if version.id in {one.id for one in self._wanted()}:
                self._usable = {**self._usable, version.id: replace(how, by_name=not self._limits.exclusive)}
        except VersionRefused as refused:
            await self._refuse(version, refused)
        except BatonError as error:  # an engine that is away or starting: looked at again soon
            log.warning("%s is not loaded yet: %s", version.id, error.message)
        finally:
            self._loading.pop(version.id, None)

    async def _refuse(self, version: Version, refused: VersionRefused) -> None:
        self._refused[version.id] = refused.message
        self._metrics.policy_refused(version.id)
        log.error("%s is refused: %s", version.id, refused.message)
        if refused.reason in LOCAL_REASONS:
            return
        try:
            await self._registry.note(version, "refused", by=WHO, why=refused.message)
            await self._give_up(version, refused.message)
        except BatonError as error:  # decided by another gateway, or nothing to go back to, or away
            log.info("%s: %s", version.id, error.message)

    async def _give_up(self, version: Version, why: str) -> None:
        """A refused version takes no part: a shadow retires, a canary and a live one are rolled back."""
        if version.state == "shadow":
            await self._registry.move(version.id, "retired", by=WHO, why=why)
        elif version.state in SERVED:
            await self._registry.rollback(version.id, by=WHO, why=why, cause="refused")
            self._metrics.policy_rolled_back("refused")

    async def _unload(self, loaded: set[str], wanted: Mapping[str, Version]) -> None:
        """Let go of what has been wanted by nobody for so long that no request can still be on its way to it."""
        now_s = self._clock.monotonic_s()
        idle = {one for one in loaded if one.startswith(f"{self.name}@")} - wanted.keys() - self._loading.keys()
        self._unwanted_s = {one: self._unwanted_s.get(one, now_s) for one in idle}
        for one in sorted(idle):
            if now_s - self._unwanted_s[one] >= self._limits.unload_s:
                self._unwanted_s[one] = now_s
                with suppress(VersionRefused, EngineDown):  # held where it has nothing else; away: looked at again
                    await self._engine.unload(one)
