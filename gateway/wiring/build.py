"""The composition root: the only place that knows every adapter. Builds them, wires the use cases, starts and stops.

Order of starting: journal, shipper, balances, then traffic. Stopping runs it backwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from gateway import __version__
from gateway.adapters.host import poolfile
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.journal.shipper import Shipper, ShipperLimits
from gateway.adapters.journal.spool import Spool, SpoolLimits
from gateway.adapters.postgres.database import Connections
from gateway.adapters.postgres.jobs import JobStore, queue_app
from gateway.adapters.postgres.reports import PostgresReports
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.postgres.writer import LogWriter
from gateway.adapters.redis.budgets import RedisBudgets
from gateway.adapters.redis.ratelimits import RedisRateLimits
from gateway.adapters.upstream.embedder import HashingEmbedder, HttpEmbedder
from gateway.adapters.upstream.pooled import PooledWorkers
from gateway.adapters.upstream.tokens import Tokenizers
from gateway.api.edge import spec
from gateway.api.edge import stack as edge
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.edge.headers import with_cors
from gateway.api.edge.health import HealthApi
from gateway.api.edge.idempotency import Idempotency
from gateway.api.operator.jobs import JobsApi
from gateway.api.operator.pages import PagesApi
from gateway.api.operator.policies import PoliciesApi
from gateway.api.public.outcomes import OutcomesApi
from gateway.api.public.texts import TextsApi
from gateway.config.planning import HASHING
from gateway.config.serving import listed
from gateway.config.settings import Services, Settings, environment
from gateway.core.access.keys import PEPPER_VERSION
from gateway.core.log.redact import Redactor
from gateway.core.loop.experience import RuleWeights
from gateway.service.admin.sweeping import Sweep, sweeping
from gateway.service.loop.conducting import ConductorPlanner, ConductorSettings
from gateway.service.loop.rounds import Rounds
from gateway.service.loop.routers import AutoPlanner, CascadeRouter, RulePlanner, VoteRouter
from gateway.service.loop.state import Planner
from gateway.service.money.recover import Recovery
from gateway.service.ports.request import Conductor
from gateway.service.request.admit import no_version
from gateway.service.request.auth import Authenticator
from gateway.service.request.catalog import Catalog
from gateway.service.request.complete import Completer
from gateway.service.request.outcomes import Outcomes
from gateway.wiring.admin import AdminParts, admin_of
from gateway.wiring.conductor import PolicyParts, conductor_of, engine_of, policy_parts
from gateway.wiring.pools import pool_parts
from gateway.wiring.requests import (
    calls_of,
    idempotency_of,
    media_of,
    openai_of,
    policies_of,
    responses_of,
    sticky_of,
)

log = logging.getLogger("gateway")
READY_S_MAX = 30.0
SWEEP_S = 60.0
EMBEDDING_SHARE = 0.8  # of the time that a look-up of experience has; the rest is for the search
EXIT_JOURNAL_BROKEN = 70


@dataclass(slots=True)
class Bundle:
    """Two applications over one set of adapters, with their start, drain and stop."""

    public: ASGIApp
    admin: ASGIApp
    health: HealthApi
    completer: Completer
    recovery: Recovery
    spool: Spool
    shipper: Shipper
    drain_s: float
    opened: AsyncExitStack
    policies: PolicyParts | None
    admin_parts: AdminParts
    idempotency: Idempotency
    sweeps: Mapping[str, Sweep]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Ship what the journal holds, rebuild balances, load the versions. Returns once money can be reserved."""
        self.shipper.start()
        self.tasks.append(asyncio.create_task(self.recovery.run(), name="recovery"))
        self.tasks.append(asyncio.create_task(sweeping(self.sweeps, SWEEP_S), name="sweeping"))
        self.tasks.append(asyncio.create_task(self.admin_parts.housekeeping.run(), name="housekeeping"))
        self.tasks.append(asyncio.create_task(self.admin_parts.pools.note_first(), name="pool revision"))
        if self.policies is not None:
            await self.policies.versions.start(READY_S_MAX)
            self.tasks += [asyncio.create_task(work, name=name) for name, work in self.policies.tasks().items()]
        with suppress(TimeoutError):  # then it serves 503 for money until it can
            await asyncio.wait_for(self.recovery.first.wait(), READY_S_MAX)

    def drain(self) -> None:
        """Readiness turns off; open requests go on."""
        self.health.draining = True

    async def stop(self) -> None:
        """Finish open requests, then close everything, last built first."""
        self.health.draining = True
        await self.completer.drain(self.drain_s)
        await self.idempotency.drain(self.drain_s)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        with suppress(TimeoutError):  # what is left ships at the next start
            await self.spool.shipped()
        await self.opened.aclose()


