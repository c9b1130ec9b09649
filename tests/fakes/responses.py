"""`ResponseStore` over the fake store's rows (tests/contract/test_responses.py holds it to PostgreSQL's answers)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gateway.adapters.postgres.store import ERASED, erased, logged
from gateway.service.ports.turns import LoggedResponse
from tests.fakes.store import FakeStore


class FakeResponses:
    """Reads and erases the rollouts of a FakeStore."""

    def __init__(self, store: FakeStore) -> None:
        self._store = store

    async def find(self, response_ids: Collection[str], key_id: str) -> Mapping[str, LoggedResponse]:
        self._store._up()
        own = [row for row in self._store.rows.rollouts if row["key_id"] == key_id and not row["depth"]]
        return {row["completion_id"]: logged(row) for row in own if row["completion_id"] in response_ids}

    async def erase(self, response_id: str, key_id: str) -> bool:
        self._store._up()
        root = self._store._owned(response_id, key_id)
        if root is None:
            return False
        ids = [root]
        for one in ids:
            ids += [row["id"] for row in self._store.rows.rollouts if row["parent_id"] == one]
        for row in self._store.rows.rollouts:
            if row["id"] in ids:
                self._erase(row)
        return True

    def _erase(self, row: dict[str, Any]) -> None:
        rows = self._store.rows
        parts = {
            name: [part for part in getattr(rows, name) if part["rollout_id"] == row["id"]]
            for name in ("rounds", "steps")
        }
        bare = erased(row, parts)
        for name, olds in parts.items():
            for old, new in zip(olds, bare.pop(name), strict=True):
                old.update(new)
        row.update(bare)
        for past in (one for key, one in self._store.experience.items() if key[0] == row["id"]):
            past["embedding"] = None
        for grading in (one for one in rows.gradings if one["rollout_id"] == row["id"]):
            waiting = grading["state"] == "waiting"
            grading |= {"reference": "", "detail": ERASED} | ({"state": "ungraded"} if waiting else {})
