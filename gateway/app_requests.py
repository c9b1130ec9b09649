"""The request path, wired: attempts, caps and settings, Idempotency-Key, the OpenAI routes. Part of `app`."""

from __future__ import annotations

import time

from gateway.adapters.store import PostgresStore
from gateway.adapters.store_replies import PostgresReplies
from gateway.adapters.workers import PooledWorkers
from gateway.api.idempotency import Idempotency
from gateway.api.openai import OpenAIApi
from gateway.config import Settings
from gateway.core.caps import Caps
from gateway.service.admit import LEASE_SLACK_S, Policies
from gateway.service.attempts import Attempts, RetryBudget
from gateway.service.auth import Authenticator
from gateway.service.catalog import Catalog
from gateway.service.complete import Completer
from gateway.service.conducting import ConductorSettings
from gateway.service.ports import Clock


def attempts_of(settings: Settings, workers: PooledWorkers, clock: Clock) -> Attempts:
    return Attempts(
        workers,
        RetryBudget(calls_per_retry=round(1 / settings.retry_budget_share)),
        clock,
        attempts_max=settings.retry_attempts_max,
        wait_initial_s=settings.retry_backoff_s,
    )


def policies_of(settings: Settings, planning: ConductorSettings) -> Policies:
    caps = Caps(
        depth=settings.caps_depth_max,
        rounds=settings.caps_rounds_max,
        steps=settings.caps_steps_max,
        parallel=settings.caps_parallel_max,
        calls=settings.caps_calls_max,
        tokens=settings.caps_tokens_max,
        cost_nano=settings.caps_cost_nano_max,
        wall_s=settings.caps_wall_s_max,
    )
    return Policies(
        caps=caps,
        planning_price=planning.price,
        planning_tokens_max=planning.tokens_max,
        rounds=settings.conductor_rounds,
        attempts_max=settings.retry_attempts_max,
        explore_share=settings.explore_share,
        experience_k=settings.experience_neighbours,
        experience_timeout_s=settings.experience_timeout_s,
    )


def idempotency_of(settings: Settings, store: PostgresStore) -> Idempotency:
    """A request that never ended is given up once recovery has settled its money."""
    return Idempotency(
        PostgresReplies(store.engine),
        lease_s=settings.caps_wall_s_max + LEASE_SLACK_S + settings.money_sweep_s,
        keep_s=settings.idempotency_keep_s,
        reply_bytes_max=settings.idempotency_reply_bytes_max,
    )


def openai_of(
    settings: Settings,
    completer: Completer,
    catalog: Catalog,
    auth: Authenticator,
    depth_secret: bytes,
    idempotency: Idempotency,
) -> OpenAIApi:
    return OpenAIApi(
        completer=completer,
        catalog=catalog,
        authenticator=auth,
        depth_secret=depth_secret,
        body_bytes_max=settings.body_bytes_max,
        messages_max=settings.messages_max,
        in_flight_max=settings.in_flight_max,
        keepalive_s=settings.keepalive_s,
        strict_fields=settings.strict_fields,
        models_created_s=int(time.time()),
        idempotency=idempotency,
    )
