"""One program run for a job: leashed to this process, niced, its output in a file, asked to stop before it is made to.

A directory is worked on by one program at a time, whoever started it: the lock on it is passed down to the program, so
that it is free only when a program left behind by a killed worker has written its checkpoint and gone.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from gateway.adapters.host.supervisor import LEASH, PROGRAMS_ROOT
from gateway.errors import Conflict

NICE = 10
TICK_S = 1.0
STOP_S = 120.0  # from the request to stop to the kill: time for a checkpoint
POLL_S = 0.1
TAIL_BYTES = 8_192


@asynccontextmanager
async def held(directory: Path, wait_s: float = STOP_S + 30) -> AsyncIterator[int]:
    """The lock of a directory as a file descriptor to pass down. Raises Conflict when another holds it for too long."""
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
    said: bytes | None = None,
    tick_s: float = TICK_S,
    stop_s: float = STOP_S,
) -> int:
    """The exit status (negative: the signal that ended it). `tick` is awaited every `tick_s` and once more after the
    end; when it returns true, or raises, or this is cancelled, the program is asked to stop. `said`: its standard
    input."""
    process = await _start(command, log, lock, said)
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


async def _start(command: Sequence[str], log: Path, lock: int, said: bytes | None) -> asyncio.subprocess.Process:
    leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(int(signal.SIGTERM)), "-"]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *leash,
            *command,
            stdin=asyncio.subprocess.PIPE if said is not None else asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=PROGRAMS_ROOT,
            pass_fds=(lock,),
            start_new_session=True,
        )
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
    if said is not None and process.stdin is not None:
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(said)
            await process.stdin.drain()
        process.stdin.close()
    return process


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task[int], stop_s: float) -> None:
    """Ask, wait, make. A second cancellation does not cut the wait short: the kill is what bounds it."""
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
