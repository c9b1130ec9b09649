"""`baton serve`: start a gateway with everything it needs, print how to use it, and serve until Ctrl-C.

What is not configured is started here: PostgreSQL, Redis, simulated workers, the shipped conductor. All state is in one
data directory; docs/configuration.md lists every setting.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import uvloop

from gateway.adapters.host import poolfile
from gateway.cli.process import runtime
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.cli.process.keyring import FirstKeys, WantedKeys, first_keys, judge_key
from gateway.cli.process.listeners import Listener, bind, listener, reserve, url
from gateway.cli.process.processes import Processes, serving_of, watching
from gateway.cli.process.services import Stack
from gateway.cli.process.worker import EmbeddedWorker, write_settings
from gateway.config import settings as config
from gateway.config.settings import Services, Settings
from gateway.core.access.keys import parse
from gateway.errors import Conflict

if TYPE_CHECKING:
    from gateway.wiring.build import Bundle

EXIT_RUNNING = 3
BANNER_CHARS = 120
READ_KEY = "$OPENAI_API_KEY"  # of a shell; OpenAI's SDK reads it by itself
SIMULATED = """
The workers are simulated: they answer exercises like the one below (arithmetic, units, dates, tables, strings, lists,
logic, formats) and nothing else. A real model on this machine, without a key: make serve POOL=deploy/pools/smol.yaml
"""
QUESTION = "How many grams are there in 51 kilograms? Give the amount as a plain number."


def run(options: argparse.Namespace) -> int:
    """Serve. 0 after a clean stop, 3 where another gateway runs on this data directory."""
    names = ("pool", "conductor", "data_dir", "host", "port", "admin_port", "processes")
    settings = config.load(**{name: getattr(options, name) for name in names})
    runtime.log_to_stderr(settings.log_level, settings.log_format)
    runtime.tune_switching()
    data = DataDir(settings.data_dir)
    try:
        with data.locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            hangups = runtime.Hangups()
            return runner.run(runtime.until_stopped(_Run(settings, data, hangups), settings, hangups))
    except Conflict as error:
        print(error.message, file=sys.stderr)
        return EXIT_RUNNING


class _Run:
    """One run of a gateway: up in order, and down in the reverse order, from wherever it got to."""

    def __init__(self, settings: Settings, data: DataDir, hangups: runtime.Hangups) -> None:
        self._settings = settings
        self._data = data
        self._hangups = hangups
        self._began_s = time.monotonic()
        self.lame_duck_s = 0.0  # for which it says at its end that it is not ready, and still serves

    async def serve(self) -> None:
        """Start the servers, serve until cancelled, and stop the servers."""
        _say(f"baton: starting in {self._data.path}")
        if self._settings.port_strict:  # before anything starts
            places = (self._settings.host, self._settings.port), (self._settings.admin_host, self._settings.admin_port)
            for host, port in places:
                bind(host, port, strict=True).close()
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
        keys = await first_keys(services, self._data, _wanted_keys(self._settings))
        if judge := self._settings.judge_worker:
            await judge_key(services, self._data, judge, self._settings.judge_usd_a_day)
        settings = self._settings = _with_operator(self._settings, keys.data_key)
        if settings.processes > 1:
            services = replace(services, serving=serving_of(self._data, settings))
            settings = watching(settings)
        bundle = await build(settings, services)
        bundle.admin_parts.pools.tell(learn=runtime.scrub_from_log)
        await bundle.start()
        try:
            await self._listen(bundle, services, stack, keys)
        finally:
            await bundle.stop()

    async def _listen(self, bundle: Bundle, services: Services, stack: Stack, keys: FirstKeys) -> None:
        settings, data = self._settings, self._data
        listen = bind if settings.processes == 1 else reserve
        sockets = [
            listen(settings.host, settings.port, strict=settings.port_strict),
            bind(settings.admin_host, settings.admin_port, strict=settings.port_strict),
        ]
        for wanted, sock in zip((settings.port, settings.admin_port), sockets, strict=True):
            if wanted not in (0, sock.getsockname()[1]):
                _say(f"  port       {wanted} is taken; {sock.getsockname()[1]} instead")
        public = self._public(bundle, services, sockets[0])
        admin = listener(bundle.admin, sockets[1], settings)
        await public.open()
        try:
            await admin.open()
            facts = {
                "base_url": f"{url(sockets[0])}/v1",
                "admin_url": url(sockets[1]),
                "data_key": keys.data_key,
                "admin_key": keys.admin_key,
                "pid": os.getpid(),
                "database_url": services.database_url,
                "redis_url": services.redis_url,
                "pool_file": str(services.pool_file),
                "simulated": settings.pool is None,
                "conductor": settings.conductor,
            }
            runtime.tune_garbage()
            data.write(FACTS, facts)
            if settings.jobs_worker and find_spec("policy") is not None:
                await stack.run(EmbeddedWorker(data.path, write_settings(settings, data, services.database_url)))
            took_s, simulated = time.monotonic() - self._began_s, settings.pool is None
            shown, plans = keys.new and settings.show_keys, await bundle.standings.line()
            _say(banner(facts, data.path, new=shown, took_s=took_s, simulated=simulated, plans=plans))
            with runtime.large_pages():
                await self._hangups.serve(bundle.admin_parts.pools)  # until another signal cancels it
        finally:
            await self._drain(bundle, public, admin)

    def _public(self, bundle: Bundle, services: Services, sock: socket.socket) -> Listener | Processes:
        """What serves the public port: a listener of this process, or processes that this one watches."""
        if services.serving is None:
            return listener(bundle.public, sock, self._settings)
        processes = Processes(self._settings, services, self._data, sock)
        bundle.admin_parts.pools.tell(follow=processes.follow_pool)
        bundle.health.needed = {**bundle.health.needed, "processes": processes.ready}
        bundle.health.others = processes.metrics
        return processes

    async def _drain(self, bundle: Bundle, public: Listener | Processes, admin: Listener) -> None:
        """Turn readiness off, so that balancers send their requests elsewhere; a little later refuse new connections,
        and let open requests finish. The admin API, which reports this, closes last."""
        _say("baton: draining; Ctrl-C again ends at once")
        bundle.drain()
        if isinstance(public, Processes):
            public.lame_duck = self.lame_duck_s > 0
        else:
            await asyncio.sleep(self.lame_duck_s)
        await public.close()
        await admin.close()
        self._data.forget_facts()


# ---------------------------------------------------------------- what it prints


def _with_operator(settings: Settings, data_key: str | None) -> Settings:
    """The settings, by which the first data key is an operator's."""
    if data_key is None:
        return settings
    ids = sorted(settings.operators | {parse(data_key).public_id})
    return settings.model_copy(update={"operator_keys": ",".join(ids)})


