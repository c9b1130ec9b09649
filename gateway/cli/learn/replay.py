"""Serve recorded answers of real models as OpenAI-compatible workers, for trying the gateway on real input."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from gateway.adapters.host.servers import EmbeddedProgram
from gateway.cli.process.datadir import DataDir
from gateway.cli.process.services import output_of
from gateway.config import settings as config
from gateway.errors import ConfigError

MODULE = "policy.simulators.replay"


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    parser.add_argument("file", type=Path, help="recordings, .jsonl or .jsonl.gz")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--workers", default="", metavar="A,B", help="only these models")
    parser.add_argument("--prices", type=Path, help="JSON: model → dollars per million tokens; for --pool-file")
    parser.add_argument("--pool-file", type=Path, help="write a pool file of these workers here (needs --prices)")


def run(options: argparse.Namespace) -> int:
    """Serve in the foreground until Ctrl-C."""
    for path in (options.file, *([options.prices] if options.prices else [])):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
    if options.pool_file and not options.prices:
        raise ConfigError("--pool-file needs --prices: a worker without a price is refused, never free")
    asyncio.run(_serve(options, DataDir(config.load().data_dir)))
    return 0


async def _serve(options: argparse.Namespace, data: DataDir) -> None:
    recorded = [str(options.file.resolve()), *(["--workers", options.workers] if options.workers else [])]
    server = EmbeddedProgram("replay-workers", data.path, MODULE, ["serve", *recorded])
    server.health, server.port = "/healthz", options.port
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    try:
        print(f"replay workers at {server.url}/w/MODEL/v1 (log: {server.log_path}); Ctrl-C ends them", flush=True)
        if options.pool_file:
            listed = ["--base-url", server.url, "--prices", str(options.prices.resolve())]
            options.pool_file.write_bytes(await output_of(MODULE, "pool", *recorded, *listed))
            print(f"their pool file: {options.pool_file}; `make serve POOL={options.pool_file}`", flush=True)
        await stop.wait()
    finally:
        await server.stop()
