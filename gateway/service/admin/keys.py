"""Issue, change, rotate, list and revoke API keys. A secret exists in one place: the reply to the request that made
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, get_args

from gateway.core.access import keys
from gateway.core.access.audit import Act
from gateway.core.access.keys import KeyClass, Role
from gateway.core.loop.caps import Caps
from gateway.core.openai.shapes import check_names
from gateway.core.pool.workers import EVERY_POOL
from gateway.errors import BadRequest, Conflict, Forbidden, NotFound
from gateway.service.admin import limits
from gateway.service.admin.limits import bad as _bad
from gateway.service.ports.admin import AdminStore, KeyRow
from gateway.service.ports.request import Clock

LOG_MODES = ("full", "redacted", "metadata")
GRACE_S_MAX = 90 * 86_400
GRACE_S = 86_400
FLAGS = ("train", "judges", "signals")
CHANGEABLE = frozenset({"name", "role", "pools", "workers", "caps", "log_mode", *FLAGS, "worth", *limits.FIELDS})
CREATABLE = CHANGEABLE | {"key_class", "org"}
UNLIMITED: Mapping[str, Any] = {
    **{"pools": (), "workers": (), "caps": {}, "log_mode": "full", "train": True},
    **{"budget_nano": None, "rpm": None, "tpm": None, "concurrency": None},
}
WORTH_MAX = 1e9
ITSELF = Act("baton")  # acts of the gateway itself

T = TypeVar("T", bound=str)


class KeyAdmin:
    """`pools` maps the name of each pool to its workers' names; new secrets are digested under the newest pepper."""

    def __init__(
        self, store: AdminStore, peppers: Mapping[int, bytes], clock: Clock, pools: Mapping[str, Sequence[str]]
    ) -> None:
        self._store = store
        self._pepper_version = max(peppers)
        self._pepper = peppers[self._pepper_version]
        self._clock = clock
        self.adopt(pools)

    def adopt(self, pools: Mapping[str, Sequence[str]]) -> None:
        """Use these pools from now on."""
        self._pools = pools

    async def create_key(
        self, name: str, key_class: str = "data", *, act: Act = ITSELF, **fields: Any
    ) -> tuple[KeyRow, str]:
        """A new key's row and its secret. Fields (CREATABLE) that are absent or None set no limit; no pools: the
        default pool; EVERY_POOL: all of them; no workers: all of its pools; no role: that of an admin. Raises
        BadRequest, which names field and fix, Forbidden for a role that may not, and Unavailable when the store is
        away."""
        known_class = _one_of("key_class", key_class, get_args(KeyClass))
        _check_right(act, known_class)
        values = self._values(check_names(fields, CREATABLE), fields.get("pools"))
        secret, public_id = keys.mint(known_class)
        row = KeyRow(
            public_id=public_id,
            key_class=known_class,
            digest=keys.digest(secret, self._pepper),
            pepper_version=self._pepper_version,
            org=limits.label("org", fields.get("org", "default")),
            role=_role(known_class, fields.get("role")),
            created_at=self._clock.now(),
            **{**UNLIMITED, **values, "name": limits.label("name", name)},
        )
        await self._store.key_insert(row, act)
        return row, secret

    async def list_keys(
        self, limit: int, before: str | None = None, text: str | None = None
    ) -> tuple[Sequence[KeyRow], str | None]:
        """One page of keys, revoked ones too, newest first, and the `before` of the next page, None on the last one.
        `text`: only keys with it in their id, name or organisation."""
        rows = await self._store.key_list(limit + 1, before, text)
        return rows[:limit], rows[limit - 1].public_id if len(rows) > limit else None

    async def get_key(self, public_id: str) -> KeyRow:
        """The key's row. Raises NotFound."""
        return _require(await self._store.key_find(public_id), public_id)

    async def update_key(self, public_id: str, fields: Mapping[str, Any], act: Act = ITSELF) -> KeyRow:
        """Change fields (CHANGEABLE) of a key; None lifts a limit. Changes take effect within a second. Raises
        NotFound, BadRequest, Forbidden, Conflict for a revoked key."""
        row = await self._managed(public_id, act)
        pools = row.pools if "workers" in fields and "pools" not in fields else None
        values = self._values(check_names(fields, CHANGEABLE), fields.get("pools", pools))
        if "role" in fields:
            values["role"] = _role(row.key_class, fields["role"])
        return _require(await self._store.key_change(public_id, values, act, "key.changed"), public_id)

    async def rotate_key(self, public_id: str, grace_s: int = GRACE_S, act: Act = ITSELF) -> tuple[KeyRow, str]:
        """Give the key a new secret; it keeps its id, limits, balance and rollouts. The old secret works for `grace_s`
        seconds more, the one before it ends now. Raises NotFound, Forbidden, Conflict for a revoked key."""
        if type(grace_s) is not int or not 0 <= grace_s <= GRACE_S_MAX:
            raise _bad("grace_s", f"give whole seconds from 0 to {GRACE_S_MAX:,}")
        row = await self._managed(public_id, act)
        if row.revoked_at is not None:
            raise Conflict(f"key `{row.public_id}` was revoked; it cannot be changed", code="key_revoked")
        secret, _ = keys.mint(_one_of("key_class", row.key_class, get_args(KeyClass)), row.public_id)
        changes = {
            "digest": keys.digest(secret, self._pepper),
            "pepper_version": self._pepper_version,
            "previous_digest": row.digest,
            "previous_pepper_version": row.pepper_version,
            "previous_until": self._clock.now() + timedelta(seconds=grace_s),
        }
        return _require(await self._store.key_change(public_id, changes, act, "key.rotated"), public_id), secret

    async def revoke_key(self, public_id: str, act: Act = ITSELF) -> KeyRow:
        """Revoke a key and return its row; it may be revoked already. Raises NotFound, Forbidden."""
        await self._managed(public_id, act)
        return _require(await self._store.key_revoke(public_id, self._clock.now(), act), public_id)

    async def _managed(self, public_id: str, act: Act) -> KeyRow:
        """The key's row, for whoever may change it. Raises NotFound, Forbidden."""
        row = await self.get_key(public_id)
        _check_right(act, row.key_class)
        return row

    def _values(self, fields: Mapping[str, Any], pools: Any) -> dict[str, Any]:
        """Columns from fields. `pools`: the pools among which the workers must be."""
        values: dict[str, Any] = dict(limits.columns(fields))
        if "name" in fields:
            values["name"] = limits.label("name", fields["name"])
        if fields.get("pools") is not None:
            values["pools"] = tuple(self._known_pools(fields["pools"]))
        if fields.get("workers") is not None:
            values["workers"] = tuple(self._known_workers(fields["workers"], _names("pools", pools or ())))
        if fields.get("caps") is not None:
            values["caps"] = _caps(fields["caps"])
        if "log_mode" in fields:
            values["log_mode"] = _one_of("log_mode", fields["log_mode"], LOG_MODES)
        for flag in FLAGS:
            if flag in fields:
                if type(fields[flag]) is not bool:
                    raise _bad(flag, "give true or false")
                values[flag] = fields[flag]
        if "worth" in fields:
            values["worth"] = _worth(fields["worth"])
        return values

    def _known_pools(self, value: Any) -> list[str]:
        names = _names("pools", value)
        if names == [EVERY_POOL]:
            return names
        for name in names:
            if name not in self._pools:
                raise _bad("pools", f"no pool `{name[:64]}`; known are {', '.join(sorted(self._pools))}")
        return names

    def _known_workers(self, value: Any, pools: Sequence[str]) -> list[str]:
        names = _names("workers", value)
        pools = () if EVERY_POOL in pools else pools
        workers = {worker for pool in pools or self._pools for worker in self._pools.get(pool, ())}
        for name in names:
            if name not in workers:
                where = f"in {', '.join(pools)}" if pools else "in any pool"
                raise _bad("workers", f"no worker `{name[:64]}` {where}; known are {', '.join(sorted(workers))}")
        return names


