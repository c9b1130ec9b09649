"""Which workers rest now: the breakers of this gateway, which it shares with the others on its Redis.

Each call of a worker passes `leave` before it goes and `ended` at its end. `of` names the workers that a plan should
do without: those that rest, that another call tries just now, or that let calls wait in silence. It never names every
model: somebody has to answer, so the likeliest one stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from gateway.core.pool.breaker import (
    HEALTHY,
    Fault,
    Health,
    RestRules,
    abandoned,
    failed,
    fault_of,
    newer,
    succeeded,
    tried,
)
from gateway.core.pool.workers import BUILTINS, MODEL_KINDS, WorkerSpec
from gateway.errors import BatonError, UpstreamError, UpstreamRateLimited, UpstreamResting
from gateway.service.ports.pools import NO_STORE, RestMetrics, RestStore
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.rests")
EXCHANGE_S = 1.0
UNPROVEN_MAX = 2  # calls that wait at a worker which has never answered yet
UNANSWERED_MAX = 4  # calls that wait at any other before its silence is looked at
SILENT_S_MIN, SILENT_FACTOR = 1.0, 4.0  # silence is odd after this time, and after so many times the usual one
USUAL_SHARE = 0.2  # of the latest call in the usual time
NEVER = RestRules(failures_max=0)
WHY: Mapping[Fault, str] = {
    "failed": "its calls fail",
    "overloaded": "it is overloaded",
    "broken": "its replies are broken",
    "unreachable": "it cannot be reached",
    "forbidden": "it forbids its calls (403)",
    "missing": "it does not know its model or path (404)",
    "slow": "its replies do not end in time",
    "silent": "it does not answer in time",
    "rate_limited": "it is over its rate limit (429)",
    "unpaid": "its account is not paid (402)",
    "key": "its key is refused (401)",
}


def sooner(one: UpstreamError | None, other: BatonError) -> UpstreamError | None:
    """The failure of a worker that a client is told of two: the one that names the shorter wait, else the later one."""
    if not isinstance(other, UpstreamError):
        return one
    if one is None or one.retry_after_s is None or other.retry_after_s is None:
        return other
    return one if one.retry_after_s < other.retry_after_s else other


class Flight:
    """A call on its way. `tries`: the breakers that it tries after a rest."""

    __slots__ = ("heard", "left_s", "place", "spec", "tries")

    def __init__(self, spec: WorkerSpec, place: _Place, left_s: float) -> None:
        self.spec, self.place, self.left_s = spec, place, left_s
        self.heard, self.tries = False, list[str]()


class _Place:
    """The calls at one worker that wait for the first sign of a reply, oldest first, and how long that usually takes;
    `answered_s`: when the latest sign came."""

    __slots__ = ("answered_s", "usual_s", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Flight, None] = {}
        self.answered_s: float | None = None
        self.usual_s = 0.0

    def is_silent(self, now_s: float) -> bool:
        """Whether so many calls wait that no other should join them."""
        if self.answered_s is None or len(self.waiting) < UNANSWERED_MAX:
            return self.answered_s is None and len(self.waiting) >= UNPROVEN_MAX
        since_s = max(self.answered_s, next(iter(self.waiting)).left_s)
        return now_s - since_s >= max(SILENT_S_MIN, SILENT_FACTOR * self.usual_s)

    def answered(self, flight: Flight, now_s: float) -> None:
        took_s = now_s - flight.left_s
        share = 1.0 if self.answered_s is None else USUAL_SHARE
        self.usual_s += share * (took_s - self.usual_s)
        self.answered_s = now_s


class Breakers:
    """The breakers of all workers, by the ids of `WorkerSpec.place` and `.account`."""

    def __init__(
        self,
        clock: Clock,
        rules: RestRules = NEVER,
        store: RestStore = NO_STORE,
        metrics: RestMetrics = NO_STORE,
        workers: Callable[[], Sequence[WorkerSpec]] = tuple,
    ) -> None:
        """`workers`: those of the pool file in use, for the metrics."""
        self._clock, self._rules, self._store, self._metrics, self._workers = clock, rules, store, metrics, workers
        self._places: dict[str, _Place] = {}
        self._healths: dict[str, Health] = {}  # of those that are not healthy, or were not a moment ago
        self._resting: set[str] = set()
        self._crowded: set[str] = set()  # places where calls wait
        self._unsent: dict[str, Health] = {}
        self._wake = asyncio.Event()

    # ------------------------------------------------------------ who is asked

    def holds(self, spec: WorkerSpec) -> bool:
        """Whether a plan should do without this worker now."""
        if not self._resting and not self._crowded:
            return False
        now_s = self._now_s()
        if (rest := self._rest(spec, now_s)) is not None and rest.holds(now_s):
            return True
        return spec.place in self._crowded and self._places[spec.place].is_silent(now_s)

    def of(self, workers: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        """Those of these workers that a plan should do without; of models never all."""
        if not self._resting and not self._crowded:
            return ()
        out = [spec for spec in workers if self.holds(spec)]
        models = [spec for spec in out if spec.kind in MODEL_KINDS]
        if models and len(models) == sum(spec.kind in MODEL_KINDS for spec in workers):
            out.remove(min(models, key=self._left_s))
        return out

    def without(self, workers: Sequence[WorkerSpec], failed: frozenset[str]) -> Sequence[WorkerSpec]:
        """These workers without those that a plan should do without, where others are left beside those with the
        handles `failed`."""
        if not self._resting and not self._crowded:
            return workers
        out = self.of([spec for spec in workers if spec.handle not in failed])
        return [spec for spec in workers if spec not in out] if out else workers

    def leave(self, spec: WorkerSpec, has_others: Callable[[], bool]) -> Flight:
        """Note that a call is about to leave. Raises UpstreamResting where the worker rests and others can be asked,
        UpstreamRateLimited where its vendor said when to come back; else even a worker that rests is asked."""
        now_s = self._now_s()
        place = self._places.get(spec.place)
        if place is None:
            place = self._places[spec.place] = _Place()
        flight = Flight(spec, place, now_s)
        if self._resting:
            self._enter(flight, has_others, now_s)
        place.waiting[flight] = None
        if len(place.waiting) >= UNPROVEN_MAX and self._rules.failures_max:
            self._crowded.add(spec.place)
        return flight

    def _enter(self, flight: Flight, has_others: Callable[[], bool], now_s: float) -> None:
        for name in {flight.spec.place, flight.spec.account} & self._resting:
            health = self._healths[name]
            if not health.holds(now_s):
                flight.tries.append(name)
            elif has_others():
                raise self._not_asked(UpstreamResting, flight.spec, health, health.left_s(now_s))
            elif health.fault == "rate_limited" and now_s < health.told_s:
                raise self._not_asked(UpstreamRateLimited, flight.spec, health, health.told_s - now_s)
        for name in flight.tries:
            self._put(flight.spec, name, tried(self._healths[name], now_s))

    def _not_asked(self, of: type[UpstreamError], spec: WorkerSpec, health: Health, wait_s: float) -> UpstreamError:
        """The error of a call that does not leave. The request does not try again; its client may, after the wait."""
        error = of(self._line(spec, health, self._now_s()), retryable=False, retry_after_s=wait_s, dispatched=False)
        error.should_retry = True
        return error

    def heard(self, flight: Flight) -> None:
        """Note the first sign of a reply."""
        if not flight.heard:
            flight.heard = True
            self._arrived(flight)
            flight.place.answered(flight, self._now_s())

    def ended(self, flight: Flight, error: BaseException | None = None) -> None:
        """Note how a call ended. A status that blames the request shows that the worker answers."""
        now_s = self._now_s()
        alive = flight.heard or (flight.place.answered_s or 0.0) > flight.left_s
        own = flight.spec.url not in BUILTINS  # those run in this process
        fault = fault_of(error, alive=alive) if isinstance(error, UpstreamError) and own else None
        answers = error is None or (isinstance(error, UpstreamError) and error.upstream_status is not None)
        if answers:
            self.heard(flight)
        else:
            self._arrived(flight)
        if fault is not None and isinstance(error, UpstreamError):
            self._failed(flight, fault, error, now_s)
        elif answers and (self._healths or flight.tries):
            self._succeeded(flight, now_s)
        elif flight.tries:
            for name in flight.tries:
                self._put(flight.spec, name, abandoned(self._healths.get(name, HEALTHY), now_s))

    def _arrived(self, flight: Flight) -> None:
        waiting = flight.place.waiting
        waiting.pop(flight, None)
        if len(waiting) < UNPROVEN_MAX:
            self._crowded.discard(flight.spec.place)

    def _failed(self, flight: Flight, fault: Fault, error: UpstreamError, now_s: float) -> None:
        spec = flight.spec
        name = spec.account if fault in ("unpaid", "key") else spec.place
        before = self._healths.get(name, HEALTHY)
        after = failed(before, fault, flight.left_s, now_s, self._rules, error.retry_after_s)
        for tried_name in flight.tries:
            if tried_name != name:
                self._put(spec, tried_name, abandoned(self._healths.get(tried_name, HEALTHY), now_s))
        self._put(spec, name, after)
        if after.rests > before.rests:
            self._metrics.rested(spec.name, fault)
            log.warning("%s (%s)", self._line(spec, after, now_s), error.in_full)

    def _succeeded(self, flight: Flight, now_s: float) -> None:
        spec = flight.spec
        for name in {spec.place, spec.account}:
            before = self._healths.get(name)
            if before is not None and (before.failures or before.rests):
                after = succeeded(before, flight.left_s, now_s)
                self._put(spec, name, after)
                if before.rests and not after.rests:
                    log.info("worker %s answers again", spec.name)

    # ------------------------------------------------------------ what is known

    def report(self, spec: WorkerSpec) -> dict[str, Any] | None:
        """The rest of a worker as JSON data; None where its breaker is closed."""
        now_s = self._now_s()
        rest = self._rest(spec, now_s)
        if rest is None or rest.fault is None:
            return None
        return {
            "state": rest.state(now_s),
            "reason": rest.fault,
            "why": WHY[rest.fault],
            "failures": rest.failures,
            "since": datetime.fromtimestamp(rest.began_s, UTC).isoformat(),
            "until": datetime.fromtimestamp(rest.until_s, UTC).isoformat(),
        }

    def reasons(self, workers: Sequence[WorkerSpec]) -> dict[str, str]:
        """Why each of these workers is left out now, by its name; those that are not are not in it."""
        now_s = self._now_s()
        found = {spec.name: self._rest(spec, now_s) for spec in workers if self.holds(spec)}
        return {name: "waiting" if rest is None else str(rest.fault) for name, rest in found.items()}

    def _rest(self, spec: WorkerSpec, now_s: float) -> Health | None:
        """The breaker of a worker or of its account that is open, the one that lasts longer."""
        if not self._resting:
            return None
        opened = [self._healths[name] for name in {spec.place, spec.account} & self._resting]
        return max(opened, key=lambda health: (health.holds(now_s), health.until_s), default=None)

    def _left_s(self, spec: WorkerSpec) -> float:
        now_s = self._now_s()
        rest = self._rest(spec, now_s)
        return SILENT_S_MIN if rest is None else rest.left_s(now_s)

    def _line(self, spec: WorkerSpec, health: Health, now_s: float) -> str:
        why = WHY[health.fault or "failed"]
        return f"worker {spec.name} rests for {health.left_s(now_s):.0f} s: {why}"

    def _put(self, spec: WorkerSpec, name: str, health: Health) -> None:
        before = self._healths.get(name, HEALTHY)
        if health == before:
            return
        if health.rests or before.rests:  # the others shall know of it
            health = health._replace(at_s=max(health.at_s, before.at_s + 0.001))
            self._unsent[name] = health
            self._wake.set()
        self._take(name, health)

    def _take(self, name: str, health: Health) -> None:
        self._healths[name] = health
        (self._resting.add if health.rests else self._resting.discard)(name)

    def _now_s(self) -> float:
        return self._clock.now_us() / 1e6

    # ------------------------------------------------------------ between processes and gateways

    async def run(self) -> None:
        """Exchange breakers with the other processes and gateways, for ever. Without the store each has its own."""
        while True:
            try:
                await self.exchange()
            except BatonError as error:
                log.debug("rests of workers are not shared now: %s", error.message)
            except Exception:  # boundary: a breaker of its own is better than no gateway
                log.exception("rests of workers are not shared")
            with suppress(TimeoutError):
                async with asyncio.timeout(EXCHANGE_S):
                    await self._wake.wait()
            self._wake.clear()

    async def exchange(self) -> None:
        """Store what changed here, and take over what changed elsewhere. Raises Unavailable; then it is sent later."""
        unsent, self._unsent = self._unsent, {}
        try:
            stored = await self._store.exchange(unsent)
        except BaseException:  # boundary: whatever kept it from being stored, it is sent again
            self._unsent = {**unsent, **self._unsent}
            raise
        for name, health in stored.items():
            own = self._healths.get(name, HEALTHY)
            if newer(own, health) is health:
                self._take(name, health)
        self._metrics.resting(self._shown())

    def _shown(self) -> dict[str, str]:
        now_s = self._now_s()
        rests = {spec.name: self._rest(spec, now_s) for spec in self._workers() if spec.url not in BUILTINS}
        return {name: str(rest.fault) if rest and rest.holds(now_s) else "" for name, rest in rests.items()}
