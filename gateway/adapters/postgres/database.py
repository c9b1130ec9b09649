"""Connections to PostgreSQL over psycopg 3, with time-outs to connect, to get one and for a statement; named
statements.

Whoever makes an engine disposes of it; the stores never close the one they are given. `queries.sql` holds the named
statements; psycopg composes their identifiers and numbers.
"""

from __future__ import annotations

import asyncio
import re
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, cast

import psycopg
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.errors import IdleInTransactionSessionTimeout
from psycopg.pq import Format, TransactionStatus
from sqlalchemy import URL, Engine, Select, TextClause, create_engine, make_url, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, InternalError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.errors import ConfigError, Unavailable

_NAME = re.compile(r"^-- name: (\w+)$", re.M)
IDLE_S = 60.0  # a transaction that rests longer is rolled back: its client was cut off, and its locks stop others
LOOKUPS_MAX = 4  # connections of one process, beside those of requests
ABSENT_S, PRESENT_S = 2.0, 60.0  # how long a look at what there is counts
ABSENCES_MAX = 10_000
_ONE_MOMENT = text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
_AWAY = (psycopg.OperationalError, psycopg.InterfaceError, OperationalError, InterfaceError, PoolTimeout)
_DIALECT = PGDialect_psycopg()  # type: ignore[no-untyped-call]
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


def _options(
    connect_timeout_s: float,
    statement_timeout_s: float,
    pool_size: int,
    pool_timeout_s: float,
    *,
    may_rest: bool = False,
) -> Any:
    """`may_rest`: whether a transaction may rest for longer than IDLE_S between two statements."""
    bounds = {"statement_timeout": statement_timeout_s}
    if not may_rest:
        bounds["idle_in_transaction_session_timeout"] = IDLE_S
    settings = " ".join(f"-c {name}={round(seconds * 1000)}" for name, seconds in bounds.items())
    return {
        "pool_size": pool_size,
        "max_overflow": 0,
        "pool_timeout": pool_timeout_s,
        "pool_pre_ping": True,
        "pool_recycle": 1800,
        "hide_parameters": True,  # an error text must not carry a client's prompt into a log line
        "connect_args": {
            "connect_timeout": max(2, round(connect_timeout_s)),  # libpq's own least is 2 s
            "options": f"{settings} -c timezone=UTC",
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
    autocommit: bool = False,
) -> AsyncEngine:
    """An engine for short statements on the event loop. `autocommit`: each is a transaction of its own. The driver is
    told so as it connects: SQLAlchemy's isolation level is set at each use, and whoever is cancelled meanwhile loses
    the connection."""
    options = _options(connect_timeout_s, statement_timeout_s, pool_size, pool_timeout_s)
    options["connect_args"] |= {"autocommit": autocommit, "async_creator_fn": _connect}
    return create_async_engine(driver_url(database_url), **options)


def lookup_engine(
    database_url: str, *, pool_timeout_s: float = 2.0, connect_timeout_s: float = 2.0, statement_timeout_s: float = 2.0
) -> AsyncEngine:
    """An engine for `Lookups`: no connection is asked whether it lives, nor put back into a state it never left; each
    statement is a transaction of its own (as in `async_engine`)."""
    options = _options(connect_timeout_s, statement_timeout_s, LOOKUPS_MAX, pool_timeout_s)
    options |= {"pool_pre_ping": False, "pool_reset_on_return": None}
    options["connect_args"] |= {"autocommit": True, "async_creator_fn": _connect}
    return create_async_engine(driver_url(database_url), **options)


async def _connect(*arguments: Any, **options: Any) -> psycopg.AsyncConnection[Any]:
    """A connection. Where whoever wanted it is cancelled meanwhile it is closed once it is there: psycopg forgets one
    that it has begun, and the server counts it until the garbage is collected."""
    connecting = asyncio.ensure_future(psycopg.AsyncConnection.connect(*arguments, **options))
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close)
        raise


