"""`baton serve`: start a gateway with everything it needs, print how to use it, and serve until Ctrl-C.

What is not configured is started here: PostgreSQL, Redis, simulated workers, the shipped conductor. All state is in one
data directory; docs/configuration.md lists every setting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from gateway.adapters.host import poolfile
from gateway.cli.process import runtime
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.cli.process.keyring import FirstKeys, first_keys, judge_key
from gateway.cli.process.listeners import Listener, bind, url
from gateway.cli.process.services import Stack
from gateway.cli.process.worker import EmbeddedWorker, write_settings
from gateway.config import settings as config
from gateway.config.settings import Services, Settings
from gateway.errors import Conflict

if TYPE_CHECKING:
    from gateway.wiring.build import Bundle

EXIT_RUNNING = 3
FILES_RESERVED = 512  # open files beside the connections of clients and of workers
CONNECTIONS_MIN = 64
EXIT_FORCED = 130
SIMULATED = """
The workers are simulated: they answer exercises like the one below (arithmetic, units, dates, tables, strings, lists,
logic, formats) and nothing else. A real model on this machine, without a key: make serve POOL=deploy/pools/smol.yaml
"""
QUESTION = "How many grams are there in 51 kilograms? Give the amount as a plain number."


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments; each stands for the setting of its name."""
    parser.add_argument("--pool", type=Path, help="pool file; default: simulated workers (BATON_POOL)")
    parser.add_argument(
        "--conductor",
        help="auto, none, embedded, DIRECTORY, worker:NAME or http://host:port/v1#model (BATON_CONDUCTOR)",
    )
    parser.add_argument("--data-dir", type=Path, help="directory of all state; default .baton (BATON_DATA_DIR)")
    parser.add_argument("--host", help="address of the public API (BATON_HOST)")
    parser.add_argument("--port", type=int, help="its port, 0: any free one (BATON_PORT)")
    parser.add_argument("--admin-port", type=int, help="port of the admin API (BATON_ADMIN_PORT)")


def run(options: argparse.Namespace) -> int:
    """Serve. 0 after a clean stop, 3 where another gateway runs on this data directory."""
    names = ("pool", "conductor", "data_dir", "host", "port", "admin_port")
    settings = config.load(**{name: getattr(options, name) for name in names})
    runtime.log_to_stderr(settings.log_level)
    runtime.tune_switching()
    data = DataDir(settings.data_dir)
    try:
        with data.locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_stopped(settings, data))
    except Conflict as error:
        print(error.message, file=sys.stderr)
        return EXIT_RUNNING


async def _until_stopped(settings: Settings, data: DataDir) -> int:
    """Serve until the first signal, which cancels; a second one ends the process, and its children with it. SIGHUP
    reloads the pool file, unless it means that the terminal of this process was closed."""
    loop = asyncio.get_running_loop()
    hangups = runtime.Hangups()
    serving = loop.create_task(_Run(settings, data, hangups).serve())
    signals: list[int] = []
    at_a_terminal = runtime.ends_with_terminal()

    def stop(number: int) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(EXIT_FORCED)
        serving.cancel()

    def hang_up() -> None:
        if at_a_terminal and not runtime.has_terminal():
            stop(signal.SIGHUP)
        else:
            hangups.signal()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        await serving
    except asyncio.CancelledError:
        if not signals:
            raise
    return 0


