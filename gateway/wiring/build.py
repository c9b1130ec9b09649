"""The composition root: the only place that knows every adapter. Builds them, wires the use cases, starts and stops.

Order of starting: journal, shipper, balances, then traffic. Stopping runs it backwards. Administration uses the
background's connections: no request waits for it, and it waits for none.
"""

from __future__ import annotations

import asyncio
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from gateway import __version__
from gateway.adapters.host.anchors import ANCHORS, AnchorFile
from gateway.adapters.journal.shipper import Shipper
from gateway.adapters.journal.spool import Spool
from gateway.adapters.postgres.admin import PostgresAdmin, PostgresPools
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.jobs import JobStore, queue_app
from gateway.adapters.postgres.reports import PostgresReports
from gateway.adapters.postgres.retention import PostgresRetention
from gateway.adapters.postgres.vectors import OldVectors
from gateway.api.edge import spec
from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.edge.headers import with_cors
from gateway.api.edge.health import HealthApi
from gateway.api.edge.idempotency import Idempotency
from gateway.api.operator.jobs import JobsApi
from gateway.api.operator.keys import Balances, KeysApi
from gateway.api.operator.orgs import AuditApi, CreditsApi, OrgsApi
from gateway.api.operator.pages import PagesApi
from gateway.api.operator.policies import PoliciesApi
from gateway.api.operator.pools import PoolsApi
from gateway.api.public.chat import TextsApi
from gateway.api.public.outcomes import OutcomesApi
from gateway.config.serving import listed
from gateway.config.settings import Services, Settings
from gateway.core.log.redact import Redactor
from gateway.service.admin.audit import Auditor
from gateway.service.admin.housekeeping import Housekeeping, Retention, Sweep, run_sweeps
from gateway.service.admin.keys import KeyAdmin
from gateway.service.admin.orgs import OrgAdmin
from gateway.service.admin.pools import Pools
from gateway.service.loop.auto import Earnings
from gateway.service.money.credits import Credits
from gateway.service.money.recover import Recovery
from gateway.service.policies.admin import PolicyAdmin
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Conductor, Journal
from gateway.service.request.admit import no_version
from gateway.service.request.auth import Authenticator
from gateway.service.request.catalog import Catalog
from gateway.service.request.complete import Completer
from gateway.service.request.outcomes import Outcomes
from gateway.wiring.base import Base, base_of
from gateway.wiring.conductor import PolicyParts, conductor_of, earnings_of, planners_of, policies_of
from gateway.wiring.requests import (
    PoolParts,
    admission_of,
    auth_of,
    embedder_of,
    embedding_of,
    idempotency_of,
    journal_of,
    media_of,
    money_of,
    openai_of,
    pool_of,
    rounds_of,
    states_of,
    sticky_of,
    vendors_of,
)

WORKER_PREFIX = "worker:"
log = logging.getLogger("gateway")
READY_S_MAX = 30.0
SWEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class AdminParts:
    """The routes of administration, and what runs beside the traffic."""

    routers: tuple[APIRouter, ...]
    housekeeping: Housekeeping
    pools: Pools


def admin_of(
    base: Base, pool: PoolParts, budgets: Budgets, auth: Authenticator, policies: PolicyAdmin | None
) -> AdminParts:
    """Wire administration. `policies`: None if this gateway's conductor has one version."""
    settings, clock, engine = base.settings, base.clock, base.connections.background
    operators = Operators(by_admin_key(auth), settings.body_bytes_max)
    store = PostgresAdmin(engine)
    auditor = Auditor(PostgresAudit(engine), AnchorFile(settings.data_dir / ANCHORS), clock)
    retention = Retention(PostgresRetention(engine), clock, settings.retention_days or None)
    pools = _pools(base, pool, store)
    keys = KeyAdmin(store, base.peppers, clock, pool.first.pools.pools)
    pools.tell(follow=lambda file: keys.adopt(file.pools))
    balances = Balances(budgets, clock)
    apis = (
        PagesApi(PostgresReports(engine), operators, clock),
        KeysApi(keys, balances, operators),
        OrgsApi(OrgAdmin(store, clock), balances, operators),
        CreditsApi(Credits(store, budgets, clock), operators),
        AuditApi(auditor, operators),
        PoolsApi(pools, operators),
        PoliciesApi(policies, operators),
        JobsApi(JobStore(engine, queue_app(base.services.database_url)), operators),
    )
    housekeeping = Housekeeping(auditor, retention, budgets, clock, every_s=settings.retention_every_s)
    return AdminParts(tuple(api.router() for api in apis), housekeeping, pools)


def _pools(base: Base, pool: PoolParts, store: PostgresAdmin) -> Pools:
    """The use case that reloads the pool file."""
    settings = base.settings
    planner = settings.conductor.removeprefix(WORKER_PREFIX) if settings.conductor_kind == "worker" else None
    place = {"file": str(base.services.pool_file), "host": platform.node()}
    revisions = PostgresPools(base.connections.background)
    return Pools(
        pool.first, pool.source, revisions, pool.workers, base.clock, base.metrics, store, planner=planner, place=place
    )


