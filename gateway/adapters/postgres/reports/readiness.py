"""What the log has for a retraining, by named queries: judged requests, and whether each can be trained on or asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.adapters.postgres.database import fragment, query, transaction
from gateway.core.policies.readiness import JudgedRequest

RECENT_MAX = 50_000  # judged requests that are counted, the latest
TIMEOUT_S = 10.0
GREEDY_BELOW = 1e-5  # vLLM's bound of a temperature that explores nothing
JUDGED = query("judged_requests", trains=fragment("trains"))
TRAINABLE = query("trainable_requests", trains=fragment("trains"))


class PostgresReadiness:
    """Read-only. Every call raises Unavailable when PostgreSQL is away."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def judged(self, prompt_hash: str | None, filters: Mapping[str, Any]) -> Sequence[JudgedRequest]:
        """Judged requests that may train, oldest first, by the filters of `core.policies.readiness.FILTERS`.
        `prompt_hash`: of the prompt that plans must be sampled under; None: any."""
        lists = {name: list(filters[name]) if filters.get(name) else None for name in ("pools", "keys")}
        values = {"recent": RECENT_MAX, "prompt": prompt_hash, "greedy_below": GREEDY_BELOW, **lists}
        values |= {name: filters.get(name) for name in ("since", "until")}
        values |= {"versions": list(filters["policy_versions"]) if filters.get("policy_versions") else None}
        values |= {"tags": json.dumps(dict(filters.get("tags") or ()))}
        async with transaction(self._engine, TIMEOUT_S) as connection:
            return [JudgedRequest(*row) for row in await connection.execute(JUDGED, values)]

    async def trainable(self, most: int) -> int | None:
        """The number of judged requests that can be trained on, counted up to `most`; None where none was judged."""
        values = {"recent": RECENT_MAX, "prompt": None, "greedy_below": GREEDY_BELOW, "versions": None, "most": most}
        async with transaction(self._engine, TIMEOUT_S) as connection:
            count, judged = (await connection.execute(TRAINABLE, values)).one()
            return int(count) if judged else None
