"""Memory of a gateway: over many requests, and with many streams open at a time. MiB are of the process that serves
and its shipper; PostgreSQL and Redis are not in them."""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.suite.baton import USER, Baton, baton, shipped
from bench.suite.client import Connection, Crowd
from bench.suite.cores import REST, on, rss_mib
from bench.suite.rounds import rounded, say
from bench.suite.sizes import Size
from policy.recipes.stack import program

POINTS = 20
WARM_SHARE = 0.2  # of the requests: what is cached is there by then
OPENED_S = 100.0  # streams a second
TICKS = "ticks-500"
OPEN_S = 60.0  # most that opening may take beyond its pace
FILES_SPARE = 200


def requests(directory: Path, size: Size) -> dict[str, Any]:
    """Send requests; memory after each twentieth of them, once the log is in PostgreSQL."""
    with ExitStack() as held:
        own = _gateway(held, directory, {})
        with on(REST):
            points = asyncio.run(_watched(own, size))
    return {"points": points, "in_flight": size.in_flight}


async def _watched(own: Baton, size: Size) -> list[list[float]]:
    target = own.target("mock")
    crowd = Crowd(target.address, [target.request(**USER)])
    points, asked, refused = [[0.0, rss_mib(own.pid)]], 0, 0
    step = size.requests / POINTS
    while asked < size.requests:
        replies = await crowd.closed(size.in_flight, 0.5)
        asked += replies.requests
        refused += replies.requests - replies.statuses[200]
        if asked >= points[-1][0] + step or asked >= size.requests:
            await shipped(own.served)
            points.append([asked, round(rss_mib(own.pid), 1)])
            say(f"  {asked} of {size.requests} requests, {points[-1][1]:.0f} MiB")
    crowd.close()
    if refused:
        raise SystemExit(f"memory: {refused} of {asked} requests were refused")
    return points


def figures_of_requests(raw: dict[str, Any]) -> dict[str, Any]:
    """Memory once warm and at the end, their ratio, and growth in MiB for 100,000 requests."""
    points = raw["points"]
    last = points[-1]
    warm = next(point for point in points if point[0] >= WARM_SHARE * last[0])
    grown = (last[1] - warm[1]) / max(1.0, last[0] - warm[0]) * 100_000
    about = {"points": points, "in_flight": raw["in_flight"], "requests": last[0]}
    memory = {"warm_mib": warm[1], "last_mib": last[1], "ratio": round(last[1] / warm[1], 3)}
    return about | memory | {"mib_per_100k": rounded(grown)}


def streams(directory: Path, size: Size) -> dict[str, Any]:
    """Open streams that say a number twice a second; memory before, and with all of them open."""
    room = str(size.streams + 64)
    files = (size.streams + FILES_SPARE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0]), files[1]))
    settings = {"BATON_IN_FLIGHT_MAX": room, "BATON_WORKER_CONNECTIONS_MAX": room}
    with ExitStack() as held:
        own = _gateway(held, directory, settings)
        with on(REST):
            return asyncio.run(_opened(own, size))


async def _opened(own: Baton, size: Size) -> dict[str, Any]:
    target = own.target("ticking")
    request = target.request(stream=True, **USER)
    warm = own.target("mock")
    crowd = Crowd(warm.address, [warm.request(stream=True, **USER)])
    await crowd.closed(size.in_flight, 1.0)
    crowd.close()
    await shipped(own.served)
    before_mib = rss_mib(own.pid)
    ended: list[Connection] = []
    held = []
    loop, pause_s = asyncio.get_running_loop(), 1 / OPENED_S
    for _ in range(size.streams):
        _, one = await loop.create_connection(Connection, *target.address)
        one.ask(request, ended.append)
        held.append(one)
        await asyncio.sleep(pause_s)
    until_s = time.monotonic() + OPEN_S
    while not all(one.head for one in held) and time.monotonic() < until_s:  # noqa: ASYNC110 - as they come
        await asyncio.sleep(0.1)
    good = sum(one.head[9:12] == b"200" for one in held) - len(ended)
    say(f"  {good} of {size.streams} streams are open")
    most_mib = rss_mib(own.pid)
    for one in held:
        one.close()
    return {"streams": size.streams, "open": good, "before_mib": round(before_mib, 1), "with_mib": round(most_mib, 1)}


def figures_of_streams(raw: dict[str, Any]) -> dict[str, Any]:
    """The same, with the ratio and KiB a stream."""
    each = (raw["with_mib"] - raw["before_mib"]) * 1024 / max(1, raw["open"])
    return raw | {"ratio": rounded(raw["with_mib"] / raw["before_mib"]), "kib_each": rounded(each)}


def _gateway(held: ExitStack, directory: Path, settings: dict[str, str]) -> Baton:
    with on(REST):
        upstream = held.enter_context(program("upstream", directory, "bench.suite.upstream"))
    workers = {"mock": "m", "ticking": TICKS}
    return held.enter_context(baton(directory / "baton", upstream.url, workers=workers, settings=settings))
