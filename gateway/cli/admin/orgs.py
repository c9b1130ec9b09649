"""Create, list, show, limit and close organisations.

Works on the database of the running gateway (found through the data directory) or on DATABASE_URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from gateway.cli.admin.show import add_limits, given, services_of, table
from gateway.cli.process.keyring import administration, person
from gateway.config import settings as config
from gateway.service.admin.limits import FIELDS
from gateway.service.admin.orgs import OrgAdmin, describe_org

COLUMNS = ("name", "budget_usd", "budget_month_usd", "budget_day_usd", "rpm", "retention_days", "closed_at")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = {
        name: actions.add_parser(name, help=told)
        for name, told in (
            ("create", "make an organisation"),
            ("list", "every organisation, closed ones too"),
            ("show", "one organisation"),
            ("update", "change its limits; they count within a second"),
            ("close", "end it for good: its keys stop working within a second"),
        )
    }
    for name, action in made.items():
        if name != "list":
            action.add_argument("name", help="letters, digits, dots, dashes and underscores")
        if name in ("create", "update"):
            add_limits(action)
        if name in ("create", "update", "close"):
            action.add_argument("--why", default="", help="kept in the audit")
        action.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """One action; what it prints is a line, a table, or JSON."""
    services, _ = services_of(config.load())
    found = asyncio.run(_done(services.database_url, options))
    print(json.dumps(found) if options.json else _text(options.action, found))
    return 0


async def _done(database_url: str, options: argparse.Namespace) -> Any:
    async with administration(database_url) as office:
        admin = OrgAdmin(office.store, office.clock)
        if options.action == "list":
            return [describe_org(row) for row in await admin.list()]
        if options.action == "show":
            return describe_org(await admin.get(options.name))
        act = person(options.why)
        if options.action == "close":
            return describe_org(await admin.close(options.name, act))
        change = admin.create if options.action == "create" else admin.update
        return describe_org(await change(options.name, given(options, FIELDS), act))


def _text(action: str, found: Any) -> str:
    if action == "list":
        return table(COLUMNS, found)
    if action == "close":
        return f"organisation {found['name']} was closed at {found['closed_at']}"
    return json.dumps(found, indent=2)
