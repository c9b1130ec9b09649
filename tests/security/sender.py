"""Sends monsters from a process of its own, so that what they cost is the gateway's alone.

`python -m tests.security.sender URL SECRET` sends the monster whose number it reads on a line, and answers with a line:
the status (null: closed without one) and the seconds from the last byte that could be sent to the first of the answer.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.security.monsters import Monster, monsters

WAIT_S = 20.0


def sent(url: str, monster: Monster) -> tuple[int | None, float]:
    """One monster, one connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as wire:
        with suppress(ConnectionError, TimeoutError):  # refused before it was all there
            wire.sendall(monster.head + monster.body)
        began = time.perf_counter()
        try:
            answer = wire.recv(65_536)
        except ConnectionError:
            return None, time.perf_counter() - began
    return (int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else None), time.perf_counter() - began


class Sender:
    """The program, seen from the test."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program

    def send(self, number: int) -> tuple[int | None, float]:
        """(status, seconds) of the monster of that number."""
        assert self._program.stdin
        assert self._program.stdout
        self._program.stdin.write(f"{number}\n")
        self._program.stdin.flush()
        status, wait_s = json.loads(self._program.stdout.readline())
        return status, wait_s


@contextmanager
def sender(url: str, secret: str) -> Iterator[Sender]:
    """The program, running; it ends with its input."""
    command = [sys.executable, "-m", "tests.security.sender", url, secret]
    place = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=place) as program:
        yield Sender(program)
        assert program.stdin
        program.stdin.close()


def main() -> None:
    """Send what is asked for until there is no more input."""
    url, secret = sys.argv[1:]
    every = monsters(secret)
    for line in sys.stdin:
        sys.stdout.write(json.dumps(sent(url, every[int(line)])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
