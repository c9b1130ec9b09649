"""`BackgroundStore` in memory. Leases are by the real clock."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.errors import RateLimited, Unavailable
from gateway.service.ports.background import BackgroundRequest, Status


@dataclass
class Row:
    request: BackgroundRequest
    claim: str | None = None
    lease_until_s: float = 0.0


@dataclass
class FakeBackground:
    """`saves`: how often work was saved. `away`: every call raises Unavailable."""

    rows: dict[str, Row] = field(default_factory=dict)
    saves: int = 0
    away: bool = False

    async def create(self, request: BackgroundRequest, open_max: int) -> None:
        if sum(row.request.open and row.request.key_id == request.key_id for row in self._rows()) >= open_max:
            raise RateLimited("too many", retry_after_s=5.0)
        self.rows[request.id] = Row(_through_json(request))

    async def get(self, key_id: str, response_id: str) -> BackgroundRequest | None:
        row = next((row for row in self._rows() if row.request.id == response_id), None)
        if row is None or row.request.key_id != key_id:
            return None
        return replace(row.request, records={})

    async def cancel(self, key_id: str, response_id: str) -> BackgroundRequest | None:
        request = await self.get(key_id, response_id)
        if request is not None and request.open:
            self._change(response_id, status="cancelling")
        return await self.get(key_id, response_id)

    async def delete(self, key_id: str, response_id: str) -> bool:
        request = await self.get(key_id, response_id)
        if request is None or request.open:
            return False
        del self.rows[response_id]
        return True

    async def take(self, runner: str, limit: int, lease_s: float) -> Sequence[BackgroundRequest]:
        now_s = time.monotonic()
        free = [row for row in self._rows() if row.request.open and row.lease_until_s <= now_s]
        for row in free[:limit]:
            row.claim, row.lease_until_s = runner, now_s + lease_s
            if row.request.status == "queued":
                self._change(row.request.id, status="in_progress")
        return [row.request for row in free[:limit]]

    async def save(
        self, response_id: str, runner: str, state: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]
    ) -> Status | None:
        if not self._is_claimed(response_id, runner):
            return None
        self.saves += 1
        known = self.rows[response_id].request.records
        merged = {**known, **json.loads(json.dumps(dict(records), default=dict))}
        self._change(response_id, state=json.loads(json.dumps(state)), records=merged)
        return self.rows[response_id].request.status

    async def end(self, response_id: str, runner: str, status: Status, error: Mapping[str, Any] | None = None) -> bool:
        if not self._is_claimed(response_id, runner):
            return False
        ended: Status = "cancelled" if self.rows[response_id].request.status == "cancelling" else status
        self._change(response_id, status=ended, error=error, state=None, records={})
        return True

    async def postpone(self, response_id: str, runner: str, delay_s: float) -> None:
        if self._is_claimed(response_id, runner):
            self.rows[response_id].claim, self.rows[response_id].lease_until_s = None, time.monotonic() + delay_s

    async def renew(self, runner: str, response_ids: Sequence[str], lease_s: float) -> Collection[str]:
        mine = [one for one in response_ids if self._is_claimed(one, runner)]
        for one in mine:
            self.rows[one].lease_until_s = time.monotonic() + lease_s
        return {one for one in mine if self.rows[one].request.status == "cancelling"}

    async def release(self, runner: str) -> None:
        for row in self._rows():
            if row.claim == runner and row.request.open:
                row.claim, row.lease_until_s = None, 0.0

    async def holds(self) -> Collection[str]:
        return {row.request.rollout_id for row in self._rows() if row.request.open}

    async def sweep(self, limit: int) -> int:
        return 0

    def _rows(self) -> list[Row]:
        if self.away:
            raise Unavailable("the store is away", code="store_unavailable")
        return list(self.rows.values())

    def _is_claimed(self, response_id: str, runner: str) -> bool:
        self._rows()
        row = self.rows.get(response_id)
        return row is not None and row.claim == runner and row.request.open

    def _change(self, response_id: str, **changes: Any) -> None:
        row = self.rows[response_id]
        row.request = replace(row.request, **changes)


def _through_json(request: BackgroundRequest) -> BackgroundRequest:
    return replace(request, body=json.loads(json.dumps(request.body)), options=dict(request.options))
