"""Authentication: turns a bearer token into a Principal, or raises Unauthorized.

The form and the checksum of a key are checked before any look-up. Rows are cached for `cache_s` seconds, so a revoked
key may work for that long. While the store fails, rows that it returned within `stale_s` seconds stay valid.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

from gateway.core.access import keys
from gateway.core.access.keys import Allowance, KeyClass, Organisation, ParsedKey, Principal, Role
from gateway.errors import Unauthorized, Unavailable
from gateway.service.ports.admin import KeyRow, OrgRow
from gateway.service.ports.request import Clock, Store


@dataclass(slots=True)
class _CachedRow:
    """A row (None: no such key) that was read at `read_s`. `asked_s` is the time of the last attempt to read it."""

    row: KeyRow | None
    read_s: float
    asked_s: float


@dataclass(frozen=True, slots=True)
class _KnownHeader:
    """What a header came to that was checked: the row whose secret it has, and the Principal of that row."""

    row: KeyRow
    principal: Principal


class Authenticator:
    """Authenticates requests. `peppers` are by version; each key is checked under the one it was made with. `lookup_s`
    bounds one look-up in seconds. `operators`: ids of data keys that operators use."""

    def __init__(
        self,
        store: Store,
        peppers: Mapping[int, bytes],
        clock: Clock,
        *,
        cache_s: float = 1.0,
        stale_s: float = 60.0,
        lookup_s: float = 2.0,
        cached_keys_max: int = 10_000,
        operators: Collection[str] = (),
    ) -> None:
        self._store = store
        self._peppers = dict(peppers)
        self._clock = clock
        self._cache_s = cache_s
        self._stale_s = stale_s
        self._lookup_s = lookup_s
        self._cached_keys_max = cached_keys_max
        self._operators = frozenset(operators)
        self._cache: OrderedDict[str, _CachedRow] = OrderedDict()
        self._known: OrderedDict[tuple[str, KeyClass], _KnownHeader] = OrderedDict()  # by header
        self._lookups: dict[str, asyncio.Task[KeyRow | None]] = {}

    async def authenticate(self, header: str | None, key_class: KeyClass) -> Principal:
        """The Principal of a request with this Authorization header, on a listener for keys of this class. Raises
        Unauthorized, and Unavailable if the store fails and no recent row of the key is cached."""
        known = self._known.get((header or "", key_class))
        if known is not None:
            row = await self._row(known.row.public_id)
            if row is known.row:
                return known.principal  # the header was checked against this very row
            parsed = _parse(header, key_class)
        else:
            parsed = _parse(header, key_class)
            row = await self._row(parsed.public_id)
        if row is None or not self._is_secret_of(parsed, row):
            raise _unauthorized("This gateway does not know this API key. Check that this gateway issued it.")
        owner = self._usable(row)
        if row.previous_digest is None:  # else the header may hold the previous secret, which ends at a time
            self._know((header or "", key_class), _KnownHeader(row, owner))
        return owner

    def _know(self, header: tuple[str, KeyClass], known: _KnownHeader) -> None:
        self._known[header] = known
        self._known.move_to_end(header)
        if len(self._known) > self._cached_keys_max:
            self._known.popitem(last=False)

    async def owner(self, public_id: str) -> Principal:
        """The Principal of a key whose request was accepted before. Raises Unauthorized for a key that may no longer
        be used, and Unavailable."""
        row = await self._row(public_id)
        if row is None:
            raise _unauthorized(f"This gateway does not know the API key `{public_id}`.")
        return self._usable(row)

    def _usable(self, row: KeyRow) -> Principal:
        """The Principal of a key's row. Raises Unauthorized for a key that was revoked or whose organisation was
        closed."""
        if row.revoked_at is not None:
            raise _unauthorized(f"This API key (`{row.public_id}`) was revoked. Ask your operator for a new one.")
        if row.organisation is not None and row.organisation.closed_at is not None:
            raise _unauthorized("The organisation of this API key was closed. Ask your operator.")
        return replace(principal(row), is_operators=row.public_id in self._operators)

    def _is_secret_of(self, parsed: ParsedKey, row: KeyRow) -> bool:
        """Whether the text is the key's secret, or its previous one during the grace time of a rotation."""
        if row.key_class != parsed.key_class:
            return False
        if keys.matches(parsed.text, self._pepper(row, row.pepper_version), row.digest):
            return True
        if row.previous_digest is None or row.previous_until is None or self._clock.now() >= row.previous_until:
            return False
        version = row.pepper_version if row.previous_pepper_version is None else row.previous_pepper_version
        return keys.matches(parsed.text, self._pepper(row, version), row.previous_digest)

    def _pepper(self, row: KeyRow, version: int) -> bytes:
        pepper = self._peppers.get(version)
        if pepper is None:
            raise Unavailable(
                f"Key `{row.public_id}` was made under pepper version {version}, which is not configured.",
                code="pepper_missing",
            )
        return pepper

    async def _row(self, public_id: str) -> KeyRow | None:
        now_s = self._clock.monotonic_s()
        cached = self._cache.get(public_id)
        if cached is not None and now_s - cached.asked_s < self._cache_s:
            self._cache.move_to_end(public_id)
            return cached.row
        try:
            return await self._look_up_once(public_id)
        except Exception as error:  # boundary: however the store fails, a recent row is better than an outage
            if cached is None or now_s - cached.read_s > self._stale_s:
                raise Unavailable("Keys cannot be checked now; retry shortly.", code="keys_unavailable") from error
            cached.asked_s = now_s
            return cached.row

    async def _look_up_once(self, public_id: str) -> KeyRow | None:
        """Read a row from the store. Concurrent callers share one look-up, and the cancellation of one caller does not
        affect the others."""
        task = self._lookups.get(public_id)
        if task is None:
            task = asyncio.create_task(self._look_up(public_id))
            self._lookups[public_id] = task
            task.add_done_callback(lambda finished: self._forget_lookup(public_id, finished))
        return await asyncio.shield(task)

    async def _look_up(self, public_id: str) -> KeyRow | None:
        started_s = self._clock.monotonic_s()
        async with asyncio.timeout(self._lookup_s):
            row = await self._store.key_get(public_id)
        self._cache[public_id] = _CachedRow(row, started_s, started_s)
        self._cache.move_to_end(public_id)
        if len(self._cache) > self._cached_keys_max:
            self._cache.popitem(last=False)
        return row

    def _forget_lookup(self, public_id: str, task: asyncio.Task[KeyRow | None]) -> None:
        del self._lookups[public_id]
        if not task.cancelled():
            task.exception()  # retrieves it, or asyncio warns if every caller has left


