"""Organisations: what all of their keys share, and what each of their end users may spend."""

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
        """A new organisation. Raises BadRequest naming the field, Conflict where the name is taken."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise limits.bad("name", "give 1 to 64 letters, digits, `.`, `-` or `_`, a letter or digit first")
        values: dict[str, Any] = dict(limits.columns(check_names(fields, CHANGEABLE)))
        org = OrgRow(name=name, created_at=self._clock.now(), **values)
        await self._store.org_insert(org, act)
        return org

    async def list(self) -> Sequence[OrgRow]:
        """By name, closed ones too."""
        return await self._store.org_list()

    async def get(self, name: str) -> OrgRow:
        """Raises NotFound."""
        return _found(await self._store.org_get(name), name)

    async def update(self, name: str, fields: Mapping[str, Any], act: Act = ITSELF) -> OrgRow:
        """With those limits changed; None lifts one. They count within a second. Raises NotFound, BadRequest, Conflict
        for a closed one."""
        values = limits.columns(check_names(fields, CHANGEABLE))
        return _found(await self._store.org_change(name, values, act, "org.changed"), name)

    async def close(self, name: str, act: Act = ITSELF) -> OrgRow:
        """Its keys stop working within a second, for good; what they did stays. Raises NotFound, Conflict for one that
        was closed before."""
        return _found(await self._store.org_change(name, {"closed_at": self._clock.now()}, act, "org.closed"), name)


def describe_org(row: OrgRow) -> dict[str, Any]:
    """An organisation as people and scripts see it."""
    times = {"created_at": row.created_at, "closed_at": row.closed_at}
    shown = {name: None if at is None else at.isoformat() for name, at in times.items()}
    return {"name": row.name, **limits.shown(row), **shown}


def _found(row: OrgRow | None, name: str) -> OrgRow:
    if row is None:
        raise NotFound(f"No organisation `{name[:64]}`; `baton orgs list` names them all.", code="org_not_found")
    return row
