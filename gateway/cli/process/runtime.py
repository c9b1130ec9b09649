"""The process of a gateway: how its interpreter is set, its log on standard error, and SIGHUP."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

from gateway.config.settings import Settings
from gateway.core.access.audit import Act
from gateway.core.log.redact import Redactor
from gateway.errors import BatonError
from gateway.service.admin.pools import Pools

SWITCH_S = 0.0005
YOUNG_OBJECTS = 10_000
PAGE_BYTES = 2 * 2**20
MADV_COLLAPSE = 25
PAGES_AFTER_S = 10.0
ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw\S+ \S+ \S+ 0\s*(?:\[heap\])?$")  # a line of /proc/PID/maps, proc(5)
FILES_MAX = 65_536
EXIT_FORCED = 130
FORM = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
QUIET = ("alembic", "httpx", "httpcore", "procrastinate", "uvicorn")
HANGUP = Act("signal:SIGHUP")
log = logging.getLogger("gateway")
pools_log = logging.getLogger("gateway.pools")

# ---------------------------------------------------------------- the interpreter


def tune_switching() -> None:
    """Shorten the interpreter's switch interval from 5 to 0.5 ms, so that the event-loop thread gets the GIL back
    sooner from the threads that store the log. Call it at the start of the process."""
    sys.setswitchinterval(SWITCH_S)


def tune_garbage() -> None:
    """Exempt what is loaded now from garbage collection, and collect young objects less often: one request makes some
    thousand, without cycles. Call it once everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)


def tune_pages() -> int:
    """Ask Linux for pages of 2 MiB under the memory in use (madvise(2), MADV_COLLAPSE, Linux 6.1); return how many it
    gave, 0 where it gives none. A request touches thousands of objects all over that memory, and each page of 4 KiB is
    an address to translate: in a virtual machine twice."""
    pages = 0
    with suppress(OSError, AttributeError, ValueError):  # not Linux
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            if (match := ANONYMOUS.match(line)) is not None:
                begin, end = (int(part, 16) for part in match.groups())
                first = -(-begin // PAGE_BYTES) * PAGE_BYTES
                blocks = range(first, end - PAGE_BYTES + 1, PAGE_BYTES)
                pages += sum(madvise(block, PAGE_BYTES, MADV_COLLAPSE) == 0 for block in blocks)
    return pages


@contextmanager
def large_pages(after_s: float = PAGES_AFTER_S) -> Iterator[None]:
    """`tune_pages` in a thread, in the block and after that time: the first requests have been served then, and the
    start waits for nothing."""

    async def later() -> None:
        await asyncio.sleep(after_s)
        log.debug("%d pages of 2 MiB", await asyncio.to_thread(tune_pages))

    task = asyncio.create_task(later(), name="large pages")
    try:
        yield
    finally:
        task.cancel()


def raise_files_limit() -> int:
    """Raise this process's limit of open files as far as it may, to FILES_MAX at most, and return it. Each connection
    is one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return FILES_MAX
    limit = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(soft, limit)


# ---------------------------------------------------------------- the log


class Scrubbed(logging.Formatter):
    """Formats records without secrets, known ones and what has the shape of one; tracebacks included."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__(FORM)
        self.redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        """The text of the record, with its traceback."""
        return self.redactor.scrub_text(super().format(record))


class JsonLines(Scrubbed):
    """Formats each record as one JSON object without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The object: `time` (UTC), `level`, `logger`, `message`, and `traceback` where there is one."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({name: self.redactor.scrub_text(text) for name, text in line.items()}, ensure_ascii=False)


def log_to_stderr(level: str, form: Literal["text", "json"] = "text") -> None:
    """Begin to log. An exception that nothing catches is logged too, before the process ends of it."""
    handler = logging.StreamHandler()
    handler.setFormatter((JsonLines if form == "json" else Scrubbed)(Redactor()))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.excepthook = _log_crash


def scrub_from_log(secrets: Iterable[str]) -> None:
    """Remove these values from every line from now on."""
    values = list(secrets)
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, Scrubbed):
            handler.formatter.redactor.learn(values)


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    log.critical("the process ends", exc_info=(kind, error, trace))


# ---------------------------------------------------------------- signals


class Run(Protocol):
    """One run of a gateway. `lame_duck_s`: the seconds for which it says at its end that it is not ready, and still
    serves."""

    lame_duck_s: float

    async def serve(self) -> None:
        """Serve until cancelled."""


async def until_stopped(running: Run, settings: Settings, hangups: Hangups, *, orphan: bool = False) -> int:
    """Serve until the first signal, which cancels; a second one ends the process, and its children with it. SIGHUP
    reloads the pool file, unless it means that the terminal of this process was closed. `orphan`: a signal that comes
    because the parent has died ends the process at once."""
    loop = asyncio.get_running_loop()
    serving = loop.create_task(running.serve())
    signals: list[int] = []
    at_a_terminal, parent = ends_with_terminal(), os.getppid()

    def stop(number: int) -> None:
        signals.append(number)
        if len(signals) > 1 or (orphan and os.getppid() != parent):
            os._exit(EXIT_FORCED)
        running.lame_duck_s = settings.lame_duck_s if number == signal.SIGTERM else 0.0
        serving.cancel()

    def hang_up() -> None:
        if at_a_terminal and not has_terminal():
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


class Hangups:
    """Reloads the pool file on SIGHUP. Signals that come during a reload count as one; one that comes before there are
    pools waits for them."""

    def __init__(self) -> None:
        self._signalled = asyncio.Event()

    def signal(self) -> None:
        """Note that SIGHUP came."""
        self._signalled.set()

    async def serve(self, pools: Pools) -> None:
        """Reload on each signal, for ever. A pool file that cannot be used is one line in the log, and the pool in use
        stays."""
        while True:
            await self._signalled.wait()
            self._signalled.clear()
            try:
                report = await pools.reload(HANGUP)
            except BatonError as error:
                pools_log.error("the pool file was not taken: %s", error.message)
                continue
            except Exception:  # boundary: a signal must not end a gateway that serves
                pools_log.exception("the pool file was not taken")
                continue
            if not report["changed"]:
                pools_log.info("the pool file has not changed: %s", report["hash"][:12])


def ends_with_terminal() -> bool:
    """Whether this process is to end with its terminal: it has one, and was not started with `nohup`."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()


def has_terminal() -> bool:
    """Whether a terminal controls this process. A closed one no longer does."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
