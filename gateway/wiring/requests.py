"""The path of a request, wired: pool and workers, journal, money, the use case, the OpenAI routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.adapters.host.poolfile import PoolFileSource
from gateway.adapters.postgres.evidence.remembered import PostgresPast
from gateway.adapters.postgres.store import PostgresResponses
from gateway.adapters.postgres.turns import PostgresConversations, PostgresReplies, PostgresSessions
from gateway.adapters.postgres.upkeep.claims import StoreLocks
from gateway.adapters.redis.budgets import RedisBudgets
from gateway.adapters.redis.conversations import RedisConversations
from gateway.adapters.redis.ratelimits import RedisRateLimits
from gateway.adapters.redis.states import RedisCallStates
from gateway.adapters.upstream.embedder import HttpEmbedder, LocalEmbedder
from gateway.adapters.upstream.media import WebMedia
from gateway.adapters.upstream.pooled import PooledWorkers, pooled_workers
from gateway.adapters.upstream.tokens import Tokenizers
from gateway.api.edge.idempotency import Idempotency
from gateway.api.public.chat import OpenAIApi
from gateway.api.public.messages import MessagesApi
from gateway.api.public.responses import ResponsesApi
from gateway.config.planning import MINILM
from gateway.config.serving import listed
from gateway.config.settings import Settings, environment
from gateway.core.log.outcome import parse_labels
from gateway.core.log.redact import Redactor
from gateway.core.loop.caps import Caps
from gateway.core.loop.experience.likeness import Embedding
from gateway.core.loop.replies.errors import CheckerErrors
from gateway.core.loop.turns.replanning import DISTANCE_MAX, Replanning
from gateway.core.pool.workers import Price
from gateway.service.admin.sessions import Sessions
from gateway.service.batches.conversations import StoredConversations
from gateway.service.loop.calls import Calls
from gateway.service.loop.conducting import ROUNDS_MOST, ConductorSettings
from gateway.service.loop.experience.candidates import Shortlist
from gateway.service.loop.experience.lookup import ExperienceLookup, LookupLimits
from gateway.service.loop.experience.memory import ExperienceMemory
from gateway.service.loop.health.breakers import Breakers
from gateway.service.loop.health.retries import RetryBudget
from gateway.service.loop.rounds import Rounds
from gateway.service.loop.summaries import AUTO, NOBODY, SummaryRules
from gateway.service.money.stores import StoreGuard
from gateway.service.policies.readiness import Shortage
from gateway.service.ports.background import BackgroundStore
from gateway.service.ports.money import LEASE_SLACK_S, Budgets
from gateway.service.ports.pools import LoadedPool
from gateway.service.ports.request import Embedder, Journal
from gateway.service.request.admit import Policies
from gateway.service.request.auth import Authenticator
from gateway.service.request.catalog import Catalog, Shares
from gateway.service.request.complete import Completer
from gateway.service.request.counting import InputTokens
from gateway.service.request.outcomes import Outcomes
from gateway.service.request.responses import Responses
from gateway.service.request.states import VendorStates
from gateway.service.request.sticky import Sticky
from gateway.wiring.base import Base

log = logging.getLogger("gateway")
EMBEDDING_SHARE = 0.8  # of the time for a look-up of experience; the search has the rest
KEEP_SLACK_S = 60.0


# ---------------------------------------------------------------- pool and workers


@dataclass(frozen=True, slots=True)
class PoolParts:
    """The pool that the gateway starts with, the adapters of its workers, and the source of the next pool."""

    first: LoadedPool
    source: PoolFileSource
    workers: PooledWorkers


def pool_of(base: Base) -> PoolParts:
    """Read the pool. Raises ConfigError for a pool file that cannot be used."""
    settings = base.settings
    names = {"BATON_JUDGE": settings.judge_worker}
    if settings.summarizer not in (NOBODY, AUTO):
        names["BATON_SUMMARIZER"] = settings.summarizer
    file, planner = base.services.pool_file, settings.conductor_worker
    first_token_s = settings.worker_first_token_s
    source = PoolFileSource(file, environment, settings.default_pool_name, names, planner, first_token_s)
    first = source.load()
    workers = pooled_workers(
        first.pools,
        first.secrets,
        base.secret(b"depth"),
        places=base.services.places,
        ways=base.ways,
        connections_max=settings.worker_connections_max,
        reply_bytes_max=settings.worker_reply_bytes_max,
        chunk_gap_s_max=settings.worker_idle_s,
        keep_s=settings.caps_wall_s_max + KEEP_SLACK_S,  # the longest that a request is open
        shared=base.counts.count if base.counts else None,
    )
    return PoolParts(first, source, base.closing(workers))


def rounds_of(base: Base, workers: PooledWorkers, errors: Mapping[str, CheckerErrors], rests: Breakers) -> Rounds:
    """Runs loops. `errors`: how often checkers err, by worker name."""
    settings = base.settings
    retries = RetryBudget(calls_per_retry=round(1 / settings.retry_budget_share))
    tokens = base.closing(Tokenizers())
    attempts_max, wait_s = settings.retry_attempts_max, settings.retry_backoff_s
    more: dict[str, Any] = {"attempts_max": attempts_max, "wait_initial_s": wait_s, "rests": rests}
    calls = Calls(workers, retries, base.clock, tokens, workers, **more)
    rules = SummaryRules(settings.summarizer, settings.summary_tokens_max, settings.summary_timeout_s)
    return Rounds(calls, errors, rules)


# ---------------------------------------------------------------- journal and money


async def money_of(base: Base) -> tuple[RedisBudgets, RedisRateLimits, StoreGuard]:
    """Budgets, rate limits, and the guard of their store. Raises ConfigError for a store that may lose balances, and
    for another one than that of the gateways that share the ledger."""
    settings, url = base.settings, base.services.redis_url
    deadline_s, connections = settings.redis_timeout_s, settings.redis_connections_max
    budgets = RedisBudgets(url, deadline_s=deadline_s, connections_max=connections, lease_s=settings.money_lease_s)
    limits = RedisRateLimits(
        url,
        fail_open=settings.rate_limits_fail_open,
        deadline_s=deadline_s / 5,  # a hung Redis is waited for here, then by money: together no more than 250 ms
        connections_max=connections,
    )
    limits = base.closing(limits)
    await base.closing(budgets).check()
    guard = StoreGuard(budgets, base.closing(StoreLocks(base.services.database_url)), base.clock)
    await guard.start()
    return budgets, limits, guard


# ---------------------------------------------------------------- the use case


def admission_of(base: Base, planning: ConductorSettings | None, shortage: Shortage) -> Policies:
    """The caps and shares of each request. `planning`: None where there is no conductor."""
    settings = base.settings
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
    by_prompt = planning is not None and planning.profile == "guided"
    return Policies(
        caps=caps,
        planning_price=planning.price if planning else Price(),
        planning_tokens_max=planning.tokens_max if planning else 0,
        rounds=settings.conductor_rounds or 1,
        rounds_most=ROUNDS_MOST if by_prompt and settings.conductor_rounds is None else 1,
        attempts_max=settings.retry_attempts_max,
        shares=Shares(
            settings.explore_share,
            settings.conductor_trial_share,
            settings.explore_share_max,
            short=lambda: shortage.short,
        ),
        held_wait_s=settings.budget_wait_s,
        worth=worth_of(settings),
        traced=bool(settings.otel_url),
    )


def worth_of(settings: Settings) -> Mapping[str, float]:
    """What a right answer is worth, as far as the settings say."""
    said = {"usd": settings.right_usd, "seconds": settings.right_seconds}
    return {name: value for name, value in said.items() if value is not None}


def embedder_of(base: Base, embedding: Embedding | None) -> LocalEmbedder | HttpEmbedder:
    """The embedder of tasks. Raises ConfigError if its key is missing."""
    settings = base.settings
    if embedding is not None:
        return base.closing(LocalEmbedder(embedding))
    url, _, model = settings.embedder.partition("#")
    key, timeout_s = base.referred(settings.embedder_api_key), EMBEDDING_SHARE * settings.experience_timeout_s
    return base.closing(HttpEmbedder(url, model, key, timeout_s=timeout_s, client=base.client()))


def memory_of(base: Base) -> ExperienceMemory:
    """The memory of experience."""
    settings = base.settings
    memory = ExperienceMemory(
        PostgresPast(base.connections.lookups),
        base.clock,
        bytes_max=settings.experience_bytes_max,
        stale_s=settings.experience_stale_s,
        timeout_s=settings.experience_timeout_s,
    )
    base.metrics.gauge("experience_steps", "Judged steps in the memory of this process", lambda: memory.steps)
    return base.watching("experience", base.closing(memory))


def lookup_of(
    base: Base,
    memory: ExperienceMemory,
    embedder: Embedder,
    redactor: Redactor,
    catalog: Catalog,
    planning: ConductorSettings | None,
) -> ExperienceLookup:
    """Looks up what a request is planned by."""
    settings = base.settings
    examples_max = settings.plan_examples_max if planning and planning.profile == "guided" else 0
    limits = LookupLimits(settings.experience_neighbours, settings.experience_timeout_s, examples_max)
    return ExperienceLookup(memory, base.store, embedder, redactor, base.metrics, limits, catalog.shares_experience)


def outcomes_of(
    base: Base, journal: Journal, redactor: Redactor, memory: ExperienceMemory, limits: RedisRateLimits
) -> Outcomes:
    """Takes outcomes, of each key so many a minute."""
    labels, most = parse_labels(base.settings.outcome_labels), base.settings.outcomes_per_minute
    more: Any = {"memory": memory, "limits": limits, "per_minute": most}
    return Outcomes(base.store, journal, base.clock, redactor, labels, **more)


def shortlist_of(base: Base, embedder: Embedder, memory: ExperienceMemory) -> Shortlist:
    """Chooses the candidates of a large pool."""
    settings = base.settings
    return Shortlist(
        embedder,
        memory,
        base.clock,
        settings.experience_neighbours,
        most=settings.candidates_max,
        explored=settings.candidates_drawn,
    )


def media_of(base: Base) -> WebMedia:
    settings = base.settings
    return WebMedia(
        listed(settings.media_hosts),
        bytes_max=settings.media_bytes_max,
        timeout_s=settings.media_timeout_s,
        fetches_max=settings.media_fetches_max,
    )


def sticky_of(base: Base) -> Sticky:
    """Sticky routing. Its marks use a secret that all gateways over these stores share, as keys do."""
    settings = base.settings
    conversations = RedisConversations(
        base.services.redis_url,
        PostgresConversations(base.connections.requests),
        deadline_s=min(settings.redis_timeout_s, settings.sticky_timeout_s / 2),
        timeout_s=settings.sticky_timeout_s,
        connections_max=settings.redis_connections_max,
    )
    times = settings.sticky_window_s, settings.sticky_tools_s, settings.sticky_timeout_s
    measured = DISTANCE_MAX if settings.embedder == MINILM else None
    rules = Replanning(
        frozenset(listed(settings.replan)),
        settings.replan_distance or measured,
        settings.replan_turns_left,
        settings.replan_gain,
    )
    return Sticky(base.closing(conversations), base.metrics, base.secret(b"sticky"), *times, rules)


def sessions_of(base: Base, budgets: Budgets) -> Sessions:
    """The budgets of runs."""
    return base.watching("sessions", Sessions(PostgresSessions(base.connections.requests), budgets, base.clock))


def states_of(base: Base) -> VendorStates:
    """The vendor state of tool calls, which all gateways over one Redis share."""
    settings = base.settings
    store = RedisCallStates(
        base.services.redis_url,
        deadline_s=min(settings.redis_timeout_s, settings.sticky_timeout_s / 2),
        connections_max=settings.redis_connections_max,
    )
    return VendorStates(base.closing(store), base.metrics, settings.vendor_state_keep_s, settings.sticky_timeout_s)


# ---------------------------------------------------------------- routes


def auth_of(base: Base) -> Authenticator:
    settings = base.settings
    return Authenticator(
        base.store,
        base.peppers,
        base.clock,
        cache_s=settings.key_cache_s,
        stale_s=settings.key_stale_s,
        cached_keys_max=settings.key_cache_max,
        operators=settings.operators,
    )


def idempotency_of(base: Base) -> Idempotency:
    """Idempotency. A request that never ended is given up once recovery has settled its money."""
    settings = base.settings
    return Idempotency(
        PostgresReplies(base.connections.requests),
        lease_s=settings.caps_wall_s_max + LEASE_SLACK_S + settings.money_sweep_s,
        keep_s=settings.idempotency_keep_s,
        reply_bytes_max=settings.idempotency_reply_bytes_max,
    )


def openai_of(
    base: Base, completer: Completer, catalog: Catalog, auth: Authenticator, idempotency: Idempotency
) -> OpenAIApi:
    settings = base.settings
    return OpenAIApi(
        completer=completer,
        catalog=catalog,
        authenticator=auth,
        depth_secret=base.secret(b"depth"),
        body_bytes_max=settings.body_bytes_max,
        messages_max=settings.messages_max,
        keepalive_s=settings.keepalive_s,
        strict_fields=settings.strict_fields,
        progress=settings.progress,
        models_created_s=int(time.time()),
        idempotency=idempotency,
        media_bytes_max=settings.media_bytes_max,
    )


def vendors_of(
    base: Base,
    journal: Journal,
    catalog: Catalog,
    chats: OpenAIApi,
    background: BackgroundStore,
    conversations: StoredConversations,
) -> tuple[ResponsesApi, MessagesApi]:
    """The Responses API and Anthropic's, over the same chats."""
    settings = base.settings
    responses = Responses(
        PostgresResponses(base.connections.requests),
        journal,
        base.clock,
        messages_max=settings.messages_max,
        body_bytes_max=settings.body_bytes_max,
        strict=settings.strict_fields,
        media_bytes_max=settings.media_bytes_max,
        background=background,
        background_s=settings.background_s,
        conversations=conversations,
    )
    tokens = InputTokens(catalog, base.closing(Tokenizers()))
    return ResponsesApi(chats, responses, tokens), MessagesApi(chats, tokens)