def describe(row: KeyRow) -> dict[str, Any]:
    """A key as JSON for people and scripts, without its digest."""
    times = {"created_at": row.created_at, "revoked_at": row.revoked_at, "previous_until": row.previous_until}
    return {
        "id": row.public_id,
        "class": row.key_class,
        "role": (row.role or "admin") if row.key_class == "admin" else None,
        "name": row.name,
        "org": row.org,
        "pools": list(row.pools),
        "workers": list(row.workers),
        **limits.shown(row),
        "caps": dict(row.caps),
        "log_mode": row.log_mode,
        **{flag: getattr(row, flag) for flag in FLAGS},
        "worth": row.worth,
        **{name: None if at is None else at.isoformat() for name, at in times.items()},
    }


def _check_right(act: Act, key_class: str) -> None:
    if not keys.may_manage(act.role, key_class):
        raise Forbidden(f"keys of role `{act.role}` may not manage keys of class `{key_class}`", code="role_forbids")


def _worth(value: Any) -> dict[str, float] | None:
    """What a right answer is worth: {usd, seconds}, each optional and above 0; None: as pool and settings say."""
    if value is None:
        return None
    known = isinstance(value, Mapping) and value and value.keys() <= {"usd", "seconds"}
    if not known or not all(type(one) in (int, float) and 0 < one <= WORTH_MAX for one in value.values()):
        raise _bad("worth", 'give what a right answer is worth, such as {"usd": 0.05, "seconds": 60}')
    return {name: float(one) for name, one in value.items()}


def _role(key_class: str, role: Any) -> Role | None:
    if key_class == "data":
        if role is not None:
            raise _bad("role", "only keys of class `admin` have a role")
        return None
    return "admin" if role is None else _one_of("role", role, get_args(Role))


def _require(row: KeyRow | None, public_id: str) -> KeyRow:
    if row is None:
        raise NotFound(f"No key `{public_id[:64]}`; `baton keys list` shows the ids.", code="key_not_found")
    return row


def _one_of(field: str, value: Any, allowed_values: Sequence[T]) -> T:
    for candidate in allowed_values:
        if value == candidate:
            return candidate
    raise _bad(field, f"`{str(value)[:64]}` is not one of {', '.join(allowed_values)}")


def _names(field: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise _bad(field, "give a list of names")
    return list(dict.fromkeys(value))


def _caps(caps: Any) -> dict[str, Any]:
    if not isinstance(caps, Mapping):
        raise BadRequest("caps: give an object of caps and their largest values", param="caps", code="bad_field")
    Caps().narrow(caps)
    return dict(caps)
