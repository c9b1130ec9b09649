"""Export the log as training data (Parquet, or the shapes of verl and ART).

Works on the database of the running gateway (found through the data directory) or on DATABASE_URL. The work itself is
`python -m policy traces`, which takes the arguments as they are; `baton traces export --help` lists them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec

from gateway.cli.process.datadir import FACTS, DataDir
from gateway.cli.process.services import database_of
from gateway.config import settings as config
from gateway.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: the action; the rest is policy's."""
    parser.add_argument("action", choices=("export",), help="planning calls with tokens, steps and outcomes, as a file")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="see `baton traces export --help`")


def run(options: argparse.Namespace) -> int:
    """Its exit status. Raises ConfigError where there is no log or no policy package."""
    if find_spec("policy") is None:
        raise ConfigError("this installation has no policy package; export where it is installed, with --database-url")
    # The URL may hold a password: on standard input no other user of the machine sees it.
    asks = any(one in ("-h", "--help") for one in options.rest)
    url, known = ("", []) if asks else _log()
    command = [sys.executable, "-m", "policy", "traces", options.action, "--database-url", "-", *known, *options.rest]
    return subprocess.run(command, input=f"{url}\n", text=True, check=False).returncode  # noqa: S603 - our own program


def _log() -> tuple[str, list[str]]:
    """The URL of the database, and the pool file whose worker versions are today's."""
    settings = config.load()
    data = DataDir(settings.data_dir)
    pool_file = settings.pool or (data.read(FACTS) or {}).get("pool_file")
    return database_of(settings, data), ["--pool-file", str(pool_file)] if pool_file else []
