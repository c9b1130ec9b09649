"""The leash in this process: what it asks of the kernel, whom it becomes, what it runs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from typing import Any

import pytest

from gateway.adapters.host import leash
from tests.waiting import BOUND_S


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call that would change or replace the process."""
    calls: list[Any] = []
    for name in ("setgroups", "setgid", "setuid", "execv"):
        monkeypatch.setattr(os, name, lambda *args, name=name: calls.append((name, *args)))
    return calls


def test_it_becomes_the_command(ran: list[Any]) -> None:
    leash.main(os.getppid(), 0, "-", ["/bin/true", "x"])
    assert ran == [("execv", "/bin/true", ["/bin/true", "x"])]


def test_it_drops_groups_before_the_user(ran: list[Any]) -> None:
    nobody = pwd.getpwnam("nobody")
    leash.main(os.getppid(), 0, "nobody", ["/bin/true"])
    assert ran[:3] == [("setgroups", []), ("setgid", nobody.pw_gid), ("setuid", nobody.pw_uid)]


def test_a_parent_that_is_gone_already_ends_it(ran: list[Any]) -> None:
    with pytest.raises(SystemExit):
        leash.main(1 if os.getppid() != 1 else 2, 0, "-", ["/bin/true"])
    assert ran == []


def test_the_process_id_stays(tmp_path: Any) -> None:
    command = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), "15", "-", "/bin/sh", "-c", "echo $$"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=BOUND_S)
    assert int(out) == process.pid
