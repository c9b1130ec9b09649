"""The port JudgedPast: what the memory of a gateway reads of stored experience."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from psycopg import sql
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import Lookups, fragment, placeholders, query
from gateway.core.loop.experience.past import Change, JudgedStep, Owner, Reals

CHANGES_RECENT = 10_000  # among which the organisations are looked for that were active last
_ARRAY = struct.Struct("!iiIii")  # dimensions, nulls, type, length, first index
_NUMBER = np.dtype([("bytes", ">i4"), ("value", ">f4")])
_COLUMNS = {"org": sql.Identifier("org"), "pool": sql.Identifier("pool_name")}
BEGIN = {kind: placeholders(query("experience_begin", owner=column)) for kind, column in _COLUMNS.items()}
LATEST = {
    kind: placeholders(query("experience_latest", step=fragment("judged_step"), owner=column))
    for kind, column in _COLUMNS.items()
}
RECENT, CHANGES = placeholders(query("experience_recent")), placeholders(query("experience_changes"))
OF_ROLLOUTS = placeholders(query("experience_of_rollouts", step=fragment("judged_step")))


class PostgresPast:
    """Reads one statement at a time."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._lookups = Lookups(engine)

    async def recent(self, most: int) -> Sequence[Owner]:
        """See the port."""
        found = await self._lookups.rows(RECENT, {"recent": CHANGES_RECENT, "most": most})
        return [Owner("org", name) for (name,) in found]

    async def begin(self, owner: Owner, most: int) -> tuple[int, Sequence[str]]:
        """See the port."""
        ((now_us, workers),) = await self._lookups.rows(BEGIN[owner.kind], {"name": owner.name, "most": most})
        return now_us, workers

    async def latest(self, owner: Owner, worker: str, most: int) -> Sequence[JudgedStep]:
        """See the port."""
        values = {"name": owner.name, "worker": worker, "most": most}
        return await self._steps(LATEST[owner.kind], values)

    async def changes(self, owners: Collection[Owner], since_us: int, most: int) -> Sequence[Change]:
        """See the port."""
        orgs, pools = ([one.name for one in owners if one.kind == kind] for kind in _COLUMNS)
        values = {"orgs": orgs, "pools": pools, "since_us": since_us, "most": most}
        rows = await self._lookups.rows(CHANGES, values)
        return [Change(rollout_id, (round_, step), *rest) for rollout_id, round_, step, *rest in rows]

    async def of_rollouts(self, ids: Collection[str]) -> Sequence[JudgedStep]:
        """See the port."""
        return await self._steps(OF_ROLLOUTS, {"ids": list(ids)})

    async def _steps(self, statement: str, values: Mapping[str, Any]) -> Sequence[JudgedStep]:
        rows = await self._lookups.rows(statement, values, binary=True)
        return [JudgedStep._make([*row[:10], _vector(row[10]), *row[11:]]) for row in rows]


def _vector(array: bytes | None) -> Reals | None:
    """The numbers of a `real[]` in PostgreSQL's binary form."""
    if array is None or len(array) <= _ARRAY.size:
        return None
    return np.frombuffer(array, _NUMBER, offset=_ARRAY.size)["value"].astype(np.float32)
