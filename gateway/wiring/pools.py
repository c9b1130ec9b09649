"""The pool file, wired: where it is read, what calls its workers, who follows when it changes. Part of `app`."""

from __future__ import annotations

import platform
from contextlib import AsyncExitStack
from dataclasses import dataclass

from gateway.adapters.host.poolsource import PoolFileSource
from gateway.adapters.upstream.pooled import PooledWorkers, pooled_workers
from gateway.config.settings import Services, Settings, environment
from gateway.service.admin.pools import Pools
from gateway.service.ports.pools import Keys, LoadedPool, PoolMetrics, PoolRevisions
from gateway.service.ports.request import Clock

WORKER_PREFIX = "worker:"
KEEP_SLACK_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolParts:
    """The pool that the gateway starts with, what calls its workers, and where the next one comes from."""

    first: LoadedPool
    source: PoolFileSource
    workers: PooledWorkers


def pool_parts(settings: Settings, services: Services, depth_secret: bytes, opened: AsyncExitStack) -> PoolParts:
    """Raises ConfigError for a pool file that cannot be used."""
    source = PoolFileSource(services.pool_file, environment, settings.default_pool_name, settings.judge_model)
    first = source.load()
    workers = pooled_workers(
        first.pools,
        first.secrets,
        depth_secret,
        connections_max=settings.worker_connections_max,
        reply_bytes_max=settings.worker_reply_bytes_max,
        chunk_gap_s_max=settings.worker_idle_s,
        keep_s=settings.caps_wall_s_max + KEEP_SLACK_S,  # no request is open for longer
    )
    opened.push_async_callback(workers.close)
    return PoolParts(first, source, workers)


def pools_of(
    settings: Settings,
    services: Services,
    parts: PoolParts,
    revisions: PoolRevisions,
    keys: Keys,
    clock: Clock,
    metrics: PoolMetrics,
) -> Pools:
    """The use case that reloads the pool."""
    planner = settings.conductor.removeprefix(WORKER_PREFIX) if settings.conductor_kind == "worker" else None
    place = {"file": str(services.pool_file), "host": platform.node()}
    return Pools(
        parts.first, parts.source, revisions, parts.workers, clock, metrics, keys, planner=planner, place=place
    )