def _wanted_keys(settings: Settings) -> WantedKeys:
    """When keys are made: a database of its own belongs to this data directory, another one may have keys already."""
    if settings.first_keys != "auto":
        return settings.first_keys
    return "always" if settings.database_url is None else "first"


def banner(
    facts: Mapping[str, Any], data_dir: Path, *, new: bool, took_s: float, simulated: bool = False, plans: str = ""
) -> str:
    """Addresses, keys, and two snippets that work when pasted. `new`: this start made the keys, so they are shown, this
    once; later the snippets read the data key from the facts. `simulated`: the workers are, so it says what they
    know. `plans`: who plans, and the next rung."""
    where = data_dir / FACTS
    key_note = (
        f"made at the first start; see {where}" if facts["admin_key"] else "none of its own: the database has keys"
    )
    data_key = f"{facts['data_key']}   (shown once)" if new else key_note
    admin_key = f"{facts['admin_key']}   (shown once)" if new else key_note
    if not new:
        facts = {**facts, "data_key": READ_KEY}
    read_key = f"""    export OPENAI_API_KEY=$(sed -n 's/.*"data_key": "\\(.*\\)".*/\\1/p' {where})\n\n"""
    return f"""
Baton serves after {took_s:.1f} s. Ctrl-C drains and stops everything it started.

  base URL    {facts["base_url"]}
  data key    {data_key}
  admin URL   {facts["admin_url"]}   (a page: what was asked, planned, answered and spent)
  admin key   {admin_key}
  all this    {where}

{fill(plans, BANNER_CHARS)}
{SIMULATED if simulated else ""}
With curl:

{"" if new else read_key}{curl(facts)}

With Python (`pip install openai`):

{python(facts)}
"""


def curl(facts: Mapping[str, Any]) -> str:
    """A shell command that asks one question."""
    quote = '"' if facts["data_key"] == READ_KEY else "'"  # a shell puts a variable between double quotes
    body = json.dumps({"model": "baton", "messages": [{"role": "user", "content": QUESTION}]})
    return (
        f"curl -s {facts['base_url']}/chat/completions \\\n"
        f"  -H {quote}authorization: Bearer {facts['data_key']}{quote} \\\n"
        f"  -H 'content-type: application/json' \\\n"
        f"  -d '{body}'"
    )


def python(facts: Mapping[str, Any]) -> str:
    """A program that asks the same question with OpenAI's SDK."""
    key = "" if facts["data_key"] == READ_KEY else f', api_key="{facts["data_key"]}"'
    return f"""from openai import OpenAI

client = OpenAI(base_url="{facts["base_url"]}"{key})
reply = client.chat.completions.create(
    model="baton", messages=[{{"role": "user", "content": "{QUESTION}"}}]
)
print(reply.choices[0].message.content)"""


def _say(text: str) -> None:
    print(text, flush=True)
