"""Give a charge back, top a budget up, and list what was given.

Asks the admin API of the running gateway, found through the data directory, or the one at --url with the key in
--key-file. A credit counts at once, and is written to the ledger and to the audit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import table
from gateway.core.money.scopes import WINDOWS

ROUTE = "/admin/credits"
COLUMNS = ("id", "at", "usd", "charge", "scopes", "by", "why")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    give = actions.add_parser("give", help="give a charge back, or top a budget up")
    what = give.add_mutually_exclusive_group(required=True)
    what.add_argument("--charge", metavar="ID", help="of a rollout, completion or hold: give it back")
    what.add_argument("--key", metavar="ID", help="top up the budget of a key")
    what.add_argument("--org", metavar="NAME", help="top up the budget of an organisation")
    give.add_argument("--usd", metavar="X", help="dollars; of a charge, none: all that is left of it")
    give.add_argument("--window", choices=WINDOWS, help="which budget is topped up: in all (life), this month, today")
    give.add_argument("--once", metavar="NAME", help="the same name again is the same credit, given once")
    give.add_argument("--why", default="", help="kept in the ledger and in the audit")
    for action in (give, actions.add_parser("list", help="the latest credits")):
        action.add_argument("--url", help="the admin API; default: of the gateway on the data directory")
        action.add_argument("--key-file", type=Path, metavar="FILE", help="an admin key, with --url")
        action.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """One action; what it prints is a line, a table, or JSON."""
    admin = AdminClient(options.url, options.key_file)
    if options.action == "list":
        found = admin.ask("GET", ROUTE)["data"]
        print(json.dumps(found) if options.json else table(COLUMNS, found))
        return 0
    names = ("charge", "key", "org", "usd", "window", "why")
    body = {name: getattr(options, name) for name in names if getattr(options, name)}
    headers = {"idempotency-key": options.once} if options.once else {}
    made = admin.ask("POST", ROUTE, body, headers)
    print(json.dumps(made) if options.json else _text(made))
    return 0


def _text(made: dict[str, Any]) -> str:
    when = "" if made["created"] else " before"
    return (
        f"credit {made['id']}: ${made['usd']} was given{when} to {', '.join(made['scopes'])}; counts {made['counts']}"
    )
