"""What every part of a gateway is built on: settings, servers, clock, metrics, and the connections to PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from gateway import __version__
from gateway.adapters.host import poolfile
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.host.metrics import PrometheusMetrics
from gateway.adapters.host.siblings import SharedCounts, Siblings
from gateway.adapters.postgres.database import Connections
from gateway.adapters.postgres.store import PostgresStore
from gateway.adapters.upstream.client import PooledClient, http_client
from gateway.adapters.upstream.http1.ways import Ways
from gateway.config.settings import Services, Settings, environment
from gateway.core.access.keys import PEPPER_VERSION


class Closing(Protocol):
    """A part that holds connections."""

    async def close(self) -> None: ...


class Runs(Protocol):
    """A part that runs beside the traffic."""

    async def run(self) -> None: ...


Part = TypeVar("Part", bound=Closing)
Watched = TypeVar("Watched", bound=Runs)
Watch = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Base:
    """`opened` closes the parts at the end of the gateway, the last one first."""

    settings: Settings
    services: Services
    opened: AsyncExitStack
    clock: SystemClock
    metrics: PrometheusMetrics
    connections: Connections
    store: PostgresStore
    ways: Ways = field(default_factory=Ways)
    counts: SharedCounts | None = None  # of the processes that serve one public port, if this is one of several
    watches: dict[str, Watch] = field(default_factory=dict)  # what runs beside the traffic, by name

    @property
    def alone(self) -> bool:
        """Whether this process does what is done once for a gateway, such as housekeeping and audits: it is the only
        one, or it watches those that serve."""
        return self.siblings is None or not self.siblings.index

    @property
    def siblings(self) -> Siblings | None:
        """The processes that serve the public port, if there are several."""
        return siblings_of(self.services)

    def closing(self, part: Part) -> Part:
        """Return the part, which is closed at the end of the gateway."""
        self.opened.push_async_callback(part.close)
        return part

    def watching(self, name: str, part: Watched) -> Watched:
        """Return the part, whose `run` runs beside the traffic."""
        self.watches[name] = part.run
        return part

    def client(self) -> PooledClient:
        """A client of HTTP, which takes the ways of the environment. Whoever gets it closes it."""
        return http_client(ways=self.ways)

    @property
    def peppers(self) -> Mapping[int, bytes]:
        """The secrets under key digests, by version."""
        return {PEPPER_VERSION: self.services.pepper}

    def secret(self, use: bytes) -> bytes:
        """A secret for one use, the same for all gateways over these stores."""
        return hashlib.sha256(use + self.services.pepper).digest()

    def referred(self, reference: str | None) -> str | None:
        """The secret that a setting refers to; None if it is not set. Raises ConfigError."""
        return poolfile.resolve_secret(reference, environment()) if reference else None


def base_of(settings: Settings, services: Services, opened: AsyncExitStack) -> Base:
    """Build the base; it connects to nothing yet. Raises ConfigError for a DATABASE_URL that is not PostgreSQL's."""
    connections = Connections.of(
        services.database_url,
        requests_max=settings.db_connections_max,
        background_max=settings.db_background_connections_max,
        connect_timeout_s=settings.db_connect_s,
        statement_timeout_s=settings.db_statement_s,
    )
    opened.push_async_callback(connections.close)
    store = PostgresStore(connections.requests, lookups=connections.lookups)
    metrics, counts = PrometheusMetrics(__version__), _counts(siblings_of(services))
    return Base(settings, services, opened, SystemClock(), metrics, connections, store, Ways(environment()), counts)


def siblings_of(services: Services) -> Siblings | None:
    """The processes that serve the public port, if there are several."""
    serving = services.serving
    return None if serving is None else Siblings(serving.directory, serving.count, serving.index)


def _counts(siblings: Siblings | None) -> SharedCounts | None:
    if siblings is None or not siblings.index:
        return None
    return SharedCounts(siblings.shared, siblings.index - 1, siblings.count)
