"""`Reports` over a `FakeStore`: enough for tests of routes. Only tests on PostgreSQL check the sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from gateway.adapters.postgres import rows
from gateway.core.log.counterfactual import JudgedPlan
from gateway.core.policies.earning import Rewards
from gateway.service.ports.admin import RolloutsQuery
from tests.fakes.store import FakeStore


class FakeReports:
    """Keeps the arguments of its calls in `asked`."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.asked: list[Any] = []
        self.alike: list[JudgedPlan] = []
        self.rewards: list[Rewards] = []

    async def overview(self, until: datetime, window_s: int) -> Mapping[str, Any]:
        self.asked.append((until, window_s))
        empty: dict[str, Any] = {name: [] for name in ("series", "by_key", "by_policy", "by_worker")}
        totals = {"requests": len(self.store.rows.rollouts)}
        return empty | {"since": "", "until": until.isoformat(), "truncated": False, "totals": totals}

    async def planner_rewards(self) -> Sequence[Rewards]:
        return self.rewards

    async def spend(self, until: datetime, days: int) -> Mapping[str, Any]:
        self.asked.append((until, days))
        return {"since": "", "until": until.isoformat(), "truncated": False, "by_key": [], "by_worker": []}

    async def open_holds(self, now: datetime) -> Sequence[Mapping[str, Any]]:
        return []

    async def workers(self, until: datetime, window_s: int, names: Sequence[str]) -> Mapping[str, Any]:
        self.asked.append((until, window_s, names))
        return {"calls": [], "errors": [], "success": [], "sources": []}

    async def rollouts_page(self, query: RolloutsQuery) -> Mapping[str, Any]:
        self.asked.append(query)
        shown = [row for row in self.store.rows.rollouts if query.key in (None, row["key_id"])]
        newest = sorted(shown, key=lambda row: row["created_at"], reverse=True)
        place = int(query.before) if query.before and query.before.isdigit() else 0
        data = [rows.summary(row) for row in newest[place : place + query.limit]]
        after = place + len(data)
        more = str(after) if after < len(newest) else None
        return {"object": "list", "data": data, "next": more, "scanned_to": None}

    async def rollout_any(self, rollout_id: str) -> Mapping[str, Any] | None:
        for row in self.store.rows.rollouts:
            if rollout_id in (row["id"], row["completion_id"]):
                return await self.store.rollout_get(rollout_id, row["key_id"])
        return None

    async def judged_plans(self, rollout_id: str, key: str | None) -> tuple[str, Sequence[JudgedPlan]]:
        self.asked.append((rollout_id, key))
        return "requests of task type sums", self.alike
