"""Administration, wired: keys, organisations, credits, pools, the audit and housekeeping. Part of `app`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import APIRouter

from gateway.adapters.host.anchors import ANCHORS, AnchorFile
from gateway.adapters.postgres.admin import PostgresAdmin, PostgresPools
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import Connections
from gateway.adapters.postgres.retention import PostgresRetention
from gateway.api.edge.bodies import Operators
from gateway.api.operator.keys import Balances, KeysApi
from gateway.api.operator.orgs import AuditApi, CreditsApi, OrgsApi
from gateway.api.operator.pools import PoolsApi
from gateway.config.settings import Services, Settings
from gateway.service.admin.audit import Auditor
from gateway.service.admin.housekeeping import Housekeeping, Retention
from gateway.service.admin.keys import KeyAdmin
from gateway.service.admin.orgs import OrgAdmin
from gateway.service.admin.pools import Pools
from gateway.service.money.credits import Crediting
from gateway.service.ports.money import Budgets
from gateway.service.ports.pools import PoolMetrics
from gateway.service.ports.request import Clock
from gateway.wiring.pools import PoolParts, pools_of


@dataclass(frozen=True, slots=True)
class AdminParts:
    """The routes, and what runs beside the traffic."""

    routers: tuple[APIRouter, ...]
    housekeeping: Housekeeping
    pools: Pools


def admin_of(
    settings: Settings,
    services: Services,
    connections: Connections,
    parts: PoolParts,
    budgets: Budgets,
    operators: Operators,
    peppers: Mapping[int, bytes],
    clock: Clock,
    metrics: PoolMetrics,
) -> AdminParts:
    """Administration over the background's connections: no request waits for it, and it waits for none."""
    engine = connections.background
    store = PostgresAdmin(engine)
    auditor = Auditor(PostgresAudit(engine), AnchorFile(settings.data_dir / ANCHORS), clock)
    retention = Retention(PostgresRetention(engine), clock, settings.retention_days or None)
    pools = pools_of(settings, services, parts, PostgresPools(engine), store, clock, metrics)
    key_admin = KeyAdmin(store, peppers, clock, parts.first.pools.pools)
    pools.tell(follow=lambda file: key_admin.adopt(file.pools))
    balances = Balances(budgets, clock)
    keys, orgs = KeysApi(key_admin, balances, operators), OrgsApi(OrgAdmin(store, clock), balances, operators)
    credits, audit = CreditsApi(Crediting(store, budgets, clock), operators), AuditApi(auditor, operators)
    keeping = Housekeeping(auditor, retention, budgets, clock, every_s=settings.retention_every_s)
    routes = (keys, orgs, credits, audit, PoolsApi(pools, operators))
    return AdminParts(tuple(api.router() for api in routes), keeping, pools)
