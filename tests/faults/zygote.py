"""A process that has imported the gateway and forks a new one for each line it reads: a start costs no imports.

    {"argv": […], "env": {…}, "log": path, "kill": [point, n] | null}   →   {"pid": n}

Ends, with all it has forked, when its input ends. Nothing is imported here that starts a thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

import gateway.cli.process.serve
import gateway.wiring.build
from gateway.cli import main
from tests.faults import killpoints, seams

PR_SET_PDEATHSIG = 1  # linux/prctl.h
assert gateway.wiring.build  # imported for its children
assert gateway.cli.process.serve


def child(order: dict[str, Any]) -> None:
    """Become the gateway. Never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["env"])
    status = 1
    try:
        if order["kill"]:
            killpoints.arm(*order["kill"])
        if order["seam"]:
            seams.SEAMS[order["seam"]]()
        status = main(order["argv"])
    finally:
        sys.stdout.flush()
        os._exit(status)


def serve() -> None:
    """Fork for each order, until there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
        sys.stdout.write(json.dumps({"pid": pid}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
