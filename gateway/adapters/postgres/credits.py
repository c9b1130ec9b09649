"""Credits in the ledger: what was charged and is given back, and what tops a budget up.

A credit is a row of `ledger` of kind `credit`, which counts against what was posted in its scopes, so that balances
rebuilt from the ledger hold it. Its id is made from what the operator called it: the same again is the same row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, func, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables import SETTLED, ledger
from gateway.core.access.audit import Act
from gateway.core.money.amounts import NANO_MAX, nano_to_usd
from gateway.errors import Conflict, NotFound
from gateway.service.ports.admin import Credit, CreditRequest

LOCK_KEY = 0x637265646974  # "credit": a charge is given back once, whoever asks at the same time
CREDIT = "credit"
LIST_MAX = 1_000
TOP_UP = "top-up:"


async def credit_insert(
    connection: AsyncConnection, asked: CreditRequest, at: datetime, act: Act
) -> tuple[Credit, bool]:
    """The credit, and whether it is new. Raises NotFound and Conflict as the port says."""
    await connection.execute(select(func.pg_advisory_xact_lock(LOCK_KEY)))
    known = (await connection.execute(select(ledger).where(ledger.c.event_id == asked.id))).mappings().first()
    if known is not None:
        return _same(_credit(known), asked), False
    charge = None if asked.charge is None else await _charge(connection, asked.charge)
    scopes = [[asked.scope, None]] if charge is None else [[name, None] for name, _ in charge["scopes"]]
    amount = asked.amount_nano if charge is None else await _amount(connection, charge, asked.amount_nano)
    values = {
        "event_id": asked.id,
        "hold_id": f"{TOP_UP}{asked.id}" if charge is None else charge["hold_id"],
        "rollout_id": None if charge is None else charge["rollout_id"],
        "kind": CREDIT,
        "amount_nano": amount,
        "scopes": scopes,
        "detail": {"by": act.actor, "why": str(clean(act.why)), "asked": _asked(asked)},
        "at": at,
    }
    await connection.execute(insert(ledger).values(**values))
    made = _credit(values)
    shown = {"amount_nano": made.amount_nano, "scopes": list(made.scopes), "hold_id": made.hold_id}
    await store_audit.write(connection, act, "credit.given", f"credit:{made.id}", None, shown)
    return made, True


async def credit_list(connection: AsyncConnection, limit: int) -> Sequence[Credit]:
    """Newest first."""
    query = select(ledger).where(ledger.c.kind == CREDIT).order_by(ledger.c.at.desc(), ledger.c.event_id.desc())
    return [_credit(row) for row in (await connection.execute(query.limit(min(limit, LIST_MAX)))).mappings()]


async def _charge(connection: AsyncConnection, name: str) -> Mapping[Any, Any]:
    """The settlement of a hold, by the hold's id, its rollout's or its completion's."""
    settled = select(ledger).where(_named(name), ledger.c.kind.in_(SETTLED)).limit(1)
    found = (await connection.execute(settled)).mappings().first()
    if found is not None:
        return found
    if (await connection.execute(select(ledger.c.hold_id).where(_named(name)).limit(1))).first() is not None:
        raise Conflict(f"`{name[:64]}` is not settled yet; there is nothing to give back", code="hold_open")
    raise NotFound(f"no charge `{name[:64]}`; give a hold's, a rollout's or a completion's id", code="charge_not_found")


def _named(name: str) -> ColumnElement[bool]:
    plain = str(clean(name))
    try:
        rollout = str(UUID(plain.removeprefix("chatcmpl-").removeprefix("resp_")))
    except ValueError:
        return ledger.c.hold_id == plain
    return or_(ledger.c.hold_id == plain, ledger.c.rollout_id == rollout)


async def _amount(connection: AsyncConnection, charge: Mapping[Any, Any], wanted: int | None) -> int:
    """What is given back of a charge: all that is left of it, or less. Raises Conflict for more."""
    given = select(func.coalesce(func.sum(ledger.c.amount_nano), 0))
    given = given.where(ledger.c.hold_id == charge["hold_id"], ledger.c.kind == CREDIT)
    left = int(charge["amount_nano"]) - int(await connection.scalar(given) or 0)
    amount = left if wanted is None else wanted
    if not 0 < amount <= left:
        raise Conflict(f"of this charge ${nano_to_usd(left)} can be given back", code="credit_above_charge")
    return min(amount, NANO_MAX)


def _asked(asked: CreditRequest) -> dict[str, Any]:
    return {"charge": asked.charge, "scope": asked.scope, "amount_nano": asked.amount_nano}


def _same(known: Credit, asked: CreditRequest) -> Credit:
    """The credit of before. Raises Conflict where something else is asked for under its name."""
    whole = asked.amount_nano is None or asked.amount_nano == known.amount_nano
    scope = asked.scope is None or (known.hold_id is None and known.scopes == (asked.scope,))
    if whole and scope and (asked.charge is None) == (known.hold_id is None):
        return known
    raise Conflict(f"credit {known.id} was another one; give this one a key of its own", code="credit_conflict")


def _credit(row: Mapping[Any, Any]) -> Credit:
    hold = None if str(row["hold_id"]).startswith(TOP_UP) else str(row["hold_id"])
    scopes = tuple(str(name) for name, _ in row["scopes"])
    detail = row["detail"]
    return Credit(str(row["event_id"]), hold, int(row["amount_nano"]), scopes, row["at"], detail["by"], detail["why"])