@dataclass(slots=True)
class Bundle:
    """Two applications over one set of adapters, with their start, drain and stop."""

    public: ASGIApp
    admin: ASGIApp
    health: HealthApi
    completer: Completer
    recovery: Recovery
    journal: Spool
    shipper: Shipper
    drain_s: float
    opened: AsyncExitStack
    policies: PolicyParts | None
    admin_parts: AdminParts
    idempotency: Idempotency
    sweeps: Mapping[str, Sweep]
    earnings: Earnings
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Ship what the journal holds, rebuild balances, load the versions. Return once money can be reserved."""
        self.shipper.start()
        self.tasks.append(asyncio.create_task(self.recovery.run(), name="recovery"))
        self.tasks.append(asyncio.create_task(run_sweeps(self.sweeps, SWEEP_S), name="sweeping"))
        self.tasks.append(asyncio.create_task(self.admin_parts.housekeeping.run(), name="housekeeping"))
        self.tasks.append(asyncio.create_task(self.admin_parts.pools.note_first(), name="pool revision"))
        self.tasks.append(asyncio.create_task(self.earnings.run(), name="earnings"))
        if self.policies is not None:
            await self.policies.versions.start(READY_S_MAX)
            self.tasks += [asyncio.create_task(work, name=name) for name, work in self.policies.tasks().items()]
        with suppress(TimeoutError):  # it answers 503 for money until then
            await asyncio.wait_for(self.recovery.first.wait(), READY_S_MAX)

    def drain(self) -> None:
        """Turn readiness off; open requests go on."""
        self.health.draining = True

    async def stop(self) -> None:
        """Finish open requests, then close everything, last built first."""
        self.health.draining = True
        await self.completer.drain(self.drain_s)
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
    clock, metrics, store = base.clock, base.metrics, base.store
    pool = pool_of(base)
    redactor = Redactor(pool.first.secrets.values())
    embedding = embedding_of(settings)
    embedder = embedder_of(base, embedding)
    conductor = await conductor_of(base, pool)
    journal, shipper = await journal_of(base, embedding)
    budgets, limits = money_of(base)
    policies, learned = policies_of(base, conductor, budgets, journal)
    earnings = earnings_of(base)
    planners = planners_of(base, learned, conductor.pools if conductor else (), earnings)
    catalog = Catalog(pool.first.pools, planners, policies.versions if policies else None)
    sticky = sticky_of(base)
    completer = Completer(
        catalog=catalog,
        rounds=rounds_of(base, pool.workers),
        budgets=budgets,
        limits=limits,
        journal=journal,
        store=store,
        embedder=embedder,
        clock=clock,
        metrics=metrics,
        policies=admission_of(base, conductor.planning if conductor else None),
        redactor=redactor,
        sticky=sticky,
        states=states_of(base),
        media=media_of(base),
        pick=policies.versions.pick if policies else no_version,
    )
    metrics.gauge("in_flight", "Requests admitted and not yet settled and logged", lambda: completer.in_flight)
    auth, idempotency = auth_of(base), idempotency_of(base)
    openai = openai_of(base, completer, catalog, auth, idempotency)
    outcomes = _outcomes(base, Outcomes(store, journal, clock, redactor), auth)
    health = _health(base, budgets, conductor.conductor if conductor else None, policies)
    wires = (openai, *vendors_of(base, journal, catalog, openai), TextsApi(openai))
    admin = admin_of(base, pool, budgets, auth, policies.admin if policies else None)
    admin.pools.tell(learn=redactor.learn, follow=catalog.adopt)
    return Bundle(
        public=_public(settings, [api.router() for api in (*wires, outcomes, health)], idempotency),
        admin=_app("Baton admin", settings, [*admin.routers, health.router()]),
        health=health,
        completer=completer,
        recovery=_recovery(base, budgets, journal),
        journal=journal,
        shipper=shipper,
        drain_s=settings.drain_s,
        opened=opened,
        policies=policies,
        admin_parts=admin,
        idempotency=idempotency,
        earnings=earnings,
        sweeps={
            "kept replies": idempotency.sweep,
            "marks of conversations": sticky.conversations.sweep,
            "vectors of an earlier embedder": OldVectors(base.connections.background, embedding).sweep,
        },
    )


def _recovery(base: Base, budgets: Budgets, journal: Journal) -> Recovery:
    sweep_s, lease_s = base.settings.money_sweep_s, base.settings.money_lease_s
    return Recovery(budgets, base.store, journal, base.clock, sweep_s=sweep_s, lease_s=lease_s)


def _outcomes(base: Base, outcomes: Outcomes, auth: Authenticator) -> OutcomesApi:
    return OutcomesApi(outcomes, auth, PostgresReports(base.connections.background), base.settings.body_bytes_max)


def _health(base: Base, budgets: Budgets, conductor: Conductor | None, policies: PolicyParts | None) -> HealthApi:
    versions = policies.versions if policies else None
    plans = {} if conductor is None else {"conductor": versions.serves if versions else conductor.ready}
    return HealthApi(
        needed={"money": budgets.ready, **({"versions": versions.ready} if versions else {})},
        watched={"postgres": base.store.ready, **plans},
        metrics=base.metrics.exposition,
    )


def _public(settings: Settings, routers: Sequence[APIRouter], idempotency: Idempotency) -> ASGIApp:
    app = _app("Baton", settings, routers, abandoned=lambda: idempotency.abandoned)
    return with_cors(app, listed(settings.cors_origins))


def _app(title: str, settings: Settings, routers: Sequence[APIRouter], abandoned: Callable[[], int] = int) -> ASGIApp:
    app = FastAPI(title=title, version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    edge.install(app)
    for router in routers:
        app.include_router(router)
    spec.describe(app)
    pace = edge.BodyPace(settings.body_s_max, settings.body_bytes_per_s_min)
    return edge.Edge(app, settings.in_flight_max, abandoned, pace)
