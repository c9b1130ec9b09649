"""The ports of administration: organisations, keys and credits with their audit, and what is kept elsewhere of it.

Every change writes its audit entry in the same transaction: both are there, or neither. All of it raises Unavailable
when the store is away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from gateway.core.access.audit import Act, Anchor, Link
from gateway.service.ports.keys import KeyRow, OrgRow


@dataclass(frozen=True, slots=True)
class Credit:
    """Money given back: `amount_nano` in each of `scopes`. `hold_id`: the charge it takes back, None for a top-up."""

    id: str
    hold_id: str | None
    amount_nano: int
    scopes: tuple[str, ...]
    at: datetime
    by: str
    why: str


@dataclass(frozen=True, slots=True)
class CreditAsked:
    """A credit before it is given. `charge`: the hold or rollout whose charge it takes back, `amount_nano` None for all
    that is left of it; else `scope`, which must be one. `id`: the same again is the same credit."""

    id: str
    amount_nano: int | None
    charge: str | None = None
    scope: str | None = None


class AdminStore(Protocol):
    """Keys and organisations for those who may change them."""

    async def key_insert(self, key: KeyRow, act: Act) -> None:
        """Raises Conflict when the public id exists, NotFound(org) for an organisation that is not there or closed."""
        ...

    async def key_list(self) -> Sequence[KeyRow]:
        """Every key, revoked ones too, newest first."""
        ...

    async def key_find(self, public_id: str) -> KeyRow | None: ...

    async def key_change(self, public_id: str, changes: Mapping[str, Any], act: Act, what: str) -> KeyRow | None:
        """The key with those columns changed; None for no such key. What changes nothing is not audited. Raises
        Conflict for a revoked key."""
        ...

    async def key_revoke(self, public_id: str, at: datetime, act: Act) -> KeyRow | None:
        """The key, revoked now or earlier: the first time stands."""
        ...

    async def org_insert(self, org: OrgRow, act: Act) -> None:
        """Raises Conflict when the name is taken."""
        ...

    async def org_list(self) -> Sequence[OrgRow]:
        """By name, closed ones too."""
        ...

    async def org_get(self, name: str) -> OrgRow | None: ...

    async def org_change(self, name: str, changes: Mapping[str, Any], act: Act, what: str) -> OrgRow | None:
        """As `key_change`. Raises Conflict for a closed one."""
        ...

    async def credit(self, asked: CreditAsked, at: datetime, act: Act) -> tuple[Credit, bool]:
        """The credit, and whether it is new. Raises NotFound for a charge that is not there, Conflict for one that is
        not settled or was credited already as far, and for an id that stands for another credit."""
        ...

    async def credits(self, limit: int) -> Sequence[Credit]:
        """Newest first."""
        ...


class AuditLog(Protocol):
    """The audit, for those who read it."""

    async def head(self) -> Anchor:
        """The end of the chain; of an empty one, number 0."""
        ...

    async def walk(self, after: int, limit: int) -> Sequence[Link]:
        """Entries that come after number `after`, oldest first."""
        ...

    async def latest(self, limit: int, before: int | None = None, target: str | None = None) -> Sequence[Link]:
        """Newest first; `before` a number, of one target or of all."""
        ...


class Anchors(Protocol):
    """Where heads of the audit are written down, outside the database."""

    async def add(self, anchor: Anchor, at: datetime) -> None:
        """Durable when it returns."""
        ...

    async def all(self) -> Sequence[Anchor]: ...


@dataclass(frozen=True, slots=True)
class MonthGone:
    """A month of the log whose tables were dropped, or would be: rollouts by key, and the rows that went with them."""

    month: str
    rollouts: Mapping[str, int]
    rounds: int
    steps: int


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep of the retention deleted, or would delete: whole `months`, then by row rollouts by key, and other
    rows. `held`: months whose time is over, left for the next time as they are in use."""

    rollouts: Mapping[str, int] = field(default_factory=dict)
    shadows: int = 0
    dead_letters: int = 0
    months: Sequence[MonthGone] = ()
    held: Sequence[str] = ()

    @property
    def by_row(self) -> int:
        """Rows that were deleted as such."""
        return sum(self.rollouts.values()) + self.shadows + self.dead_letters

    @property
    def total(self) -> int:
        """Of all: rollouts, and what was counted beside them."""
        return self.by_row + sum(sum(one.rollouts.values()) for one in self.months)


class RetentionStore(Protocol):
    """What outlived its time."""

    async def sweep(self, now: datetime, days: int | None, act: Act, *, dry: bool = False) -> Swept:
        """Delete rollouts, and all that hangs on them, that are older than their key, else their organisation, else
        `days` says (None: kept for ever): months of which nothing is to be kept as a whole, the rest by row. This month
        and the next get their tables. `dry`: only count. Ledger and audit stay. Nothing where another gateway is at
        it."""
        ...
