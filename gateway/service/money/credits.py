"""Credits: an operator gives a charge back, or tops a budget up.

The credit is in the ledger, and in the audit, before the balances hear of it. Where they do not (a rebuild came
between), the next rebuild counts it: money given back late, never twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from gateway.core.access.audit import Act
from gateway.core.log.ids import uuid7
from gateway.core.money.amounts import nano_to_usd
from gateway.core.money.scopes import WINDOWS, key_scope, org_scope, windows
from gateway.core.openai.shapes import check_names
from gateway.errors import BadRequest, MoneyUnavailable
from gateway.service.admin import limits
from gateway.service.admin.keys import ITSELF
from gateway.service.ports.admin import AdminStore, Credit, CreditRequest
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

FIELDS = frozenset({"charge", "key", "org", "window", "usd", "why"})
NAME_CHARS_MAX = 255
LISTED = 100


class Crediting:
    """The use case behind `baton credits` and the admin API."""

    def __init__(self, store: AdminStore, budgets: Budgets, clock: Clock) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock

    async def give(self, fields: Mapping[str, Any], name: str | None, act: Act = ITSELF) -> dict[str, Any]:
        """`charge` (the id of a hold, rollout or completion) gives that charge back, `usd` of it or all; `key` or `org`
        tops its budget up by `usd`, in its `window` (life, month, day). The same `name` again is the same credit.
        Raises BadRequest, NotFound, Conflict."""
        asked = await self._asked(check_names(fields, FIELDS), name)
        fence = self._budgets.fence()
        credit, new = await self._store.credit(asked, self._clock.now(), act)
        shown = describe_credit(credit) | {"created": new}
        if new:
            try:
                await self._budgets.credit(credit.amount_nano, credit.scopes, fence)
            except MoneyUnavailable:
                return shown | {"counts": "after the next rebuild of the balances"}
        return shown | {"counts": "now"}

    async def list(self) -> Sequence[Credit]:
        """The latest, newest first."""
        return await self._store.credits(LISTED)

    async def _asked(self, fields: Mapping[str, Any], name: str | None) -> CreditRequest:
        given = [field for field in ("charge", "key", "org") if fields.get(field) is not None]
        if len(given) != 1:
            raise BadRequest("give exactly one of `charge`, `key` and `org`", param="charge", code="bad_field")
        of = limits.label(given[0], fields[given[0]])
        amount = limits.nano("usd", fields.get("usd"))
        if amount == 0 or (amount is None and given[0] != "charge"):
            raise limits.bad("usd", "give more than nothing")
        known = self._id(name)
        if given[0] == "charge":
            if fields.get("window") is not None:
                raise limits.bad("window", "a charge is given back in every window that it was charged in")
            return CreditRequest(known, amount, charge=of)
        return CreditRequest(known, amount, scope=await self._scope(given[0], of, fields.get("window") or "life"))

    async def _scope(self, kind: str, of: str, window: Any) -> str:
        if window not in WINDOWS:
            raise limits.bad("window", f"give one of {', '.join(WINDOWS)}")
        found = await (self._store.key_find(of) if kind == "key" else self._store.org_get(of))
        if found is None:
            raise limits.bad(kind, "there is none of that name")
        scope = key_scope(of) if kind == "key" else org_scope(of)
        return windows(scope, self._clock.now())[WINDOWS.index(window)]

    def _id(self, name: str | None) -> str:
        if name is None:
            return uuid7(int(self._clock.now().timestamp() * 1000))
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise BadRequest(f"`Idempotency-Key` must have 1 to {NAME_CHARS_MAX} characters", param="Idempotency-Key")
        return str(UUID(bytes=hashlib.sha256(f"credit\0{name}".encode("utf-8", "surrogatepass")).digest()[:16]))


def describe_credit(credit: Credit) -> dict[str, Any]:
    """A credit as people and scripts see it."""
    return {
        "id": credit.id,
        "charge": credit.hold_id,
        "scopes": list(credit.scopes),
        "usd": nano_to_usd(credit.amount_nano),
        "by": credit.by,
        "why": credit.why,
        "at": credit.at.isoformat(),
    }
