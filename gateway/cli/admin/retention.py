"""Delete rollouts whose time is over, months at a time where all of one is; money and audit stay.

The gateway does so by itself every BATON_RETENTION_EVERY_S. Works on the database of the running gateway (found through
the data directory) or on DATABASE_URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from typing import Any

from gateway.cli.admin.show import services_of
from gateway.cli.process.keyring import administration, person
from gateway.config import settings as config
from gateway.service.admin.housekeeping import Retention, describe_swept


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    sweep = actions.add_parser("run", help="one sweep, now")
    sweep.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    sweep.add_argument("--why", default="", help="kept in the audit")
    sweep.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """One sweep."""
    settings = config.load()
    services, _ = services_of(settings)
    found = asyncio.run(_swept(services.database_url, settings.retention_days or None, options))
    print(json.dumps(found) if options.json else "\n".join(_lines(found, dry=options.dry_run)))
    return 0


def _lines(found: dict[str, Any], *, dry: bool) -> Iterator[str]:
    verb = "would be " if dry else ""
    for one in found["months"]:
        rows = f"{sum(one['rollouts'].values())} rollouts, {one['rounds']} rounds, {one['steps']} steps"
        yield f"{one['month']} {verb}dropped whole: {rows}"
    for month in found["held"]:
        yield f"{month} is over and in use: tried again with the next sweep"
    by_key = ", ".join(f"{key}: {count}" for key, count in sorted(found["rollouts"].items())) or "none"
    yield f"rollouts {verb}deleted: {by_key}; other rows: {_others(found)}"


async def _swept(database_url: str, days: int | None, options: argparse.Namespace) -> dict[str, Any]:
    async with administration(database_url) as office:
        retention = Retention(office.retention, office.clock, days)
        swept = await retention.run(person(options.why), dry=options.dry_run)
    return dict(describe_swept(swept, dry=options.dry_run))


def _others(found: dict[str, Any]) -> str:
    return f"{found['shadows']} shadow plans, {found['dead_letters']} dead letters"
