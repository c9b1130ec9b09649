"""The worker of the learning loop: `work` carries out jobs and grades replies; `select` is a job's first stage."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path

from gateway.errors import ConfigError

ASKED_BYTES_MAX = 4 << 20
QUIET = ("procrastinate", "httpx", "httpcore")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: the action."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    worker = actions.add_parser("work", help="run until stopped")
    worker.add_argument("--settings", type=Path, required=True, metavar="FILE", help="as `baton worker` writes it")
    worker.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    actions.add_parser("select", help="read {arguments, database_url, work} from standard input; used by `work`")


def run(options: argparse.Namespace) -> int:
    """0; `work` returns when it is told to stop."""
    if options.action == "select":
        return _select()
    from policy.jobs.worker import read_settings, work  # here: `select` needs no queue

    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    asyncio.run(work(read_settings(options.settings)))
    return 0


def _select() -> int:
    from policy.jobs.select import select, write_json

    try:
        asked = json.loads(sys.stdin.read(ASKED_BYTES_MAX))
        work = Path(asked["work"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError("standard input must hold {arguments, database_url, work} as JSON") from None
    write_json(work / "rows.json", select(asked))
    return 0
