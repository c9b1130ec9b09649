"""Delete rollouts whose time is over; money and audit stay.

The gateway does so by itself every BATON_RETENTION_EVERY_S. Works on the database of the running gateway (found through
the data directory) or on DATABASE_URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from gateway import config
from gateway.cli.keyring import administration, person
from gateway.cli.show import services_of
from gateway.service.housekeeping import Retention, describe_swept


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
    verb = "would be deleted" if options.dry_run else "deleted"
    by_key = ", ".join(f"{key}: {count}" for key, count in sorted(found["rollouts"].items())) or "none"
    print(json.dumps(found) if options.json else f"rollouts {verb}: {by_key}; other rows: {_others(found)}")
    return 0


async def _swept(database_url: str, days: int | None, options: argparse.Namespace) -> dict[str, Any]:
    async with administration(database_url) as office:
        retention = Retention(office.retention, office.clock, days)
        swept = await retention.run(person(options.why), dry=options.dry_run)
    return dict(describe_swept(swept, dry=options.dry_run))


def _others(found: dict[str, Any]) -> str:
    return f"{found['shadows']} shadow plans, {found['dead_letters']} dead letters"
