"""What a request costs the gateway as a multiple of the least that a Python gateway could do, in one run.

    python -m bench.floor [--rounds 5] [--requests 200] [--concurrency 16] [--plan]

With --plan a scripted conductor plans three steps at a time and one that merges; the floor then makes five calls.
The floor is FastAPI, one call with aiohttp, and two commands to Redis, a hold and a settlement; no log, no checks, no
plans. Both have the same mock worker and the same client; rounds alternate. The ratio is of processor time (user +
system) a request, the gateway's child processes included, PostgreSQL and Redis not. `tests/bench/test_floor.py` holds
it under a bound: a ratio of one run says more than microseconds of some machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import redis.asyncio
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from bench.cost import PLANNED, POOL, SETTINGS, load, scripted, shipped, used
from policy.recipes.stack import Gateway, gateway, program, temporary_directory

WARM_UP = 100
WORST_CASE = 1_000_000
STEPS = 3  # of a plan, at a time


@dataclass(frozen=True, slots=True)
class Ratios:
    """One value a round: microseconds a request of the gateway and of the floor."""

    gateway_us: list[float]
    floor_us: list[float]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(mine / its for mine, its in zip(self.gateway_us, self.floor_us, strict=True))


# ---------------------------------------------------------------- the floor


def floor(worker_url: str, redis_socket: str) -> FastAPI:
    """The least gateway: it holds, calls, settles and passes the reply on."""
    store = redis.asyncio.Redis(unix_socket_path=redis_socket, db=1)
    session: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as one:
            session.append(one)
            yield

    app = FastAPI(lifespan=lifespan)

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        async with session[0].post(f"{worker_url}/v1/chat/completions", json=body) as reply:
            content: dict[str, Any] = await reply.json()
            return content

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        await store.incrby("held", WORST_CASE)
        if body["model"] == "baton":  # a plan, its steps, and the merge below
            await ask(body)
            await asyncio.gather(*(ask(body) for _ in range(STEPS)))
        content = await ask(body)
        await store.incrby("held", -WORST_CASE)
        content["model"] = body["model"]
        return JSONResponse(content)

    return app


async def serve(worker_url: str, redis_socket: str, port_file: Path) -> None:
    """Serve the floor on a free port, as the gateway serves: uvicorn, httptools, uvloop."""
    config = uvicorn.Config(floor(worker_url, redis_socket), port=0, log_config=None, access_log=False, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    part = port_file.with_suffix(".part")
    part.write_text(f"{port}\n")
    part.rename(port_file)
    await serving


# ---------------------------------------------------------------- one run


def run(options: argparse.Namespace) -> Ratios:
    """Start worker, gateway and floor, measure, end all."""
    with ExitStack() as held:
        directory = held.enter_context(temporary_directory())
        worker = held.enter_context(program("mock", directory, "bench.cost", "worker"))
        pool = directory / "pool.yaml"
        pool.write_text(POOL.format(url=worker.url, gap_ms=0))
        conductor = scripted(held, directory) if options.plan else "none"
        settings = SETTINGS | (PLANNED if options.plan else {})
        served = held.enter_context(gateway(directory, conductor=conductor, pool=pool, settings=settings))
        socket = directory / "data" / "run" / "redis" / "redis.sock"
        least = held.enter_context(program("floor", directory, "bench.floor", "serve", worker.url, str(socket)))
        base = replace(served, base_url=f"{least.url}/v1", pid=least.pid)
        return asyncio.run(measure(served, base, options))


async def measure(served: Gateway, base: Gateway, options: argparse.Namespace) -> Ratios:
    """All rounds, after a warm-up of each."""
    ratios = Ratios([], [])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for number in range(-1, options.rounds):
            for which, samples in ((served, ratios.gateway_us), (base, ratios.floor_us)):
                before = used(which.pid)
                answered = len(await load(client, which, options, options.requests if number >= 0 else WARM_UP))
                if which is served:
                    await shipped(client, served)
                if number >= 0:
                    samples.append(used(which.pid).since(before).tree_s * 1e6 / max(1, answered))
    return ratios


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="per round")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--plan", action="store_true", help="plans: three steps at a time and one that merges")
    parser.set_defaults(stream=False)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; `serve WORKER REDIS`: be the floor."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["serve"]:
        asyncio.run(serve(argv[1], argv[2], Path(argv[argv.index("--port-file") + 1])))
        return 0
    ratios = run(options_of(argv))
    rounds = ", ".join(f"{a:.0f}/{b:.0f}" for a, b in zip(ratios.gateway_us, ratios.floor_us, strict=True))
    print(f"{ratios.ratio:.2f} x the floor (us a request, gateway/floor: {rounds}; load {os.getloadavg()[0]:.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