async def build(settings: Settings, services: Services) -> Bundle:
    """Everything wired. Raises ConfigError for what cannot be used as configured, and then nothing stays open."""
    async with AsyncExitStack() as opened:
        bundle = await _build(settings, services, opened)
        bundle.opened = opened.pop_all()
    return bundle


async def _build(settings: Settings, services: Services, opened: AsyncExitStack) -> Bundle:
    clock, metrics = SystemClock(), PrometheusMetrics()
    depth_secret = hashlib.sha256(b"depth" + services.pepper).digest()
    parts = pool_parts(settings, services, depth_secret, opened)
    pools = parts.first.pools
    redactor = Redactor(parts.first.secrets.values())
    connections = _connections(settings, services)
    opened.push_async_callback(connections.close)
    store = PostgresStore(connections.requests, experience_half_life=settings.experience_half_life)
    embedder = _embedder(settings)
    opened.push_async_callback(embedder.close)
    conductor, planning = await conductor_of(settings, services, pools, parts.workers, opened)
    spool, shipper = await _log(settings, connections, metrics, opened)
    budgets, limits = _money(settings, services)
    opened.push_async_callback(budgets.close)
    opened.push_async_callback(limits.close)
    under = (connections, budgets, spool, clock, metrics)
    policies, learned = _versions(settings, services, conductor, planning, under, opened)
    catalog = Catalog(pools, _planners(settings, learned, store), policies.versions if policies else None)
    sticky = sticky_of(settings, services, connections, metrics, opened)
    completer = Completer(
        catalog=catalog,
        rounds=_rounds(settings, parts.workers, clock, opened),
        budgets=budgets,
        limits=limits,
        journal=spool,
        store=store,
        embedder=embedder,
        clock=clock,
        metrics=metrics,
        policies=policies_of(settings, planning),
        redactor=redactor,
        sticky=sticky,
        media=media_of(settings),
        pick=policies.versions.pick if policies else no_version,
    )
    peppers = {PEPPER_VERSION: services.pepper}
    auth = _auth(settings, store, peppers, clock)
    health = _health(budgets, store, conductor, policies, metrics)
    idempotency = idempotency_of(settings, connections)
    openai = openai_of(settings, completer, catalog, auth, depth_secret, idempotency)
    responses, texts = responses_of(settings, connections, spool, openai), TextsApi(openai)
    outcomes = OutcomesApi(Outcomes(store, spool, clock, redactor), auth, settings.body_bytes_max)
    operators = Operators(by_admin_key(auth), settings.body_bytes_max)
    admin = admin_of(settings, services, connections, parts, budgets, operators, peppers, clock, metrics)
    admin.pools.tell(learn=redactor.learn, follow=catalog.adopt)
    versions = PoliciesApi(policies.admin if policies else None, operators)
    pages = PagesApi(PostgresReports(connections.background), operators, clock)
    training = JobsApi(JobStore(connections.background, queue_app(services.database_url)), operators)
    metrics.gauge("in_flight", "Requests admitted and not yet settled and logged", lambda: completer.in_flight)
    public = [api.router() for api in (openai, responses, texts, outcomes, health)]
    private = [pages.router(), *admin.routers, versions.router(), training.router(), health.router()]
    return Bundle(
        public=with_cors(
            _app("Baton", settings.in_flight_max, *public, abandoned=lambda: idempotency.abandoned),
            listed(settings.cors_origins),
        ),
        admin=_app("Baton admin", settings.in_flight_max, *private),
        health=health,
        completer=completer,
        recovery=Recovery(budgets, store, spool, clock, sweep_s=settings.money_sweep_s, lease_s=settings.money_lease_s),
        spool=spool,
        shipper=shipper,
        drain_s=settings.drain_s,
        opened=opened,
        policies=policies,
        admin_parts=admin,
        idempotency=idempotency,
        sweeps={"kept replies": idempotency.sweep, "marks of conversations": sticky.conversations.sweep},
    )


def _rounds(settings: Settings, workers: PooledWorkers, clock: SystemClock, opened: AsyncExitStack) -> Rounds:
    tokens = Tokenizers()
    opened.push_async_callback(tokens.close)
    return Rounds(calls_of(settings, workers, clock, tokens))


def _auth(settings: Settings, store: PostgresStore, peppers: Mapping[int, bytes], clock: SystemClock) -> Authenticator:
    return Authenticator(
        store,
        peppers,
        clock,
        cache_s=settings.key_cache_s,
        stale_s=settings.key_stale_s,
        cached_keys_max=settings.key_cache_max,
    )


