"""Proves the invariants after a run, from five witnesses that know nothing of each other: what the clients were told,
the worker's own bill, Redis, the journals on disk, and PostgreSQL.

    I1 no overspend      the bill, and what is posted and held, stay within every limit
    I2 conservation      every hold ends once; nothing stays held; Redis and ledger agree; nobody is under-billed
    I3 no lost log       a whole reply has its rollout; a call upstream has its `dispatched` before it
    I4 no double         one rollout an id, one settlement a hold, calls upstream ≤ calls written down
    I5 caps              cost, calls and steps of every rollout within what it was allowed
    I6 no secret         canaries stand in no log, journal, table or metric
    I7 liveness          ready again within 10 s (`Site.ready`)
    I8 history           every rollout names one policy version at most, and who planned
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import text

from gateway.adapters.database import async_engine
from tests.faults.client import Client
from tests.faults.site import INPUT_NANO, LEASE_S, OUTPUT_NANO, Site
from tests.faults.upstream import CANARY

READY_S = 10.0
SETTLED_WITHIN_S = 12 * LEASE_S
SHIPPED_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Found:
    """What the witnesses said."""

    ledger: Sequence[dict[str, Any]]
    rollouts: Sequence[dict[str, Any]]
    redis_posted: dict[str, int]
    redis_held: dict[str, int]
    bill_nano: int
    ready_s: float

    def posted(self, scope: str) -> int:
        """By the ledger."""
        rows = [row for row in self.ledger if row["kind"] in ("posted", "uncertain")]
        return sum(row["amount_nano"] for row in rows if scope in [name for name, _ in row["scopes"]])

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [row for row in self.ledger if row["kind"] in kinds]


async def check(
    site: Site, clients: Sequence[Client], *, limit_nano: int | None = None, truthful: bool = True, bounded: bool = True
) -> Found:
    """Wait until the site has healed, then compare. Raises AssertionError naming the invariant. `truthful`: the worker
    reports its usage, so that what is posted can be compared with its bill. `bounded`:
    and never more than it was allowed. At least one gateway must live."""
    ready_s = await site.ready(READY_S)  # I7
    found = await _settled(site, ready_s)
    scope = f"key:{site.key_id}"
    _money(found, scope, limit_nano, truthful)
    _log(found, clients, site)
    for rollout in found.rollouts:
        assert rollout["cost_nano"] <= rollout["hold_nano"] or not bounded, f"I5: {rollout}"
        assert len(rollout["workers"] or []) <= rollout["caps"]["calls"], f"I5: {rollout}"
        assert rollout["versions"] <= 1, f"I8: {rollout}"
        assert rollout["policy_used"], f"I8: {rollout}"
    await _secrets(site)
    return found


def _money(found: Found, scope: str, limit_nano: int | None, truthful: bool) -> None:
    posted = found.posted(scope)
    if limit_nano is not None:
        assert found.bill_nano <= limit_nano, f"I1: the worker bills {found.bill_nano} of {limit_nano}"
        assert posted <= limit_nano, f"I1: {posted} posted of {limit_nano}"
        assert found.redis_posted.get(scope, 0) <= limit_nano, "I1"
    holds, ends = found.of_kind("hold"), found.of_kind("posted", "voided", "uncertain")
    assert sorted(row["hold_id"] for row in holds) == sorted(row["hold_id"] for row in ends), "I2: holds and their ends"
    assert found.redis_held == {}, f"I2: still held: {found.redis_held}"
    assert found.redis_posted.get(scope, 0) == posted, f"I2: Redis {found.redis_posted}, ledger {posted}"
    if truthful:
        assert posted >= found.bill_nano, f"I2: {posted} posted, {found.bill_nano} billed by the worker"


def _log(found: Found, clients: Sequence[Client], site: Site) -> None:
    known = {rollout["id"]: rollout for rollout in found.rollouts}
    for reply in (reply for client in clients for reply in client.history if reply.whole):
        assert reply.rollout_id in known, f"I3: a whole reply without its rollout: {reply}"
        assert known[reply.rollout_id]["status"] == "done", f"I3: {known[reply.rollout_id]}"
    told = [reply.rollout_id for client in clients for reply in client.history if reply.whole]
    assert len(told) == len(set(told)), "I4: one rollout was given to two clients"
    sent = found.of_kind("dispatched")
    assert len(site.upstream.bills) <= len(sent), f"I3, I4: {len(site.upstream.bills)} calls, {len(sent)} written down"


async def _settled(site: Site, ready_s: float) -> Found:
    """The state once everything is shipped and nothing is held; the state as it is when that takes too long."""
    until_s = time.monotonic() + SHIPPED_WITHIN_S + SETTLED_WITHIN_S
    while True:
        found = await look(site, ready_s)
        holds, ends = found.of_kind("hold"), found.of_kind("posted", "voided", "uncertain")
        if (len(holds) == len(ends) and not found.redis_held and _agree(found)) or time.monotonic() > until_s:
            return found
        await asyncio.sleep(0.1)


def _agree(found: Found) -> bool:
    return all(found.posted(scope) == nano for scope, nano in found.redis_posted.items())


async def look(site: Site, ready_s: float = 0.0) -> Found:
    """What the witnesses say now."""
    engine = async_engine(site.database_url, pool_size=1)
    redis: Redis = Redis.from_url(site.redis.url)
    try:
        async with engine.connect() as connection:
            ledger = (await connection.execute(text("SELECT * FROM ledger"))).mappings().all()
            rollouts = (await connection.execute(text(ROLLOUTS))).mappings().all()
        posted, held = [await redis.hgetall("{baton}:" + name) for name in ("posted", "held")]
    finally:
        await redis.aclose()
        await engine.dispose()
    return Found(
        [dict(row) for row in ledger],
        [{**row, "id": str(row["id"])} for row in rollouts],
        {_text(name): int(nano) for name, nano in posted.items()},
        {_text(name): int(nano) for name, nano in held.items() if int(nano)},
        site.upstream.total_nano(INPUT_NANO, OUTPUT_NANO),
        ready_s,
    )


ROLLOUTS = """
SELECT r.id, r.status, r.cost_nano, r.hold_nano, r.caps, r.policy_used,
       (SELECT array_agg(s.worker) FROM steps s WHERE s.rollout_id = r.id) AS workers,
       (SELECT count(DISTINCT o.policy_version) FROM rounds o WHERE o.rollout_id = r.id) AS versions
FROM rollouts r WHERE r.parent_id IS NULL
"""


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


async def _secrets(site: Site) -> None:
    canaries = [CANARY.encode(), site.key.encode()]
    places = [path for one in site.gateways for path in (one.log, *one.directory.glob("spool/*"))]
    for path in places:
        content = path.read_bytes() if path.is_file() else b""
        assert not [canary for canary in canaries if canary in content], f"I6: a secret in {path}"
    engine = async_engine(site.database_url, pool_size=1)
    try:
        async with engine.connect() as connection:
            for canary in canaries:
                for table in ("rollouts", "steps", "rounds", "ledger"):
                    query = text(f"SELECT count(*) FROM {table} t WHERE t::text LIKE :secret")  # noqa: S608
                    hits = await connection.scalar(query, {"secret": f"%{canary.decode()}%"})
                    assert hits == 0, f"I6: a secret in {table}"
    finally:
        await engine.dispose()
