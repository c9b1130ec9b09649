"""Processes of recipes and measurements: start, wait until they serve, end by their process id.

Nothing here outlives its parent (`gateway/adapters/host/leash.py`), and none of the caller's own Baton settings,
database or Redis is used: every gateway started here has its own, in a temporary directory.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.config.settings import environment

ROOT = Path(__file__).resolve().parents[2]
LEASH = ROOT / "gateway" / "adapters" / "host" / "leash.py"
START_S = 120.0
STOP_S = 40.0
LAST_WORDS_CHARS = 2000
DEFAULTS = {
    "BATON_REDIS_TIMEOUT_S": "5",  # a stall of a busy machine refuses no request
    "BATON_DEFAULT_POLICY": "conductor",
    "BATON_CONDUCTOR_ROUNDS": "1",  # as a stream has: a free planner would be asked twice
}


class RecipeFailed(Exception):
    """Something did not do what the demo promises; the message says what."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway: what its `serve.json` says."""

    base_url: str
    data_key: str
    admin_url: str
    admin_key: str
    database_url: str
    pid: int

    @classmethod
    def read(cls, facts: Path) -> Gateway:
        """Raises SystemExit with what to do when there is no such gateway."""
        try:
            values = json.loads(facts.read_text(encoding="utf-8"))
            return cls(**{name: values[name] for name in cls.__slots__})
        except (OSError, ValueError, KeyError) as error:
            raise SystemExit(f"{facts}: no running gateway ({error}); start one with `make serve`") from None


@dataclass(frozen=True, slots=True)
class HelperServer:
    """A running helper server on loopback."""

    url: str
    pid: int


def clean_environment() -> dict[str, str]:
    """The environment without anything that would point a gateway at somebody's own servers or settings."""
    private = ("DATABASE_URL", "REDIS_URL")
    return {
        name: value for name, value in environment().items() if not name.startswith("BATON_") and name not in private
    }


@contextmanager
def process(command: Sequence[str], output: Path, settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A process of this interpreter's own; ends with the block, by its id. Ctrl-C reaches only us, and we end it."""
    leashed = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(int(signal.SIGTERM)), "-", *command]
    variables = clean_environment() | dict(settings or {})
    with output.open("ab") as log:
        running = subprocess.Popen(
            leashed, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield running
    finally:
        end(running)


def end(running: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL for what does not heed it."""
    running.terminate()
    try:
        running.wait(STOP_S)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def wait_until(ready: Callable[[], bool], running: subprocess.Popen[bytes], log: Path) -> None:
    """Returns once `ready`. Raises SystemExit with the process's last words when it ends or START_S are over."""
    until_s = time.monotonic() + START_S
    while not ready():
        if running.poll() is not None or time.monotonic() > until_s:
            words = log.read_text(errors="replace")[-LAST_WORDS_CHARS:]
            raise SystemExit(f"{log.stem} did not start (status {running.poll()}):\n{words}")
        time.sleep(0.05)


@contextmanager
def program(name: str, directory: Path, *arguments: str, port: int = 0) -> Iterator[HelperServer]:
    """`python -m …` that takes `--port` and `--port-file`, on a free port unless one is given."""
    port_file, log = directory / f"{name}.port", directory / f"{name}.log"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", *arguments, "--port", str(port), "--port-file", str(port_file)]
    with process(command, log) as running:
        wait_until(port_file.is_file, running, log)
        yield HelperServer(f"http://127.0.0.1:{port_file.read_text().strip()}", running.pid)


@contextmanager
def gateway(
    directory: Path,
    *,
    conductor: str = "embedded",
    pool: Path | None = None,
    settings: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] = DEFAULTS,
    python: Path | str = sys.executable,
) -> Iterator[Gateway]:
    """`baton serve` on free ports with its state in `directory`. `settings` are BATON_ variables over `defaults`. With
    `conductor` empty the gateway chooses one, as it does for a new user."""
    data, log = directory / "data", directory / "gateway.log"
    command = [str(python), "-m", "gateway", "serve", "--data-dir", str(data), "--port", "0", "--admin-port", "0"]
    command += ["--conductor", conductor] if conductor else []
    command += ["--pool", str(pool)] if pool else []
    facts = data / "serve.json"
    with process(command, log, {**defaults, **(settings or {})}) as running:
        wait_until(facts.is_file, running, log)
        yield Gateway.read(facts)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A short path: PostgreSQL's socket has to fit into 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def output_of(*arguments: str) -> str:
    """What `python -m …` prints. Raises SystemExit with its error."""
    process = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=clean_environment(), capture_output=True, text=True,
        timeout=START_S, check=False,
    )  # fmt: skip
    if process.returncode:
        raise SystemExit(process.stderr.strip() or f"{arguments[0]} ended with status {process.returncode}")
    return process.stdout


def run_program(python: str, *words: str, good: Sequence[int] = (0,)) -> None:
    """A module of ours to its end, showing what it says; it ends with us. Raises RecipeFailed on a status not in
    `good`."""
    print(f"$ python -m {shlex.join(words)}", file=sys.stderr, flush=True)
    leashed = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), "15", "-", python, "-m", *words]
    process = subprocess.run(leashed, cwd=ROOT, env=clean_environment(), stdout=sys.stderr, check=False)
    if process.returncode not in good:
        raise RecipeFailed(
            f"python -m {words[0]} ended with status {process.returncode}; the same command goes on from there"
        )


def replace_directory(source: Path, target: Path) -> None:
    """Replace `target` by a copy of `source`. An interrupted copy leaves `target` without content, never in part."""
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