def _health(
    budgets: RedisBudgets,
    store: PostgresStore,
    conductor: Conductor,
    policies: PolicyParts | None,
    metrics: PrometheusMetrics,
) -> HealthApi:
    return HealthApi(
        needed={"money": budgets.ready, **({"versions": policies.versions.ready} if policies else {})},
        watched={"postgres": store.ready, "conductor": policies.versions.serving if policies else conductor.ready},
        metrics=metrics.exposition,
    )


# ---------------------------------------------------------------- who plans


def _versions(
    settings: Settings,
    services: Services,
    conductor: Conductor,
    planning: ConductorSettings,
    under: tuple[Connections, RedisBudgets, Spool, SystemClock, PrometheusMetrics],
    opened: AsyncExitStack,
) -> tuple[PolicyParts | None, Planner]:
    """The versions of the conductor, where engines hold any, and the planner `conductor`."""
    if services.policies is None:
        return None, ConductorPlanner(conductor, planning)
    engine, conductor = engine_of(settings, services, conductor, opened)
    parts = policy_parts(settings, services, engine, ConductorPlanner(conductor, planning), planning, *under, opened)
    return parts, parts.planner


def _planners(settings: Settings, learned: Planner, store: PostgresStore) -> dict[str, tuple[Planner, Planner | None]]:
    weights = RuleWeights(settings.rule_w_success, settings.rule_w_latency, settings.rule_w_cost)
    rule = RulePlanner(weights)
    default: Planner = rule if settings.default_policy == "rule" else learned
    if settings.default_policy == "auto" and settings.conductor_outcomes_min:
        default = AutoPlanner(rule, learned, store.outcome_count, settings.conductor_outcomes_min)
    routers: list[Planner] = [rule, VoteRouter(rule), CascadeRouter(rule)]
    named: dict[str, tuple[Planner, Planner | None]]
    named = {f"baton/{planner.name}": (planner, rule) for planner in (learned, *routers)}
    return {"baton": (default, rule), **named}


# ---------------------------------------------------------------- log, store, money


async def _log(
    settings: Settings, connections: Connections, metrics: PrometheusMetrics, opened: AsyncExitStack
) -> tuple[Spool, Shipper]:
    limits = SpoolLimits(
        segment_bytes=settings.spool_segment_bytes,
        total_bytes=settings.spool_bytes_max,
        shipped_timeout_s=settings.ship_wait_s,
    )
    spool = await Spool.open(settings.spool_path, limits, metrics, on_fatal=_die)
    opened.push_async_callback(spool.close)
    shipper = Shipper(spool, LogWriter(connections.shipping), ShipperLimits(records=settings.ship_batch_max), metrics)
    opened.push_async_callback(shipper.stop)
    return spool, shipper


def _die(error: BaseException) -> None:
    """The disk under the journal failed: nothing this process says can be trusted to be logged any more."""
    log.critical("the journal is broken: %s; ending, so that nothing goes on unlogged", error)
    os._exit(EXIT_JOURNAL_BROKEN)


def _connections(settings: Settings, services: Services) -> Connections:
    return Connections.of(
        services.database_url,
        requests_max=settings.db_connections_max,
        background_max=settings.db_background_connections_max,
        connect_timeout_s=settings.db_connect_s,
        statement_timeout_s=settings.db_statement_s,
    )


def _embedder(settings: Settings) -> HashingEmbedder | HttpEmbedder:
    if settings.embedder == HASHING:
        return HashingEmbedder()
    url, _, model = settings.embedder.partition("#")
    ref = settings.embedder_api_key
    key = poolfile.resolve_secret(ref, environment()) if ref else None
    return HttpEmbedder(url, model, key, timeout_s=EMBEDDING_SHARE * settings.experience_timeout_s)


def _money(settings: Settings, services: Services) -> tuple[RedisBudgets, RedisRateLimits]:
    deadline_s, connections = settings.redis_timeout_s, settings.redis_connections_max
    budgets = RedisBudgets(
        services.redis_url, deadline_s=deadline_s, connections_max=connections, lease_s=settings.money_lease_s
    )
    limits = RedisRateLimits(
        services.redis_url,
        fail_open=settings.rate_limits_fail_open,
        deadline_s=deadline_s / 5,  # one that hangs is waited for here, and then by money: together no more than 250 ms
        connections_max=connections,
    )
    return budgets, limits


def _app(title: str, in_flight_max: int, *routers: APIRouter, abandoned: Callable[[], int] = int) -> ASGIApp:
    app = FastAPI(title=title, version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    edge.install(app)
    for router in routers:
        app.include_router(router)
    spec.describe(app)
    return edge.Edge(app, in_flight_max, abandoned)
