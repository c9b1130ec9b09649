"""What a job says of itself while a program runs: progress with the time left, and its log, line by line."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ_BYTES_MAX = 1 << 20  # of new output in one go
JOB_LINES_MAX = 10_000  # of one attempt; the file has them all


class ProgressFile:
    """The trainer's progress file. `read` gives its last whole line with `eta_s`, None where nothing is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: tuple[float, float] | None = None  # (seconds, step) of the first line seen
        self._said: Mapping[str, Any] | None = None

    def read(self) -> dict[str, Any] | None:
        """Never raises: a file that is not there yet, or a line half written, is nothing new."""
        said = _last_object(self._path)
        if said is None or said == self._said:
            return None
        self._said = said
        return {**said, "eta_s": self._eta_s(said)}

    def _eta_s(self, said: Mapping[str, Any]) -> int | None:
        step, steps, now_s = said.get("step"), said.get("steps"), time.monotonic()
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
    for line in reversed(lines[:-1]):  # what follows the last newline is not whole
        try:
            found = json.loads(line)
        except ValueError:
            continue
        return found if isinstance(found, dict) else None
    return None


class Tail:
    """New whole lines of a log file from where it ended at first. `take` shows them, `taken` moves on."""

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
        whole = data[: data.rfind(b"\n") + 1] if b"\n" in data else data if len(data) == READ_BYTES_MAX else b""
        self._next = self._at + len(whole)
        lines = [line.rstrip().rpartition("\r")[2] for line in whole.decode(errors="replace").split("\n")]
        return self._bounded([line for line in lines if line.strip()])

    def taken(self) -> None:
        """What `take` gave last is stored."""
        self._at, self._given = self._next, self._given + self._seen

    def _bounded(self, lines: list[str]) -> list[str]:
        self._seen, left = len(lines), JOB_LINES_MAX - self._given
        if len(lines) <= left:
            return lines
        return [*lines[:left], f"more in {self._path}"] if left >= 0 else []
