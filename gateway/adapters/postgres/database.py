"""Connections to PostgreSQL over psycopg 3, with time-outs to connect, to get one and for a statement; named
statements.

Whoever makes an engine disposes of it; the stores never close the one they are given. `queries.sql` holds the named
statements; psycopg composes their identifiers and numbers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from psycopg import sql
from sqlalchemy import URL, Engine, TextClause, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.errors import ConfigError, Unavailable

_NAME = re.compile(r"^-- name: (\w+)$", re.M)
_COMMENT = re.compile(r"^--.*\n", re.M)


def driver_url(database_url: str) -> URL:
    """The URL with SQLAlchemy's driver name for psycopg 3. Raises ConfigError unless it begins with `postgres://` or
    `postgresql://`."""
    try:
        url = make_url(database_url)
    except ArgumentError:
        raise ConfigError("DATABASE_URL is not a URL; write postgresql://user:password@host:5432/name") from None
    if url.drivername not in ("postgres", "postgresql", "postgresql+psycopg"):
        raise ConfigError(f"DATABASE_URL starts with `{url.drivername}://`; Baton speaks postgresql:// only")
    return url.set(drivername="postgresql+psycopg")


def _options(connect_timeout_s: float, statement_timeout_s: float, pool_size: int, pool_timeout_s: float) -> Any:
    return {
        "pool_size": pool_size,
        "max_overflow": 0,
        "pool_timeout": pool_timeout_s,
        "pool_pre_ping": True,
        "pool_recycle": 1800,
        "hide_parameters": True,  # an error text must not carry a client's prompt into a log line
        "connect_args": {
            "connect_timeout": max(2, round(connect_timeout_s)),  # libpq's own least is 2 s
            "options": f"-c statement_timeout={round(statement_timeout_s * 1000)} -c timezone=UTC",
            "application_name": "baton",
        },
    }


def async_engine(
    database_url: str,
    *,
    pool_size: int = 8,
    pool_timeout_s: float = 2.0,
    connect_timeout_s: float = 2.0,
    statement_timeout_s: float = 2.0,
) -> AsyncEngine:
    """An engine for short statements on the event loop."""
    options = _options(connect_timeout_s, statement_timeout_s, pool_size, pool_timeout_s)
    return create_async_engine(driver_url(database_url), **options)


def sync_engine(
    database_url: str,
    *,
    pool_size: int = 1,
    pool_timeout_s: float = 2.0,
    connect_timeout_s: float = 2.0,
    statement_timeout_s: float = 30.0,
) -> Engine:
    """An engine for long statements in a thread of their own: the shipper's and the migrations'."""
    options = _options(connect_timeout_s, statement_timeout_s, pool_size, pool_timeout_s)
    return create_engine(driver_url(database_url), **options)


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of one gateway process. `requests`: for the path of a request, and for the money that it waits
    for. `background`: for everything else, so that no request waits for a report, a sweep or an operator. `shipping`:
    the background's one synchronous connection; the shipper inserts in a thread, which cannot use an async pool."""

    requests: AsyncEngine
    background: AsyncEngine
    shipping: Engine

    @classmethod
    def of(
        cls,
        database_url: str,
        *,
        requests_max: int,
        background_max: int,
        connect_timeout_s: float,
        statement_timeout_s: float,
    ) -> Connections:
        """Make the engines; each connects at its first use. Raises ConfigError for a URL that is not PostgreSQL's."""
        limits = {"connect_timeout_s": connect_timeout_s, "statement_timeout_s": statement_timeout_s}
        return cls(
            requests=async_engine(database_url, pool_size=requests_max, **limits),
            background=async_engine(database_url, pool_size=background_max, **limits),
            shipping=sync_engine(database_url, connect_timeout_s=connect_timeout_s),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self.requests.dispose()
        await self.background.dispose()
        await asyncio.to_thread(self.shipping.dispose)


@asynccontextmanager
async def connected(database_url: str, **limits: Any) -> AsyncIterator[AsyncEngine]:
    """An engine that is disposed of when the block ends. `limits`: the arguments of `async_engine`."""
    engine = async_engine(database_url, **limits)
    try:
        yield engine
    finally:
        await engine.dispose()


@lru_cache(maxsize=64)
def _statement_timeout(timeout_ms: int) -> TextClause:
    return query("statement_timeout", timeout_ms=sql.Literal(timeout_ms))


@asynccontextmanager
async def transaction(engine: AsyncEngine, timeout_s: float | None = None) -> AsyncIterator[AsyncConnection]:
    """A transaction; `timeout_s` replaces the engine's statement time-out inside it. Raises Unavailable."""
    try:
        async with engine.begin() as connection:
            if timeout_s is not None:
                await connection.execute(_statement_timeout(round(timeout_s * 1000)))
            yield connection
    except (OperationalError, InterfaceError, PoolTimeout) as error:
        reason = type(error.orig or error).__name__ if isinstance(error, DBAPIError) else type(error).__name__
        raise Unavailable(f"the database is not available ({reason})", code="store_unavailable") from error


@cache
def _statements() -> Mapping[str, sql.SQL]:
    source = files("gateway.adapters.postgres").joinpath("queries.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(source)
    statements = [sql.SQL(_COMMENT.sub("", part).strip()) for part in parts[1::2]]
    return dict(zip(parts[::2], statements, strict=True))


def query(name: str, **parts: sql.Composable) -> TextClause:
    """Return the statement of that name, with `parts` for its {words}. Raises KeyError for a missing name or part."""
    return text(_statements()[name].format(**parts).as_string())


def fragment(name: str) -> sql.Composable:
    """Return the expression of that name, a part of other statements. Raises KeyError."""
    return _statements()[name]


def identifiers(names: Iterable[str]) -> sql.Composable:
    """Join the names of columns or tables by commas."""
    return sql.SQL(", ").join(sql.Identifier(name) for name in names)
