"""Policy versions on the request path: which version plans a request, and whether the engines hold it.

Every gateway reads the state from the registry every `poll_s`, and keeps the last state while the registry is away. A
request waits for nothing: it uses the state that was read last. A version counts only while every engine holds it and
has proven it, so a swap is the change of one reference. Loading runs in its own tasks and never delays the polling.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from tenacity import AsyncRetrying, retry_if_result, wait_fixed

from gateway.core.policies.versions import SERVED, Pick, Standing, Version, pick, picked
from gateway.errors import BatonError, Conflict, EngineDown, VersionRefused
from gateway.service.ports.policies import PolicyEngine, PolicyMetrics, PolicyRegistry
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.versions")
WHO = "gateway"
# faults of this host or of its engine, not of the version, so the registry does not change
LOCAL_REASONS = ("missing", "full", "propensity", "tokenizer")
MISSING_S = 10.0  # after which weights that were on no shelf, or had no room, are tried again
LOADING = "is loading it"


@dataclass(frozen=True, slots=True)
class VersionLimits:
    """`poll_s`: the seconds after which a change by another gateway is seen. `check_s`: the seconds after which the
    restart of an engine is seen. `unload_s`: the seconds after its last use when a version is unloaded. `exclusive`:
    the engine holds one version at a time."""

    poll_s: float = 0.5
    check_s: float = 1.0
    unload_s: float = 180.0
    exclusive: bool = False


class PolicyVersions:
    """Follows the versions of the policy `name`. One object serves the whole process; call `run` in a task."""

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
        self._again_s: dict[str, float] = {}  # of a refusal for missing weights: when to look again
        self._placed: set[str] = set()  # of an exclusive engine: versions whose directories are here
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._unwanted_s: dict[str, float] = {}
        self._read = False
        self._engine_up = False
        self._checked_s = float("-inf")

    # ------------------------------------------------------------ for a request: these never wait

    def pick(self, request_id: str) -> Pick | None:
        """The version that plans this request, or None if no version can."""
        return pick(self._now, self._usable, request_id)

    def by_name(self, name: str) -> Pick | None:
        """The version of a name such as `conductor@7`. None unless it is live, the canary, or the one before the live
        one, and every engine holds it."""
        ids = {version.id for version in self._now.asked_for}
        return self._usable.get(name) if name in ids else None

    def names(self) -> list[str]:
        """The names that `by_name` accepts now."""
        return [version.id for version in self._now.asked_for if version.id in self._usable]

    @property
    def shadow(self) -> Pick | None:
        """The shadow version, or None if there is none or an engine does not hold it."""
        return self._usable.get(self._now.shadow.id) if self._now.shadow else None

    @property
    def standing(self) -> Standing:
        """The versions that serve, as read last."""
        return self._now

    def holds(self, version: str) -> bool:
        """Whether every engine holds the version and has proven it."""
        return version in self._usable

    def report(self) -> dict[str, str]:
        """Each serving version, with an empty text where this gateway can serve it, else the reason why it cannot."""
        able = {*self._usable, *(self._placed if self._limits.exclusive else ())}
        ids = (version.id for version in self._now.held)
        return {name: "" if name in able else self._refused.get(name, LOADING) for name in ids}

    async def ready(self) -> bool:
        """Whether every serving version is either held or refused. True also if no engine answers: then a router
        plans."""
        settled = all(version.id in self._usable or version.id in self._refused for version in self._wanted())
        return self._read and (settled or not self._engine_up)

    async def serves(self) -> bool:
        """Whether the engines answered last time, and some version plans."""
        return self._engine_up and (self.pick("") is not None or self._now.live is None)

    # ------------------------------------------------------------ for an operator

    async def admit(self, version: Version) -> None:
        """Load a version into every engine before it serves. Raises VersionRefused, EngineDown, and Conflict(prompt) if
        this gateway renders another prompt."""
        if picked(version) is None:
            trained = version.manifest.get("prompt_version")
            problem = f"{version.id} was trained on prompt {trained}, which this gateway does not render"
            raise Conflict(problem, code="prompt")
        if self._limits.exclusive:
            return  # here loading is the swap itself, and happens when the registry changes
        self._refused.pop(version.id, None)
        await self._load_here(version)

    async def _load_here(self, version: Version) -> None:
        """Load a version into every engine. One that is full unloads the version that nothing has wanted for longest,
        and is asked again. Raises VersionRefused, EngineDown."""
        place = await self._registry.place(version)
        try:
            await self._engine.load(version.id, place)
        except VersionRefused as refusal:
            if refusal.reason != "full" or (oldest := await self._least_wanted()) is None:
                raise
            log.info("%s makes room for %s", oldest, version.id)
            await self._engine.unload(oldest)
            self._unwanted_s.pop(oldest, None)
            await self._engine.load(version.id, place)

    async def _least_wanted(self) -> str | None:
        """The loaded version that nobody serves for longest; None where each one is served or being loaded."""
        served = {version.id for version in self._wanted()} | self._loading.keys()
        idle = {name for name in await self._engine.loaded() if name.startswith(f"{self.name}@")} - served
        now_s = self._clock.monotonic_s()
        return min(sorted(idle), key=lambda name: self._unwanted_s.get(name, now_s), default=None)

    def check_share(self, percent: int) -> None:
        """Raises Conflict(one_version) if the engine cannot serve two versions at once."""
        if self._limits.exclusive and percent != 100:
            problem = "this engine holds one version at a time: make it the canary of 100 %, or use a second engine"
            raise Conflict(problem, code="one_version")

    # ------------------------------------------------------------ following

    async def run(self) -> None:
        """Follow the registry for ever. No error ends it."""
        while True:
            try:
                await self.sync()
            except Exception as bug:  # boundary: no error may end the polling; the last state stays in use
                log.error("policy versions cannot be followed: %s", bug, exc_info=not isinstance(bug, BatonError))
            await asyncio.sleep(self._limits.poll_s)

    async def start(self, limit_s: float) -> None:
        """Follow until every serving version is held or refused, for at most `limit_s` seconds. Call `run`
        afterwards."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                poll = wait_fixed(self._limits.poll_s / 10)
                await AsyncRetrying(retry=retry_if_result(lambda settled: not settled), wait=poll)(self._settled)

    async def sync(self) -> None:
        """Read the registry, and check the engine if a change or `check_s` requires it. Load and unload accordingly."""
        try:
            now = await self._registry.standing(self.name)
        except BatonError as error:
            if not self._read:
                raise
            log.warning("the registry of versions is away (%s); what was live stays live", error.message)
            now = self._now
        changed = _states(now) != _states(self._now)
        self._now, self._read = now, True
        if changed or self._clock.monotonic_s() - self._checked_s >= self._limits.check_s:
            await self._check_engine()
        self._metrics.policy_standing(self._now, self._usable.keys())

    async def close(self) -> None:
        """Cancel every load."""
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    async def _settled(self) -> bool:
        self._checked_s = float("-inf")
        try:
            await self.sync()
        except BatonError as error:
            log.warning("policy versions cannot be read yet: %s", error.message)
            return False
        return not self._loading and await self.ready()

    def _wanted(self) -> tuple[Version, ...]:
        """The versions that the engines should hold."""
        now = self._now
        if self._limits.exclusive:
            only = now.canary if now.canary is not None and now.canary.percent == 100 else now.live
            return () if only is None else (only,)
        return now.held

    async def _check_engine(self) -> None:
        """Compare what the engine holds with what it should hold. Load and unload accordingly."""
        self._checked_s = self._clock.monotonic_s()
        versions = {version.id: version for version in self._wanted()}
        try:
            loaded = await self._engine.loaded()
            self._engine_up = True
        except EngineDown as error:
            if self._engine_up:
                log.warning("%s", error.message)
            self._engine_up = False
            return
        self._refused = {name: reason for name, reason in self._refused.items() if name in versions}
        self._usable = {name: choice for name, choice in self._usable.items() if name in versions and name in loaded}
        for name, version in versions.items():
            if name not in self._usable and self._may_load(name) and name not in self._loading:
                self._loading[name] = asyncio.create_task(self._load(version), name=f"load {name}")
        if self._limits.exclusive:
            self._fetch(versions)
        else:
            await self._unload(loaded, versions)

    def _may_load(self, name: str) -> bool:
        again_s = self._again_s.get(name, float("inf"))
        return name not in self._refused or self._clock.monotonic_s() >= again_s

    def _fetch(self, loading: Container[str]) -> None:
        """Bring the directories of versions here that the engine may be asked to load next."""
        self._placed &= {version.id for version in self._now.held}
        for version in self._now.held:
            if version.id not in loading and version.id not in self._placed and version.id not in self._loading:
                self._loading[version.id] = asyncio.create_task(self._place(version), name=f"fetch {version.id}")

    async def _place(self, version: Version) -> None:
        try:
            await self._registry.place(version)
            self._placed.add(version.id)
        except BatonError as error:  # the next check tries again
            log.warning("%s is not here yet: %s", version.id, error.message)
        finally:
            self._loading.pop(version.id, None)

    async def _load(self, version: Version) -> None:
        """Load a version and make it usable, or refuse it. Until then the previous version stays in use."""
        try:
            choice = picked(version)
            if choice is None:
                problem = f"{version.id} was trained on a prompt that this gateway does not render"
                raise VersionRefused("prompt", problem)
            await self._load_here(version)
            self._refused.pop(version.id, None)
            self._placed.add(version.id)
            if version.id in {one.id for one in self._wanted()}:
                self._usable = {**self._usable, version.id: replace(choice, by_name=not self._limits.exclusive)}
        except VersionRefused as refusal:
            await self._refuse(version, refusal)
        except BatonError as error:  # the engine is away or starting; the next check tries again
            log.warning("%s is not loaded yet: %s", version.id, error.message)
        finally:
            self._loading.pop(version.id, None)

    async def _refuse(self, version: Version, refusal: VersionRefused) -> None:
        """Record a refusal, and take the version out of service. Weights that are missing here are looked for again."""
        if refusal.reason in ("missing", "full"):
            self._again_s[version.id] = self._clock.monotonic_s() + MISSING_S
        if self._refused.get(version.id) == refusal.message:
            return
        self._refused[version.id] = refusal.message
        self._metrics.policy_refused(version.id)
        log.error("%s is refused: %s", version.id, refusal.message)
        if refusal.reason in LOCAL_REASONS:
            return
        try:
            await self._registry.note(version, "refused", by=WHO, why=refusal.message)
            await self._withdraw(version, refusal.message)
        except BatonError as error:  # another gateway was first, there is no previous version, or the registry is away
            log.info("%s: %s", version.id, error.message)

    async def _withdraw(self, version: Version, why: str) -> None:
        """Take a refused version out of service: retire a shadow, roll back a canary or a live version."""
        if version.state == "shadow":
            await self._registry.move(version.id, "retired", by=WHO, why=why)
        elif version.state in SERVED:
            await self._registry.rollback(version.id, by=WHO, why=why, cause="refused")
            self._metrics.policy_rolled_back("refused")

    async def _unload(self, loaded: set[str], versions: Mapping[str, Version]) -> None:
        """Unload the versions that have been unwanted for `unload_s`, so that no request can still be using them."""
        now_s = self._clock.monotonic_s()
        idle = {name for name in loaded if name.startswith(f"{self.name}@")} - versions.keys() - self._loading.keys()
        self._unwanted_s = {name: self._unwanted_s.get(name, now_s) for name in idle}
        for name in sorted(idle):
            if now_s - self._unwanted_s[name] >= self._limits.unload_s:
                self._unwanted_s[name] = now_s
                with suppress(VersionRefused, EngineDown):  # the engine has no other version, or is away: try later
                    await self._engine.unload(name)


def _states(standing: Standing) -> set[tuple[str, str, int | None]]:
    """(id, state, percent) of every version that the engines hold."""
    return {(version.id, version.state, version.percent) for version in standing.held}
