"""The request path, wired: attempts, caps and settings, Idempotency-Key, the OpenAI routes. Part of `app`."""

from __future__ import annotations

import hashlib
import time
from contextlib import AsyncExitStack

from gateway.adapters.postgres.database import Connections
from gateway.adapters.postgres.responses import PostgresResponses
from gateway.adapters.postgres.turns import PostgresConversations, PostgresReplies
from gateway.adapters.redis.conversations import RedisConversations
from gateway.adapters.upstream.media import WebMedia
from gateway.adapters.upstream.pooled import PooledWorkers
from gateway.api.edge.idempotency import Idempotency
from gateway.api.public.chat import OpenAIApi
from gateway.api.public.responses import ResponsesApi
from gateway.config.serving import listed
from gateway.config.settings import Services, Settings
from gateway.core.loop.caps import Caps
from gateway.service.loop.calls import Calls, RetryBudget
from gateway.service.loop.conducting import ConductorSettings
from gateway.service.ports.money import LEASE_SLACK_S
from gateway.service.ports.request import Clock, Journal, RequestMetrics, TokenCounter
from gateway.service.request.admit import Policies
from gateway.service.request.auth import Authenticator
from gateway.service.request.catalog import Catalog
from gateway.service.request.complete import Completer
from gateway.service.request.responses import Responses
from gateway.service.request.sticky import Sticky


def calls_of(settings: Settings, workers: PooledWorkers, clock: Clock, tokens: TokenCounter) -> Calls:
    return Calls(
        workers,
        RetryBudget(calls_per_retry=round(1 / settings.retry_budget_share)),
        clock,
        tokens,
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


def media_of(settings: Settings) -> WebMedia:
    return WebMedia(
        listed(settings.media_hosts),
        bytes_max=settings.media_bytes_max,
        timeout_s=settings.media_timeout_s,
        fetches_max=settings.media_fetches_max,
    )


def idempotency_of(settings: Settings, connections: Connections) -> Idempotency:
    """A request that never ended is given up once recovery has settled its money."""
    return Idempotency(
        PostgresReplies(connections.requests),
        lease_s=settings.caps_wall_s_max + LEASE_SLACK_S + settings.money_sweep_s,
        keep_s=settings.idempotency_keep_s,
        reply_bytes_max=settings.idempotency_reply_bytes_max,
    )


def sticky_of(
    settings: Settings, services: Services, connections: Connections, metrics: RequestMetrics, opened: AsyncExitStack
) -> Sticky:
    """The marks are under a secret of all gateways that share the stores, as keys are."""
    conversations = RedisConversations(
        services.redis_url,
        PostgresConversations(connections.requests),
        deadline_s=min(settings.redis_timeout_s, settings.sticky_timeout_s / 2),
        timeout_s=settings.sticky_timeout_s,
        connections_max=settings.redis_connections_max,
    )
    opened.push_async_callback(conversations.close)
    secret = hashlib.sha256(b"sticky" + services.pepper).digest()
    return Sticky(
        conversations, metrics, secret, settings.sticky_window_s, settings.sticky_tools_s, settings.sticky_timeout_s
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
        keepalive_s=settings.keepalive_s,
        strict_fields=settings.strict_fields,
        models_created_s=int(time.time()),
        idempotency=idempotency,
        media_bytes_max=settings.media_bytes_max,
    )


def responses_of(settings: Settings, connections: Connections, journal: Journal, chats: OpenAIApi) -> ResponsesApi:
    responses = Responses(
        PostgresResponses(connections.requests),
        journal,
        messages_max=settings.messages_max,
        body_bytes_max=settings.body_bytes_max,
        strict=settings.strict_fields,
        media_bytes_max=chats.media_bytes_max,
    )
    return ResponsesApi(chats, responses)
