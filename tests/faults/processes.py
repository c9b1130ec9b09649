"""Processor time of processes, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

TICKS_S = os.sysconf("SC_CLK_TCK")
PPID, UTIME, CUTIME = 1, 11, 13  # proc(5), counted from the state on
FAMILIES = ("postgres",)  # a process a connection


def cpu_s(pid: int, *, family: bool = False) -> float:
    """Return the processor seconds of a process; with `family`, of its children too, including those that ended."""
    spent = 0.0
    for path in Path("/proc").glob("[0-9]*/stat") if family else [Path(f"/proc/{pid}/stat")]:
        fields = _stat(path)
        if fields and (int(path.parent.name) == pid or int(fields[PPID]) == pid):
            spent += sum(int(ticks) for ticks in fields[UTIME : CUTIME + (2 if family else 0)]) / TICKS_S
    return spent


def parent(pid: int) -> int:
    return int(_stat(Path(f"/proc/{pid}/stat"))[PPID])


def busy_s() -> float:
    """Return the processor seconds of the machine since boot, without idling and waiting for disks."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS_S


class Shares:
    """Processor time by process since this object exists; a whole processor is 100 %."""

    def __init__(self, pids: Mapping[str, list[int]]) -> None:
        self._pids = pids
        self._busy_s, self._began_s = busy_s(), time.monotonic()
        self._before = self._spent()

    def percent(self, gone: Mapping[str, float] | None = None) -> dict[str, int]:
        """By name, and `others` for all that has none. `gone`: processor seconds of what began and ended meanwhile."""
        lasted_s = time.monotonic() - self._began_s
        spent = {name: now - self._before[name] for name, now in self._spent().items()} | dict(gone or {})
        others_s = busy_s() - self._busy_s - sum(spent.values())
        return {name: round(100 * each / lasted_s) for name, each in {**spent, "others": others_s}.items()}

    def _spent(self) -> dict[str, float]:
        return {name: sum(cpu_s(pid, family=name in FAMILIES) for pid in pids) for name, pids in self._pids.items()}


def _stat(path: Path) -> list[str]:
    """From the state on; nothing of a process that is gone."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
