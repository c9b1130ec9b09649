"""Named queries of administration in PostgreSQL (port `AdminStore`): each change with its audit entry, or neither.

A credit gives back a charge or tops up a budget. It is a row of `ledger` of kind `credit`, which counts against what
was posted in its scopes, so that balances rebuilt from the ledger include it. Its id is made from the name that the
operator gave it, so a repeated request finds the same row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    Table,
    Text,
    and_,
    exists,
    func,
    insert,
    or_,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.adapters.postgres import audit as store_audit
from gateway.adapters.postgres.admin_tables import BUDGETS, keys, orgs, pool_revisions
from gateway.adapters.postgres.database import transaction
from gateway.adapters.postgres.rows import clean
from gateway.adapters.postgres.tables import SETTLED, ledger
from gateway.core.access.audit import Act
from gateway.core.money.amounts import NANO_MAX, nano_to_usd
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.service.ports.admin import Credit, CreditRequest, KeyRow, OrgRow, UncertainCharge
from gateway.service.ports.pools import PoolRevision

ORGS_MAX = 100_000
SECRETS = frozenset({"digest", "previous_digest"})  # never shown, not even in the audit
Row = Mapping[Any, Any]
POOLS_TARGET = "pools"
CREDIT_LOCK_KEY = 0x637265646974  # "credit": two requests at a time give a charge back once
CREDIT = "credit"
CREDITS_MAX = 1_000
TOP_UP = "top-up:"


class PostgresAdmin:
    """Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    # ---------------------------------------------------------------- keys

    async def key_insert(self, key: KeyRow, act: Act) -> None:
        values = key_values(key)
        try:
            async with transaction(self._engine) as connection:
                await _open_org(connection, key.org)
                await connection.execute(insert(keys).values(**values))
                await store_audit.write(connection, act, "key.created", f"key:{key.public_id}", None, _shown(values))
        except IntegrityError as error:
            raise Conflict(f"key `{key.public_id}` exists or is malformed", code="key_conflict") from error

    async def key_list(self, limit: int, before: str | None = None, text: str | None = None) -> Sequence[KeyRow]:
        query = _newest(limit)
        if before is not None:
            last = select(keys.c.created_at).where(keys.c.public_id == str(clean(before))).scalar_subquery()
            later = and_(keys.c.created_at == last, keys.c.public_id > str(clean(before)))
            query = query.where(or_(keys.c.created_at < last, later))
        if text is not None:
            columns = (keys.c.public_id, keys.c.name, keys.c.org)
            query = query.where(or_(*(column.icontains(str(clean(text)), autoescape=True) for column in columns)))
        return await self._keys(query)

    async def key_budgets(self, limit: int, after: str = "", among: Collection[str] | None = None) -> Sequence[KeyRow]:
        limited = or_(*(keys.c[name].is_not(None) for name in BUDGETS[:3]))
        query = select(keys).where(keys.c.revoked_at.is_(None), limited, keys.c.public_id > after)
        if among is not None:
            query = query.where(keys.c.public_id.in_([str(clean(one)) for one in among]))
        return await self._keys(query.order_by(keys.c.public_id).limit(limit))

    async def key_naming(self, pools: Sequence[str], workers: Sequence[str], limit: int) -> Sequence[KeyRow]:
        named = or_(_overlaps(keys.c.pools, pools), _overlaps(keys.c.workers, workers))
        return await self._keys(_newest(limit).where(keys.c.revoked_at.is_(None), named))

    async def key_exists(self) -> bool:
        async with transaction(self._engine) as connection:
            query = select(exists().where(keys.c.revoked_at.is_(None)))
            return bool(await connection.scalar(query))

    async def _keys(self, query: Select[Any]) -> Sequence[KeyRow]:
        async with transaction(self._engine) as connection:
            return [key_row(row) for row in (await connection.execute(query)).mappings()]

    async def key_find(self, public_id: str) -> KeyRow | None:
        async with transaction(self._engine) as connection:
            found = await _one(connection, keys, keys.c.public_id == str(clean(public_id)))
        return None if found is None else key_row(found)

    async def key_change(self, public_id: str, changes: Mapping[str, Any], act: Act, what: str) -> KeyRow | None:
        async with transaction(self._engine) as connection:
            row = await _locked(connection, keys, keys.c.public_id == str(clean(public_id)))
            if row is None:
                return None
            if row["revoked_at"] is not None:
                raise Conflict(f"key `{row['public_id']}` was revoked; it cannot be changed", code="key_revoked")
            if "org" in changes:
                await _open_org(connection, changes["org"])
            changed = await _change(connection, keys, row, changes, act, what, f"key:{row['public_id']}")
        return key_row(changed)

    async def key_revoke(self, public_id: str, at: datetime, act: Act) -> KeyRow | None:
        async with transaction(self._engine) as connection:
            row = await _locked(connection, keys, keys.c.public_id == str(clean(public_id)))
            if row is None or row["revoked_at"] is not None:
                return None if row is None else key_row(row)
            change = {"revoked_at": at, "previous_until": None}
            revoked = await _change(connection, keys, row, change, act, "key.revoked", f"key:{row['public_id']}")
        return key_row(revoked)

    # ---------------------------------------------------------------- organisations

    async def org_insert(self, org: OrgRow, act: Act) -> None:
        try:
            async with transaction(self._engine) as connection:
                await connection.execute(insert(orgs).values(**asdict(org)))
                await store_audit.write(connection, act, "org.created", f"org:{org.name}", None, _shown(asdict(org)))
        except IntegrityError as error:
            raise Conflict(f"organisation `{org.name}` exists", code="org_conflict") from error

    async def org_list(self) -> Sequence[OrgRow]:
        async with transaction(self._engine) as connection:
            rows = await connection.execute(select(orgs).order_by(orgs.c.name).limit(ORGS_MAX))
            return [org_row(row) for row in rows.mappings()]

    async def org_get(self, name: str) -> OrgRow | None:
        async with transaction(self._engine) as connection:
            row = await _one(connection, orgs, orgs.c.name == str(clean(name)))
        return None if row is None else org_row(row)

    async def org_change(self, name: str, changes: Mapping[str, Any], act: Act, what: str) -> OrgRow | None:
        async with transaction(self._engine) as connection:
            row = await _locked(connection, orgs, orgs.c.name == str(clean(name)))
            if row is None:
                return None
            if row["closed_at"] is not None:
                raise Conflict(f"organisation `{row['name']}` was closed; it cannot be changed", code="org_closed")
            changed = await _change(connection, orgs, row, changes, act, what, f"org:{row['name']}")
        return org_row(changed)

    # ---------------------------------------------------------------- credits

    async def credit(self, request: CreditRequest, at: datetime, act: Act) -> tuple[Credit, bool]:
        async with transaction(self._engine) as connection:
            return await credit_insert(connection, request, at, act)

    async def credits(self, limit: int) -> Sequence[Credit]:
        async with transaction(self._engine) as connection:
            return await credit_list(connection, limit)

    async def uncertain(self, limit: int, hold_id: str | None = None) -> Sequence[UncertainCharge]:
        async with transaction(self._engine) as connection:
            return await uncertain_list(connection, limit, hold_id)


