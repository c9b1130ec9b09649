"""Starts PostgreSQL and Redis in the directory given, prints their pids and waits to be killed without a chance."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gateway.adapters.host.servers import EmbeddedPostgres, EmbeddedRedis


async def main() -> None:
    servers = [EmbeddedPostgres(Path(sys.argv[1])), EmbeddedRedis(Path(sys.argv[1]))]
    for server in servers:
        await server.start()
    sys.stdout.write(f"{servers[0].pid} {servers[1].pid}\n")
    sys.stdout.flush()
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main())
