"""`AdminStore` and `AuditLog` in memory; tests/contract/test_admin_store.py holds them to PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from gateway.adapters.postgres.tables import SETTLED
from gateway.core.access.audit import FIRST, Act, Anchor, Entry, Link, link, plain_json
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.service.ports.admin import Credit, CreditRequest, KeyRow, OrgRow, UncertainCharge
from tests.fakes.store import FakeStore

SECRETS = {"digest", "previous_digest", "organisation"}


class FakeAdmin:
    """Organisations and keys live in `store`, which requests read."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.links: list[Link] = []
        self.given: dict[str, tuple[Credit, CreditRequest]] = {}
        store.orgs.setdefault("default", OrgRow("default", datetime(2026, 1, 1, tzinfo=UTC)))

    # ---------------------------------------------------------------- keys

    async def key_insert(self, key: KeyRow, act: Act) -> None:
        self.store._up()
        self._open_org(key.org)
        if key.public_id in self.store.keys:
            raise Conflict(f"key `{key.public_id}` exists or is malformed", code="key_conflict")
        self.store.keys[key.public_id] = replace(key, organisation=None)
        self._write(act, "key.created", f"key:{key.public_id}", None, asdict(key))

    async def key_list(self, limit: int, before: str | None = None, text: str | None = None) -> Sequence[KeyRow]:
        every = self._newest()
        if before is not None:
            places = [place for place, key in enumerate(every) if key.public_id == before]
            every = every[places[0] + 1 :] if places else []
        part = (text or "").casefold()
        matches = [key for key in every if any(part in one.casefold() for one in (key.public_id, key.name, key.org))]
        return matches[:limit]

    async def key_budgets(self, limit: int, after: str = "", among: Collection[str] | None = None) -> Sequence[KeyRow]:
        limited = [
            key
            for key in self._newest()
            if key.revoked_at is None
            and key.public_id > after
            and (among is None or key.public_id in among)
            and any(one is not None for one in (key.budget_nano, key.budget_month_nano, key.budget_day_nano))
        ]
        return sorted(limited, key=lambda key: key.public_id)[:limit]

    async def key_naming(self, pools: Sequence[str], workers: Sequence[str], limit: int) -> Sequence[KeyRow]:
        named = [key for key in self._newest() if set(pools) & set(key.pools) or set(workers) & set(key.workers)]
        return [key for key in named if key.revoked_at is None][:limit]

    async def key_exists(self) -> bool:
        return any(key.revoked_at is None for key in self._newest())

    def _newest(self) -> list[KeyRow]:
        self.store._up()
        every = sorted(self.store.keys.values(), key=lambda key: key.public_id)
        return sorted(every, key=lambda key: key.created_at, reverse=True)

    async def key_find(self, public_id: str) -> KeyRow | None:
        self.store._up()
        return self.store.keys.get(public_id)

    async def key_change(self, public_id: str, changes: Mapping[str, Any], act: Act, what: str) -> KeyRow | None:
        self.store._up()
        key = self.store.keys.get(public_id)
        if key is None:
            return None
        if key.revoked_at is not None:
            raise Conflict(f"key `{public_id}` was revoked; it cannot be changed", code="key_revoked")
        self.store.keys[public_id] = self._changed(key, changes, act, what, f"key:{public_id}")
        return self.store.keys[public_id]

    async def key_revoke(self, public_id: str, at: datetime, act: Act) -> KeyRow | None:
        self.store._up()
        key = self.store.keys.get(public_id)
        if key is None or key.revoked_at is not None:
            return key
        change = {"revoked_at": at, "previous_until": None}
        self.store.keys[public_id] = self._changed(key, change, act, "key.revoked", f"key:{public_id}")
        return self.store.keys[public_id]

    # ---------------------------------------------------------------- organisations

    async def org_insert(self, org: OrgRow, act: Act) -> None:
        self.store._up()
        if org.name in self.store.orgs:
            raise Conflict(f"organisation `{org.name}` exists", code="org_conflict")
        self.store.orgs[org.name] = org
        self._write(act, "org.created", f"org:{org.name}", None, asdict(org))

    async def org_list(self) -> Sequence[OrgRow]:
        self.store._up()
        return [self.store.orgs[name] for name in sorted(self.store.orgs)]

    async def org_get(self, name: str) -> OrgRow | None:
        self.store._up()
        return self.store.orgs.get(name)

    async def org_change(self, name: str, changes: Mapping[str, Any], act: Act, what: str) -> OrgRow | None:
        self.store._up()
        org = self.store.orgs.get(name)
        if org is None:
            return None
        if org.closed_at is not None:
            raise Conflict(f"organisation `{name}` was closed; it cannot be changed", code="org_closed")
        changed: OrgRow = self._changed(org, changes, act, what, f"org:{name}")
        self.store.orgs[name] = changed
        return changed

    # ---------------------------------------------------------------- credits

    async def credit(self, asked: CreditRequest, at: datetime, act: Act) -> tuple[Credit, bool]:
        self.store._up()
        if asked.id in self.given:
            known, first = self.given[asked.id]
            if (asked.charge is None, asked.scope) != (first.charge is None, first.scope) or asked.amount_nano not in (
                None,
                known.amount_nano,
            ):
                raise Conflict(f"credit {known.id} was another one; give this one a key of its own")
            return known, False
        credit = self._credit(asked, at, act)
        self.given[asked.id] = credit, asked
        row = {"event_id": credit.id, "hold_id": credit.hold_id or credit.id, "rollout_id": None, "kind": "credit"}
        scopes = [[name, None] for name in credit.scopes]
        self.store.rows.ledger.append(
            row | {"amount_nano": credit.amount_nano, "scopes": scopes, "detail": {}, "at": at}
        )
        shown = {"amount_nano": credit.amount_nano, "scopes": list(credit.scopes), "hold_id": credit.hold_id}
        self._write(act, "credit.given", f"credit:{credit.id}", None, shown)
        return credit, True

    def _credit(self, asked: CreditRequest, at: datetime, act: Act) -> Credit:
        if asked.charge is None:
            assert asked.amount_nano is not None
            assert asked.scope is not None
            return Credit(asked.id, None, asked.amount_nano, (asked.scope,), at, act.actor, act.why)
        rows = [row for row in self.store.rows.ledger if asked.charge in (row["hold_id"], row["rollout_id"])]
        if not rows:
            raise NotFound(f"no charge `{asked.charge}`", code="charge_not_found")
        settled = [row for row in rows if row["kind"] in SETTLED]
        if not settled:
            raise Conflict(f"`{asked.charge}` is not settled yet", code="hold_open")
        left = settled[0]["amount_nano"] - sum(row["amount_nano"] for row in rows if row["kind"] == "credit")
        amount = left if asked.amount_nano is None else asked.amount_nano
        if not 0 < amount <= left:
            raise Conflict("of this charge less can be given back", code="credit_above_charge")
        scopes = tuple(str(name) for name, _ in settled[0]["scopes"])
        return Credit(asked.id, str(settled[0]["hold_id"]), amount, scopes, at, act.actor, act.why)

    async def credits(self, limit: int) -> Sequence[Credit]:
        every = [credit for credit, _ in self.given.values()]
        return sorted(every, key=lambda credit: (credit.at, credit.id), reverse=True)[:limit]

    async def uncertain(self, limit: int, hold_id: str | None = None) -> Sequence[UncertainCharge]:
        rows = self.store.rows.ledger
        charges = [
            UncertainCharge(
                *(row["hold_id"], row["rollout_id"], row["amount_nano"]),
                credited_nano=sum(
                    r["amount_nano"] for r in rows if r["kind"] == "credit" and r["hold_id"] == row["hold_id"]
                ),
                scopes=tuple(str(name) for name, _ in row["scopes"]),
                at=row["at"],
            )
            for row in rows
            if row["kind"] == "uncertain" and hold_id in (None, row["hold_id"])
        ]
        return sorted(charges, key=lambda charge: charge.at, reverse=True)[:limit]

    # ---------------------------------------------------------------- the audit

    async def head(self) -> Anchor:
        return Anchor(self.links[-1].entry.seq, self.links[-1].hash) if self.links else Anchor(0, FIRST)

    async def walk(self, after: int, limit: int) -> Sequence[Link]:
        return [one for one in self.links if one.entry.seq > after][:limit]

    async def latest(
        self,
        limit: int,
        before: int | None = None,
        target: str | None = None,
        actor: str | None = None,
        act: str | None = None,
    ) -> Sequence[Link]:
        found = [
            one
            for one in reversed(self.links)
            if target in (None, one.entry.target) and actor in (None, one.entry.actor) and act in (None, one.entry.act)
        ]
        return [one for one in found if before is None or one.entry.seq < before][:limit]

    def _changed(self, row: Any, changes: Mapping[str, Any], act: Act, what: str, target: str) -> Any:
        differs = {name: value for name, value in changes.items() if getattr(row, name) != value}
        if differs:
            self._write(act, what, target, {name: getattr(row, name) for name in differs}, differs)
        return replace(row, **differs)

    def _write(
        self, act: Act, what: str, target: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
    ) -> None:
        head = self.links[-1] if self.links else None
        seq, prev = (head.entry.seq + 1, head.hash) if head else (1, FIRST)
        was, became = (None if each is None else plain_json(_open(each)) for each in (before, after))
        entry = Entry(seq, datetime.now(UTC), act.actor, what, target, was, became, act.why)
        self.links.append(link(entry, prev))

    def _open_org(self, name: str) -> None:
        org = self.store.orgs.get(name)
        if org is None or org.closed_at is not None:
            raise BadRequest(f"org: there is no organisation `{name}`", param="org", code="unknown_org")


def _open(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in SECRETS}
