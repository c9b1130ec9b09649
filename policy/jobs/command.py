"""The worker of the learning loop: `work` carries out jobs and grades replies; `select`, `spec` are parts of a job."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gateway.errors import ConfigError

REQUEST_BYTES_MAX = 4 << 20
TRAIN_EXTRA = ("torch", "pyarrow")  # packages of the extra, by which one knows whether it is installed
QUIET = ("procrastinate", "httpx", "httpcore")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: the action."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    worker = actions.add_parser("work", help="run until stopped")
    worker.add_argument("--settings", type=Path, required=True, metavar="FILE", help="as `baton worker` writes it")
    worker.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    actions.add_parser("select", help="read what `work` writes from standard input, choose the rows and requests")
    actions.add_parser(
        "spec", help="read {arguments, gate} from standard input, print {train, gate, lacks}; used by submit"
    )


def run(options: argparse.Namespace) -> int:
    """0; `work` returns when it is told to stop."""
    if options.action == "select":
        return _select()
    if options.action == "spec":
        return _spec()
    from policy.jobs.worker import read_settings, work  # here: `select` needs no queue

    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    asyncio.run(work(read_settings(options.settings)))
    return 0


def _select() -> int:
    from policy.jobs.select import select, write_json

    request = _request("train", "gate", "known", "database_url", "work")
    write_json(Path(request["work"]) / "rows.json", select(request))
    return 0


def _spec() -> int:
    from policy.jobs.spec import job_spec

    request = _request("arguments", "gate")
    spec = job_spec(request["arguments"], request["gate"])
    lacks = [name for name in TRAIN_EXTRA if find_spec(name) is None]
    sys.stdout.write(f"{json.dumps({'train': spec.train, 'gate': spec.gate, 'lacks': lacks})}\n")
    return 0


def _request(*names: str) -> dict[str, Any]:
    """The object on standard input. Raises ConfigError if it lacks one of the names."""
    try:
        request = json.loads(sys.stdin.read(REQUEST_BYTES_MAX))
        return {name: request[name] for name in names}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"standard input must hold {{{', '.join(names)}}} as JSON") from None
