"""Look-ups of keys, which requests wait for: those that come in one turn of the event loop, or while a read is under
way, are one read. A gateway with more keys than requests a second reads a key for nearly every request."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

from sqlalchemy import ARRAY, Text, any_, bindparam, select

from gateway.adapters.postgres.admin import key_row, org_row
from gateway.adapters.postgres.admin_tables import keys, orgs
from gateway.adapters.postgres.database import Lookups, placeholders
from gateway.errors import Unavailable
from gateway.service.ports.admin import KeyRow

READ_MAX = 256  # keys of one read
READ_S = 2.0  # of one read: those behind it wait for it
ORG_COLUMNS = tuple(column.label(f"org_{column.name}") for column in orgs.columns)
KEYS = placeholders(
    select(keys, *ORG_COLUMNS)
    .select_from(keys.outerjoin(orgs, orgs.c.name == keys.c.org))
    .where(keys.c.public_id == any_(bindparam("public_ids", type_=ARRAY(Text))))
)


class KeyLookups:
    """Reads keys with their organisations, one read at a time."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups = lookups
        self._wanted: dict[str, asyncio.Future[KeyRow | None]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def get(self, public_id: str) -> KeyRow | None:
        """The key; None where there is none. Raises Unavailable."""
        wanted = self._wanted.get(public_id)
        if wanted is None:
            wanted = self._wanted[public_id] = asyncio.get_running_loop().create_future()
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_all())
        return await asyncio.shield(wanted)  # others may wait for it too

    async def _read_all(self) -> None:
        """Read until nobody waits."""
        try:
            while self._wanted:
                batch = {public_id: self._wanted.pop(public_id) for public_id in [*islice(self._wanted, READ_MAX)]}
                await self._read(batch)
        finally:
            self._reading = None

    async def _read(self, batch: dict[str, asyncio.Future[KeyRow | None]]) -> None:
        found: dict[str, KeyRow] = {}
        failure: Exception | None = None
        try:
            async with asyncio.timeout(READ_S):
                rows = await self._lookups.rows(KEYS, {"public_ids": list(batch)})
            found = {key.public_id: key for key in map(_key_of, rows)}
        except TimeoutError:
            failure = Unavailable("the database does not answer", code="store_unavailable")
        except Exception as error:  # boundary: it is raised where the keys are waited for
            failure = error
        for public_id, wanted in batch.items():
            if failure is None:
                wanted.set_result(found.get(public_id))
            else:
                wanted.set_exception(failure)
                wanted.exception()  # retrieves it, or asyncio warns if every caller has left


def _key_of(row: tuple[Any, ...]) -> KeyRow:
    own = dict(zip((column.name for column in keys.columns), row, strict=False))
    org = dict(zip((column.name for column in orgs.columns), row[len(own) :], strict=True))
    return key_row(own, None if org["name"] is None else org_row(org))
