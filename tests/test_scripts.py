"""What the shell scripts share: a step of an installation is one line, and its output is shown only where it fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOISE = "WARNING: Location 'file:///nowhere' is ignored"


def step(directory: Path, status: int) -> subprocess.CompletedProcess[str]:
    """Run a step whose command warns on both outputs and ends with this status."""
    script = f'. {ROOT}/scripts/venv.sh; step "installing it" bash -c "echo out; echo \\"$NOISE\\" >&2; exit {status}"'
    command = ["bash", "-c", f"set -euo pipefail; {script}"]
    return subprocess.run(
        command,
        cwd=directory,
        env={"NOISE": NOISE, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_step_prints_one_line_and_keeps_the_rest_in_the_log(tmp_path: Path) -> None:
    done = step(tmp_path, 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "installing it\n", "")
    assert NOISE in (tmp_path / "build" / "install.log").read_text()


def test_a_step_that_fails_shows_the_end_of_the_log_and_its_status(tmp_path: Path) -> None:
    done = step(tmp_path, 7)
    assert (done.returncode, done.stdout) == (7, "installing it\n")
    assert NOISE in done.stderr
    assert done.stderr.splitlines()[-1] == "failed with status 7: installing it; the whole log is build/install.log"