class _Run:
    """One run of a gateway: up in order, and down in the reverse order, from wherever it got to."""

    def __init__(self, settings: Settings, data: DataDir, hangups: runtime.Hangups) -> None:
        self._settings = settings
        self._data = data
        self._hangups = hangups
        self._began_s = time.monotonic()

    async def serve(self) -> None:
        """Start the servers, serve until cancelled, and stop the servers."""
        _say(f"baton: starting in {self._data.path}")
        stack = Stack(self._settings, self._data, _say)
        services = await stack.start()
        try:
            await self._serve_on(services, stack)
        finally:
            await stack.stop()
            _say("baton: stopped")

    async def _serve_on(self, services: Services, stack: Stack) -> None:
        from gateway.wiring.build import build  # here, so that `baton --help` need not load it

        environ = config.environment()
        runtime.scrub_from_log(poolfile.secrets(poolfile.load(services.pool_file, environ), environ).values())
        keys = await first_keys(services, self._data)
        if self._settings.judge_model:
            await judge_key(services, self._data, self._settings.judge_model, self._settings.judge_budget_usd)
        bundle = await build(self._settings, services)
        bundle.admin_parts.pools.tell(learn=runtime.scrub_from_log)
        await bundle.start()
        try:
            await self._listen(bundle, services, stack, keys)
        finally:
            await bundle.stop()

    async def _listen(self, bundle: Bundle, services: Services, stack: Stack, keys: FirstKeys) -> None:
        settings, data = self._settings, self._data
        sockets = [
            bind(settings.host, settings.port, strict=settings.port_strict),
            bind(settings.admin_host, settings.admin_port, strict=settings.port_strict),
        ]
        files_max = runtime.raise_files_limit()
        connections_max = max(CONNECTIONS_MIN, files_max - settings.worker_connections_max - FILES_RESERVED)
        public, admin = (
            Listener(
                app,
                sock,
                drain_s=settings.drain_s,
                head_bytes_max=settings.header_bytes_max,
                connections_max=connections_max,
            )
            for app, sock in zip((bundle.public, bundle.admin), sockets, strict=True)
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
        runtime.tune_garbage()
        data.write(FACTS, facts)
        if settings.jobs_worker and find_spec("policy") is not None:
            await stack.run(EmbeddedWorker(data.path, write_settings(settings, data, services.database_url)))
        took_s, simulated = time.monotonic() - self._began_s, settings.pool is None
        _say(banner(facts, data.path, new=keys.new, took_s=took_s, simulated=simulated))
        try:
            await self._hangups.serve(bundle.admin_parts.pools)  # until another signal cancels it
        finally:
            await self._drain(bundle, public, admin)

    async def _drain(self, bundle: Bundle, public: Listener, admin: Listener) -> None:
        """Turn readiness off, refuse new connections, let open requests finish. The admin API, which reports this,
        closes last."""
        _say("baton: draining; Ctrl-C again ends at once")
        bundle.drain()
        await public.close()
        await admin.close()
        self._data.forget_facts()


# ---------------------------------------------------------------- what it prints


def banner(facts: Mapping[str, Any], data_dir: Path, *, new: bool, took_s: float, simulated: bool = False) -> str:
    """Addresses, keys, and two snippets that work when pasted. `new`: this start made the keys, so the admin key is
    shown, this once. `simulated`: the workers are, so it says what they know."""
    where = data_dir / FACTS
    admin_key = f"{facts['admin_key']}   (shown once)" if new else f"made at the first start; see {where}"
    return f"""
Baton serves after {took_s:.1f} s. Ctrl-C drains and stops everything it started.

  base URL    {facts["base_url"]}
  data key    {facts["data_key"]}
  admin URL   {facts["admin_url"]}   (a page: what was asked, planned, answered and spent)
  admin key   {admin_key}
  all this    {where}
{SIMULATED if simulated else ""}
With curl:

{curl(facts)}

With Python (`pip install openai`):

{python(facts)}
"""


def curl(facts: Mapping[str, Any]) -> str:
    """A shell command that asks one question."""
    body = json.dumps({"model": "baton", "messages": [{"role": "user", "content": QUESTION}]})
    return (
        f"curl -s {facts['base_url']}/chat/completions \\\n"
        f"  -H 'authorization: Bearer {facts['data_key']}' \\\n"
        f"  -H 'content-type: application/json' \\\n"
        f"  -d '{body}'"
    )


def python(facts: Mapping[str, Any]) -> str:
    """A program that asks the same question with OpenAI's SDK."""
    return f"""from openai import OpenAI

client = OpenAI(base_url="{facts["base_url"]}", api_key="{facts["data_key"]}")
reply = client.chat.completions.create(
    model="baton", messages=[{{"role": "user", "content": "{QUESTION}"}}]
)
print(reply.choices[0].message.content)"""


def _say(text: str) -> None:
    print(text, flush=True)
