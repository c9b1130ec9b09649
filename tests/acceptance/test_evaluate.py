"""`baton evaluate` as a process: its exit status, and Ctrl-C in the middle of a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.acceptance.test_show import ROOT
from tests.waiting import BOUND_S

N = 150  # so many that the second policy is under way when the first one is done


def command(out: Path, *more: str) -> list[str]:
    given = ["--env", "arena", "--n", str(N), "--train-n", "20", "--policy", "random", "--out", str(out)]
    return [sys.executable, "-m", "gateway", "evaluate", *given, *more]


def test_ctrl_c_leaves_no_report_and_the_same_command_finishes_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # a job in the background ignores SIGINT, and its children inherit that; they do not inherit a handler
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    program = subprocess.Popen(command(out), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with program:
        assert program.stderr is not None
        first = next(line for line in program.stderr if ": right" in line)
        program.send_signal(signal.SIGINT)
        rest = program.stderr.read()
        assert program.wait(BOUND_S) == 130, rest
    assert first.startswith("[1/10] fixed:")
    assert "the same command goes on from there" in rest
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["out.json.partial"]
    again = subprocess.run(command(out), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert first.strip() + ", from before" in again.stderr
    assert json.loads(out.read_text())["policies"]["random"]["n"] == N
    assert not (tmp_path / "out.json.partial").exists()


def test_bad_arguments_end_with_status_2_and_one_line(tmp_path: Path) -> None:
    arguments = command(tmp_path / "out.json", "--policy", "nothing")
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