def _close(connecting: asyncio.Future[psycopg.AsyncConnection[Any]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().pgconn.finish()


def sync_engine(
    database_url: str,
    *,
    pool_size: int = 1,
    pool_timeout_s: float = 2.0,
    connect_timeout_s: float = 2.0,
    statement_timeout_s: float = 30.0,
    may_rest: bool = True,
) -> Engine:
    """An engine for long statements in a thread of their own: the shipper's, the migrations', those of training.
    `may_rest`: whether a transaction may rest for longer than IDLE_S between two statements."""
    options = _options(connect_timeout_s, statement_timeout_s, pool_size, pool_timeout_s, may_rest=may_rest)
    return create_engine(driver_url(database_url), **options)


@dataclass(frozen=True, slots=True)
class Connections:
    """The connections of one gateway process. `requests`: for the path of a request, and for the money that it waits
    for. `lookups`: for its reads of experience. `background`: for everything else, so that no request waits for a
    report, a sweep or an operator. `shipping`: the background's one synchronous connection; the shipper inserts in a
    thread, which cannot use an async pool."""

    requests: AsyncEngine
    lookups: AsyncEngine
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
        limits: Any = {"connect_timeout_s": connect_timeout_s, "statement_timeout_s": statement_timeout_s}
        return cls(
            requests=async_engine(database_url, pool_size=requests_max, **limits),
            lookups=lookup_engine(database_url, **limits),
            background=async_engine(database_url, pool_size=background_max, **limits),
            shipping=sync_engine(database_url, connect_timeout_s=connect_timeout_s, may_rest=False),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self.requests.dispose()
        await self.lookups.dispose()
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


class Vector(list[float]):
    """An array of `real`, sent as it is stored: as text it took most of a look-up's time."""


class _VectorDumper(Dumper):
    oid, format = 1021, Format.BINARY  # float4[]

    def dump(self, obj: Vector) -> bytes:
        size = len(obj)
        if not size:
            return struct.pack("!iiI", 0, 0, 700)
        head = struct.pack("!iiIii", 1, 0, 700, size, 1)  # dimensions, nulls, the type float4, length, first index
        return head + struct.pack("!" + size * "if", *[item for number in obj for item in (4, number)])


psycopg.adapters.register_dumper(Vector, _VectorDumper)


class Lookups:
    """Statements that only read, one at a time, each a transaction of its own: without the three round trips and the
    layers of a transaction. A connection that the server has closed is replaced, and the statement sent again."""

    def __init__(self, engine: AsyncEngine) -> None:
        """`engine`: of `lookup_engine`, or any other, whose connections are then tested before each statement and
        rolled back after it."""
        self._engine = engine

    async def rows(
        self, statement: str, values: Mapping[str, Any], *, binary: bool = False
    ) -> Sequence[tuple[Any, ...]]:
        """The rows of a statement with psycopg's placeholders. `binary`: as the server stores them, which takes bytes
        half the time. Raises Unavailable."""
        try:
            for _ in range(LOOKUPS_MAX):
                with suppress(_Lost):
                    return await self._rows(statement, values, binary)
            return await self._rows(statement, values, binary)
        except _AWAY as error:
            raise _unavailable(error) from error

    async def _rows(self, statement: str, values: Mapping[str, Any], binary: bool) -> Sequence[tuple[Any, ...]]:
        async with self._engine.connect() as connection:
            driver = cast(psycopg.AsyncConnection[Any], (await connection.get_raw_connection()).driver_connection)
            try:
                return await (await driver.execute(statement, values, binary=binary)).fetchall()
            except BaseException as error:  # boundary: a connection in the middle of a statement is not used again
                if driver.info.transaction_status is not TransactionStatus.IDLE:
                    await connection.invalidate()
                if isinstance(error, psycopg.OperationalError) and driver.closed:
                    raise _Lost(*error.args) from error
                raise


class Absences:
    """What the database was found to hold nothing of, so that searches for it need not be sent: many a key never
    reports an outcome. An absence is known for ABSENT_S; after `forget`, which follows each change by this process,
    for none."""

    def __init__(self, lookups: Lookups, now_s: Callable[[], float] = time.monotonic) -> None:
        self._lookups, self._now_s = lookups, now_s
        self._known: dict[str, tuple[bool, float]] = {}  # whether there is nothing, and until when that counts
        self._changes = 0

    def known(self, name: str) -> bool:
        """Whether there is nothing of it."""
        absent, until_s = self._known.get(name, (False, 0.0))
        return absent and self._now_s() < until_s

    async def look(self, names: Iterable[str], statement: str, values: Mapping[str, Any]) -> None:
        """After a search that found nothing like the question: of which `names` there is anything at all. `statement`
        selects those, with the parameter `names` for the ones to look for. Raises Unavailable."""
        now_s = self._now_s()
        asked = [name for name in names if now_s >= self._known.get(name, (False, 0.0))[1]]
        if not asked:
            return
        changes = self._changes
        present = {name for (name,) in await self._lookups.rows(statement, {**values, "names": asked})}
        if changes == self._changes:
            if len(self._known) + len(asked) > ABSENCES_MAX:
                self._known.clear()
            until_s = {True: self._now_s() + PRESENT_S, False: self._now_s() + ABSENT_S}
            self._known.update((name, (name not in present, until_s[name in present])) for name in asked)

    def forget(self) -> None:
        """What was absent may have come."""
        self._changes += 1
        self._known.clear()


class _Lost(psycopg.OperationalError):
    """The server had closed the connection."""


def placeholders(statement: TextClause | Select[Any]) -> str:
    """The statement with psycopg's placeholders, for `Lookups`."""
    return str(statement.compile(dialect=_DIALECT))


@lru_cache(maxsize=64)
def _statement_timeout(timeout_ms: int) -> TextClause:
    return query("statement_timeout", timeout_ms=sql.Literal(timeout_ms))


@asynccontextmanager
async def transaction(
    engine: AsyncEngine, timeout_s: float | None = None, *, one_moment: bool = False
) -> AsyncIterator[AsyncConnection]:
    """A transaction; `timeout_s` replaces the engine's statement time-out inside it. `one_moment`: its statements all
    read the database as of one moment. Raises Unavailable."""
    try:
        async with engine.begin() as connection:
            if one_moment:
                await connection.execute(_ONE_MOMENT)
            if timeout_s is not None:
                await connection.execute(_statement_timeout(round(timeout_s * 1000)))
            yield connection
    except _AWAY as error:
        raise _unavailable(error) from error
    except InternalError as error:
        if isinstance(error.orig, IdleInTransactionSessionTimeout):  # this process was stalled for IDLE_S
            raise _unavailable(error) from error
        raise


def _unavailable(error: Exception) -> Unavailable:
    reason = type(error.orig or error).__name__ if isinstance(error, DBAPIError) else type(error).__name__
    return Unavailable(f"the database is not available ({reason})", code="store_unavailable")


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
