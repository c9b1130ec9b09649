"""Which workers of a pool file are there, for `baton check --ask` and `baton doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from gateway.adapters.host import poolfile
from gateway.adapters.upstream.http1.ways import Ways
from gateway.adapters.upstream.looks import HttpLooks
from gateway.adapters.upstream.pooled import pooled_workers
from gateway.core.pool.workers import PoolFile, WorkerSpec
from gateway.service.policies.reach import ask, look_at
from gateway.service.ports.pools import LoadedPool, Sight


def seen(pool: PoolFile, environ: Mapping[str, str]) -> Sequence[Sight]:
    """What a look at each worker shows; it costs nothing."""
    return asyncio.run(_seen(LoadedPool(pool, poolfile.secrets(pool, environ)), Ways(environ), pool.workers))


async def _seen(loaded: LoadedPool, ways: Ways, workers: Iterable[WorkerSpec]) -> Sequence[Sight]:
    looks = HttpLooks(ways)
    try:
        return [*(await look_at(looks, loaded, workers)).values()]
    finally:
        await looks.close()


def asked(pool: PoolFile, environ: Mapping[str, str]) -> Sequence[Sight]:
    """What each answers to one short question, which is paid for; of those that answer none, a look."""
    return asyncio.run(_look_at_all(LoadedPool(pool, poolfile.secrets(pool, environ)), Ways(environ)))


async def _look_at_all(loaded: LoadedPool, ways: Ways) -> Sequence[Sight]:
    workers = pooled_workers(loaded.pools, loaded.secrets, b"", ways=ways)
    try:
        sights = await asyncio.gather(*(ask(workers, spec) for spec in loaded.pools.workers if not spec.local_model))
    finally:
        await workers.close()
    answers = {sight.worker: sight for sight in sights if sight is not None}
    others = [spec for spec in loaded.pools.workers if spec.name not in answers]
    return [*answers.values(), *(await _seen(loaded, ways, others))]


def ways(pool: PoolFile, environ: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """(worker, by which way it is reached) of each that has a URL. Raises ConfigError."""
    every, secrets = Ways(environ), poolfile.secrets(pool, environ)
    reached = [worker for worker in pool.workers if (worker.url or "").startswith("http")]
    return [(worker.name, every.of_worker(worker, secrets).why) for worker in reached]
