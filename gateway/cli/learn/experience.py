"""`baton experience`: credit what workers did once more, and how far judges and other sources are believed."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from typing import Any

from gateway.cli.admin.show import show, table

COLUMNS = ("judge", "n", "agreement", "kappa", "false_accepts", "false_rejects")
SOURCES = ("org", "source", "n", "agreement", "sensitivity", "specificity", "weight_right", "weight_wrong")
STEP = 1_000  # outcomes between two lines of progress


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baton experience`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    again = actions.add_parser("recredit", help="count outcomes again that were counted under earlier rules")
    again.add_argument("--dry-run", action="store_true", help="only say how many there are")
    judges = actions.add_parser("judges", help="how far judges and graders agree with what people posted as outcomes")
    sources = actions.add_parser("sources", help="how far each source of outcomes is believed, and what it weighs")
    for action in (again, judges, sources):
        action.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    """On PostgreSQL itself. A sweep may be stopped at any time; the next one goes on where it was."""
    from gateway.cli.process.datadir import DataDir  # here and below, so that `--help` does not load the database's
    from gateway.cli.process.services import database_of
    from gateway.config import settings as config

    settings = config.load()
    url = database_of(settings, DataDir(settings.data_dir))
    if options.action == "judges":
        show(options, asyncio.run(_judges(url)), partial(table, COLUMNS))
        return 0
    if options.action == "sources":
        show(options, asyncio.run(_sources(url)), partial(table, SOURCES))
        return 0
    report = asyncio.run(_recredit(url, dry=options.dry_run))
    show(options, report, lambda report: f"outcomes counted again: {report['counted']}; left: {report['left']}")
    return 0


async def _judges(database_url: str) -> list[dict[str, Any]]:
    from gateway.adapters.postgres.database import connected
    from gateway.adapters.postgres.reports.checks import judge_calibrations

    async with connected(database_url, pool_size=1) as engine:
        return [one.as_json() for one in await judge_calibrations(engine)]


async def _sources(database_url: str) -> list[dict[str, Any]]:
    """Measure the sources and return them."""
    from gateway.adapters.postgres.database import connected
    from gateway.adapters.postgres.sources import PostgresSources, known_sources

    async with connected(database_url, pool_size=1) as engine:
        await PostgresSources(engine).sweep(1)
        async with engine.begin() as connection:
            return await known_sources(connection)


async def _recredit(database_url: str, *, dry: bool) -> dict[str, int]:
    from gateway.adapters.postgres.credit import OldCredit
    from gateway.adapters.postgres.database import connected

    async with connected(database_url, pool_size=1) as engine:
        work, counted = OldCredit(engine), 0
        while not dry and (some := await work.sweep(STEP)):
            counted += some
            print(f"{counted} outcomes counted again", file=sys.stderr)
        return {"counted": counted, "left": await work.left()}
