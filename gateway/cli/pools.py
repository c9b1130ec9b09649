"""Show the pools and workers of the running gateway.

Asks its admin API, found through the data directory, or the one at --url with the key in --key-file. `baton check`
says what is wrong with a pool file before a gateway reads it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gateway.cli.adminapi import AdminClient
from gateway.cli.show import table

COLUMNS = ("name", "handle", "kind", "model", "pools")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="every worker, and the pools it is in")
    show.add_argument("--url", help="the admin API; default: of the gateway on the data directory")
    show.add_argument("--key-file", type=Path, metavar="FILE", help="an admin key, with --url")
    show.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """What the gateway read."""
    found = AdminClient(options.url, options.key_file).ask("GET", "/admin/pools")
    if options.json:
        print(json.dumps(found))
        return 0
    pools = found["pools"]
    rows = [
        {**worker, "pools": [name for name, workers in pools.items() if worker["name"] in workers]}
        for worker in found["workers"]
    ]
    print(f"{table(COLUMNS, rows)}\ndefault pool: {found['default']}")
    return 0
