"""The evidence after a run: PostgreSQL, Redis, and the worker's own bill. The checker judges it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.adapters.postgres.database import async_engine
from tests.faults.site import INPUT_NANO, OUTPUT_NANO, Site


@dataclass(frozen=True, slots=True)
class Evidence:
    """Rows of the ledger; whole trees by their roots; nano-dollars by scope."""

    ledger: Sequence[dict[str, Any]]
    rollouts: Sequence[dict[str, Any]]
    redis_posted: Mapping[str, int]
    redis_held: Mapping[str, int]
    bill_nano: int

    def posted(self, scope: str) -> int:
        """Sum the nano-dollars of a scope in the ledger."""
        return sum(row["amount_nano"] for row in self.of_kind("posted", "uncertain") if scope in _names(row))

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [row for row in self.ledger if row["kind"] in kinds]


async def look(site: Site) -> Evidence:
    """Collect the evidence as it is now."""
    async with connected(site) as connection:
        ledger = (await connection.execute(text(LEDGER))).mappings().all()
        rollouts = (await connection.execute(text(TREES))).mappings().all()
    posted, held = await balances(site)
    bill_nano = site.upstream.total_nano(INPUT_NANO, OUTPUT_NANO)
    return Evidence([dict(row) for row in ledger], [dict(row) for row in rollouts], posted, held, bill_nano)


async def at_rest(site: Site) -> bool:
    """Return whether every hold has ended in the ledger and in Redis, with equal balances."""
    posted, held = await balances(site)
    async with connected(site) as connection:
        open_holds = await connection.scalar(text(OPEN_HOLDS))
        sums = {name: int(nano) for name, nano in (await connection.execute(text(POSTED))).all()}
    return not open_holds and not held and all(sums.get(name, 0) == nano for name, nano in posted.items())


async def balances(site: Site) -> tuple[dict[str, int], dict[str, int]]:
    """Nano-dollars (posted, held) by scope, in Redis; of those held only what is not 0."""
    redis: Redis = Redis.from_url(site.redis.url)
    try:
        posted, held = [await redis.hgetall("{baton}:" + name) for name in ("posted", "held")]
    finally:
        await redis.aclose()
    held_nano = {_text(name): int(nano) for name, nano in held.items() if int(nano)}
    return {_text(name): int(nano) for name, nano in posted.items()}, held_nano


async def tables_with(site: Site, secrets: Sequence[str]) -> list[str]:
    """Return the names of all tables that hold one of the secrets."""
    async with connected(site) as connection:
        names = (await connection.execute(text(TABLES))).scalars().all()
        given = {"secrets": [f"%{secret}%" for secret in secrets]}
        evidence = {}
        for name in names:
            query = text(f'SELECT EXISTS (SELECT FROM "{name}" t WHERE t::text LIKE ANY (:secrets))')  # noqa: S608
            evidence[name] = bool(await connection.scalar(query, given))
    return [name for name, hit in evidence.items() if hit]


@asynccontextmanager
async def connected(site: Site) -> AsyncIterator[AsyncConnection]:
    """Connect to the site's database directly, not through a proxy that a test may break."""
    engine = async_engine(site.database_url, pool_size=1, statement_timeout_s=300.0)
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()


def _names(row: Mapping[str, Any]) -> list[str]:
    return [name for name, _ in row["scopes"]]


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


