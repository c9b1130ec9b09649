"""Faults that no network has, made inside the process of the gateway."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _failing_write(code: int, switch: Path) -> None:
    """`os.write` to the journal fails with `code` while the switch file exists."""
    real = os.write

    def write(fd: int, data: Any) -> int:
        if switch.exists() and os.readlink(f"/proc/self/fd/{fd}").endswith(".log") and len(data) > 8:
            raise OSError(code, os.strerror(code))
        return real(fd, data)

    os.write = write


def _failing_sync(switch: Path) -> None:
    real = os.fdatasync

    def fdatasync(fd: Any) -> None:
        if switch.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    os.fdatasync = fdatasync


def switch() -> Path:
    """The file that turns the fault on while it exists."""
    return Path(os.environ["FAULT_SWITCH"])


SEAMS: dict[str, Callable[[], None]] = {
    "disk full": lambda: _failing_write(errno.ENOSPC, switch()),
    "fsync fails": lambda: _failing_sync(switch()),
}
