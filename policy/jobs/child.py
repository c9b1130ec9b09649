"""One program run for a job: leashed to this process, niced, asked to stop before it is killed; its log and progress.

One program at a time works on a directory. The program inherits the lock on it, so the lock is free only when a
program that a killed worker left behind has written its checkpoint and ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from gateway.adapters.host.supervisor import LEASH, PROGRAMS_ROOT
from gateway.errors import Conflict

NICE = 10
TICK_S = 1.0
STOP_S = 120.0  # from the request to stop to the kill: time for a checkpoint
POLL_S = 0.1
TAIL_BYTES = 8_192
READ_BYTES_MAX = 1 << 20  # of new output in one go
JOB_LINES_MAX = 10_000  # of one attempt; the file has them all


@asynccontextmanager
async def held(directory: Path, wait_s: float = STOP_S + 30) -> AsyncIterator[int]:
    """Yield the lock of a directory as a file descriptor. Raises Conflict after `wait_s` if another holds it."""
    with (directory / "lock").open("a") as file:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if loop.time() > until_s:
                    raise Conflict(f"{directory} is in use by another program for over {wait_s:g} s") from None
            await asyncio.sleep(POLL_S)
        yield file.fileno()


async def run(
    command: Sequence[str],
    log: Path,
    *,
    lock: int,
    tick: Callable[[], Awaitable[bool]],
    stdin_data: bytes | None = None,
    tick_s: float = TICK_S,
    stop_s: float = STOP_S,
) -> int:
    """The exit status (negative: the signal that ended it). `tick` is awaited every `tick_s` and once more after the
    end; when it returns true, or raises, or this is cancelled, the program is asked to stop. `stdin_data`: its standard
    input."""
    process = await _start(command, log, lock, stdin_data)
    ended = asyncio.create_task(process.wait())
    try:
        while not ended.done():
            if await tick():
                break
            await asyncio.wait({ended}, timeout=tick_s)
    finally:
        await _end(process, ended, stop_s)
    await tick()
    return ended.result()


async def _start(command: Sequence[str], log: Path, lock: int, stdin_data: bytes | None) -> asyncio.subprocess.Process:
    leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(int(signal.SIGTERM)), "-"]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *leash,
            *command,
            stdin=asyncio.subprocess.PIPE if stdin_data is not None else asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=PROGRAMS_ROOT,
            pass_fds=(lock,),
            start_new_session=True,
        )
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, process.pid, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    if stdin_data is not None and process.stdin is not None:
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(stdin_data)
            await process.stdin.drain()
        process.stdin.close()
    return process


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task[int], stop_s: float) -> None:
    """Send SIGTERM, wait up to `stop_s`, send SIGKILL. A second cancellation does not shorten the wait."""
    if not ended.done():
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        waiting = asyncio.ensure_future(asyncio.wait({ended}, timeout=stop_s))
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(waiting)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # and whatever it has started
    await asyncio.wait({ended})


def last_words(log: Path, since: int = 0) -> str:
    """The last line that a program wrote after byte `since` of its log."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").replace("\r", "\n").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# ---------------------------------------------------------------- what it writes while it runs


class ProgressFile:
    """The trainer's progress file. `read` returns its last complete line with `eta_s`, None if nothing is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: tuple[float, float] | None = None  # (seconds, step) of the first line seen
        self._shown: Mapping[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """Never raises: a missing file and an incomplete line count as nothing new."""
        line = _last_object(self._path)
        if line is None or line == self._shown:
            return None
        self._shown = line
        return {**line, "eta_s": self._eta_s(line)}

    def _eta_s(self, line: Mapping[str, Any]) -> int | None:
        step, steps, now_s = line.get("step"), line.get("steps"), time.monotonic()
        if not isinstance(step, int) or not isinstance(steps, int):
            return None
        if self._first is None:
            self._first = (now_s, step)
            return None
        began_s, first = self._first
        return round((now_s - began_s) / (step - first) * (steps - step)) if step > first else None


def _last_object(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65_536))
            lines = file.read(65_536).split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):  # what follows the last newline is not complete
        try:
            value = json.loads(line)
        except ValueError:
            continue
        return value if isinstance(value, dict) else None
    return None


class Tail:
    """New lines of a log file, from where it ended at first. `take` returns them; `taken` marks them as stored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.start = self._at = path.stat().st_size if path.exists() else 0
        self._next = self._at
        self._given = self._seen = 0

    def take(self) -> list[str]:
        """The lines not yet taken; a bar drawn over itself counts with its last state."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(READ_BYTES_MAX)
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1] if b"\n" in data else data if len(data) == READ_BYTES_MAX else b""
        self._next = self._at + len(complete)
        lines = [line.rstrip().rpartition("\r")[2] for line in complete.decode(errors="replace").split("\n")]
        return self._bounded([line for line in lines if line.strip()])

    def taken(self) -> None:
        """Mark the lines of the last `take` as stored."""
        self._at, self._given = self._next, self._given + self._seen

    def _bounded(self, lines: list[str]) -> list[str]:
        self._seen, left = len(lines), JOB_LINES_MAX - self._given
        if len(lines) <= left:
            return lines
        return [*lines[:left], f"more in {self._path}"] if left >= 0 else []
