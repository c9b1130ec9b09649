"""The data directory: who runs in it, what it is serving, its keys and its pepper. Everything in it is private."""

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

PEPPER_BYTES = 32
FACTS = "serve.json"  # exists while a gateway serves, and only then
KEYS = "keys.json"  # the first keys, for the next start
JUDGE = "judge.json"  # the judge's key, for the worker


class DataDir:
    """Makes the directory (0700) where there is none. Raises ConfigError when it can't be written."""

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
        """Hold the directory. Raises Conflict that says which process has it and what it serves."""
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict(self._holder(file.name), code="already_running") from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            self.forget_facts()  # of a gateway that was killed
            yield

    def _holder(self, lock: str) -> str:
        pid = Path(lock).read_text().strip()
        facts = self.read(FACTS)
        doing = f"serves {facts['base_url']}" if facts else "is still starting or stopping"
        fix = f"stop it with `kill {pid}`, or set BATON_DATA_DIR to another directory"
        return f"already running on {self.path}: process {pid} {doing}; {fix}"

    def read(self, name: str) -> dict[str, Any] | None:
        """One of the JSON files, None where it is missing or not whole."""
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace one of the JSON files in one step, readable by this user only (0600)."""
        self._private(name, json.dumps(content, indent=2).encode() + b"\n")

    def forget_facts(self) -> None:
        """Nothing is served here any more."""
        (self.path / FACTS).unlink(missing_ok=True)

    def pepper(self) -> bytes:
        """The secret under this installation's key digests, made the first time."""
        path = self.path / "pepper"
        if not path.exists():
            self._private("pepper", secrets.token_hex(PEPPER_BYTES).encode())
        return bytes.fromhex(path.read_text().strip())

    def engine_key(self) -> Path:
        """The file with the key of the routes by which our conductor's server takes versions; new for each start."""
        name = "run/engine.key"
        self._private(name, secrets.token_hex(PEPPER_BYTES).encode())
        return self.path / name

    def _private(self, name: str, content: bytes) -> None:
        new = self.path / f"{name}.new"
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / name)
