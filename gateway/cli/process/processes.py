"""The processes that serve the public port where there are several: started, watched, restarted, stopped together.

The process that starts them serves the admin port, and nothing of the public one: it stays free under any load. Each of
the others is a gateway of its own on the same stores (`sibling.py`), with its own journal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gateway.adapters.host.siblings import Siblings
from gateway.adapters.host.supervisor import Server
from gateway.cli.process.datadir import DataDir
from gateway.config.settings import Services, ServingProcesses, Settings
from gateway.core.pool.workers import PoolFile

log = logging.getLogger("gateway.embedded")
PROGRAM = "gateway.cli.process.sibling"
PROCESSES = "processes"  # the directory of their state, and of nothing that outlives them
FILE = "process.json"  # its settings; they may hold the password of the database
READY_S, PROBE_S, SCRAPE_S = 60.0, 2.0, 2.0
WATCH_S, HUNG_S = 5.0, 60.0  # a process that answers no probe for so long is killed
SHUTDOWN_S = 15.0  # beside the seconds that the settings give
_SAMPLE = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?")


class ServingProcess(Server):
    """One of them. Its output goes where ours goes."""

    fix = "see the lines above"
    has_log = False

    def __init__(self, siblings: Siblings, index: int, file: Path, data_dir: Path, stop_s: float) -> None:
        super().__init__(f"process-{index}", data_dir, ready_s=READY_S, stop_s=stop_s)
        self._siblings = siblings
        self._index = index
        self._file = file

    async def command(self) -> list[str]:
        """The gateway's own interpreter."""
        self._siblings.port_file(self._index).unlink(missing_ok=True)
        return [sys.executable, "-m", PROGRAM, str(self._file)]

    async def probe(self) -> bool:
        """Whether its event loop answers."""
        return await self._siblings.ask_one(self._index, "/livez", PROBE_S) is not None

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def serving_of(data: DataDir, settings: Settings) -> ServingProcesses:
    """Where the processes of a gateway have their state."""
    return ServingProcesses(data.path / PROCESSES, settings.processes)


class Processes:
    """All of them. `sock` holds the port that they share. `lame_duck`: whether they say for a while at their end that
    they are not ready, and still serve."""

    def __init__(self, settings: Settings, services: Services, data: DataDir, sock: socket.socket) -> None:
        self.lame_duck = False
        self._serving = serving_of(data, settings)
        self.siblings = Siblings(self._serving.directory, self._serving.count)
        self._sock = sock
        host, port = sock.getsockname()[:2]
        address = host, port
        shutil.rmtree(self.siblings.shared, ignore_errors=True)  # counts of an earlier run
        self.siblings.shared.mkdir(mode=0o700, parents=True)
        stop_s = settings.lame_duck_s + 3 * settings.drain_s + settings.ship_wait_s + SHUTDOWN_S
        self._all = [
            ServingProcess(self.siblings, index, self._write(index, settings, services, address), data.path, stop_s)
            for index in range(1, settings.processes + 1)
        ]
        self._watching: asyncio.Task[None] | None = None

    def _write(self, index: int, settings: Settings, services: Services, address: tuple[str, int]) -> Path:
        """Write the settings of one process; return the file, which only this user can read."""
        place = DataDir(self.siblings.place(index))
        services = replace(services, serving=replace(self._serving, index=index))
        own = share_of(settings, index) | {"data_dir": str(place.path), "host": address[0], "port": address[1]}
        content = {"settings": settings.model_dump(mode="json") | own, "services": _as_json(services)}
        place.write(FILE, content)
        return place.path / FILE

    async def open(self) -> None:
        """Return once all serve. Raises Unavailable; then none is left."""
        try:
            await _all_or_first([server.start() for server in self._all])
        except BaseException:  # boundary: undone, and raised again
            await self._stop(signal.SIGKILL)
            raise
        self._watching = asyncio.create_task(self._watch(), name="watch processes")

    async def close(self) -> None:
        """Let all drain at the same time, and return once they have ended."""
        await self._stop(signal.SIGTERM if self.lame_duck else signal.SIGINT)
        self._sock.close()

    async def _stop(self, number: signal.Signals) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        for server in self._all:
            server.stop_signal = number
        await asyncio.gather(*(server.stop() for server in self._all))

    async def ready(self) -> bool:
        """Whether at least one can serve requests."""
        return any(body is not None for body in (await self.siblings.ask("/readyz", PROBE_S)).values())

    def follow_pool(self, _pools: PoolFile) -> None:
        """Let all read the pool file again."""
        for server in self._all:
            server.signal(signal.SIGHUP)

    async def metrics(self, own: bytes) -> bytes:
        """The metrics of this process, and those of each other with its index as the label `process`."""
        texts = await self.siblings.ask("/metrics", SCRAPE_S)
        return join_expositions(own, {index: text for index, text in texts.items() if text is not None})

    @property
    def pids(self) -> list[int]:
        """The ids of those that run."""
        return [server.pid for server in self._all if server.pid is not None]

    async def _watch(self) -> None:
        """Kill a process whose event loop stands still; it is started again."""
        now_s = asyncio.get_running_loop().time
        answered_s = {server.name: now_s() for server in self._all}
        while True:
            await asyncio.sleep(WATCH_S)
            for server, alive in zip(self._all, await asyncio.gather(*(s.probe() for s in self._all)), strict=True):
                if alive or server.pid is None:
                    answered_s[server.name] = now_s()
                elif now_s() - answered_s[server.name] > HUNG_S:
                    log.error("%s has not answered for %g s; killed", server.name, HUNG_S)
                    answered_s[server.name] = now_s()
                    server.signal(signal.SIGKILL)


def watching(settings: Settings) -> Settings:
    """The settings of the process that watches the others: those that serve do all of the work that waits."""
    return settings.model_copy(update={"batch_lines_max": 0, "background_max": 0})


def share_of(settings: Settings, index: int) -> dict[str, Any]:
    """The settings of one process that differ from those of the gateway: its part of what processes do not share."""
    count = settings.processes
    policies = settings.policies_path

    def part(whole: int) -> int:
        return whole // count + (index <= whole % count)

    return {
        "processes": 1,
        "jobs_worker": False,
        "spool_dir": str(settings.spool_of(index).resolve()),
        "spool_bytes_max": max(1024, settings.spool_bytes_max // count),
        "batch_lines_max": part(settings.batch_lines_max),
        "background_max": part(settings.background_max),
        "policies_dir": str(policies.resolve()) if policies else None,
    }


def join_expositions(own: bytes, others: dict[int, bytes]) -> bytes:
    """Expositions as one: the samples of a metric stand together, those of others with the label `process`."""
    families: dict[bytes, list[bytes]] = {}
    for index, text in [(0, own), *sorted(others.items())]:
        family, is_new = list[bytes](), False
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, [])
            if not line.startswith(b"#"):
                family.append(_labelled(line, index) if index else line)
            elif is_new:
                family.append(line)
    return b"".join(line + b"\n" for family in families.values() for line in family)


def _labelled(line: bytes, index: int) -> bytes:
    label = b'process="%d"' % index
    return _SAMPLE.sub(
        lambda match: match[1] + b"{" + label + (b"," if match[2] else b"}"),
        line,
        count=1,
    )


def _as_json(services: Services) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(asdict(services) | {"pepper": services.pepper.hex()}, default=str))
    return fields


async def _all_or_first(starts: Iterable[Any]) -> None:
    """Wait for all; raise the first error once all have ended."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
