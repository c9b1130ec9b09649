"""The files of keys in PostgreSQL (docs/adr/0025): one row each, and their bytes in pieces of PIECE_BYTES."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    tuple_,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables import metadata, required, timestamp
from gateway.core.openai.batches.objects import UploadedFile
from gateway.errors import NotFound, TooLarge

PIECE_BYTES = 2**20
files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    required("key_id", Text),
    required("name", Text),
    required("purpose", Text),
    required("size_bytes", BigInteger),
    timestamp("created_at", nullable=False),
    timestamp("expires_at"),
    Index(None, "key_id", "created_at"),
    Index("files_expires_at_idx", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
)

file_pieces = Table(
    "file_pieces",
    metadata,
    Column("file_id", Text, primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    required("data", LargeBinary),
    ForeignKeyConstraint(["file_id"], ["files.id"], ondelete="CASCADE"),
)

_f = files.c


class PostgresFiles:
    """The port FileStore."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def add(self, file: UploadedFile, pieces: AsyncIterator[bytes], key_bytes_max: int) -> UploadedFile:
        async with transaction(self._engine) as connection:
            await insert_file(connection, file)
            writer = FileWriter(connection, file.id)
            async for piece in pieces:
                await writer.write(piece)
            size_bytes = await writer.close()
            stored = await connection.scalar(select(func.sum(_f.size_bytes)).where(_f.key_id == file.key_id, _alive()))
            if int(stored or 0) > key_bytes_max:
                problem = f"The files of this key may hold {key_bytes_max:,} bytes; with this one they hold {stored:,}."
                raise TooLarge(f"{problem} Delete some.", param="file", code="files_too_large")
        return replace(file, size_bytes=size_bytes)

    async def get(self, key_id: str, file_id: str) -> UploadedFile | None:
        query = select(files).where(_f.id == file_id, _f.key_id == key_id, _alive())
        async with transaction(self._engine) as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else _file(row)

    async def page(
        self, key_id: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Sequence[UploadedFile]:
        query = select(files).where(_f.key_id == key_id, _alive())
        if purpose is not None:
            query = query.where(_f.purpose == purpose)
        place = tuple_(_f.created_at, _f.id)
        async with transaction(self._engine) as connection:
            if after is not None:
                last = await connection.scalar(select(_f.created_at).where(_f.id == after, _f.key_id == key_id))
                if last is None:
                    raise NotFound(f"No such File object: {after[:64]}", param="after")
                query = query.where(place < (last, after) if newest_first else place > (last, after))
            order = (_f.created_at.desc(), _f.id.desc()) if newest_first else (_f.created_at, _f.id)
            rows = (await connection.execute(query.order_by(*order).limit(limit))).mappings()
            return [_file(row) for row in rows]

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        n = 0
        while True:
            query = select(file_pieces.c.data).where(file_pieces.c.file_id == file_id, file_pieces.c.n == n)
            async with transaction(self._engine) as connection:
                piece = await connection.scalar(query)
            if piece is None:
                return
            yield bytes(piece)
            n += 1

    async def delete(self, key_id: str, file_id: str) -> bool:
        async with transaction(self._engine) as connection:
            gone = delete(files).where(_f.id == file_id, _f.key_id == key_id, _alive())
            return (await connection.execute(gone)).rowcount == 1

    async def sweep(self, limit: int) -> int:
        old = select(_f.id).where(_f.expires_at <= func.now()).limit(limit).with_for_update(skip_locked=True)
        async with transaction(self._engine) as connection:
            return int((await connection.execute(delete(files).where(_f.id.in_(old)))).rowcount)


class FileWriter:
    """Writes the bytes of one file, whose row is there, in a transaction of the caller's."""

    def __init__(self, connection: AsyncConnection, file_id: str) -> None:
        self._connection = connection
        self._file_id = file_id
        self._rest = bytearray()
        self._n = self.size_bytes = 0

    async def write(self, data: bytes) -> None:
        """Add these bytes."""
        self._rest += data
        self.size_bytes += len(data)
        while len(self._rest) >= PIECE_BYTES:
            await self._put(bytes(self._rest[:PIECE_BYTES]))
            del self._rest[:PIECE_BYTES]

    async def close(self) -> int:
        """Write the rest, and the size in the row; return the size."""
        if self._rest:
            await self._put(bytes(self._rest))
        resize = files.update().where(_f.id == self._file_id).values(size_bytes=self.size_bytes)
        await self._connection.execute(resize)
        return self.size_bytes

    async def _put(self, data: bytes) -> None:
        await self._connection.execute(insert(file_pieces).values(file_id=self._file_id, n=self._n, data=data))
        self._n += 1


async def insert_file(connection: AsyncConnection, file: UploadedFile) -> None:
    """Insert the row of a file."""
    times = {"created_at": _at(file.created_s), "expires_at": None if file.expires_s is None else _at(file.expires_s)}
    texts = {"id": file.id, "key_id": file.key_id, "name": clean(file.name), "purpose": file.purpose}
    await connection.execute(insert(files).values(**texts, **times, size_bytes=file.size_bytes))


def _alive() -> ColumnElement[bool]:
    return or_(_f.expires_at.is_(None), _f.expires_at > func.now())


def _at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _file(row: Mapping[Any, Any]) -> UploadedFile:
    expires_at = row["expires_at"]
    return UploadedFile(
        id=row["id"],
        key_id=row["key_id"],
        name=row["name"],
        purpose=row["purpose"],
        size_bytes=row["size_bytes"],
        created_s=int(row["created_at"].timestamp()),
        expires_s=None if expires_at is None else int(expires_at.timestamp()),
    )
