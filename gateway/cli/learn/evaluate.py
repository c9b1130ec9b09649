"""Compare policies on recorded or simulated questions: accuracy, dollars, intervals, baselines.

The work itself is `python -m policy evaluate`, which takes the arguments as they are; `baton evaluate --help` lists
them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec

from gateway.errors import ConfigError

COMMAND = ("-m", "policy", "evaluate")


def add(parser: argparse.ArgumentParser) -> None:
    """None of its own: with no prefix that marks an option, options too are passed on."""
    parser.prefix_chars = ""
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…")


def run(options: argparse.Namespace) -> int:
    """Become that program: its signals and exit status are ours. Raises ConfigError without the policy package."""
    if find_spec("policy") is None:
        raise ConfigError("this installation has no policy package; evaluate where it is installed")
    command = [sys.executable, *COMMAND, *options.rest]
    if not any(one in ("-h", "--help") for one in options.rest):
        os.execv(sys.executable, command)  # noqa: S606 - our own program
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - the same
    print(told.replace(f"python {' '.join(COMMAND)}", "baton evaluate"), end="")
    raise SystemExit(0)
