"""SIGHUP from a terminal that closed is no wish for another pool: a process can tell the two apart."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_until

PROGRAM = """
import fcntl, os, signal, sys, termios, time
from pathlib import Path
from gateway.cli.process.runtime import has_terminal
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
heard = []
signal.signal(signal.SIGHUP, lambda number, frame: heard.append(has_terminal()))
said = [has_terminal()]
os.kill(os.getpid(), signal.SIGHUP)
Path(sys.argv[2]).touch()
while len(heard) < 2:
    time.sleep(0.005)
Path(sys.argv[1]).write_text(repr([*said, *heard]))
"""


def test_a_terminal_that_closed_is_seen_in_its_signal(tmp_path: Path) -> None:
    told, ready = tmp_path / "told", tmp_path / "ready"
    ours, theirs = pty.openpty()
    line = [sys.executable, "-c", PROGRAM, str(told), str(ready)]
    child = subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    wait_until(lambda: ready.exists() or child.poll() is not None)
    assert child.poll() is None
    os.close(ours)  # the kernel sends SIGHUP to whom the terminal controlled
    assert child.wait(60) == 0
    assert told.read_text() == "[True, True, False]"
