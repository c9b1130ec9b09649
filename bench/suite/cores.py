"""Which cores a program may use, and how much of one; what it used. Linux only (sched_setaffinity(2), cgroups(7),
proc(5)).

The gateway under test has the first core of this process's set to itself; client and upstream share the others. On a
machine with one core all share it. Shares of a core need control groups, of either version, that this process may make:
mostly as root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bench.cost import DATA_SERVERS, processes_of

ALL = frozenset(os.sched_getaffinity(0))
UNDER_TEST = frozenset(sorted(ALL)[:1])
REST = ALL - UNDER_TEST or ALL
GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 10_000  # of a quota: short, so that a process that has used its share waits a few milliseconds
EMPTY_S = 5.0


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


class NoQuota(Exception):
    """This machine gives no shares, or not to this user."""


@contextmanager
def limited(groups: Sequence[Sequence[int]], share: float, root: Path = GROUPS) -> Iterator[None]:
    """In the block, the processes of each group and what they start have at most `share` of a core together. Raises
    NoQuota, before which nothing has changed."""
    parent, is_second = _parent(root)
    with ExitStack() as held:
        for number, pids in enumerate(groups):
            group = parent / f"baton-bench-{os.getpid()}-{number}"
            try:
                group.mkdir()
            except OSError as error:
                raise NoQuota(f"{parent}: {error.strerror}") from None
            held.callback(_dissolve, group, parent)
            _limit(group, is_second, round(share * PERIOD_US))
            _move(pids, group)
        yield


def _parent(root: Path) -> tuple[Path, bool]:
    """Where groups are made, and whether they are of the second version."""
    if (root / "cgroup.controllers").exists():
        try:
            (root / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            raise NoQuota(f"{root}: {error.strerror}") from None
        return root, True
    if (root / "cpu" / "cpu.cfs_quota_us").exists():
        return root / "cpu", False
    raise NoQuota("no control groups with shares of processors")


def _limit(group: Path, is_second: bool, quota_us: int) -> None:
    try:
        if is_second:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        raise NoQuota(f"{group}: {error.strerror}") from None


def _move(pids: Sequence[int], group: Path) -> None:
    """Move processes with all their threads; one that has ended is passed over."""
    for pid in pids:
        with suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))


def _dissolve(group: Path, parent: Path) -> None:
    """Give the processes of a group back to its parent, and remove it."""
    until_s = time.monotonic() + EMPTY_S
    while group.exists() and time.monotonic() < until_s:
        _move([int(pid) for pid in (group / "cgroup.procs").read_text().split()], parent)
        with suppress(OSError):
            group.rmdir()


def rss_mib(pid: int) -> float:
    """Resident memory of a gateway's processes without PostgreSQL and Redis, in MiB."""
    return sum(_rss_mib(each) for each, name in processes_of(pid).items() if not name.startswith(DATA_SERVERS))


def _rss_mib(pid: int) -> float:
    with suppress(OSError, IndexError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0
