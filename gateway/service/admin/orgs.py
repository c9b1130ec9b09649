"""Organisations: the limits that all of their keys share, and the budget of each of their end users."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.access.audit import Act
from gateway.core.openai.shapes import check_names
from gateway.errors import NotFound
from gateway.service.admin import limits
from gateway.service.admin.keys import ITSELF
from gateway.service.ports.admin import AdminStore, OrgRow
from gateway.service.ports.request import Clock

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CHANGEABLE = frozenset(limits.FIELDS)


class OrgAdmin:
    """The use case behind `baton orgs` and the admin API."""

    def __init__(self, store: AdminStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def create(self, name: str, fields: Mapping[str, Any], act: Act = ITSELF) -> OrgRow:
        """Make an organisation. Raises BadRequest, which names the field, and Conflict if the name is taken."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise limits.bad("name", "give 1 to 64 letters, digits, `.`, `-` or `_`, a letter or digit first")
        values: dict[str, Any] = dict(limits.columns(check_names(fields, CHANGEABLE)))
        org = OrgRow(name=name, created_at=self._clock.now(), **values)
        await self._store.org_insert(org, act)
        return org

    async def list(self) -> Sequence[OrgRow]:
        """Organisations by name, closed ones included."""
        return await self._store.org_list()

    async def get(self, name: str) -> OrgRow:
        """One organisation. Raises NotFound."""
        return _require(await self._store.org_get(name), name)

    async def update(self, name: str, fields: Mapping[str, Any], act: Act = ITSELF) -> OrgRow:
        """Change limits; None lifts one. Changes take effect within a second. Raises NotFound, BadRequest, Conflict for
        a closed organisation."""
        values = limits.columns(check_names(fields, CHANGEABLE))
        return _require(await self._store.org_change(name, values, act, "org.changed"), name)

    async def close(self, name: str, act: Act = ITSELF) -> OrgRow:
        """Close an organisation: its keys stop working within a second, for good; its records stay. Raises NotFound,
        Conflict for a closed one."""
        return _require(await self._store.org_change(name, {"closed_at": self._clock.now()}, act, "org.closed"), name)


def describe_org(row: OrgRow) -> dict[str, Any]:
    """An organisation as JSON for people and scripts."""
    times = {"created_at": row.created_at, "closed_at": row.closed_at}
    body = {name: None if at is None else at.isoformat() for name, at in times.items()}
    return {"name": row.name, **limits.shown(row), **body}


def _require(row: OrgRow | None, name: str) -> OrgRow:
    if row is None:
        raise NotFound(f"No organisation `{name[:64]}`; `baton orgs list` names them all.", code="org_not_found")
    return row
