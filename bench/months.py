"""The cost and the gain of a log in months. `python -m bench.months --rollouts 20000`

A real PostgreSQL of its own (`--socket DIRECTORY`: one that runs already, to be filled with databases), with the log as
one table each (revision 0006) beside the log by months, both filled as the shipper fills them:

    insert    a batch of 500 rollouts with their rounds and steps, in turn into the one and the other: milliseconds, and
              the processor time of the server's process, which a busy machine changes less
    migrate   seconds a million rollouts from the one to the other
    drop      seconds to let a month go as a whole, and by row; and the longest that a reader of rollouts waited
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from sqlalchemy import Engine, create_engine, insert, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.host.servers import EmbeddedPostgres
from gateway.adapters.postgres import rows
from gateway.adapters.postgres.database import async_engine, driver_url, sync_engine
from gateway.adapters.postgres.inserts import insert_rows
from gateway.adapters.postgres.migrate import upgrade
from gateway.adapters.postgres.tables import metadata
from gateway.adapters.postgres.upkeep.retention import PostgresRetention
from gateway.core.access.audit import Act
from gateway.core.log.events import Event, uuid7
from gateway.core.log.rollout import AttemptRecord, RolloutRecord, RoundRecord, StepRecord, as_payload
from policy.recipes.stack import temporary_directory

BEFORE = "0006"
BATCH = 500
WORDS = [
    "the",
    "log",
    "of",
    "a",
    "gateway",
    "holds",
    "what",
    "was",
    "asked",
    "for",
    "and",
    "what",
    "came",
    "back",
    "of",
    "it",
]
WHO = Act("bench", "measured")


def record(at: datetime, chance: Random, key: str = "bench") -> RolloutRecord:
    """A rollout of one round and two steps, with texts and tokens of everyday length."""
    us = int(at.timestamp() * 1e6) + chance.randrange(1_000_000)
    texts = [" ".join(chance.choices(WORDS, k=120)) for _ in range(4)]
    asked, times = [{"role": "user", "content": texts[0]}], {"started_us": us, "finished_us": us + 9_000}
    step: dict[str, Any] = {
        "worker": "one",
        "handle": "atlas",
        "kind": "openai",
        "worker_version": "1",
        "status": "done",
    }
    step |= {"round": 1, "task": None, "see": [], "messages": asked, **times}
    tokens = [chance.randrange(50_000) for _ in range(600)]
    plan: dict[str, Any] = {"planner": "conductor", "messages": asked, "prompt_token_ids": tokens, **times}
    plan |= {"plan_token_ids": tokens[:30], "plan_logprobs": [-0.1] * 30, "decision_mask": [True] * 30}
    made = uuid7(us // 1000)
    rollout: dict[str, Any] = {
        "id": made,
        "key_id": key,
        "org": "default",
        "created_us": us,
        "finished_us": us + 20_000,
    }
    rollout |= {"policy_requested": "baton", "policy_used": "conductor", "completion_id": f"chatcmpl-{made}"}
    rollout |= {"pool_name": "main", "pool_hash": "0", "pool": [], "caps": {}, "request": {"messages": asked}}
    rollout |= {"status": "done", "reply": {"text": texts[3]}, "rounds": [RoundRecord(round=1, **plan)]}
    attempts = [AttemptRecord(us, us + 9_000)]
    steps = [StepRecord(step=n, reply=texts[n + 1], attempts=attempts, **step) for n in range(2)]
    return RolloutRecord(steps=steps, **rollout)


def batches(count: int, at: datetime, over: timedelta, seed: int) -> Iterator[rows.Rows]:
    """Return the rows of `n` rollouts, spread evenly over a time."""
    chance = Random(seed)
    for first in range(0, count, BATCH):
        new = rows.Rows()
        for n in range(first, min(first + BATCH, count)):
            one = record(at + over * n / count, chance)
            new.extend(rows.event_rows(Event(one.id, "rollout", one.finished_us, as_payload(one))))
        yield new


def store(engine: Engine, new: rows.Rows) -> float:
    """Insert one batch; return the seconds it took."""
    began_s = time.perf_counter()
    with engine.begin() as connection:
        insert_rows(connection, new)
    return time.perf_counter() - began_s


def inserting(plain: Engine, months: Engine, count: int, at: datetime) -> dict[str, Any]:
    """Insert the same batches into both, taking turns in who is first."""
    engines = {"plain": plain, "months": months}
    took: dict[str, list[float]] = {name: [] for name in engines}
    before = {name: cpu_s(engine) for name, engine in engines.items()}
    for n, new in enumerate(batches(count, at, timedelta(hours=1), 1)):
        for name in list(engines)[:: 1 if n % 2 else -1]:
            took[name].append(store(engines[name], new))
    figures: dict[str, Any] = {f"{name}_batch_ms": round(median(values) * 1000, 1) for name, values in took.items()}
    used = {name: cpu_s(engine) - before[name] for name, engine in engines.items()}
    figures |= {f"{name}_server_cpu_s": round(seconds, 2) for name, seconds in used.items()}
    ratio = median(a / b for a, b in zip(took["months"], took["plain"], strict=True))
    return figures | {"time_ratio": round(ratio, 3), "server_cpu_ratio": round(used["months"] / used["plain"], 3)}


def cpu_s(engine: Engine) -> float:
    """Processor seconds of the server's process behind the engine's one connection, on this host."""
    with engine.connect() as connection:
        pid = connection.scalar(text("SELECT pg_backend_pid()"))
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def migrating(url: str, plain: Engine, count: int) -> dict[str, Any]:
    """The log of half a year from one table each into months."""
    for new in batches(count, datetime.now(UTC) - timedelta(days=180), timedelta(days=150), 2):
        store(plain, new)
    with plain.connect() as connection:
        stored = int(connection.scalar(text("SELECT count(*) FROM rollouts")) or 0)
        size = int(connection.scalar(text("SELECT pg_database_size(current_database())")) or 0)
    began_s = time.perf_counter()
    upgrade(url)
    took_s = time.perf_counter() - began_s
    return {"rollouts": stored, "mb": size >> 20, "s": round(took_s, 2), "s_per_million": round(took_s / stored * 1e6)}


async def waiting(engine: AsyncEngine, rollout_id: str, times: list[float]) -> None:
    """Read rollouts in a loop, as a client reads its own."""
    while True:
        began_s = time.perf_counter()
        async with engine.begin() as connection:
            await connection.execute(text("SELECT status FROM rollouts WHERE id = :id"), {"id": rollout_id})
        times.append(time.perf_counter() - began_s)


async def letting_go(url: str, months: Engine, count: int) -> dict[str, Any]:
    """Two months of the same size: one as a whole, the other by row since one rollout of it is kept."""
    engine = async_engine(url, statement_timeout_s=60.0)
    retention = PostgresRetention(engine)
    june, july = (datetime(2020, month, 2, tzinfo=UTC) for month in (6, 7))
    await retention.sweep(june, None, WHO)
    for at in (june, july):
        for new in batches(count, at, timedelta(days=20), at.month):
            store(months, new)
    kept = record(july, Random(3), "kept")
    new = rows.event_rows(Event(kept.id, "rollout", kept.finished_us, as_payload(kept)))
    store(months, new)
    with months.begin() as connection:
        judged = "INSERT INTO outcomes (id, rollout_id, key_id, kind, value, source, created_at) SELECT "
        connection.execute(text(f"{judged} gen_random_uuid(), id, key_id, 'number', 1, 'client', now() FROM rollouts"))
        whose = {
            "public_id": "kept",
            "key_class": "data",
            "name": "k",
            "digest": b"",
            "pepper_version": 1,
            "org": "default",
        }
        how: dict[str, Any] = {
            "pools": [],
            "workers": [],
            "caps": {},
            "log_mode": "full",
            "train": True,
            "retention_days": 30_000,
        }
        connection.execute(insert(metadata.tables["keys"]).values(**whose, **how, created_at=june))
        connection.execute(text("ANALYZE"))
    figures: dict[str, Any] = {"rollouts_a_month": count}
    for name, now, days in (("whole", july + timedelta(days=8), 8), ("by_row", july + timedelta(days=60), 8)):
        seen: list[float] = []
        reader = asyncio.create_task(waiting(engine, kept.id, seen))
        began_s = time.perf_counter()
        swept = await retention.sweep(now, days, WHO)
        figures[f"{name}_s"] = round(time.perf_counter() - began_s, 2)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        figures[f"{name}_longest_wait_ms"] = round(max(seen) * 1000)
        figures[f"{name}_rollouts"] = sum(sum(one.rollouts.values()) for one in swept.months) or swept.by_row
    await engine.dispose()
    return figures


@asynccontextmanager
async def server(sockets: str | None) -> AsyncIterator[str]:
    """Yield the URL of a PostgreSQL: the one given, or a new one while the block lasts."""
    if sockets:
        yield f"postgresql://postgres@/postgres?host={sockets}"
        return
    with temporary_directory() as directory:
        embedded = EmbeddedPostgres(Path(directory) / "data")
        await embedded.start()
        try:
            yield embedded.url
        finally:
            await embedded.stop()


def database(url: str, revision: str) -> str:
    """Make a database at this revision."""
    name = f"bench_{uuid.uuid4().hex}"
    engine = create_engine(driver_url(url), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{name}"'))
    engine.dispose()
    made = make_url(url).set(database=name).render_as_string(hide_password=False)
    upgrade(made, revision)
    return made


async def measure(count: int, sockets: str | None) -> dict[str, Any]:
    async with server(sockets) as url:
        before, after = database(url, BEFORE), database(url, "head")
        plain, months = (sync_engine(each, statement_timeout_s=600.0) for each in (before, after))
        figures: dict[str, Any] = {"insert": inserting(plain, months, count, datetime.now(UTC))}
        figures["drop"] = await letting_go(after, months, count)
        figures["migrate"] = migrating(before, plain, count)
        plain.dispose()
        months.dispose()
        return figures


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--socket", default=None)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.rollouts, options.socket)), indent=2))


if __name__ == "__main__":
    main()
