"""Wire administration: its use cases, its routes, and what runs beside the traffic."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from fastapi import APIRouter

from gateway.adapters.host.anchors import ANCHORS, AnchorFile
from gateway.adapters.login.oidc import OidcProvider
from gateway.adapters.postgres.admin import PostgresAdmin, PostgresPools
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.operators.logins import PostgresLogins
from gateway.adapters.postgres.policies.jobs import JobStore, queue_app
from gateway.adapters.postgres.reports.overview import PostgresReports
from gateway.adapters.postgres.upkeep.retention import PostgresRetention
from gateway.adapters.upstream.looks import HttpLooks
from gateway.api.edge.bodies import Operators, by_admin_key
from gateway.api.operator.figures import FiguresApi
from gateway.api.operator.jobs import JobsApi
from gateway.api.operator.keys import Balances, KeysApi
from gateway.api.operator.login import LoginApi, by_session
from gateway.api.operator.orgs import AuditApi, CreditsApi, OrgsApi
from gateway.api.operator.pages import PagesApi
from gateway.api.operator.playground import PlaygroundApi
from gateway.api.operator.policies import PoliciesApi
from gateway.api.operator.pools import PoolsApi
from gateway.api.operator.rollouts import RolloutsApi
from gateway.api.operator.sessions import SessionLimitsApi
from gateway.api.operator.workers import WorkersApi
from gateway.api.public.chat import OpenAIApi
from gateway.api.public.outcomes import OutcomesApi
from gateway.core.access.login import RoleRules
from gateway.service.admin.audit import Auditor
from gateway.service.admin.explain import Explain
from gateway.service.admin.housekeeping import Housekeeping, Retention
from gateway.service.admin.keys import KeyAdmin
from gateway.service.admin.logins import Logins
from gateway.service.admin.orgs import OrgAdmin
from gateway.service.admin.pools import Pools
from gateway.service.admin.sessions import Sessions
from gateway.service.money.credits import Credits
from gateway.service.policies.reach import Reach
from gateway.service.policies.standings import Standings
from gateway.service.ports.money import Budgets
from gateway.service.request.auth import Authenticator
from gateway.service.request.outcomes import Outcomes
from gateway.wiring.base import Base
from gateway.wiring.conductor import ConductorParts, PolicyParts, check_of
from gateway.wiring.requests import PoolParts
from gateway.wiring.workers import DriftParts


@dataclass(frozen=True, slots=True)
class AdminParts:
    """The routes of administration, and what runs beside the traffic."""

    routers: tuple[APIRouter, ...]
    housekeeping: Housekeeping
    pools: Pools
    logins: PostgresLogins


def admin_of(
    base: Base,
    pool: PoolParts,
    budgets: Budgets,
    auth: Authenticator,
    policies: PolicyParts | None,
    sessions: Sessions,
    openai: OpenAIApi,
    drift: DriftParts,
    standings: Standings,
    conductor: ConductorParts | None,
) -> AdminParts:
    """Wire administration. `policies`: None if this gateway's conductor has one version."""
    settings, clock, engine = base.settings, base.clock, base.connections.background
    logins, logins_store = logins_of(base)
    operators = Operators(by_session(logins, by_admin_key(auth)), settings.body_bytes_max)
    store = PostgresAdmin(engine)
    auditor = Auditor(PostgresAudit(engine), AnchorFile(settings.data_dir / ANCHORS), clock)
    retention = Retention(PostgresRetention(engine), clock, settings.retention_days or None)
    pools = _pools(base, pool, store)
    keys = KeyAdmin(store, base.peppers, clock, pool.first.pools.pools)
    pools.tell(follow=lambda file: keys.adopt(file.pools))
    pools.tell(follow=standings.adopt)
    reach = reach_of(base, pools)
    balances, reports = Balances(budgets, clock), PostgresReports(engine)
    apis = (
        LoginApi(logins, secure=settings.oidc_redirect_url.startswith("https:")),
        PagesApi(reports, operators, clock, standings),
        RolloutsApi(reports, explaining_of(base, reports), operators),
        FiguresApi(reports, pools, operators, clock, drift.checkers, drift.rests, reach),
        PlaygroundApi(operators, auth.owner, openai.completer.entered, openai.serve),
        KeysApi(keys, balances, operators),
        OrgsApi(OrgAdmin(store, clock), balances, operators),
        CreditsApi(Credits(store, budgets, clock), operators),
        SessionLimitsApi(sessions, operators),
        AuditApi(auditor, operators),
        PoolsApi(pools, operators),
        WorkersApi(drift.quarantines, operators),
        PoliciesApi(policies.admin if policies else None, operators),
        JobsApi(
            JobStore(engine, queue_app(base.services.database_url)),
            check_of(base, conductor, pool.first.pools.default),
            operators,
        ),
    )
    housekeeping = Housekeeping(auditor, retention, budgets, clock, every_s=settings.retention_every_s)
    return AdminParts(tuple(api.router() for api in apis), housekeeping, pools, logins_store)


def logins_of(base: Base) -> tuple[Logins | None, PostgresLogins]:
    """Logins at the identity provider, None where none is set, and their store. Raises ConfigError without the
    extra, or the secret."""
    settings, store = base.settings, PostgresLogins(base.connections.background)
    if not settings.oidc_issuer:
        return None, store
    client = settings.oidc_client_id, base.referred(settings.oidc_client_secret)
    provider = OidcProvider(settings.oidc_issuer, *client, settings.oidc_redirect_url, settings.oidc_scopes)
    roles = RoleRules(settings.oidc_role_claim, settings.oidc_roles)
    return Logins(provider, store, base.clock, roles, session_s=settings.oidc_session_s), store


def _pools(base: Base, pool: PoolParts, store: PostgresAdmin) -> Pools:
    """The use case that reloads the pool file."""
    settings = base.settings
    place = {"file": str(base.services.pool_file), "host": platform.node()}
    revisions = PostgresPools(base.connections.background)
    return Pools(
        pool.first,
        pool.source,
        revisions,
        pool.workers,
        base.clock,
        base.metrics,
        store,
        planner=settings.conductor_worker,
        place=place,
        audits=base.alone,
    )


def reach_of(base: Base, pools: Pools) -> Reach | None:
    """The looks at workers, once for a gateway; None where they are off."""
    if not (base.alone and base.settings.worker_probes):
        return None
    looks = base.closing(HttpLooks(base.ways, base.services.places))
    return base.watching("reach", Reach(looks, lambda: pools.now.loaded))


def explaining_of(base: Base, reports: PostgresReports) -> Explain:
    """The use case that says why a request went where it went."""
    engine = base.connections.background
    return Explain(reports, PostgresPools(engine), PostgresAdmin(engine))


def outcomes_api_of(base: Base, outcomes: Outcomes, auth: Authenticator) -> OutcomesApi:
    """The routes of outcomes and of what is known of a rollout."""
    reports = PostgresReports(base.connections.background)
    return OutcomesApi(outcomes, auth, reports, explaining_of(base, reports), base.settings.body_bytes_max)
