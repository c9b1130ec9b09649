"""The ways in which Redis breaks, for a site whose gateways reach it through a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from redis.asyncio import Redis

from tests.faults.proxy import FaultProxy, Toxics
from tests.faults.site import Site
from tests.redis_server import start_redis

Break = Callable[[Site, FaultProxy, Path], Awaitable[Callable[[], Awaitable[None]]]]


async def _killed_and_empty(here: Site, proxy: FaultProxy, place: Path) -> Callable[[], Awaitable[None]]:
    here.redis.stop()

    async def back() -> None:
        here.redis = start_redis(place, port=here.redis.port)

    return back


async def _hung(here: Site, proxy: FaultProxy, place: Path) -> Callable[[], Awaitable[None]]:
    here.redis.freeze()

    async def back() -> None:
        here.redis.thaw()

    return back


async def _last_second_lost(here: Site, proxy: FaultProxy, place: Path) -> Callable[[], Awaitable[None]]:
    """Kill it, and start it again with an old snapshot."""
    redis: Redis = Redis.from_url(here.redis.url)
    await redis.save()
    await redis.aclose()
    await asyncio.sleep(0.5)  # the snapshot does not hold what is spent now
    here.redis.stop()

    async def back() -> None:
        here.redis = start_redis(place, port=here.redis.port, args=())

    return back


def _configured(**settings: str) -> Break:
    async def broken(here: Site, proxy: FaultProxy, place: Path) -> Callable[[], Awaitable[None]]:
        redis: Redis = Redis.from_url(here.redis.url)
        before = {name: (await redis.config_get(name))[name] for name in settings}
        for name, value in settings.items():
            await redis.config_set(name, str(value))

        async def back() -> None:
            for name, value in before.items():
                await redis.config_set(name, str(value))
            await redis.aclose()

        return back

    return broken


async def _read_only(here: Site, proxy: FaultProxy, place: Path) -> Callable[[], Awaitable[None]]:
    """Make it the replica of a primary that does not exist."""
    redis: Redis = Redis.from_url(here.redis.url)
    await redis.replicaof("127.0.0.1", "1")

    async def back() -> None:
        await redis.replicaof("NO", "ONE")
        await redis.aclose()

    return back


def _on_the_way(**toxics: object) -> Break:
    async def broken(here: Site, proxy: FaultProxy, place: Path) -> Callable[[], Awaitable[None]]:
        proxy.up = Toxics(**toxics)  # type: ignore[arg-type]

        async def back() -> None:
            proxy.heal()

        return back

    return broken


FAULTS: dict[str, Break] = {
    "killed, back empty": _killed_and_empty,
    "hung": _hung,
    "last second lost": _last_second_lost,
    "read-only": _read_only,
    "out of memory": _configured(maxmemory="1"),
    "500 ms late": _on_the_way(latency_s=0.5),
    "half-open": _on_the_way(black_hole=True),
}
