"""Wire what follows drift: the watch over workers, quarantine, and probes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

from gateway.adapters.journal.series import WorkerSeries
from gateway.adapters.postgres.credit import PostgresJudgements
from gateway.adapters.postgres.operators.drift import PostgresDrift
from gateway.adapters.postgres.reports.checks import PostgresChecks
from gateway.adapters.redis.rests import RedisRests
from gateway.config.serving import listed
from gateway.core.pool.breaker import RestRules
from gateway.core.pool.drift import DriftRules, Signal
from gateway.service.admin.checkers import CheckerWatch
from gateway.service.loop.health.breakers import Breakers
from gateway.service.policies.drift import WorkerWatch
from gateway.service.policies.probes import ProbeLimits, Probes
from gateway.service.policies.quarantine import QuarantineRules, Quarantines
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Journal, Workers
from gateway.service.request.catalog import Catalog
from gateway.service.request.fitting import Held, held
from gateway.wiring.base import Base, Watch


@dataclass(frozen=True, slots=True)
class DriftParts:
    """The watches over workers and checkers, the quarantines, their store, and the probes."""

    watch: WorkerWatch
    quarantines: Quarantines
    store: PostgresDrift
    probes: Probes
    checkers: CheckerWatch
    rests: Breakers

    @property
    def out(self) -> Held:
        """The workers that plans do without: in quarantine, or at rest."""
        return partial(held, self.quarantines.of, self.rests.of)

    def watches(self, alone: bool) -> dict[str, Watch]:
        """What runs beside the traffic, by name."""
        own: dict[str, Watch] = {"workers": self.quarantines.run}
        return own | ({"probes": self.probes.run} if alone else {})


def drift_of(base: Base, catalog: Catalog, workers: Workers, budgets: Budgets, journal: Journal) -> DriftParts:
    """Wire it."""
    settings, engine, series = base.settings, base.connections.background, WorkerSeries(base.metrics.registry)
    rules = DriftRules(settings.drift_reference, settings.drift_run_length)
    watch = WorkerWatch(PostgresJudgements(engine), catalog.worker_names, base.clock, series, rules)
    base.metrics.tell(watch.finished)
    signals = listed(settings.drift_quarantine_signals) if settings.drift_quarantine == "flagged" else ()
    store, acts = PostgresDrift(engine), QuarantineRules(frozenset(cast(tuple[Signal, ...], signals)))
    quarantines = Quarantines(store, watch, catalog.workers, base.clock, series, acts)
    limits = ProbeLimits(settings.drift_probe_nano_per_day)
    probes = Probes(quarantines, workers, budgets, journal, base.clock, series, limits)
    checkers = CheckerWatch(PostgresChecks(engine), catalog.has_checkers, base.clock)
    rests = base.watching("rests", rests_of(base, catalog, series))
    return DriftParts(watch, quarantines, store, probes, base.watching("checkers", checkers), rests)


def rests_of(base: Base, catalog: Catalog, series: WorkerSeries) -> Breakers:
    """The breakers of workers, shared over Redis."""
    settings = base.settings
    rules = RestRules(settings.worker_failures_max, settings.worker_rest_s, settings.worker_rest_s_max)
    store = base.closing(RedisRests(base.services.redis_url, deadline_s=settings.redis_timeout_s))
    return Breakers(base.clock, rules, store, series, catalog.workers)