def principal(row: KeyRow) -> Principal:
    """The Principal of a key's row: everything but digests and dates."""
    return Principal(
        public_id=row.public_id,
        key_class=cast(KeyClass, row.key_class),
        name=row.name,
        org=row.org,
        pools=row.pools,
        workers=row.workers,
        budget_nano=row.budget_nano,
        rpm=row.rpm,
        tpm=row.tpm,
        concurrency=row.concurrency,
        caps=row.caps,
        log_mode=row.log_mode,
        train=row.train,
        budget_month_nano=row.budget_month_nano,
        budget_day_nano=row.budget_day_nano,
        per_user=_per_user(row),
        organisation=Organisation() if row.organisation is None else organisation(row.organisation),
        role=cast(Role, row.role or "admin"),
        judges=row.judges,
        worth=row.worth,
    )


def organisation(row: OrgRow) -> Organisation:
    """The limits of an organisation's row."""
    allowance = Allowance(row.budget_nano, row.budget_month_nano, row.budget_day_nano)
    return Organisation(allowance, _per_user(row), row.rpm, row.tpm, row.concurrency)


def _per_user(row: KeyRow | OrgRow) -> Allowance:
    return Allowance(row.user_budget_nano, row.user_budget_month_nano, row.user_budget_day_nano)


def _parse(header: str | None, key_class: KeyClass) -> ParsedKey:
    if not header:
        raise _unauthorized(f"You didn't provide an API key: send the header `Authorization: Bearer bt_{key_class}_…`.")
    scheme, _, text = header.strip().partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise _unauthorized(f"The Authorization header must read `Bearer bt_{key_class}_…`.")
    try:
        parsed = keys.parse(text.strip())
    except ValueError as error:
        raise _unauthorized(f"This is not a valid API key: {error}.") from None
    if parsed.key_class != key_class:
        raise _unauthorized(
            f"This is a key of class `{parsed.key_class}`; this listener takes `{key_class}` keys only."
        )
    return parsed


def _unauthorized(message: str) -> Unauthorized:
    return Unauthorized(message, headers={"www-authenticate": "Bearer"})
