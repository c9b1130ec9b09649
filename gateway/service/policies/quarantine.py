"""Quarantine: a worker that became worse is kept out of plans, until an operator or its probes release it.

The state is in the store, so all gateways agree: each reads it every 15 s. While the store is away the last state
stands. What a quarantine means for one request is in `service/request/fitting.py`: it never takes away the last worker
that could serve, and a worker that a client names is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.access.audit import Act
from gateway.core.pool.drift import Signal
from gateway.core.pool.release import ReleaseTest
from gateway.core.pool.workers import MODEL_KINDS, WorkerSpec
from gateway.errors import BadRequest, BatonError, Conflict, NotFound
from gateway.service.policies.drift import SINCE, WorkerWatch, drift_line
from gateway.service.ports.drift import DriftStore, Quarantine
from gateway.service.ports.request import Clock

log = logging.getLogger("baton.drift")
EVERY_S = 15.0
BY_RULE = "rule:drift"
FACTS_DEFAULT, FACTS_MAX = 100, 1_000


@dataclass(frozen=True, slots=True)
class QuarantineRules:
    """`signals`: a flag of one of these puts its worker in quarantine; none: only operators do."""

    signals: frozenset[Signal] = frozenset()


class QuarantineMetrics(Protocol):
    """Shows quarantines and changes of identity."""

    def quarantined(self, workers: Mapping[str, bool]) -> None:
        """Set for each worker of the pool whether it is in quarantine; forget others."""
        ...

    def identity_changed(self, worker: str) -> None:
        """Count a worker that names a model or fingerprint that it did not name before."""
        ...


class Quarantines:
    """What this gateway knows of quarantines. `run` in a task; `holds` answers at once."""

    def __init__(
        self,
        store: DriftStore,
        watch: WorkerWatch,
        workers: Callable[[], Sequence[WorkerSpec]],
        clock: Clock,
        metrics: QuarantineMetrics,
        rules: QuarantineRules,
    ) -> None:
        """`workers`: those of the pool file in use."""
        self.rules = rules
        self.store = store
        self._watch = watch
        self._workers = workers
        self._clock = clock
        self._metrics = metrics
        self._out: dict[tuple[str, str], Quarantine] = {}
        self._ended: set[str] = set()  # ids of those whose end is known here
        self._shown: dict[str, bool] | None = None  # in the metrics
        self._changed = asyncio.Lock()

    def holds(self, spec: WorkerSpec) -> bool:
        """Whether this version of the worker is in quarantine."""
        return (spec.name, spec.version) in self._out

    def of(self, workers: Sequence[WorkerSpec]) -> Sequence[WorkerSpec]:
        """Those of these workers that are in quarantine. Where none is, it costs the same for any number."""
        return [spec for spec in workers if self.holds(spec)] if self._out else ()

    def standing(self) -> Sequence[Quarantine]:
        """The quarantines of workers in the pool, oldest first."""
        return [self._out[spec.name, spec.version] for spec in self._workers() if self.holds(spec)]

    def spec_of(self, quarantine: Quarantine) -> WorkerSpec | None:
        """The worker of a quarantine; None where the pool file has it no more, or in another version."""
        same = (
            spec for spec in self._workers() if (spec.name, spec.version) == (quarantine.worker, quarantine.version)
        )
        return next(same, None)

    async def run(self, every_s: float = EVERY_S) -> None:
        """Learn releases, read outcomes, act on flags, for ever. No error ends it."""
        while True:
            for step in (self.read, self._watch.read, self.act, self.meet):
                try:
                    await step()
                except BatonError as error:
                    log.info("what workers do cannot be followed now: %s", error.message)
                except Exception:  # boundary: watching workers is not worth a gateway
                    log.exception("what workers do cannot be followed")
            await asyncio.sleep(every_s)

    async def read(self) -> None:
        """Take over what is in the store. Raises Unavailable."""
        async with self._changed:
            rows = await self.store.standing(self._clock.now() - SINCE)
            self._out = {(row.worker, row.version): row for row in rows if row.ended_at is None}
            for row in rows:
                if row.ended_at is not None and row.id not in self._ended:
                    self._ended.add(row.id)
                    self._watch.released(row.worker, row.version, row.ended_at, anew=row.anew)
            self._ended &= {row.id for row in rows}
        self._show()

    async def act(self) -> None:
        """Store the flags that came since the last call, and put workers in quarantine by rule. Raises Unavailable;
        then the flags are taken again."""
        fresh = self._watch.fresh
        while fresh:
            flag, at = fresh[0]
            await self.store.flagged(flag, at)
            if flag.signal in self.rules.signals:
                act = Act(BY_RULE, drift_line(flag))
                if await self.store.put(flag.worker, flag.version, ReleaseTest.of(flag), at, act):
                    log.warning("worker %s (version %s) is in quarantine", flag.worker, flag.version)
            fresh.popleft()
        await self.read()

    async def meet(self) -> None:
        """Store the identities that were seen since the last call. Raises Unavailable; then they are taken again."""
        identities = self._watch.seen()
        for one in await self.store.meet(identities, self._clock.now()):
            what = one.model or "the model that it is asked for"
            log.warning("worker %s now names %s, fingerprint %s", one.worker, what, one.fingerprint or "none")
            self._metrics.identity_changed(one.worker)
        self._watch.met(identities)

    # ------------------------------------------------------------ operators

    async def report(self, limit: int) -> dict[str, Any]:
        """{rule, quarantines, facts, identities} as JSON. Raises Unavailable."""
        await self.read()
        names = [spec.name for spec in self._workers()]
        return {
            "rule": {"signals": sorted(self.rules.signals)},
            "quarantines": [as_json(one) for one in self.standing()],
            "facts": [dict(one) for one in await self.store.facts(limit)],
            "identities": [dict(one) for one in await self.store.identities(names)],
        }

    async def put(self, worker: str, act: Act) -> dict[str, Any]:
        """Put a worker in quarantine by hand. Raises NotFound, BadRequest for one that is no model, Unavailable."""
        spec = self._spec(worker)
        if spec.kind not in MODEL_KINDS:
            raise BadRequest(f"worker `{worker}` is no model; take it out of the pool file", param="worker")
        await self.store.put(spec.name, spec.version, None, self._clock.now(), act)
        await self.read()
        return as_json(self._out[spec.name, spec.version])

    async def release(self, worker: str, act: Act, *, anew: bool = False) -> dict[str, Any]:
        """End the quarantine of a worker. `anew`: what it does from now on is usual; else it is compared with what it
        did before its flag, and may be flagged again. Raises NotFound, Conflict where it is in none, Unavailable."""
        spec = self._spec(worker)
        ended = await self.store.release(spec.name, spec.version, self._clock.now(), act, anew=anew)
        if ended is None:
            raise Conflict(f"worker `{worker}` (version {spec.version}) is not in quarantine", code="no_quarantine")
        await self.read()
        return as_json(ended)

    def _spec(self, worker: str) -> WorkerSpec:
        spec = next((spec for spec in self._workers() if spec.name == worker), None)
        if spec is None:
            raise NotFound(f"No worker `{worker[:128]}` in the pool file.", code="worker_not_found")
        return spec

    def _show(self) -> None:
        models = [spec for spec in self._workers() if spec.kind in MODEL_KINDS]
        standing = {spec.name: self.holds(spec) for spec in models}
        if standing != self._shown:
            self._shown = standing
            self._metrics.quarantined(standing)


def as_json(quarantine: Quarantine) -> dict[str, Any]:
    """A quarantine as JSON data for people and scripts; times are ISO 8601, dollars are text."""
    ended = quarantine.ended_at
    return {
        "worker": quarantine.worker,
        "version": quarantine.version,
        "at": quarantine.at.isoformat(),
        "by": quarantine.by,
        "why": quarantine.why,
        "probes": quarantine.probes,
        "probes_nano": quarantine.nano,
        "flags": [
            {
                "task_type": test.task_type or None,
                "signal": test.signal,
                "usual": round(test.usual, 4),
                "now": round(test.now, 4),
                "probes": test.probes,
                "bad": round(test.bad / test.probes, 4) if test.probes else None,
                "passed": test.passed,
            }
            for test in quarantine.tests
        ],
        "ended_at": None if ended is None else ended.isoformat(),
        "ended_by": quarantine.ended_by,
        "ended_why": quarantine.ended_why,
    }
