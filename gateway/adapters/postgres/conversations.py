"""Stored conversations in PostgreSQL (docs/adr/0034): the conversation with the claim of its turn, and its items.

A deleted item leaves its row without its text, so that a record of the journal that is stored again adds nothing.
Leases are by the database's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    ForeignKeyConstraint,
    Index,
    Integer,
    Select,
    Table,
    Text,
    and_,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.admin_tables import keys, orgs
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables import JSONB, metadata, required, timestamp
from gateway.errors import BadRequest, ConversationLocked, NotFound, TooLarge
from gateway.service.ports.turns import StoredConversation

conversations = Table(
    "conversations",
    metadata,
    Column("id", Text, primary_key=True),
    required("key_id", Text),
    timestamp("created_at", nullable=False),
    timestamp("used_at", nullable=False),
    required("metadata", JSONB),
    required("item_count", Integer),
    required("size_bytes", BigInteger),
    required("next", Integer),
    Column("turn", Text),
    timestamp("turn_until"),
    Index(None, "key_id"),
    Index("conversations_turn_idx", "turn", postgresql_where=text("turn IS NOT NULL")),
    Index("conversations_used_at_idx", "used_at"),
)
conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation_id", Text, primary_key=True),
    Column("n", Integer, primary_key=True, autoincrement=False),
    required("id", Text),
    Column("item", JSONB),
    timestamp("at", nullable=False),
    ForeignKeyConstraint(["conversation_id"], ["conversations.id"], ondelete="CASCADE"),
    Index("conversation_items_id_key", "conversation_id", "id", unique=True),
    Index("conversation_items_at_idx", "at"),
)

_c, _i = conversations.c, conversation_items.c
_ENDED: dict[str, Any] = {"turn": None, "turn_until": None}


class PostgresStoredConversations:
    """The port ConversationStore. `retention_days`: how long items are kept where key and organisation say nothing;
    None: for ever."""

    def __init__(self, engine: AsyncEngine, retention_days: int | None = None) -> None:
        self._engine = engine
        self._retention_days = retention_days

    async def create(self, new: StoredConversation, items: Sequence[Mapping[str, Any]], most: int) -> None:
        at = datetime.fromtimestamp(new.created_s, UTC)
        row = {
            "id": new.id,
            "key_id": new.key_id,
            "created_at": at,
            "used_at": func.now(),
            "metadata": clean(new.metadata),
            **{"item_count": 0, "size_bytes": 0, "next": 0},
        }
        count = select(func.count()).select_from(conversations).where(_c.key_id == new.key_id)
        async with transaction(self._engine) as connection:
            if (await connection.scalar(count) or 0) >= most:
                problem = f"this key has {most:,} conversations; delete some, or continue with `previous_response_id`"
                raise BadRequest(problem, code="too_many_conversations")
            await connection.execute(insert(conversations).values(**row))
            await connection.run_sync(_append, new.id, 0, items)

    async def get(self, key_id: str, conversation_id: str) -> StoredConversation | None:
        async with transaction(self._engine) as connection:
            row = (await connection.execute(_one(key_id, conversation_id))).mappings().first()
        return None if row is None else _stored(row)

    async def update(self, key_id: str, conversation_id: str, metadata: Mapping[str, str]) -> StoredConversation | None:
        change = update(conversations).where(_c.key_id == key_id, _c.id == conversation_id)
        async with transaction(self._engine) as connection:
            changed = await connection.execute(change.values(metadata=clean(metadata)).returning(conversations))
            row = changed.mappings().first()
        return None if row is None else _stored(row)

    async def delete(self, key_id: str, conversation_id: str) -> bool:
        async with transaction(self._engine) as connection:
            gone = delete(conversations).where(_c.key_id == key_id, _c.id == conversation_id)
            return (await connection.execute(gone)).rowcount == 1

    async def add(
        self, key_id: str, conversation_id: str, items: Sequence[Mapping[str, Any]], bytes_max: int
    ) -> StoredConversation | None:
        async with transaction(self._engine) as connection:
            row = await _unlocked(connection, key_id, conversation_id)
            if row is None:
                return None
            if row["size_bytes"] + _size(items) > bytes_max:
                problem = f"the conversation would hold more than {bytes_max:,} bytes; begin a new one"
                raise TooLarge(problem, param="items")
            await connection.run_sync(_append, conversation_id, row["next"], items)
            return _stored((await connection.execute(_one(key_id, conversation_id))).mappings().one())

    async def remove(self, key_id: str, conversation_id: str, item_id: str) -> StoredConversation | None:
        here = and_(_i.conversation_id == conversation_id, _i.id == item_id, _i.item.is_not(None))
        async with transaction(self._engine) as connection:
            if await _unlocked(connection, key_id, conversation_id) is None:
                return None
            item = await connection.scalar(select(_i.item).where(here))
            if item is None:
                return None
            await connection.execute(update(conversation_items).where(here).values(item=None))
            less = {"item_count": _c.item_count - 1, "size_bytes": _c.size_bytes - _size([item])}
            await connection.execute(update(conversations).where(_c.id == conversation_id).values(**less))
            return _stored((await connection.execute(_one(key_id, conversation_id))).mappings().one())

    async def page(
        self, key_id: str, conversation_id: str, *, after: str | None, limit: int, newest_first: bool
    ) -> Sequence[Mapping[str, Any]]:
        query = _items(key_id, conversation_id)
        async with transaction(self._engine) as connection:
            if after is not None:
                place = select(_i.n).where(_i.conversation_id == conversation_id, _i.id == after)
                n = await connection.scalar(place)
                if n is None:
                    raise NotFound(f"No such item: {after[:64]}", param="after")
                query = query.where(_i.n < n if newest_first else _i.n > n)
            query = query.order_by(_i.n.desc() if newest_first else _i.n).limit(limit)
            return [dict(item) for item in await connection.scalars(query)]

    async def item(self, key_id: str, conversation_id: str, item_id: str) -> Mapping[str, Any] | None:
        async with transaction(self._engine) as connection:
            item = await connection.scalar(_items(key_id, conversation_id).where(_i.id == item_id))
        return None if item is None else dict(item)

    async def begin(
        self, key_id: str, conversation_id: str, turn: str, lease_s: float, *, take_over: bool
    ) -> StoredConversation | None:
        free = or_(_c.turn.is_(None), _c.turn == turn)
        if take_over:
            free = or_(free, _c.turn_until <= func.now())
        claim = update(conversations).where(_c.key_id == key_id, _c.id == conversation_id, free)
        claim = claim.values(turn=turn, turn_until=func.now() + timedelta(seconds=lease_s), used_at=func.now())
        async with transaction(self._engine) as connection:
            row = (await connection.execute(claim.returning(conversations))).mappings().first()
            if row is not None:
                return _stored(row)
            if await connection.scalar(select(_c.id).where(_c.key_id == key_id, _c.id == conversation_id)) is None:
                return None
        raise ConversationLocked(conversation_id)

    async def leave(self, turn: str) -> None:
        async with transaction(self._engine) as connection:
            await end_turn(connection, turn)

    async def sweep(self, limit: int) -> int:
        of_key = keys.c.public_id == _c.key_id
        kept = func.coalesce(keys.c.retention_days, orgs.c.retention_days, literal(self._retention_days))
        over = func.now() - func.make_interval(0, 0, 0, kept)
        whose = conversations.outerjoin(keys, of_key).outerjoin(orgs, orgs.c.name == keys.c.org)
        old = select(_i.conversation_id, _i.n).select_from(whose.join(conversation_items, _i.conversation_id == _c.id))
        old = old.where(kept.is_not(None), _i.at < over).order_by(_i.at).limit(limit)
        empty = select(_c.id).select_from(whose).where(kept.is_not(None), _c.used_at < over, _c.turn.is_(None))
        async with transaction(self._engine) as connection:
            gone = delete(conversation_items).where(tuple_(_i.conversation_id, _i.n).in_(old))
            rows = (await connection.execute(gone.returning(_i.conversation_id, _i.item))).all()
            for conversation_id in sorted({row.conversation_id for row in rows}):
                items = [row.item for row in rows if row.conversation_id == conversation_id and row.item is not None]
                less = {"item_count": _c.item_count - len(items), "size_bytes": _c.size_bytes - _size(items)}
                await connection.execute(update(conversations).where(_c.id == conversation_id).values(**less))
            left = empty.where(~select(_i.n).where(_i.conversation_id == _c.id).exists()).limit(limit)
            ended = await connection.execute(delete(conversations).where(_c.id.in_(left.scalar_subquery())))
        return len(rows) + int(ended.rowcount)


async def end_turn(connection: AsyncConnection, turn: str) -> None:
    """End the claim of a turn that has no rollout and will have none."""
    await connection.execute(update(conversations).where(_c.turn == turn).values(**_ENDED))


def append_turns(connection: Connection, turns: Sequence[Mapping[str, Any]]) -> None:
    """Add what the turns of stored rollouts add to their conversations, once, and end their claims. A conversation that
    was deleted stays deleted."""
    for turn in sorted(turns, key=lambda turn: str(turn["conversation_id"])):
        name = turn["conversation_id"]
        row = connection.execute(_one(turn["key_id"], name).with_for_update()).mappings().first()
        if row is None:
            continue
        ids = [item["id"] for item in turn["items"]]
        known = select(_i.n).where(_i.conversation_id == name, _i.id.in_(ids)).limit(1)
        if ids and connection.scalar(known) is None:
            _append(connection, name, row["next"], turn["items"])
        mine = update(conversations).where(_c.id == name, _c.turn == turn["turn"])
        connection.execute(mine.values(**_ENDED))


def _append(connection: Connection, conversation_id: str, first: int, items: Sequence[Mapping[str, Any]]) -> None:
    if not items:
        return
    new = [
        {"conversation_id": conversation_id, "n": first + at, "id": item["id"], "item": clean(item), "at": func.now()}
        for at, item in enumerate(items)
    ]
    connection.execute(insert(conversation_items).values(new))
    more = {
        "item_count": _c.item_count + len(new),
        "size_bytes": _c.size_bytes + _size(items),
        "next": first + len(new),
    }
    change = update(conversations).where(_c.id == conversation_id)
    connection.execute(change.values(**more, used_at=func.now()))


async def _unlocked(connection: AsyncConnection, key_id: str, conversation_id: str) -> Mapping[Any, Any] | None:
    """The row of a conversation, locked for this transaction. Raises ConversationLocked during a turn."""
    query = _one(key_id, conversation_id).add_columns((_c.turn_until > func.now()).label("is_claimed"))
    row = (await connection.execute(query.with_for_update())).mappings().first()
    if row is not None and row["is_claimed"]:
        raise ConversationLocked(conversation_id)
    return row


def _one(key_id: str, conversation_id: str) -> Select[Any]:
    return select(conversations).where(_c.key_id == key_id, _c.id == conversation_id)


def _items(key_id: str, conversation_id: str) -> Select[Any]:
    joined = conversation_items.join(conversations, _c.id == _i.conversation_id)
    mine = and_(_c.key_id == key_id, _c.id == conversation_id, _i.item.is_not(None))
    return select(_i.item).select_from(joined).where(mine)


def _size(items: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(msgspec.json.encode(clean(item))) for item in items)


def _stored(row: Mapping[Any, Any]) -> StoredConversation:
    return StoredConversation(
        id=row["id"],
        key_id=row["key_id"],
        created_s=int(row["created_at"].timestamp()),
        metadata=row["metadata"],
        items=row["item_count"],
        size_bytes=row["size_bytes"],
        turn=row["turn"],
    )
