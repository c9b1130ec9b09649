"""The ports of the pool file in memory; tests/contract/test_pool_revisions.py holds the store to PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.pool.workers import PoolFile
from gateway.errors import BatonError
from gateway.service.ports.pools import LoadedPool, PoolRevision, Swap
from tests.fakes.admin import FakeAdmin


class FakePools:
    """`PoolRevisions`; each change is audited in the chain of `admin`."""

    def __init__(self, admin: FakeAdmin) -> None:
        self.admin = admin
        self.kept: dict[str, PoolRevision] = {}

    async def note(self, revision: PoolRevision, after: Mapping[str, Any]) -> bool:
        self.admin.store._up()
        new = self._keep(revision)
        if new:
            self.admin._write(revision.act, "pool.loaded", "pools", None, after)
        return new

    async def change(self, revision: PoolRevision, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self.admin.store._up()
        self._keep(revision)
        self.admin._write(revision.act, "pool.reloaded", "pools", before, after)

    async def list(self, limit: int) -> Sequence[PoolRevision]:
        self.admin.store._up()
        every = sorted(self.kept.values(), key=lambda one: one.hash)
        return sorted(every, key=lambda one: one.at, reverse=True)[:limit]

    async def get(self, hash_: str) -> PoolRevision | None:
        self.admin.store._up()
        return self.kept.get(hash_)

    def _keep(self, revision: PoolRevision) -> bool:
        return self.kept.setdefault(revision.hash, revision) is revision


@dataclass
class FakeSource:
    """`PoolSource`: the present file, or the mistake in it."""

    now: LoadedPool | BatonError

    async def read(self) -> LoadedPool:
        if isinstance(self.now, BatonError):
            raise self.now
        return self.now


@dataclass
class FakePoolWorkers:
    """`PoolWorkers`: `taken` lists the revisions in use, in order, `closed` those that were prepared in vain; `refuses`
    is the error that preparing raises."""

    taken: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    refuses: BatonError | None = None

    async def prepare(self, loaded: LoadedPool, revision: str) -> Swap:
        if self.refuses is not None:
            raise self.refuses

        async def close() -> None:
            self.closed.append(revision)

        return Swap(lambda: self.taken.append(revision), close)


@dataclass
class SpyPoolMetrics:
    """Counts the reports of the pools."""

    in_use: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    def pool_in_use(self, revision: str, loaded_s: float) -> None:
        self.in_use.append(revision)

    def pool_reloaded(self, result: str) -> None:
        self.results.append(result)


def loaded(pools: PoolFile, **secrets: str) -> LoadedPool:
    return LoadedPool(pools, secrets)
