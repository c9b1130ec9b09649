"""Claims on budget stores: advisory locks, which say what other gateways settle with."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres.database import async_engine
from gateway.errors import Unavailable

KEEPALIVE = {"tcp_keepalives_idle": 15, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
LOCK_KIND = 0x62756467  # "budg": the claims on budget stores
_SET = text("SELECT set_config(:name, :value, false)")
_LOCK = text("SELECT pg_advisory_lock_shared(:kind, :key)")
_UNLOCK = text("SELECT pg_advisory_unlock_shared(:kind, :key)")
_CLAIMED = text(
    "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND classid = :kind AND objsubid = 2 AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class StoreLocks:
    """The port StoreClaims: an advisory lock of a connection of its own, which ends with the process. `database_url`
    must not lead to a pooler that shares connections between transactions."""

    def __init__(self, database_url: str, *, timeout_s: float = 2.0) -> None:
        self._engine = async_engine(database_url, pool_size=1, statement_timeout_s=timeout_s, autocommit=True)
        self._connection: AsyncConnection | None = None
        self._claimed: int | None = None

    async def claim(self, server: str) -> bool:
        key = int.from_bytes(hashlib.sha256(server.encode()).digest()[:4], "big", signed=True)
        try:
            connection = await self._connected()
            if self._claimed not in (None, key):  # or gateways that move to a new server would wait for each other
                await connection.execute(_UNLOCK, {"kind": LOCK_KIND, "key": self._claimed})
                self._claimed = None
            if await self._others(connection, key):
                return False
            if self._claimed is None:
                await connection.execute(_LOCK, {"kind": LOCK_KIND, "key": key})
                self._claimed = key
                if any(other < key for other in await self._others(connection, key)):  # of two at a time one stays
                    await connection.execute(_UNLOCK, {"kind": LOCK_KIND, "key": key})
                    self._claimed = None
        except (OperationalError, InterfaceError, PoolTimeout) as error:
            await self._drop()
            raise Unavailable("the database is not available", code="store_unavailable") from error
        return self._claimed is not None

    async def close(self) -> None:
        """Give the claim back."""
        await self._drop()
        await self._engine.dispose()

    async def _connected(self) -> AsyncConnection:
        if self._connection is None:
            self._connection = await self._engine.connect()
            for setting, seconds in KEEPALIVE.items():  # so that the claim of a host that is gone ends in half a minute
                await self._connection.execute(_SET, {"name": setting, "value": str(seconds)})
        return self._connection

    async def _others(self, connection: AsyncConnection, key: int) -> list[int]:
        claimed = await connection.scalars(_CLAIMED, {"kind": LOCK_KIND})
        return [other for other in map(_signed, claimed) if other != key]

    async def _drop(self) -> None:
        connection, self._connection, self._claimed = self._connection, None, None
        if connection is not None:
            with suppress(DBAPIError):
                await connection.invalidate()
                await connection.close()


def _signed(objid: int) -> int:
    return objid - 2**32 if objid >= 2**31 else objid
