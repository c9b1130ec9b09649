"""The composition root: the only place that knows every adapter. Builds them, wires the use cases, starts and stops.

Order of starting: journal, shipper, balances, then traffic. Stopping runs it backwards. Administration uses the
background's connections: no request waits for it, and it waits for none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from gateway import __version__
from gateway.adapters.host.clock import watch_loop
from gateway.adapters.journal.shipper import Shipper
from gateway.adapters.journal.spool import Spool
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.credit import OldCredit, OldVectors
from gateway.adapters.postgres.operators.alerts import PostgresAlerts
from gateway.adapters.postgres.reports.overview import PostgresReports
from gateway.adapters.postgres.sources import PostgresSources
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.upkeep.days import PostgresDays
from gateway.adapters.redis.budgets import RedisBudgets
from gateway.adapters.upstream.pooled import PooledWorkers
from gateway.api.edge import spec
from gateway.api.edge import stack as edge
from gateway.api.edge.access import Accesses
from gateway.api.edge.headers import with_cors
from gateway.api.edge.health import HealthApi
from gateway.api.edge.idempotency import Idempotency
from gateway.api.public.chat import OpenAIApi, TextsApi
from gateway.api.public.sessions import SessionsApi
from gateway.api.public.tasks import TasksApi
from gateway.config.serving import listed
from gateway.config.settings import Services, Settings
from gateway.core.log.redact import Redactor
from gateway.core.loop.experience.likeness import Embedding
from gateway.core.pool.workers import MODEL_KINDS
from gateway.service.admin.figures import StoreGauges
from gateway.service.admin.housekeeping import Sweep, run_sweeps
from gateway.service.admin.sessions import Sessions
from gateway.service.batches.background import BackgroundRunner
from gateway.service.batches.run import BatchRunner
from gateway.service.money.drift import DriftWatch
from gateway.service.money.recover import Recovery
from gateway.service.money.stores import StoreGuard
from gateway.service.policies.standings import Standings
from gateway.service.ports.background import BackgroundStore
from gateway.service.ports.counts import Count
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Conductor, Journal
from gateway.service.request.admit import no_version
from gateway.service.request.complete import Completer
from gateway.service.request.sticky import Sticky
from gateway.wiring.admin import AdminParts, admin_of, outcomes_api_of
from gateway.wiring.alerts import alert_watches
from gateway.wiring.base import Base, Watch, base_of
from gateway.wiring.batches import BackgroundParts, BatchParts, background_of, batches_of
from gateway.wiring.conductor import (
    ConductorParts,
    PolicyParts,
    catalog_of,
    conductor_of,
    policies_of,
    shortage_of,
)
from gateway.wiring.requests import (
    admission_of,
    auth_of,
    embedder_of,
    idempotency_of,
    lookup_of,
    media_of,
    memory_of,
    money_of,
    openai_of,
    outcomes_of,
    pool_of,
    rounds_of,
    sessions_of,
    shortlist_of,
    states_of,
    sticky_of,
)
from gateway.wiring.shipping import embedding_of, flushed_together, journal_of, ship_left
from gateway.wiring.workers import DriftParts, drift_of

log = logging.getLogger("gateway")
READY_S_MAX = 30.0
SWEEP_S = 60.0


@dataclass(slots=True)
class Bundle:
    """Two applications over one set of adapters, with their start, drain and stop."""

    public: ASGIApp
    admin: ASGIApp
    health: HealthApi
    completer: Completer
    recovery: Recovery
    journal: Spool
    workers: PooledWorkers
    shipper: Shipper
    drain_s: float
    policies: PolicyParts | None
    admin_parts: AdminParts
    idempotency: Idempotency
    sweeps: Mapping[str, Sweep]
    runner: BatchRunner
    background: BackgroundRunner
    watches: Mapping[str, Watch]  # by name; each runs until the gateway stops
    standings: Standings
    alone: bool  # see `Base.alone`
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> None:
        """Ship what the journal holds, rebuild balances, load the versions. Return once money can be reserved."""
        self.shipper.start()
        await self.workers.start()
        self.tasks.append(asyncio.create_task(self.recovery.run(), name="recovery"))
        if self.alone:
            self.tasks.append(asyncio.create_task(run_sweeps(self.sweeps, SWEEP_S), name="sweeping"))
            self.tasks.append(asyncio.create_task(self.admin_parts.housekeeping.run(), name="housekeeping"))
            self.tasks.append(asyncio.create_task(self.admin_parts.pools.note_first(), name="pool revision"))
        self.tasks += [asyncio.create_task(watch(), name=name) for name, watch in self.watches.items()]
        if self.policies is not None:
            await self.policies.versions.start(READY_S_MAX)
            self.tasks += [asyncio.create_task(work, name=name) for name, work in self.policies.tasks().items()]
        with suppress(TimeoutError):  # it answers 503 for money until then
            await asyncio.wait_for(self.recovery.first.wait(), READY_S_MAX)
        self.tasks.append(asyncio.create_task(self.runner.run(), name="batches"))
        self.tasks.append(asyncio.create_task(self.background.run(), name="background"))

    def drain(self) -> None:
        """Turn readiness off; open requests go on."""
        self.health.draining = True

    async def stop(self) -> None:
        """Finish open requests, then close everything, last built first."""
        self.health.draining = True
        runners = self.background.drain(self.drain_s), self.runner.drain(self.drain_s)
        await asyncio.gather(*runners, self.completer.drain(self.drain_s))
        await self.idempotency.drain(self.drain_s)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        with suppress(TimeoutError):  # the rest ships at the next start
            await self.journal.shipped()
        await self.opened.aclose()


async def build(settings: Settings, services: Services) -> Bundle:
    """Wire everything. Raises ConfigError for a configuration that cannot be used; then nothing stays open."""
    async with AsyncExitStack() as opened:
        bundle = await _build(settings, services, opened)
        bundle.opened = opened.pop_all()
    return bundle


async def _build(settings: Settings, services: Services, opened: AsyncExitStack) -> Bundle:
    base = base_of(settings, services, opened)
    clock, pool, embedding = base.clock, pool_of(base), embedding_of(settings)
    redactor, embedder = Redactor(pool.first.secrets.values()), embedder_of(base, embedding)
    conductor, (journal, shipper) = await conductor_of(base, pool), await journal_of(base, embedding)
    budgets, limits, guard = await money_of(base)
    (policies, learned), sticky = policies_of(base, conductor, budgets, journal), sticky_of(base)
    catalog, standings = catalog_of(base, pool.first.pools, conductor, learned, policies)
    drift = drift_of(base, catalog, pool.workers, budgets, journal)
    sessions, memory, planning = sessions_of(base, budgets), memory_of(base), conductor.planning if conductor else None
    completer = Completer(
        catalog=catalog,
        rounds=rounds_of(base, pool.workers, drift.checkers.known, drift.rests),
        budgets=budgets,
        limits=limits,
        journal=journal,
        embedder=embedder,
        clock=clock,
        metrics=base.metrics,
        policies=admission_of(base, planning, shortage_of(base)),
        redactor=redactor,
        sticky=sticky,
        states=states_of(base),
        sessions=sessions,
        shortlist=shortlist_of(base, embedder, memory),
        looks=lookup_of(base, memory, embedder, redactor, catalog, planning),
        media=media_of(base),
        pick=policies.versions.pick if policies else no_version,
        held=drift.out,
    )
    _gauges(base, completer, journal, conductor)
    openai = openai_of(base, completer, catalog, auth := auth_of(base), idempotency := idempotency_of(base))
    health = _health(base, budgets, journal, conductor.conductor if conductor else None, policies)
    background, messages = background_of(base, flushed_together(base, journal), budgets, catalog, openai, redactor)
    judged = outcomes_of(base, flushed_together(base, journal), redactor, memory, limits)
    batches = batches_of(base, completer, openai, background.api)
    own = (SessionsApi(openai, sessions, budgets, clock), outcomes_api_of(base, judged, auth), health)
    apis = (openai, *background.apis, messages, TextsApi(openai), TasksApi(openai), *batches.apis, *own)
    admin = admin_of(base, pool, budgets, auth, policies, sessions, openai, drift, standings, conductor)
    admin.pools.tell(learn=redactor.learn, follow=catalog.adopt)
    return Bundle(
        public=_public(base, openai, [api.router() for api in apis], health),
        admin=_app("Baton admin", base, [*admin.routers, health.router()], health),
        health=health,
        completer=completer,
        recovery=_recovery(base, budgets, journal, background.store),
        journal=journal,
        workers=pool.workers,
        shipper=shipper,
        drain_s=settings.drain_s,
        policies=policies,
        admin_parts=admin,
        idempotency=idempotency,
        runner=batches.runner,
        background=background.runner,
        standings=standings,
        alone=base.alone,
        watches=base.watches | _watches(base, budgets, health, guard, embedding, drift),
        sweeps=_sweeps(base, batches, background, idempotency, sticky, sessions, embedding, policies, drift, admin),
    )


def _sweeps(
    base: Base,
    batches: BatchParts,
    background: BackgroundParts,
    idempotency: Idempotency,
    sticky: Sticky,
    sessions: Sessions,
    embedding: Embedding | None,
    policies: PolicyParts | None,
    workers: DriftParts,
    admin: AdminParts,
) -> dict[str, Sweep]:
    engine = base.connections.background
    return {
        "files": batches.files.sweep,
        "background responses": background.store.sweep,
        "conversations": background.conversations.sweep,
        "sessions": sessions.sweep,
        "kept replies": idempotency.sweep,
        "alerts": PostgresAlerts(engine).sweep,
        "facts about workers": workers.store.sweep,
        "logins of the console": admin.logins.sweep,
        "sums of past days": PostgresDays(engine, base.clock).sweep,
        "marks of conversations": sticky.conversations.sweep,
        "reliability of sources": PostgresSources(engine).sweep,
        "credit under earlier rules": OldCredit(engine).sweep,
        "vectors of an earlier embedder": OldVectors(engine, embedding).sweep,
        **({"weights of retired versions": policies.sweep} if policies else {}),
    }


def _traces(base: Base) -> None:
    """Export finished requests as traces, where a backend is set. The SDK is imported only then."""
    settings = base.settings
    if settings.otel_url:
        from gateway.adapters.journal.otel import Traces

        headers, content = base.referred(settings.otel_headers) or "", settings.otel_content
        service = (settings.otel_service, __version__, MODEL_KINDS)
        base.metrics.tell(base.closing(Traces(settings.otel_url, headers, *service, content=content)).finished)


def _gauges(base: Base, completer: Completer, journal: Spool, conductor: ConductorParts | None) -> None:
    """Register the gauges that are read at each scrape."""
    metrics = base.metrics
    _traces(base)
    metrics.gauge("in_flight", "Requests admitted and not yet settled and logged", lambda: completer.in_flight)
    metrics.gauge(
        "log_lag_seconds", "Age of the oldest journal record that is not in PostgreSQL; 0: none", lambda: journal.lag_s
    )
    metrics.gauge("disk_free_bytes", "Bytes left on the journal's disk", journal.disk_free_bytes)
    metrics.gauge("spool_bytes_max", "Bytes that the journal may have", lambda: base.settings.spool_bytes_max)
    metrics.gauge(
        "conductor_paused",
        "1: calls to the conductor are paused, because it keeps failing",
        lambda: conductor is not None and conductor.breaker.is_open,
    )


def _watches(
    base: Base,
    budgets: RedisBudgets,
    health: HealthApi,
    guard: StoreGuard,
    embedding: Embedding | None,
    workers: DriftParts,
) -> dict[str, Watch]:
    engine, metrics = base.connections.background, base.metrics
    figures = StoreGauges(PostgresReports(engine), PostgresAdmin(engine), budgets, health.parts, base.clock, metrics)
    own: dict[str, Watch] = {"loop lag": partial(watch_loop, metrics.loop_late), "store": guard.run}
    own |= workers.watches(base.alone) | alert_watches(base, budgets, workers.watch)
    drift = DriftWatch(budgets, PostgresStore(engine), base.clock, metrics)
    once: dict[str, Watch] = {"figures": figures.run, "drift": drift.run}
    once |= {"left journals": partial(ship_left, base, embedding)}
    return own | (once if base.alone else {})


def _recovery(base: Base, budgets: Budgets, journal: Journal, waiting: BackgroundStore) -> Recovery:
    sweep_s, lease_s = base.settings.money_sweep_s, base.settings.money_lease_s
    return Recovery(budgets, base.store, journal, base.clock, sweep_s=sweep_s, lease_s=lease_s, kept=waiting.holds)


def _health(
    base: Base, budgets: Budgets, journal: Spool, conductor: Conductor | None, policies: PolicyParts | None
) -> HealthApi:
    versions = policies.versions if policies else None
    free_bytes_min = base.settings.disk_free_bytes_min

    async def disk() -> bool:
        return await asyncio.to_thread(journal.has_room, free_bytes_min)

    plans = {} if conductor is None else {"conductor": versions.serves if versions else conductor.ready}
    return HealthApi(
        needed={"money": budgets.ready, "disk": disk, **({"versions": versions.ready} if versions else {})},
        watched={"postgres": base.store.ready, **plans},
        metrics=base.metrics.exposition,
    )


def _public(base: Base, chats: OpenAIApi, routers: Sequence[APIRouter], health: HealthApi) -> ASGIApp:
    shared = base.counts.count("requests in flight") if base.counts else None
    direct = edge.DirectRoute("/v1/chat/completions", chats.chat)
    app = _app("Baton", base, routers, health, direct, abandoned=lambda: chats.idempotency.abandoned, shared=shared)
    return with_cors(app, listed(base.settings.cors_origins))


def _app(
    title: str,
    base: Base,
    routers: Sequence[APIRouter],
    health: HealthApi,
    *direct: edge.DirectRoute,
    abandoned: Callable[[], int] = int,
    shared: Count | None = None,
) -> ASGIApp:
    settings = base.settings
    app = FastAPI(title=title, version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    edge.install(app)
    for router in routers:
        app.include_router(router)
    spec.describe(app)
    pace = edge.BodyPace(settings.body_s_max, settings.body_bytes_per_s_min)
    accesses = Accesses(base.metrics, settings.access_log)
    served = edge.Direct(app, *direct) if direct else app
    leaving, bodies = lambda: health.draining, settings.bodies_bytes_max
    return edge.Edge(served, settings.in_flight_max, abandoned, pace, accesses, leaving, shared, bodies)
