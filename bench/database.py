"""Queries of a gateway's PostgreSQL: those printed in docs/schema.md, and those of the measurements."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Engine, text

from gateway.adapters.postgres.database import sync_engine
from policy.recipes.stack import ROOT

SHIPPED_S = 60.0
STEPS_WITH_TOKENS, TOKENS, TOGETHER = 0, 1, 2  # places of queries on the page
Row = dict[str, Any]

_STORED = "SELECT count(*) AS n FROM rollouts WHERE key_id = :key_id AND depth = 0 AND finished_at IS NOT NULL"
_NEWEST = "SELECT coalesce(max(id::text), '') AS id FROM rollouts WHERE depth = 0"
_STEPS_AFTER = """
SELECT r.id::text, r.status, r.cost_nano, s.step, s.worker, s.status AS step_status
FROM rollouts AS r LEFT JOIN steps AS s ON s.rollout_id = r.id
WHERE r.id::text > :before AND r.depth = 0
ORDER BY r.id, s.step
"""
_WORKERS = """
SELECT rollout_id::text AS id, worker FROM steps
WHERE rollout_id = ANY(CAST(:rollout_ids AS uuid[])) AND kind IN ('openai', 'litellm') AND status = 'done'
"""
_CALLS = """
WITH RECURSIVE tree AS (
  SELECT id, id AS root FROM rollouts WHERE key_id = :key_id AND depth = 0
  UNION ALL SELECT child.id, tree.root FROM rollouts AS child JOIN tree ON child.parent_id = tree.id
)
SELECT tree.root::text AS id,
       (SELECT coalesce(sum(jsonb_array_length(s.attempts)), 0) FROM steps AS s
        WHERE s.rollout_id = ANY(array_agg(tree.id)) AND s.kind IN ('openai', 'litellm')) AS calls,
       (SELECT coalesce(bool_or((p.sampling ->> 'temperature')::float > 0), false) FROM rounds AS p
        WHERE p.rollout_id = ANY(array_agg(tree.id)) AND p.planner = 'conductor') AS explored
FROM tree GROUP BY tree.root
"""


class Database:
    """A read-only view of one gateway's log."""

    def __init__(self, database_url: str) -> None:
        self._engine: Engine = sync_engine(database_url, pool_size=1)

    def rows(self, query: str, **values: Any) -> list[Row]:
        """Run the query and return its rows."""
        with self._engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(query), values).mappings()]

    def on_page(self, place: int, rollout_id: str) -> list[Row]:
        """A query of docs/schema.md about one rollout."""
        return self.rows(
            page_queries()[place].replace(":'rollout_id'", "cast(:rollout_id AS uuid)"), rollout_id=rollout_id
        )

    def workers(self, rollout_ids: Sequence[str]) -> dict[str, set[str]]:
        """Rollout → the model workers that finished a step of it."""
        workers: dict[str, set[str]] = {}
        for row in self.rows(_WORKERS, rollout_ids=list(rollout_ids)):
            workers.setdefault(row["id"], set()).add(row["worker"])
        return workers

    def newest(self) -> str:
        """Id of the newest rollout, empty where there is none. Ids sort by time."""
        return str(self.rows(_NEWEST)[0]["id"])

    def steps_after(self, rollout_id: str) -> list[Row]:
        """Return the steps of every rollout newer than this one."""
        return self.rows(_STEPS_AFTER, before=rollout_id)

    def stored(self, key_id: str, expected: int, timeout_s: float = SHIPPED_S) -> int:
        """Wait for `expected` finished rollouts of a key, or the end of the time; return their number."""
        until_s = time.monotonic() + timeout_s
        while (count := int(self.rows(_STORED, key_id=key_id)[0]["n"])) < expected and time.monotonic() < until_s:
            time.sleep(0.1)
        return count

    def calls(self, key_id: str) -> dict[str, Row]:
        """Return, by rollout of a key, the model calls in its tree and whether a plan was sampled at random."""
        return {row["id"]: row for row in self.rows(_CALLS, key_id=key_id)}

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()


@cache
def page_queries() -> tuple[str, ...]:
    """The SQL of docs/schema.md, in order."""
    page = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    return tuple(query.strip() for block in blocks for query in block.split(";") if query.strip())