async def _open_org(connection: AsyncConnection, name: str) -> None:
    """Lock an organisation as open for the transaction. Raises BadRequest if it does not exist or is closed."""
    query = select(orgs.c.closed_at).where(orgs.c.name == name).with_for_update(read=True)
    row = (await connection.execute(query)).first()
    if row is None or row[0] is not None:
        what = f"there is no organisation `{name[:64]}`" if row is None else f"organisation `{name[:64]}` is closed"
        raise BadRequest(f"org: {what}; `baton orgs list` names them all", param="org", code="unknown_org")


async def _one(connection: AsyncConnection, table: Table, which: Any) -> Row | None:
    return (await connection.execute(select(table).where(which))).mappings().first()


def _overlaps(column: Column[Any], names: Sequence[str]) -> ColumnElement[bool]:
    overlap: ColumnElement[bool] = type_coerce(column, pg.ARRAY(Text)).overlap(list(names))
    return overlap


def _newest(limit: int) -> Select[Any]:
    return select(keys).order_by(keys.c.created_at.desc(), keys.c.public_id).limit(limit)


async def _locked(connection: AsyncConnection, table: Table, which: Any) -> Row | None:
    return (await connection.execute(select(table).where(which).with_for_update())).mappings().first()


async def _change(
    connection: AsyncConnection, table: Table, row: Row, changes: Mapping[str, Any], act: Act, what: str, target: str
) -> Row:
    """Change a row and write the audit entry of the columns that changed, if any. Return the new row."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()}
    differs = {name: value for name, value in plain.items() if row[name] != value}
    if not differs:
        return row
    (key,) = table.primary_key.columns
    await connection.execute(update(table).where(key == row[key.name]).values(**differs))
    before = {name: row[name] for name in differs}
    await store_audit.write(connection, act, what, target, _shown(before), _shown(differs))
    return {**row, **differs}


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in SECRETS}


def key_values(key: KeyRow) -> dict[str, Any]:
    """A key's columns."""
    lists = {"pools": list(key.pools), "workers": list(key.workers), "caps": dict(key.caps)}
    return {name: value for name, value in asdict(key).items() if name != "organisation"} | lists


