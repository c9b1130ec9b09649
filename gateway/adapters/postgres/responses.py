"""Stored responses in PostgreSQL (port `ResponseStore`): rollouts by the id their client was given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Table, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.store import _descendants, _owned
from gateway.adapters.postgres.tables import experience, gradings, rollouts, rounds, steps
from gateway.core.log.redact import apply_mode
from gateway.service.ports.turns import LoggedResponse

_COLUMNS = ("completion_id", "created_at", "finished_at", "status", "request", "reply", "error")
_KEYS: dict[str, tuple[str, ...]] = {"rounds": ("rollout_id", "round"), "steps": ("rollout_id", "round", "step")}
ERASED = "the response was deleted"


class PostgresResponses:
    """Over the engine of the store."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def find(self, response_ids: Collection[str], key_id: str) -> Mapping[str, LoggedResponse]:
        here = rollouts.c
        query = select(*(here[name] for name in _COLUMNS))
        query = query.where(here.completion_id.in_(list(response_ids)), here.key_id == key_id, here.depth == 0)
        async with transaction(self._engine) as connection:
            found = (await connection.execute(query)).mappings().all()
        return {row["completion_id"]: logged(row) for row in found}

    async def erase(self, response_id: str, key_id: str) -> bool:
        async with transaction(self._engine) as connection:
            root = await connection.scalar(_owned(response_id, key_id))
            if root is None:
                return False
            for rollout_id in list(await connection.scalars(_descendants(root, key_id))):
                await _erase(connection, rollout_id)
        return True


def logged(row: Mapping[Any, Any]) -> LoggedResponse:
    """A row of `rollouts` as the port gives it."""
    return LoggedResponse(
        id=row["completion_id"],
        created_s=int(row["created_at"].timestamp()),
        finished_s=int((row["finished_at"] or row["created_at"]).timestamp()),
        status=row["status"],
        request=row["request"],
        reply=row["reply"],
        error=row["error"],
    )


def erased(rollout: Mapping[str, Any], parts: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A rollout's row, with its `rounds` and `steps`, without any text, and never to be trained on."""
    bare = apply_mode({**rollout, **parts}, "metadata")
    return bare | {"log_mode": "metadata", "train": False, "task_embedding": None}


async def _erase(connection: AsyncConnection, rollout_id: str) -> None:
    query = select(rollouts).where(rollouts.c.id == rollout_id).with_for_update()
    row = dict((await connection.execute(query)).mappings().one())
    parts = {table.name: await _rows(connection, table, rollout_id) for table in (rounds, steps)}
    bare = erased(row, parts)
    await _change(connection, rollouts, ("id",), row, bare)
    for table in (rounds, steps):
        for old, new in zip(parts[table.name], bare[table.name], strict=True):
            await _change(connection, table, _KEYS[table.name], old, new)
    await connection.execute(update(experience).where(experience.c.rollout_id == rollout_id).values(embedding=None))
    asked = update(gradings).where(gradings.c.rollout_id == rollout_id)
    await connection.execute(asked.values(reference="", detail=ERASED))
    await connection.execute(asked.where(gradings.c.state == "waiting").values(state="ungraded"))


async def _change(
    connection: AsyncConnection, table: Table, key: tuple[str, ...], old: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    values = {name: new[name] for name in old if new[name] != old[name]}
    if values:
        await connection.execute(update(table).where(*(table.c[name] == old[name] for name in key)).values(**values))


async def _rows(connection: AsyncConnection, table: Table, rollout_id: str) -> list[dict[str, Any]]:
    found = await connection.execute(select(table).where(table.c.rollout_id == rollout_id))
    return [dict(row) for row in found.mappings()]
