"""Administration straight on PostgreSQL: the first keys, the judge's key, retention, and commands without a gateway."""

from __future__ import annotations

import os
import pwd
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.adapters.host import poolfile
from gateway.adapters.host.anchors import ANCHORS, AnchorFile
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.host.poolsource import judge_pool
from gateway.adapters.postgres.admin import PostgresAdmin
from gateway.adapters.postgres.audit import PostgresAudit
from gateway.adapters.postgres.database import connected
from gateway.adapters.postgres.retention import PostgresRetention
from gateway.cli.process.datadir import JUDGE, KEYS, DataDir
from gateway.config import settings as config
from gateway.config.settings import Services
from gateway.core.access import keys
from gateway.core.access.keys import KeyClass
from gateway.service.admin.audit import Auditor
from gateway.service.admin.keys import KeyAdmin


@dataclass(frozen=True, slots=True)
class FirstKeys:
    """The keys of an installation. `new`: made by this start, so nobody has seen them yet."""

    data_key: str
    admin_key: str
    new: bool


@asynccontextmanager
async def key_admin(services: Services) -> AsyncIterator[tuple[KeyAdmin, PostgresAdmin]]:
    """The use case and the store under it, for as long as the block lasts."""
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
    """The stores of administration, for as long as the block lasts."""
    async with connected(database_url, pool_size=1) as engine:
        yield Office(PostgresAdmin(engine), PostgresAudit(engine), PostgresRetention(engine), SystemClock())


def local_user() -> str:
    """The user of this machine, as the audit names them."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's user need not have a name
        name = str(uid)
    return f"local:{name}"


async def first_keys(services: Services, data: DataDir) -> FirstKeys:
    """The data key and the admin key in the data directory; made anew where they are missing or don't work any more."""
    kept = data.read(KEYS) or {}
    async with key_admin(services) as (admin, store):
        if await _works(store, kept, "data", services.pepper) and await _works(store, kept, "admin", services.pepper):
            return FirstKeys(kept["data_key"], kept["admin_key"], new=False)
        _, data_key = await admin.create_key("first data key", "data")
        _, admin_key = await admin.create_key("first admin key", "admin")
    data.write(KEYS, {"data_key": data_key, "admin_key": admin_key})
    return FirstKeys(data_key, admin_key, new=True)


async def judge_key(services: Services, data: DataDir, model: str, budget_usd: str) -> None:
    """See that the data directory holds a key for the judge, for that worker alone and under that budget. Raises
    ConfigError where no pool has the worker."""
    kept = data.read(JUDGE) or {}
    asked = {"model": model, "budget_usd": budget_usd}
    pool = judge_pool(poolfile.load(services.pool_file, config.environment()), model)
    async with key_admin(services) as (admin, store):
        same = {name: kept.get(name) for name in asked} == asked
        if same and await _works(store, {"data_key": kept.get("judge_key", "")}, "data", services.pepper):
            return
        _, key = await admin.create_key("judge", budget_usd=budget_usd, pools=(pool,), workers=(model,), train=False)
    data.write(JUDGE, {**asked, "judge_key": key})


async def _works(store: PostgresAdmin, kept: dict[str, str], key_class: KeyClass, pepper: bytes) -> bool:
    try:
        parsed = keys.parse(str(kept.get(f"{key_class}_key")))
    except ValueError:
        return False
    row = await store.key_find(parsed.public_id)
    return row is not None and row.revoked_at is None and keys.matches(parsed.text, pepper, row.digest)
