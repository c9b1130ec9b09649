"""Credits: an operator refunds a charge or tops up a budget.

The ledger and the audit get the credit before the balances do. If the balances miss it, because they were being
rebuilt, the next rebuild counts it. So a credit may count late, but never twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from gateway.core.access.audit import Act
from gateway.core.log.events import uuid7
from gateway.core.money.amounts import nano_to_usd
from gateway.core.money.ledger import WINDOWS, key_scope, org_scope, windows
from gateway.core.openai.shapes import check_names
from gateway.errors import BadRequest, MoneyUnavailable, NotFound
from gateway.service.admin import limits
from gateway.service.admin.keys import ITSELF
from gateway.service.ports.admin import AdminStore, Credit, CreditRequest, UncertainCharge
from gateway.service.ports.money import Budgets
from gateway.service.ports.request import Clock

FIELDS = frozenset({"charge", "key", "org", "window", "usd", "why"})
NAME_CHARS_MAX = 255
LIST_MAX = 100


class Credits:
    """The use case behind `baton credits` and the admin API."""

    def __init__(self, store: AdminStore, budgets: Budgets, clock: Clock) -> None:
        self._store = store
        self._budgets = budgets
        self._clock = clock

    async def give(self, fields: Mapping[str, Any], name: str | None, act: Act = ITSELF) -> dict[str, Any]:
        """Give a credit; return it with `created` and with when it `counts`.

        `charge`, the id of a hold, rollout or completion, refunds that charge, either `usd` of it or all. `key` or
        `org` tops up that budget by `usd`, in its `window` (life, month or day). A repeated `name`, the
        Idempotency-Key, returns the first credit. Raises BadRequest, NotFound, Conflict.
        """
        request = await self._request(check_names(fields, FIELDS), name)
        fence = self._budgets.fence()
        credit, new = await self._store.credit(request, self._clock.now(), act)
        description = describe_credit(credit) | {"created": new}
        if new:
            try:
                await self._budgets.credit(credit.amount_nano, credit.scopes, fence)
            except MoneyUnavailable:
                return description | {"counts": "after the next rebuild of the balances"}
        return description | {"counts": "now"}

    async def list(self) -> Sequence[Credit]:
        """The latest credits, newest first, at most LIST_MAX."""
        return await self._store.credits(LIST_MAX)

    async def uncertain(self, limit: int) -> Sequence[UncertainCharge]:
        """Charges that no reply confirmed, newest first, credited ones too."""
        return await self._store.uncertain(limit)

    async def give_back(self, hold_id: str, act: Act = ITSELF) -> dict[str, Any]:
        """Give all of an uncertain charge back, once: a repeated call returns the first credit. Raises NotFound for a
        hold without an uncertain charge, Conflict where other credits have given it back."""
        if not await self._store.uncertain(1, hold_id):
            raise NotFound(f"no uncertain charge `{hold_id[:64]}`", code="charge_not_found")
        return await self.give({"charge": hold_id}, f"uncertain\0{hold_id}", act)

    async def _request(self, fields: Mapping[str, Any], name: str | None) -> CreditRequest:
        """Check the fields of a credit. Raises BadRequest."""
        kinds = [field for field in ("charge", "key", "org") if fields.get(field) is not None]
        if len(kinds) != 1:
            raise BadRequest("give exactly one of `charge`, `key` and `org`", param="charge", code="bad_field")
        kind = kinds[0]
        target = limits.label(kind, fields[kind])
        amount = limits.nano("usd", fields.get("usd"))
        if amount == 0 or (amount is None and kind != "charge"):
            raise limits.bad("usd", "give an amount above 0")
        credit_id = self._id(name)
        if kind == "charge":
            if fields.get("window") is not None:
                raise limits.bad("window", "leave it out; a refund counts in every window of its charge")
            return CreditRequest(credit_id, amount, charge=target)
        return CreditRequest(credit_id, amount, scope=await self._scope(kind, target, fields.get("window") or "life"))

    async def _scope(self, kind: str, target: str, window: Any) -> str:
        """The scope of a key's or organisation's window. Raises BadRequest."""
        if window not in WINDOWS:
            raise limits.bad("window", f"give one of {', '.join(WINDOWS)}")
        row = await (self._store.key_find(target) if kind == "key" else self._store.org_get(target))
        if row is None:
            raise limits.bad(kind, f"`{target}` does not exist")
        scope = key_scope(target) if kind == "key" else org_scope(target)
        return windows(scope, self._clock.now())[WINDOWS.index(window)]

    def _id(self, name: str | None) -> str:
        if name is None:
            return uuid7(int(self._clock.now().timestamp() * 1000))
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise BadRequest(f"`Idempotency-Key` must have 1 to {NAME_CHARS_MAX} characters", param="Idempotency-Key")
        return str(UUID(bytes=hashlib.sha256(f"credit\0{name}".encode("utf-8", "surrogatepass")).digest()[:16]))


def describe_uncertain(charge: UncertainCharge) -> dict[str, Any]:
    """An uncertain charge as JSON data."""
    return {
        "charge": charge.hold_id,
        "rollout_id": charge.rollout_id,
        "usd": nano_to_usd(charge.amount_nano),
        "credited_usd": nano_to_usd(charge.credited_nano),
        "left_usd": nano_to_usd(charge.amount_nano - charge.credited_nano),
        "scopes": list(charge.scopes),
        "at": charge.at.isoformat(),
    }


def describe_credit(credit: Credit) -> dict[str, Any]:
    """A credit as JSON data, for people and scripts."""
    return {
        "id": credit.id,
        "charge": credit.hold_id,
        "scopes": list(credit.scopes),
        "usd": nano_to_usd(credit.amount_nano),
        "by": credit.by,
        "why": credit.why,
        "at": credit.at.isoformat(),
    }
