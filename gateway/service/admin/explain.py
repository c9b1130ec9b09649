"""Explains rollouts: reads what is known beside one, and leaves the assembly to `core/log/explain.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.core.log.explain import Surroundings, explain
from gateway.errors import Unavailable
from gateway.service.ports.admin import KeyRow, Reports
from gateway.service.ports.pools import PoolRevision


class StoredPools(Protocol):
    """Reads a pool that served. Raises Unavailable."""

    async def get(self, hash_: str) -> PoolRevision | None: ...


class StoredKeys(Protocol):
    """Reads a key. Raises Unavailable."""

    async def key_find(self, public_id: str) -> KeyRow | None: ...


class Explain:
    """The use case behind `baton explain` and both routes."""

    def __init__(self, reports: Reports, pools: StoredPools, keys: StoredKeys) -> None:
        self._reports = reports
        self._pools = pools
        self._keys = keys

    async def for_operator(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The explanation with all that is logged, of any key. Raises Unavailable."""
        row = await self._keys.key_find(str(tree["key_id"]))
        return await self._explain(tree, None, row.workers if row else (), hide=False)

    async def for_key(self, tree: Mapping[str, Any], workers: Sequence[str]) -> dict[str, Any]:
        """The explanation for the key that owns the rollout: requests like it are this key's own, and workers that the
        key may not call are not named. `workers`: those that it may; empty: all of its pools."""
        return await self._explain(tree, str(tree["key_id"]), workers, hide=True)

    async def _explain(
        self, tree: Mapping[str, Any], key: str | None, workers: Sequence[str], *, hide: bool
    ) -> dict[str, Any]:
        members = await self._members(tree)
        if members is not None and hide and workers:
            members = [name for name in members if name in workers]
        try:
            likeness, alike = await self._reports.judged_plans(str(tree["id"]), key)
        except Unavailable as error:
            likeness, alike = f"none: {error.message}", ()
        about = Surroundings(members, tuple(workers), alike, likeness)
        return await asyncio.to_thread(explain, tree, about)  # thousands of judged requests are resampled

    async def _members(self, tree: Mapping[str, Any]) -> list[str] | None:
        """The workers of the pool that the rollout ran on, None where its revision is not stored."""
        revision = await self._pools.get(tree["pool_revision"]) if tree.get("pool_revision") else None
        if revision is None:
            return None
        names = json.loads(revision.file)["pools"].get(tree["pool_name"])
        return None if names is None else list(names)
