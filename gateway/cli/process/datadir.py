"""The data directory: its lock, its keys, its pepper, and the facts of the gateway that serves from it. All private."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError, Conflict
from gateway.files import write_atomic

PEPPER_BYTES = 32
FACTS = "serve.json"  # exists while a gateway serves, and only then
KEYS = "keys.json"  # the first keys, which the next start uses again
JUDGE = "judge.json"  # the judge's key, for the worker


class DataDir:
    """Makes the directory (0700) where it is missing. Raises ConfigError where it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            if not self.path.exists():
                self.path.mkdir(mode=0o700, parents=True)
            (self.path / "run").mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"BATON_DATA_DIR={path}: {error.strerror}; name a directory you can write") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory. Raises Conflict naming the process that has it, and what that serves."""
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(self._holder(file.name), code="already_running") from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            self.forget_facts()  # a gateway that was killed has left them
            yield

    def _holder(self, lock: str) -> str:
        pid = Path(lock).read_text().strip()
        facts = self.read(FACTS)
        doing = f"serves {facts['base_url']}" if facts else "is still starting or stopping"
        fix = f"stop it with `kill {pid}`, or set BATON_DATA_DIR to another directory"
        return f"already running on {self.path}: process {pid} {doing}; {fix}"

    def read(self, name: str) -> dict[str, Any] | None:
        """The content of a JSON file; None where it is missing or damaged."""
        try:
            content = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace a JSON file in one step; only this user can read it (0600)."""
        self._private(name, json.dumps(content, indent=2).encode() + b"\n")

    def forget_facts(self) -> None:
        """Remove the facts: no gateway serves from here any more."""
        (self.path / FACTS).unlink(missing_ok=True)

    def pepper(self) -> bytes:
        """The secret under key digests; the first call makes it."""
        path = self.path / "pepper"
        if not path.exists():
            self._private("pepper", secrets.token_hex(PEPPER_BYTES).encode())
        return bytes.fromhex(path.read_text().strip())

    def engine_key(self) -> Path:
        """A file with a new key, which opens the routes that load versions on the embedded conductor's server."""
        name = "run/engine.key"
        self._private(name, secrets.token_hex(PEPPER_BYTES).encode())
        return self.path / name

    def _private(self, name: str, content: bytes) -> None:
        write_atomic(self.path / name, content, mode=0o600)
