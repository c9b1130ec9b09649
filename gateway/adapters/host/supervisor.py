"""Supervision of one child program: start it on a leash, watch it, restart it after a crash, stop it in order.

The child has a session of its own (Ctrl-C reaches only Baton, which then stops it in order), is on a leash (it dies
with Baton, even with a killed one), and writes to `logs/NAME.log`. Start it from the main thread: the kernel ties the
leash to the thread that forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, wait_exponential

from gateway.errors import BatonError, Unavailable

log = logging.getLogger("gateway.embedded")
LEASH = Path(__file__).with_name("leash.py")
PROGRAMS_ROOT = Path(__file__).resolve().parents[3]  # where `python -m` finds the package, installed or not
POLL_S = 0.02
LOG_BYTES_MAX = 10 * 2**20
TAIL_BYTES_MAX = 4096  # of the log that an error quotes
BACKOFF_FIRST_S, BACKOFF_MAX_S, STEADY_S = 0.25, 30.0, 60.0


class Server:
    """One child program. Subclasses define its command, its probe, and the fix to name if it does not start."""

    fix = "see the log"
    stop_signal = signal.SIGTERM
    user = "-"
    has_log = True  # False: its output goes where ours goes
    env: dict[str, str] | None = None  # None: the environment of this process

    def __init__(self, name: str, data_dir: Path, *, ready_s: float = 60.0, stop_s: float = 10.0) -> None:
        self.name = name
        self.data_dir = data_dir.resolve()
        self.log_path = self.data_dir / "logs" / f"{name}.log"
        self.ready_s = ready_s
        self.stop_s = stop_s
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def command(self) -> list[str]:
        """Make what the program needs, and return the command line."""
        raise AssertionError(f"{type(self).__name__} has no command")

    async def probe(self) -> bool:
        """Return whether it answers."""
        raise AssertionError(f"{type(self).__name__} has no probe")

    @property
    def pid(self) -> int | None:
        """The id of the running process; None while it is down."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start the program; return once it answers. Raises Unavailable with the end of its log and the fix; then
        nothing is left."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start servers from the main thread: the leash is tied to the thread that forks")
        try:
            process = await self._launch()
        except BaseException:  # boundary: undone, and raised again
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._supervise(process), name=f"supervise {self.name}")

    async def stop(self) -> None:
        """Ask the program to end, and kill it if it does not. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._end()

    async def _end(self) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(self.stop_signal)
        try:
            await asyncio.wait_for(process.wait(), self.stop_s)
        except TimeoutError:
            log.warning("%s did not stop within %g s; killed", self.name, self.stop_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        self._process = None

    async def run(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        """Fork a child on a leash, with its output in the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES_MAX:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(int(self.stop_signal)), self.user]
        with self.log_path.open("ab") if self.has_log else contextlib.nullcontext() as output:
            return await asyncio.create_subprocess_exec(
                *leash,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.env,
                cwd=PROGRAMS_ROOT if self.user == "-" else "/",
                start_new_session=True,
            )

    async def _launch(self) -> asyncio.subprocess.Process:
        self._process = process = await self.run(await self.command())
        try:
            async with asyncio.timeout(self.ready_s):
                while process.returncode is None:
                    if await self.probe():
                        return process
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise self.failed(f"no answer within {self.ready_s:g} s") from None
        raise self.failed(f"ended with status {process.returncode}")

    def failed(self, what: str) -> Unavailable:
        """Make the error of a program that does not start: one line with the end of its log, and the fix."""
        lines = [line.strip() for line in _tail(self.log_path) if line.strip()]
        last_words = f", its last words: {' | '.join(lines[-3:])}" if lines else ""
        message = f"{self.name} did not start: {what}{last_words} (log: {self.log_path}); {self.fix}"
        return Unavailable(message, code="service_failed")

    async def _supervise(self, process: asyncio.subprocess.Process) -> None:
        """Restart the program whenever it ends; the pause doubles up to a bound, and is short again after a steady
        run."""
        doubling = wait_exponential(multiplier=BACKOFF_FIRST_S, max=BACKOFF_MAX_S)
        running: asyncio.subprocess.Process | None = process
        status: int | None = None
        now_s = asyncio.get_running_loop().time

        async def run() -> float:
            """Launch it unless it runs, and wait for its end. Return the seconds it ran, 0 where it did not start."""
            nonlocal running, status
            try:
                running = running or await self._restart()
            except (BatonError, OSError) as error:
                log.error("%s", error)
                await self._end()
                return 0.0
            started_s, status = now_s(), await running.wait()
            running = None
            return now_s() - started_s

        def pause_s(state: RetryCallState) -> float:
            if state.outcome is not None and state.outcome.result() > STEADY_S:
                state.attempt_number = 1
            return doubling(state)

        def announce(state: RetryCallState) -> None:
            what = "%s ended with status %s; restarting in %g s (%s)"
            log.error(what, self.name, status, state.upcoming_sleep, self.log_path)

        await AsyncRetrying(retry=retry_if_result(lambda _: True), wait=pause_s, before_sleep=announce)(run)

    async def _restart(self) -> asyncio.subprocess.Process:
        self.restarts += 1
        return await self._launch()


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES_MAX))
            return file.read(TAIL_BYTES_MAX).decode(errors="replace").splitlines()
    except OSError:
        return []
