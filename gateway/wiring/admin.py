"""Administration, wired over the background's connections: no request waits for it, and it waits for none."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from fastapi import APIRouter

from gateway.adapters.host.anchors import ANCHORS, AnchorFile
from gateway.adapters.postgres.admin import PostgresAdmin, PostgresPools
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.jobs import JobStore, queue_app
from gateway.adapters.postgres.reports import PostgresReports
from gateway.adapters.postgres.retention import PostgresRetention
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.operator.jobs import JobsApi
from gateway.api.operator.keys import Balances, KeysApi
from gateway.api.operator.orgs import AuditApi, CreditsApi, OrgsApi
from gateway.api.operator.pages import PagesApi
from gateway.api.operator.policies import PoliciesApi
from gateway.api.operator.pools import PoolsApi
from gateway.service.admin.audit import Auditor
from gateway.service.admin.housekeeping import Housekeeping, Retention
from gateway.service.admin.keys import KeyAdmin
from gateway.service.admin.orgs import OrgAdmin
from gateway.service.admin.pools import Pools
from gateway.service.money.credits import Credits
from gateway.service.policies.admin import PolicyAdmin
from gateway.service.ports.money import Budgets
from gateway.service.request.auth import Authenticator
from gateway.wiring.base import Base
from gateway.wiring.requests import PoolParts

WORKER_PREFIX = "worker:"


@dataclass(frozen=True, slots=True)
class AdminParts:
    """The routes, and what runs beside the traffic."""

    routers: tuple[APIRouter, ...]
    housekeeping: Housekeeping
    pools: Pools


def admin_of(
    base: Base, pool: PoolParts, budgets: Budgets, auth: Authenticator, policies: PolicyAdmin | None
) -> AdminParts:
    """`policies`: None where this gateway's conductor has one version."""
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
