"""Serve recorded answers of real models as OpenAI-compatible workers, for trying the gateway on real input."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from gateway.adapters.embedded import PROGRAMS_ROOT
from gateway.errors import ConfigError

STOP_S = 10.0


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments; those not known here go to the server as they are."""
    parser.add_argument("file", type=Path, help="recordings, .jsonl or .jsonl.gz (docs/replay.md)")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--pool-file", type=Path, help="write a pool file of these workers here")


def run(options: argparse.Namespace) -> int:
    """Run the server in the foreground until Ctrl-C; its status."""
    if not options.file.is_file():
        raise ConfigError(f"{options.file}: no such file; name a recording (docs/replay.md)")
    command = [sys.executable, "-m", "policy.replay", "serve", str(options.file.resolve()), "--port", str(options.port)]
    if options.pool_file:
        command += ["--pool-file", str(options.pool_file.resolve())]
    with subprocess.Popen(command, cwd=PROGRAMS_ROOT) as server:  # noqa: S603 - our own program
        try:
            return server.wait()
        except KeyboardInterrupt:  # the terminal told it too
            server.wait(STOP_S)
            return 0