def key_row(row: Row, organisation: OrgRow | None = None) -> KeyRow:
    """A key from its columns."""
    lists = {"pools": tuple(row["pools"]), "workers": tuple(row["workers"]), "digest": bytes(row["digest"])}
    before = {"previous_digest": None if row["previous_digest"] is None else bytes(row["previous_digest"])}
    return KeyRow(**(dict(row) | lists | before), organisation=organisation)


def org_row(row: Row) -> OrgRow:
    """An organisation from its columns."""
    return OrgRow(**row)


# ---------------------------------------------------------------- pool revisions


class PostgresPools:
    """The port PoolRevisions: each revision with its audit entry, or neither. Raises as PostgresAdmin."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def note(self, revision: PoolRevision, after: Mapping[str, Any]) -> bool:
        async with transaction(self._engine) as connection:
            new = await _store_revision(connection, revision)
            if new:
                await store_audit.write(connection, revision.act, "pool.loaded", POOLS_TARGET, None, after)
            return new

    async def change(self, revision: PoolRevision, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        async with transaction(self._engine) as connection:
            await _store_revision(connection, revision)
            await store_audit.write(connection, revision.act, "pool.reloaded", POOLS_TARGET, before, after)

    async def list(self, limit: int) -> Sequence[PoolRevision]:
        table = pool_revisions
        query = select(table).order_by(table.c.at.desc(), table.c.hash).limit(limit)
        async with transaction(self._engine) as connection:
            return [PoolRevision(**row) for row in (await connection.execute(query)).mappings()]

    async def get(self, hash_: str) -> PoolRevision | None:
        query = select(pool_revisions).where(pool_revisions.c.hash == str(clean(hash_)))
        async with transaction(self._engine) as connection:
            row = (await connection.execute(query)).mappings().first()
        return None if row is None else PoolRevision(**row)


async def _store_revision(connection: AsyncConnection, revision: PoolRevision) -> bool:
    """Store a revision unless it is stored; return whether it was new."""
    values = {name: getattr(revision, name) for name in PoolRevision.__slots__}
    values["why"] = clean(revision.why)
    query = pg.insert(pool_revisions).values(**values).on_conflict_do_nothing(index_elements=["hash"])
    return bool((await connection.execute(query.returning(pool_revisions.c.hash))).first())


async def credit_insert(
    connection: AsyncConnection, request: CreditRequest, at: datetime, act: Act
) -> tuple[Credit, bool]:
    """Return the credit, and whether it is new. Raises NotFound and Conflict as the port says."""
    await connection.execute(select(func.pg_advisory_xact_lock(CREDIT_LOCK_KEY)))
    known = (await connection.execute(select(ledger).where(ledger.c.event_id == request.id))).mappings().first()
    if known is not None:
        return _same(_credit(known), request), False
    charge = None if request.charge is None else await _charge(connection, request.charge)
    scopes = [[request.scope, None]] if charge is None else [[name, None] for name, _ in charge["scopes"]]
    amount = request.amount_nano if charge is None else await _amount(connection, charge, request.amount_nano)
    values = {
        "event_id": request.id,
        "hold_id": f"{TOP_UP}{request.id}" if charge is None else charge["hold_id"],
        "rollout_id": None if charge is None else charge["rollout_id"],
        "kind": CREDIT,
        "amount_nano": amount,
        "scopes": scopes,
        "detail": {"by": act.actor, "why": str(clean(act.why)), "asked": _plain(request)},
        "at": at,
    }
    await connection.execute(insert(ledger).values(**values))
    credit = _credit(values)
    shown = {"amount_nano": credit.amount_nano, "scopes": list(credit.scopes), "hold_id": credit.hold_id}
    await store_audit.write(connection, act, "credit.given", f"credit:{credit.id}", None, shown)
    return credit, True


async def credit_list(connection: AsyncConnection, limit: int) -> Sequence[Credit]:
    """Credits, newest first."""
    query = select(ledger).where(ledger.c.kind == CREDIT).order_by(ledger.c.at.desc(), ledger.c.event_id.desc())
    return [_credit(row) for row in (await connection.execute(query.limit(min(limit, CREDITS_MAX)))).mappings()]


async def uncertain_list(connection: AsyncConnection, limit: int, hold_id: str | None) -> Sequence[UncertainCharge]:
    """Uncertain charges, newest first."""
    given = ledger.alias()
    credited = select(func.coalesce(func.sum(given.c.amount_nano), 0))
    credited = credited.where(given.c.hold_id == ledger.c.hold_id, given.c.kind == CREDIT)
    query = select(ledger, credited.scalar_subquery().label("credited")).where(ledger.c.kind == "uncertain")
    if hold_id is not None:
        query = query.where(ledger.c.hold_id == str(clean(hold_id)))
    query = query.order_by(ledger.c.at.desc(), ledger.c.event_id.desc()).limit(min(limit, CREDITS_MAX))
    return [
        UncertainCharge(
            *(row["hold_id"], row["rollout_id"], int(row["amount_nano"]), int(row["credited"])),
            scopes=tuple(str(name) for name, _ in row["scopes"]),
            at=row["at"],
        )
        for row in (await connection.execute(query)).mappings()
    ]


async def _charge(connection: AsyncConnection, name: str) -> Mapping[Any, Any]:
    """The settlement of a hold, by the id of the hold, its rollout or its completion."""
    settled = select(ledger).where(_is_of(name), ledger.c.kind.in_(SETTLED)).limit(1)
    row = (await connection.execute(settled)).mappings().first()
    if row is not None:
        return row
    if (await connection.execute(select(ledger.c.hold_id).where(_is_of(name)).limit(1))).first() is not None:
        raise Conflict(f"`{name[:64]}` is not settled yet; there is nothing to give back", code="hold_open")
    raise NotFound(f"no charge `{name[:64]}`; give a hold's, a rollout's or a completion's id", code="charge_not_found")


def _is_of(name: str) -> ColumnElement[bool]:
    plain = str(clean(name))
    try:
        rollout = str(UUID(re.sub("^(chatcmpl-|resp_|msg_)", "", plain)))
    except ValueError:
        return ledger.c.hold_id == plain
    return or_(ledger.c.hold_id == plain, ledger.c.rollout_id == rollout)


async def _amount(connection: AsyncConnection, charge: Mapping[Any, Any], wanted: int | None) -> int:
    """The nano-dollars to give back of a charge: the wanted amount, or all that is left. Raises Conflict for more."""
    given = select(func.coalesce(func.sum(ledger.c.amount_nano), 0))
    given = given.where(ledger.c.hold_id == charge["hold_id"], ledger.c.kind == CREDIT)
    left = int(charge["amount_nano"]) - int(await connection.scalar(given) or 0)
    amount = left if wanted is None else wanted
    if not 0 < amount <= left:
        raise Conflict(f"of this charge ${nano_to_usd(left)} can be given back", code="credit_above_charge")
    return min(amount, NANO_MAX)


def _plain(request: CreditRequest) -> dict[str, Any]:
    return {"charge": request.charge, "scope": request.scope, "amount_nano": request.amount_nano}


def _same(known: Credit, request: CreditRequest) -> Credit:
    """Return the known credit. Raises Conflict if the request under its name differs."""
    whole = request.amount_nano is None or request.amount_nano == known.amount_nano
    scope = request.scope is None or (known.hold_id is None and known.scopes == (request.scope,))
    if whole and scope and (request.charge is None) == (known.hold_id is None):
        return known
    raise Conflict(f"credit {known.id} was another one; give this one a key of its own", code="credit_conflict")


def _credit(row: Mapping[Any, Any]) -> Credit:
    hold = None if str(row["hold_id"]).startswith(TOP_UP) else str(row["hold_id"])
    scopes = tuple(str(name) for name, _ in row["scopes"])
    detail = row["detail"]
    return Credit(str(row["event_id"]), hold, int(row["amount_nano"]), scopes, row["at"], detail["by"], detail["why"])
