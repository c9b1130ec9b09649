"""Issue, list and revoke API keys. The secret exists in one place: the reply to the one who asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar, get_args

from gateway.core import keys
from gateway.core.caps import Caps
from gateway.core.keys import KeyClass
from gateway.core.money import nano_to_usd, usd_to_nano
from gateway.errors import BadRequest, NotFound
from gateway.service.ports import Clock, KeyRow, Store

LOG_MODES = ("full", "redacted", "metadata")
NAME_CHARS_MAX = 128
LIMIT_MAX = 1_000_000_000


T = TypeVar("T", bound=str)


class KeyAdmin:
    """`pools` maps the name of each pool to its workers' names; new keys are digested under the newest pepper."""

    def __init__(
        self, store: Store, peppers: Mapping[int, bytes], clock: Clock, pools: Mapping[str, Sequence[str]]
    ) -> None:
        self._store = store
        self._pepper_version = max(peppers)
        self._pepper = peppers[self._pepper_version]
        self._clock = clock
        self._pools = pools

    async def create_key(
        self,
        name: str,
        key_class: str = "data",
        *,
        budget_usd: str | int | Decimal | None = None,
        rpm: int | None = None,
        tpm: int | None = None,
        concurrency: int | None = None,
        pools: Sequence[str] = (),
        workers: Sequence[str] = (),
        caps: Mapping[str, Any] | None = None,
        org: str = "default",
        log_mode: str = "full",
        train: bool = True,
    ) -> tuple[KeyRow, str]:
        """A new key's row and its secret text. None: not limited. No pools: the default pool. No workers: all of its
        pools. Raises BadRequest naming the field and the fix, Unavailable when the store is away."""
        known_class = _one_of("key_class", key_class, get_args(KeyClass))
        secret, public_id = keys.mint(known_class)
        row = KeyRow(
            public_id=public_id,
            key_class=known_class,
            name=_label("name", name),
            digest=keys.digest(secret, self._pepper),
            pepper_version=self._pepper_version,
            org=_label("org", org),
            pools=self._known_pools(pools),
            workers=self._known_workers(workers, pools),
            budget_nano=_budget(budget_usd),
            rpm=_limit("rpm", rpm),
            tpm=_limit("tpm", tpm),
            concurrency=_limit("concurrency", concurrency),
            caps=_caps(caps or {}),
            log_mode=_one_of("log_mode", log_mode, LOG_MODES),
            train=train,
            created_at=self._clock.now(),
        )
        await self._store.key_insert(row)
        return row, secret

    async def list_keys(self) -> Sequence[KeyRow]:
        """Every key, revoked ones too, newest first."""
        return await self._store.key_list()

    async def revoke_key(self, public_id: str) -> KeyRow:
        """The key's row, revoked now or earlier. Raises NotFound."""
        await self._store.key_revoke(public_id, self._clock.now())
        row = await self._store.key_get(public_id)
        if row is None:
            raise NotFound(f"No key `{public_id[:64]}`; `baton keys list` shows the ids.", code="key_not_found")
        return row

    def _known_pools(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            if name not in self._pools:
                raise _bad("pools", f"no pool `{name}`; known are {', '.join(sorted(self._pools))}")
        return tuple(dict.fromkeys(names))

    def _known_workers(self, names: Sequence[str], pools: Sequence[str]) -> tuple[str, ...]:
        known = {worker for pool in pools or self._pools for worker in self._pools[pool]}
        for name in names:
            if name not in known:
                where = f"in {', '.join(pools)}" if pools else "in any pool"
                raise _bad("workers", f"no worker `{name}` {where}; known are {', '.join(sorted(known))}")
        return tuple(dict.fromkeys(names))


def describe(row: KeyRow) -> dict[str, Any]:
    """A key as people and scripts see it: JSON-able, without its digest."""
    return {
        "id": row.public_id,
        "class": row.key_class,
        "name": row.name,
        "org": row.org,
        "pools": list(row.pools),
        "workers": list(row.workers),
        "budget_usd": None if row.budget_nano is None else nano_to_usd(row.budget_nano),
        "rpm": row.rpm,
        "tpm": row.tpm,
        "concurrency": row.concurrency,
        "caps": dict(row.caps),
        "log_mode": row.log_mode,
        "train": row.train,
        "created_at": row.created_at.isoformat(),
        "revoked_at": None if row.revoked_at is None else row.revoked_at.isoformat(),
    }


def _bad(field: str, message: str) -> BadRequest:
    return BadRequest(f"{field}: {message}", param=field, code="bad_key_field")


def _one_of(field: str, value: str, known: Sequence[T]) -> T:
    for candidate in known:
        if value == candidate:
            return candidate
    raise _bad(field, f"`{value}` is not one of {', '.join(known)}")


def _label(field: str, text: str) -> str:
    if not 1 <= len(text) <= NAME_CHARS_MAX or not text.isprintable():
        raise _bad(field, f"give 1 to {NAME_CHARS_MAX} printable characters")
    return text


def _limit(field: str, value: int | None) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= LIMIT_MAX):
        raise _bad(field, f"`{value}` is not a whole number from 1 to {LIMIT_MAX:,}; leave it out for no limit")
    return value


def _budget(usd: str | int | Decimal | None) -> int | None:
    try:
        return None if usd is None else usd_to_nano(usd)
    except ValueError as error:
        raise _bad("budget_usd", f"{error}; write dollars such as 25 or 0.50") from None


def _caps(caps: Mapping[str, Any]) -> dict[str, Any]:
    Caps().narrowed(caps)
    return dict(caps)
