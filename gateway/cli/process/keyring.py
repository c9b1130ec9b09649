"""Administration straight on PostgreSQL: the first keys, the judge's key, retention, and commands without a gateway."""

from __future__ import annotations

import os
import pwd
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gateway.adapters.host import poolfile
from gateway.adapters.host.anchors import ANCHORS, AnchorFile
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.host.poolfile import pool_with
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import connected
from gateway.adapters.postgres.upkeep.retention import PostgresRetention
from gateway.cli.process.datadir import JUDGE, KEYS, DataDir
from gateway.config import settings as config
from gateway.config.settings import Services
from gateway.core.access import keys
from gateway.core.pool.workers import EVERY_POOL
from gateway.service.admin.audit import Auditor
from gateway.service.admin.keys import KeyAdmin

WantedKeys = Literal["always", "first", "never"]


@dataclass(frozen=True, slots=True)
class FirstKeys:
    """The first keys of an installation. `new`: this start made them, so they have to be shown. None: this data
    directory has none, because the database had keys before it."""

    data_key: str | None
    admin_key: str | None
    new: bool


@asynccontextmanager
async def key_admin(services: Services) -> AsyncIterator[tuple[KeyAdmin, PostgresAdmin]]:
    """The use case of keys and the store under it, open within the block."""
    async with administration(services.database_url) as office:
        yield office.keys(services.pool_file, services.pepper), office.store


@dataclass(frozen=True, slots=True)
class Office:
    """The stores of administration, and the use cases over them."""

    store: PostgresAdmin
    entries: PostgresAudit
    retention: PostgresRetention
    clock: SystemClock

    def keys(self, pool_file: Path, pepper: bytes) -> KeyAdmin:
        """Keys that may name the pools and workers of that file. Raises ConfigError."""
        pools = poolfile.load(pool_file, config.environment()).pools
        return KeyAdmin(self.store, {keys.PEPPER_VERSION: pepper}, self.clock, pools)

    def auditor(self, data: Path) -> Auditor:
        """The audit, checked against the anchors in that data directory."""
        return Auditor(self.entries, AnchorFile(data / ANCHORS), self.clock)


@asynccontextmanager
async def administration(database_url: str) -> AsyncIterator[Office]:
    """The stores of administration, open within the block."""
    async with connected(database_url, pool_size=1) as engine:
        yield Office(PostgresAdmin(engine), PostgresAudit(engine), PostgresRetention(engine), SystemClock())


def local_user() -> str:
    """The user of this machine, as the audit names them."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # the user of a container may have no name
        name = str(uid)
    return f"local:{name}"


async def first_keys(services: Services, data: DataDir, mode: WantedKeys = "always") -> FirstKeys:
    """The data key and the admin key of the data directory. Both are made again where one is missing or does not work
    any more: `always`, `never`, or, with `first`, only in a database without a key that works."""
    stored = data.read(KEYS) or {}
    async with key_admin(services) as (admin, store):
        if all([await _works(store, stored.get(f"{name}_key"), services.pepper) for name in ("data", "admin")]):
            return FirstKeys(stored["data_key"], stored["admin_key"], new=False)
        if mode == "never" or (mode == "first" and await store.key_exists()):
            return FirstKeys(None, None, new=False)
        _, data_key = await admin.create_key("first data key", "data", pools=(EVERY_POOL,))
        _, admin_key = await admin.create_key("first admin key", "admin")
    data.write(KEYS, {"data_key": data_key, "admin_key": admin_key})
    return FirstKeys(data_key, admin_key, new=True)


async def judge_key(services: Services, data: DataDir, model: str, usd_a_day: str) -> None:
    """Make sure that the data directory holds a key for the judge: for that worker alone, under that budget a day.
    Another budget is the same key's, so that no day has two. Raises ConfigError if no pool has the worker."""
    stored = data.read(JUDGE) or {}
    pools = poolfile.load(services.pool_file, config.environment())
    first, key = pool_with(pools, "BATON_JUDGE", model), stored.get("judge_key")
    rights: dict[str, Any] = {"pools": (first,), "workers": (model,), "train": False}
    async with key_admin(services) as (admin, store):
        if await _works(store, key, services.pepper):
            limits = {"budget_usd": None, "budget_day_usd": usd_a_day}
            await admin.update_key(keys.parse(str(key)).public_id, {**limits, **rights})
        else:
            _, key = await admin.create_key("judge", budget_day_usd=usd_a_day, **rights)
    data.write(JUDGE, {"judge_key": key, "pools": [name for name, of in pools.pools.items() if model in of]})


async def _works(store: PostgresAdmin, key: str | None, pepper: bytes) -> bool:
    try:
        parsed = keys.parse(str(key))
    except ValueError:
        return False
    row = await store.key_find(parsed.public_id)
    return row is not None and row.revoked_at is None and keys.matches(parsed.text, pepper, row.digest)
