"""Run a command that cannot outlive its parent: `python -I -S leash.py PARENT_PID SIGNAL USER COMMAND…`.

A script, not a module to import. It asks the kernel for SIGNAL when the parent dies, becomes USER (`-`: no change;
PostgreSQL refuses to run as root), and is replaced by the command, which keeps the process id. Doing this between fork
and exec in the parent is not safe in a program with threads.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def become(user: str) -> None:
    """Change to that user for good: groups first, because only root may change them."""
    entry = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def main(parent_pid: int, signal_number: int, user: str, command: list[str]) -> None:
    """Never returns. The order matters: changing the user clears the death signal."""
    if user != "-":
        become(user)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the request
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the whole point; no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
