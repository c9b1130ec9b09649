"""Fill the database of a gateway under test: with keys, and with rollouts that have experience."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
from sqlalchemy import Connection, insert, select, text

from bench.suite.baton import ADMIN_S, Baton, shipped
from gateway.adapters.host.clock import SystemClock
from gateway.adapters.postgres.admin_tables import keys as keys_table
from gateway.adapters.postgres.database import connected, sync_engine
from gateway.adapters.postgres.upkeep.days import PostgresDays
from gateway.core.access import keys
from policy.simulators.arena.families.tasks import make_task

BATCH = 5000
STATEMENT_S = 3600.0
TEMPLATES = 64  # rollouts that are real, of which the others are copies
COPIES = """
CREATE TEMP TABLE copies ON COMMIT DROP AS
SELECT t.id AS old, at, CAST(lpad(to_hex(CAST(extract(epoch FROM at) * 1000 AS bigint)), 12, '0')
  || '7' || lpad(to_hex(n), 3, '0') || 'a' || lpad(to_hex(i), 15, '0') AS uuid) AS id
FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM rollouts WHERE key_id = :key_id) AS t,
  generate_series(1, :copies) AS i,
  LATERAL (SELECT CAST(:since AS timestamptz) + (CAST(:until AS timestamptz) - CAST(:since AS timestamptz))
    * i / (:copies + 1) AS at) AS times
"""
COPIED = (
    """
    INSERT INTO rollouts SELECT x.* FROM copies AS c JOIN rollouts AS r ON r.id = c.old,
      LATERAL jsonb_populate_record(r, jsonb_build_object('id', c.id, 'created_at', c.at, 'finished_at', c.at,
        'completion_id', 'chatcmpl-' || c.id)) AS x
    """,
    """
    INSERT INTO rounds SELECT x.* FROM copies AS c JOIN rounds AS r ON r.rollout_id = c.old,
      LATERAL jsonb_populate_record(r, jsonb_build_object('rollout_id', c.id)) AS x
    """,
    """
    INSERT INTO steps SELECT x.* FROM copies AS c JOIN steps AS r ON r.rollout_id = c.old,
      LATERAL jsonb_populate_record(r, jsonb_build_object('rollout_id', c.id)) AS x
    """,
    """
    INSERT INTO experience SELECT x.* FROM copies AS c JOIN experience AS r ON r.rollout_id = c.old,
      LATERAL jsonb_populate_record(r, jsonb_build_object('rollout_id', c.id, 'at', c.at)) AS x
    """,
)


def fill_keys(own: Baton, data: Path, count: int) -> list[str]:
    """Add keys with the limits of the gateway's own until it has `count`; return the texts of all of them."""
    pepper = bytes.fromhex((data / "pepper").read_text(encoding="ascii").strip())
    engine = sync_engine(own.served.database_url, statement_timeout_s=STATEMENT_S)
    made = [keys.mint("data") for _ in range(count - 1)]
    try:
        with engine.begin() as connection:
            mine = keys_table.c.public_id == keys.parse(own.key).public_id
            row = connection.execute(select(keys_table).where(mine)).mappings().one()
            values = [
                {**row, "public_id": public_id, "digest": keys.digest(secret, pepper)} for secret, public_id in made
            ]
            for at in range(0, len(values), BATCH):
                connection.execute(insert(keys_table), values[at : at + BATCH])
            connection.execute(text("ANALYZE keys"))
    finally:
        engine.dispose()
    return [own.key, *(secret for secret, _ in made)]


def questions(count: int) -> list[str]:
    """Different questions of the arena."""
    return [make_task(seed).text for seed in range(count)]


def fill_rollouts(own: Baton, model: str, count: int) -> int:
    """Fill the log up to about `count` rollouts of this month, each judged: TEMPLATES are requests, the others copies
    of them with times and ids of their own. Return the number of rollouts."""
    asyncio.run(_templates(own, model))
    engine = sync_engine(own.served.database_url, statement_timeout_s=STATEMENT_S)
    until = datetime.now(UTC) - timedelta(minutes=1)
    month = until.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    values = {"since": month, "until": until, "key_id": keys.parse(own.key).public_id}
    try:
        with engine.begin() as connection:
            connection.execute(text("SET LOCAL session_replication_role = replica"))  # copies of rows that are whole
            connection.execute(text(COPIES), values | {"copies": max(1, count // TEMPLATES - 1)})
            for statement in COPIED:
                connection.execute(text(statement))
        with engine.connect() as connection:
            return _counted(connection)
    finally:
        engine.dispose()


def sum_days(own: Baton) -> None:
    """Sum the days before today, as the gateway does within a minute."""

    async def sweep() -> None:
        async with connected(own.served.database_url) as engine:
            await PostgresDays(engine, SystemClock()).sweep(BATCH)

    asyncio.run(sweep())


def _counted(connection: Connection) -> int:
    for statement in ("ANALYZE rollouts", "ANALYZE steps", "ANALYZE experience"):
        connection.execute(text(statement))
    connection.commit()
    return int(connection.scalar(text("SELECT count(*) FROM experience")) or 0)


async def _templates(own: Baton, model: str) -> None:
    """Send requests and judge each of them."""
    headers = {"authorization": f"Bearer {own.key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(ADMIN_S)) as session:
        for number, question in enumerate(questions(TEMPLATES)):
            body = {"model": model, "messages": [{"role": "user", "content": question}]}
            async with session.post(f"{own.served.base_url}/chat/completions", json=body) as reply:
                if reply.status != 200:
                    raise SystemExit(f"{model}: {reply.status} {await reply.text()}")
                rollout_id = reply.headers["x-baton-rollout-id"]
            judged = {"rollout_id": rollout_id, "value": number % 3 > 0, "source": "bench"}
            async with session.post(f"{own.served.base_url}/outcomes", json=judged) as reply:
                if reply.status >= 300:
                    raise SystemExit(f"outcomes: {reply.status} {await reply.text()}")
    await shipped(own.served)
