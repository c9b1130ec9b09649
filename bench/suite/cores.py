"""Which cores a program may use, and what of them it used. Linux only (sched_setaffinity(2), proc(5)).

The gateway under test has the first core of this process's set to itself; client and upstream share the others. On a
machine with one core all share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.cost import DATA_SERVERS, processes_of

ALL = frozenset(os.sched_getaffinity(0))
UNDER_TEST = frozenset(sorted(ALL)[:1])
REST = ALL - UNDER_TEST or ALL


@contextmanager
def on(cores: frozenset[int]) -> Iterator[None]:
    """Programs that start in the block run on these cores, for good."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def move(pids: Sequence[int], cores: frozenset[int]) -> None:
    """Move every thread of these processes; what they start later is there too. One that has ended is passed over."""
    for pid in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)


def data_servers(pid: int) -> list[int]:
    """The PostgreSQL and Redis processes that a gateway started."""
    return [each for each, name in processes_of(pid).items() if name.startswith(DATA_SERVERS)]


def rss_mib(pid: int) -> float:
    """Resident memory of a gateway's processes without PostgreSQL and Redis, in MiB."""
    return sum(_rss_mib(each) for each, name in processes_of(pid).items() if not name.startswith(DATA_SERVERS))


def _rss_mib(pid: int) -> float:
    with suppress(OSError, IndexError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0