LEDGER = "SELECT hold_id, rollout_id, kind, amount_nano, scopes FROM ledger"
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
ENDED = "kind IN ('posted', 'voided', 'uncertain')"
OPEN_HOLDS = f"""
SELECT (SELECT count(DISTINCT hold_id) FROM ledger WHERE kind = 'hold') - (SELECT count(*) FROM ledger WHERE {ENDED})
"""  # noqa: S608 - two constants
POSTED = """
SELECT scope ->> 0, sum(amount_nano) FROM ledger, jsonb_array_elements(scopes) AS scope
WHERE kind IN ('posted', 'uncertain') GROUP BY 1
"""
# A row a request: of its whole tree, the child loops included. `calls`: attempts that the steps tell of; `planning`:
# calls written down before they left that belong to no step; `twice`: those that have the number of another;
# `attempts` of each step, where there are more of them than may be under way at one time.
TREES = """
WITH RECURSIVE tree AS (
    SELECT id AS root, id, 0 AS below FROM rollouts WHERE parent_id IS NULL
    UNION ALL SELECT t.root, r.id, t.below + 1 FROM rollouts r JOIN tree t ON r.parent_id = t.id
), step AS (
    SELECT t.root, s.rollout_id, s.round, s.step, s.worker, s.attempts, s.prompt_tokens + s.completion_tokens AS tokens
    FROM tree t JOIN steps s ON s.rollout_id = t.id
), sent AS (
    SELECT rollout_id, detail ->> 'step_id' AS step_id, count(*) AS n, count(DISTINCT detail ->> 'attempt') AS numbers
    FROM ledger WHERE kind = 'dispatched' GROUP BY 1, 2
), of_steps AS (
    SELECT s.root, array_agg(s.worker) AS workers, sum(s.tokens) AS tokens, jsonb_agg(s.attempts) AS attempts,
           sum(jsonb_array_length(s.attempts)) AS calls,
           sum(coalesce(d.n, 0)) AS announced, sum(coalesce(d.n - d.numbers, 0)) AS twice
    FROM step s LEFT JOIN sent d ON d.rollout_id = s.rollout_id AND d.step_id = s.round || '.' || s.step GROUP BY 1
), wide AS (
    SELECT root, max(n) AS steps FROM (SELECT root, count(*) AS n FROM step GROUP BY root, rollout_id, round) AS one
    GROUP BY 1
), of_rounds AS (
    SELECT t.root, sum(o.prompt_tokens + o.completion_tokens) AS tokens, count(DISTINCT o.policy_version) AS versions,
           max(o.policy_version) AS version, bool_or(o.planner = 'conductor' AND o.refusal IS NULL) AS conducted
    FROM tree t JOIN rounds o ON o.rollout_id = t.id GROUP BY 1
), long AS (
    SELECT root, max(n) AS rounds FROM (
        SELECT t.root, count(*) AS n FROM tree t JOIN rounds o ON o.rollout_id = t.id
        WHERE o.refusal IS NULL GROUP BY t.root, o.rollout_id) AS one
    GROUP BY 1
), deep AS (
    SELECT root, max(below) AS depth FROM tree GROUP BY 1
), under AS (
    SELECT hold_id, count(*) AS n FROM ledger WHERE kind = 'dispatched' GROUP BY 1
)
SELECT r.id::text AS id, r.status, r.cost_nano, r.hold_nano, r.caps, r.depth + deep.depth AS depth,
       extract(epoch FROM r.finished_at - r.created_at)::float8 AS took_s,
       r.policy_used, r.policy_version, p.version, coalesce(p.versions, 0) AS versions,
       coalesce(p.conducted, false) AS conducted, coalesce(long.rounds, 0) AS rounds, coalesce(wide.steps, 0) AS steps,
       s.workers, coalesce(s.calls, 0) AS calls, coalesce(s.twice, 0) AS twice,
       coalesce(under.n, 0) - coalesce(s.announced, 0) AS planning,
       coalesce(s.tokens, 0) + coalesce(p.tokens, 0) AS tokens,
       CASE WHEN s.calls > (r.caps ->> 'parallel')::int THEN s.attempts END AS attempts
FROM rollouts r JOIN deep ON deep.root = r.id LEFT JOIN of_steps s ON s.root = r.id LEFT JOIN wide ON wide.root = r.id
LEFT JOIN of_rounds p ON p.root = r.id LEFT JOIN long ON long.root = r.id LEFT JOIN under ON under.hold_id = r.id::text
"""
