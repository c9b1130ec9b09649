"""The pool in use, and its replacement under traffic: read, check, audit, swap.

Everything that can fail happens before the swap, and the swap is a few assignments without an await between them: a
request sees the old pool or the new one, never a part of both, and ends on the one it began with.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_fixed

from gateway.core.access.audit import Act
from gateway.core.pool.changes import change_lines, changes, gone_names, lost_names
from gateway.core.pool.revision import canonical_text, revision_of
from gateway.core.pool.workers import PoolFile
from gateway.errors import BatonError, ConfigError, NotFound
from gateway.service.admin.keys import ITSELF
from gateway.service.ports.pools import (
    Keys,
    LoadedPool,
    PoolMetrics,
    PoolRevision,
    PoolRevisions,
    PoolSource,
    PoolWorkers,
)
from gateway.service.ports.request import Clock

log = logging.getLogger("gateway.pools")
AGAIN_S = 5.0  # between two tries to store the first revision
REVISIONS_MAX = 1_000
KEYS_SHOWN_MAX = 100
KEYS_READ_MAX = 1_000
PLANS_WITH = (
    "kind",
    "model",
    "url",
    "params",
    "context_tokens",
)  # what the conductor was started with, beside its price
Learn = Callable[[Sequence[str]], None]
Follow = Callable[[PoolFile], None]


@dataclass(frozen=True, slots=True)
class InUse:
    """The pool that new requests get."""

    loaded: LoadedPool
    hash: str
    at: datetime


class Pools:
    """`planner`: the worker that is this gateway's conductor, if one is. `place`: the file and the host, as the audit
    names them. `audits`: whether revisions are stored and audited here; another process of this gateway does it if
    not."""

    def __init__(
        self,
        first: LoadedPool,
        source: PoolSource,
        revisions: PoolRevisions,
        workers: PoolWorkers,
        clock: Clock,
        metrics: PoolMetrics,
        keys: Keys,
        *,
        planner: str | None = None,
        place: Mapping[str, str] | None = None,
        audits: bool = True,
    ) -> None:
        self._source = source
        self._revisions = revisions
        self._workers = workers
        self._clock = clock
        self._metrics = metrics
        self._keys = keys
        self._learners: list[Learn] = []
        self._followers: list[Follow] = []
        self._planner = planner
        self._place = dict(place or {})
        self._audits = audits
        self._one_at_a_time = asyncio.Lock()
        self.now = InUse(first, revision_of(first.pools), clock.now())
        self._first = self.now
        metrics.pool_in_use(self.now.hash, self.now.at.timestamp())

    def tell(self, *, learn: Learn | None = None, follow: Follow | None = None) -> None:
        """Register observers: one hears of the workers' keys before a request can use them, one of each new pool. They
        must not fail."""
        self._learners += [learn] if learn else []
        self._followers += [follow] if follow else []

    async def reload(self, act: Act, *, dry: bool = False) -> dict[str, Any]:
        """Read the file and use it: {hash, before, changed, applied, changes, keys, lines}; `keys` that name a missing
        pool or worker. `dry`: only report changes. A file without changes is not audited. Raises ConfigError, and
        Unavailable if the audit cannot be written; then the old pool stays."""
        async with self._one_at_a_time:
            try:
                return await self._reload(act, dry)
            except BatonError:
                if not dry:
                    self._metrics.pool_reloaded("refused")
                raise

    async def _reload(self, act: Act, dry: bool) -> dict[str, Any]:
        old, loaded = self.now, await self._source.read()
        hash_, diff = revision_of(loaded.pools), self._changes(loaded)
        self._refuse_planner(loaded, diff)
        if diff:
            await self._replace(loaded, hash_, diff, None if dry else act)
        if not dry:
            self._metrics.pool_reloaded("changed" if diff else "unchanged")
        applied = bool(diff) and not dry
        summary = {"hash": hash_, "before": old.hash, "changed": bool(diff), "applied": applied, "changes": diff}
        keys = await self._stranded(old.loaded.pools, loaded.pools) if diff else {}
        lines = [f"key {public_id} names what is gone: {', '.join(names)}" for public_id, names in keys.items()]
        return {**summary, "keys": keys, "lines": [*change_lines(diff), *lines]}

    async def _replace(self, loaded: LoadedPool, hash_: str, diff: Mapping[str, Any], act: Act | None) -> None:
        """Put a changed pool into use; without an act, only see whether that would work. What was started for a pool
        that is not taken ends."""
        swap = await self._workers.prepare(loaded, hash_)
        before = self.now
        try:
            if act is not None:
                await self._write_down(loaded, hash_, diff, act)
                self._take(InUse(loaded, hash_, self._clock.now()), swap.take)
                log.info(
                    "pool %s took the place of %s: %s", hash_[:12], before.hash[:12], "; ".join(change_lines(diff))
                )
        finally:
            if self.now is before:
                await swap.close()

    async def _stranded(self, before: PoolFile, after: PoolFile) -> dict[str, list[str]]:
        """Keys that name a missing pool or worker, newest first; none if the store is away."""
        pools, workers = gone_names(before, after)
        if not pools and not workers:
            return {}
        try:
            rows = await self._keys.key_naming(pools, workers, KEYS_READ_MAX)
        except BatonError as error:
            log.warning("which keys name what is gone is not known: %s", error.message)
            return {}
        keys = lost_names(rows, before, after)
        return dict(islice(keys.items(), KEYS_SHOWN_MAX))

    def _changes(self, loaded: LoadedPool) -> dict[str, Any]:
        was = self.now.loaded
        refs = {worker.name: worker.api_key for worker in was.pools.workers}
        rekeyed = [
            worker.name
            for worker in loaded.pools.workers
            if worker.api_key != refs.get(worker.name)
            or _secrets_of(loaded, worker.name) != _secrets_of(was, worker.name)
        ]
        return changes(was.pools, loaded.pools, rekeyed)

    def _refuse_planner(self, loaded: LoadedPool, diff: Mapping[str, Any]) -> None:
        """Refuse to change the worker that is the conductor: its address, price and key are fixed at the start."""
        name = self._planner
        if name is None:
            return
        fields = diff.get("workers", {}).get("changed", {}).get(name, {})
        fixed = [field for field in fields if field in PLANS_WITH or field.startswith("price.")]
        if name in diff.get("rekeyed", ()):
            fixed.append("api_key")
        if all(worker.name != name for worker in loaded.pools.workers):
            fixed = ["name"]
        if fixed:
            raise ConfigError(
                f"worker `{name}` is the conductor (BATON_CONDUCTOR=worker:{name}): its {', '.join(fixed)} cannot "
                "change while the gateway runs; restart it to change the conductor",
                param=fixed[0],
            )

    async def _write_down(self, loaded: LoadedPool, hash_: str, diff: Mapping[str, Any], act: Act) -> None:
        if not self._audits:
            return
        revision = PoolRevision(hash_, canonical_text(loaded.pools), self._clock.now(), act.actor, act.why)
        after = {"hash": hash_, **self._place, "changes": diff}
        await self._revisions.change(revision, {"hash": self.now.hash}, after)

    def _take(self, new: InUse, swap: Callable[[], None]) -> None:
        """Swap. Nothing here awaits or fails."""
        for learn in self._learners:
            learn(list(new.loaded.secrets.values()))
        swap()
        for follow in self._followers:
            follow(new.loaded.pools)
        self.now = new
        self._metrics.pool_in_use(new.hash, new.at.timestamp())

    # ---------------------------------------------------------------- revisions

    async def note_first(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Store the pool that the gateway started with, as soon as the store can be reached."""
        first, text = self._first, canonical_text(self._first.loaded.pools)
        revision = PoolRevision(first.hash, text, first.at, ITSELF.actor)
        retries = AsyncRetrying(
            retry=retry_if_exception_type(BatonError), wait=wait_fixed(AGAIN_S), sleep=sleep, before_sleep=_log_wait
        )
        await retries(self._revisions.note, revision, {"hash": first.hash, **self._place})

    async def revisions(self, limit: int) -> list[dict[str, Any]]:
        """Revisions, newest first."""
        return [self._described(revision) for revision in await self._revisions.list(min(limit, REVISIONS_MAX))]

    async def revision(self, hash_: str) -> dict[str, Any]:
        """One revision with its whole pool. Raises NotFound."""
        revision = await self._revisions.get(hash_)
        if revision is None:
            raise NotFound(f"No pool `{hash_[:64]}`; `baton pools revisions` lists them.", code="pool_not_found")
        return {**self._described(revision), "pool": json.loads(revision.file)}

    def _described(self, revision: PoolRevision) -> dict[str, Any]:
        """A revision as JSON for people and scripts."""
        fields = {"hash": revision.hash, "at": revision.at.isoformat(), "actor": revision.actor, "why": revision.why}
        return {**fields, "in_use": revision.hash == self.now.hash}


def _secrets_of(loaded: LoadedPool, worker: str) -> dict[str, str]:
    """The key of a worker, and the secrets in the environment of its program (`WORKER VARIABLE`)."""
    return {name: secret for name, secret in loaded.secrets.items() if name.split(" ", 1)[0] == worker}


def _log_wait(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    log.warning("the pool's revision waits to be written down: %s", error)
