"""All faults of the kit, to draw from while traffic flows, and the memory and files of a process meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import linear_regression, median

from tests.faults import bad_workers, breaks_postgres, breaks_redis
from tests.faults.breaks_postgres import World
from tests.faults.client import Client
from tests.faults.killpoints import POINTS
from tests.faults.proxy import FaultProxy
from tests.faults.site import Gateway, Site

ENDS_WITHIN_S = 20.0
BAD_WORKERS = tuple(
    name
    for name in bad_workers.WAYS
    if name
    not in ("no usage", "bills over the bound", "100 MiB", "gzip bomb")  # their bills cannot be compared; F8 has them
)
Way = Callable[[], Awaitable[Callable[[], Awaitable[None]]]]


@dataclass
class SoakSite:
    """The installation: three gateways. The first lives all the time, the last has a way to Redis of its own."""

    here: Site
    world: World
    client: Client
    redis: FaultProxy
    redis_alone: FaultProxy
    worker: FaultProxy
    switch: Path  # while it exists, the disk of the journals is full
    draw: random.Random

    @property
    def mortal(self) -> Gateway:
        """Draw a gateway that may be killed."""
        return self.draw.choice(self.here.gateways[1:])

    def ways(self) -> dict[str, Way]:
        """Faults by name: each breaks something and returns the function that heals it."""
        place = self.here.place / "redis"
        ways: dict[str, Way] = {
            "gateway: killed": self._killed,
            "gateway: killed on its way": self._killed_on_its_way,
            "gateway: stopped": self._stopped,
            "gateway: frozen": self._frozen,
            "gateway: cut off from Redis": self._cut_off,
            "disk: full": self._disk_full,
            "clients: leave": self._clients_leave,
        }
        for name, redis_way in breaks_redis.FAULTS.items():
            ways[f"redis: {name}"] = partial(redis_way, self.here, self.redis, place)
        for name, postgres_way in breaks_postgres.FAULTS.items():
            ways[f"postgres: {name}"] = partial(self._postgres, postgres_way)
        for name in BAD_WORKERS:
            ways[f"worker: {name}"] = partial(self._bad_worker, name)
        return ways

    async def _postgres(self, way: Callable[[World], Awaitable[breaks_postgres.Heal]]) -> Callable[[], Awaitable[None]]:
        heal = await way(self.world)

        async def back() -> None:
            await asyncio.to_thread(heal)

        return back

    async def _bad_worker(self, name: str) -> Callable[[], Awaitable[None]]:
        behave, _ = bad_workers.WAYS[name]
        self.here.upstream.behave, self.worker.refuse = behave, behave is None
        self.worker.cut()

        async def back() -> None:
            self.here.upstream.behave, self.worker.refuse = None, False
            self.worker.cut()  # else a hanging call goes on

        return back

    async def _killed(self) -> Callable[[], Awaitable[None]]:
        one = self.mortal
        await one.kill()
        return partial(self._started, one)

    async def _killed_on_its_way(self) -> Callable[[], Awaitable[None]]:
        """Kill it at a point drawn at random; do not wait if it does not get there."""
        one = self.mortal
        await one.stop()
        one.start(kill=(self.draw.choice(POINTS), self.draw.randint(1, 3)), seam="disk full")
        await one.came_up()

        async def back() -> None:
            await one.kill()
            await self._started(one)

        return back

    async def _stopped(self) -> Callable[[], Awaitable[None]]:
        one = self.mortal
        await one.stop()
        return partial(self._started, one)

    async def _frozen(self) -> Callable[[], Awaitable[None]]:
        """Freeze it longer than the lease of a hold: the others settle its holds, and then it goes on."""
        one = self.mortal
        one.signal(signal.SIGSTOP)

        async def back() -> None:
            one.signal(signal.SIGCONT)

        return back

    async def _cut_off(self) -> Callable[[], Awaitable[None]]:
        self.redis_alone.set(black_hole=True)

        async def back() -> None:
            self.redis_alone.heal()

        return back

    async def _disk_full(self) -> Callable[[], Awaitable[None]]:
        self.switch.touch()

        async def back() -> None:
            self.switch.unlink()

        return back

    async def _clients_leave(self) -> Callable[[], Awaitable[None]]:
        """Forty clients leave, each a little later in its stream than the one before."""
        self.here.upstream.word_s = 0.05
        leaving = [asyncio.wait_for(self.client.ask(stream=True), 0.01 * n) for n in range(1, 41)]
        await asyncio.gather(*leaving, return_exceptions=True)

        async def back() -> None:
            self.here.upstream.word_s = 0.0

        return back

    async def _started(self, one: Gateway) -> None:
        one.start(seam="disk full")
        await one.serving()

    async def answers(self, limit_s: float, in_a_row: int = 3) -> None:
        """Wait until every gateway has answered `in_a_row` times in a row. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            for one in self.here.gateways:
                good = 0
                while good < in_a_row:
                    good = good + 1 if (await self.client.ask(gateway=one)).whole else 0


@asynccontextmanager
async def broken(way: Way) -> AsyncIterator[None]:
    """Break it for the time of the block; heal it whatever happens."""
    heal = await way()
    try:
        yield
    finally:
        async with asyncio.timeout(ENDS_WITHIN_S):
            await heal()


@dataclass
class Samples:
    """Samples of a process at moments without a fault: (seconds, resident MiB, open files)."""

    gateway: Gateway
    began_s: float = field(default_factory=time.monotonic)
    samples: list[tuple[float, float, int]] = field(default_factory=list)

    def sample(self) -> tuple[float, float, int]:
        files = len(os.listdir(f"/proc/{self.gateway.pid}/fd"))
        self.samples.append((time.monotonic() - self.began_s, self.gateway.rss_mib(), files))
        return self.samples[-1]

    def mib_per_min(self) -> float:
        """The slope of its memory over the last four fifths of the time; 0 of fewer than three samples."""
        late = [(at_s, mib) for at_s, mib, _ in self.samples if at_s >= self.samples[-1][0] / 5]
        return 60 * linear_regression(*zip(*late, strict=True)).slope if len(late) > 2 else 0.0

    def files_grown(self) -> int:
        """Open files: the median of the last third less that of the first."""
        third = max(1, len(self.samples) // 3)
        files: Sequence[int] = [files for _, _, files in self.samples]
        return round(median(files[-third:]) - median(files[:third]))
