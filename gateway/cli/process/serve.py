"""Start a gateway with everything it needs, print how to use it, and serve until Ctrl-C.

What is not configured is started here: PostgreSQL, Redis, simulated workers, the shipped conductor. All state is in one
data directory; docs/configuration.md lists every setting.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from gateway.adapters.host import poolfile
from gateway.cli.process import interpreter, logs
from gateway.cli.process.banner import banner
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.cli.process.hangup import Hangups, goes_with_terminal, has_terminal
from gateway.cli.process.keyring import first_keys, judge_key
from gateway.cli.process.listeners import Listener, bind, url
from gateway.cli.process.services import Stack
from gateway.cli.process.worker import EmbeddedWorker, tell
from gateway.config import settings as config
from gateway.config.settings import Services, Settings
from gateway.errors import Conflict

if TYPE_CHECKING:
    from gateway.wiring.build import Bundle

EXIT_RUNNING = 3
EXIT_FORCED = 130


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments; each stands for the setting of its name."""
    parser.add_argument("--pool", type=Path, help="pool file; default: simulated workers (BATON_POOL)")
    parser.add_argument(
        "--conductor", help="embedded, DIRECTORY, worker:NAME or http://host:port/v1#model (BATON_CONDUCTOR)"
    )
    parser.add_argument("--data-dir", type=Path, help="where all state lives; default .baton (BATON_DATA_DIR)")
    parser.add_argument("--host", help="address of the public API (BATON_HOST)")
    parser.add_argument("--port", type=int, help="its port, 0: any free one (BATON_PORT)")
    parser.add_argument("--admin-port", type=int, help="port of the admin API (BATON_ADMIN_PORT)")


def run(options: argparse.Namespace) -> int:
    """Serve. 0 after a clean stop, 3 when a gateway runs on this data directory already."""
    names = ("pool", "conductor", "data_dir", "host", "port", "admin_port")
    settings = config.load(**{name: getattr(options, name) for name in names})
    logs.to_stderr(settings.log_level)
    interpreter.for_latency()
    data = DataDir(settings.data_dir)
    try:
        with data.locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_stopped(settings, data))
    except Conflict as error:
        print(error.message, file=sys.stderr)
        return EXIT_RUNNING


async def _until_stopped(settings: Settings, data: DataDir) -> int:
    """Run until the first signal, which cancels; the second ends the process (its children are leashed to it). SIGHUP
    reads the pool file anew, unless it says that the terminal is gone from which the gateway was started."""
    loop = asyncio.get_running_loop()
    hangups = Hangups()
    serving = loop.create_task(_serve(settings, data, hangups))
    signals: list[int] = []
    at_a_terminal = goes_with_terminal()

    def heard(number: int) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(EXIT_FORCED)
        serving.cancel()

    def hung_up() -> None:
        if at_a_terminal and not has_terminal():
            heard(signal.SIGHUP)
        else:
            hangups.heard()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, heard, number)
    loop.add_signal_handler(signal.SIGHUP, hung_up)
    try:
        await serving
    except asyncio.CancelledError:
        if not signals:
            raise
    return 0


async def _serve(settings: Settings, data: DataDir, hangups: Hangups) -> None:
    """Up in order, and down in the reverse one, however far it got."""
    began_s = time.monotonic()
    _say(f"baton: starting in {data.path}")
    stack = Stack(settings, data, _say)
    services = await stack.start()
    try:
        await _serve_on(services, stack, data, began_s, hangups)
    finally:
        await stack.stop()
        _say("baton: stopped")


async def _serve_on(services: Services, stack: Stack, data: DataDir, began_s: float, hangups: Hangups) -> None:
    from gateway.wiring.build import build  # here, so that `baton --help` need not load it

    settings = stack.settings
    environ = config.environment()
    logs.know(poolfile.secrets(poolfile.load(services.pool_file, environ), environ).values())
    keys = await first_keys(services, data)
    if settings.judge_model:
        await judge_key(services, data, settings.judge_model, settings.judge_budget_usd)
    bundle = await build(settings, services)
    bundle.admin_parts.pools.tell(learn=logs.know)
    await bundle.start()
    try:
        sockets = [
            bind(settings.host, settings.port, strict=settings.port_strict),
            bind(settings.admin_host, settings.admin_port, strict=settings.port_strict),
        ]
        apps = (bundle.public, bundle.admin)
        public, admin = (
            Listener(app, sock, drain_s=settings.drain_s, head_bytes_max=settings.header_bytes_max)
            for app, sock in zip(apps, sockets, strict=True)
        )
        await public.open()
        await admin.open()
        facts = {
            "base_url": f"{url(sockets[0])}/v1",
            "admin_url": url(sockets[1]),
            "data_key": keys.data_key,
            "admin_key": keys.admin_key,
            "pid": os.getpid(),
            "database_url": services.database_url,
            "pool_file": str(services.pool_file),
        }
        interpreter.loaded()
        data.write(FACTS, facts)
        if settings.jobs_worker and find_spec("policy") is not None:
            await stack.run(EmbeddedWorker(data.path, tell(settings, data, services.database_url)))
        _say(banner(facts, data.path, new=keys.new, took_s=time.monotonic() - began_s))
        try:
            await hangups.serve(bundle.admin_parts.pools)  # until cancelled by another signal
        finally:
            await _drain(bundle, public, admin, data)
    finally:
        await bundle.stop()


async def _drain(bundle: Bundle, public: Listener, admin: Listener, data: DataDir) -> None:
    """Not ready; no new connections; open requests finish; the admin API, which says so meanwhile, goes last."""
    _say("baton: draining; Ctrl-C again ends at once")
    bundle.drain()
    await public.close()
    await admin.close()
    data.forget_facts()


def _say(text: str) -> None:
    print(text, flush=True)
