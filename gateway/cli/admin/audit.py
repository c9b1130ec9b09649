"""`baton audit` and `baton retention`: the record of every change, and the deletion of old rollouts."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urlencode

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, add_why, show, table
from gateway.core.access.audit import Act

ROUTE = "/admin/audit"
PAGE_MAX = 1_000  # entries of one request
VERIFY_S_MAX = 600.0  # the gateway reads the whole chain
EXIT_FAULTY = 1
COLUMNS = ("seq", "at", "actor", "act", "target", "why")
FAULTS = {
    "changed": "its content is not what was written",
    "missing": "the entry before it is gone, or entries were swapped",
    "unlinked": "it does not follow from the entry before it",
    "cut": "it was there once: the end was cut off",
    "forged": "it had another hash once: the chain was replaced",
}


def add_audit(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baton audit`: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    latest = actions.add_parser("list", help="the latest entries, newest first")
    latest.add_argument("--limit", type=int, default=50, metavar="N", help="how many entries")
    latest.add_argument("--before", type=int, metavar="SEQ", help="only entries before that number")
    latest.add_argument("--target", help="only of one key (key:ID), organisation (org:NAME) or version")
    verify = actions.add_parser("verify", help="check the chain; exit status 1 where something is wrong")
    for action in (latest, verify):
        add_admin(action)


def run_audit(options: argparse.Namespace) -> int:
    """One action on the audit; 1 where the chain is broken."""
    admin = AdminClient(options.url, options.key_file, timeout_s=VERIFY_S_MAX)
    if options.action == "list":
        entries = list(islice(_entries(admin, options), max(1, options.limit)))
        show(options, entries, partial(table, COLUMNS))
        return 0
    report = admin.ask("GET", f"{ROUTE}/verify")
    show(options, report, _report_text)
    return 0 if report["ok"] else EXIT_FAULTY


def _entries(admin: AdminClient, options: argparse.Namespace) -> Iterator[Any]:
    """Entries, newest first, in pages of at most PAGE_MAX."""
    query: dict[str, Any] = {"limit": min(max(1, options.limit), PAGE_MAX)}
    query |= {name: getattr(options, name) for name in ("before", "target") if getattr(options, name) is not None}
    while page := admin.ask("GET", f"{ROUTE}?{urlencode(query)}")["data"]:
        yield from page
        query["before"] = page[-1]["seq"]
        if len(page) < query["limit"]:
            return


def _report_text(report: dict[str, Any]) -> str:
    lines = [f"entry {fault['seq']}: {fault['wrong']}: {FAULTS[fault['wrong']]}" for fault in report["faults"]]
    state = "whole" if report["ok"] else f"NOT whole: {len(lines)} faults"
    summary = f"{report['entries']} entries, anchored up to {report['anchored']}; the audit is {state}"
    return "\n".join([*lines, summary])


def add_retention(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baton retention`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    sweep = actions.add_parser("run", help="delete rollouts that are over their time now")
    sweep.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add_why(sweep)
    sweep.add_argument("--json", action="store_true", help="print JSON, for programs")


def run_retention(options: argparse.Namespace) -> int:
    """One sweep, on PostgreSQL itself: it may take longer than a request of the admin API."""
    from gateway.cli.process.datadir import DataDir  # here and below, so that `--help` does not load the database's
    from gateway.cli.process.keyring import local_user
    from gateway.cli.process.services import database_of
    from gateway.config import settings as config
    from gateway.service.admin import limits

    settings = config.load()
    url = database_of(settings, DataDir(settings.data_dir))
    act = Act(local_user(), limits.why(options.why))
    report = asyncio.run(_sweep(url, settings.retention_days or None, act, dry=options.dry_run))
    show(options, report, lambda report: "\n".join(_sweep_lines(report, dry=options.dry_run)))
    return 0


async def _sweep(database_url: str, days: int | None, act: Act, *, dry: bool) -> dict[str, Any]:
    from gateway.cli.process.keyring import administration
    from gateway.service.admin.housekeeping import Retention, describe_sweep

    async with administration(database_url) as office:
        swept = await Retention(office.retention, office.clock, days).run(act, dry=dry)
    return dict(describe_sweep(swept, dry=dry))


def _sweep_lines(report: dict[str, Any], *, dry: bool) -> Iterator[str]:
    verb = "would be " if dry else ""
    for one in report["months"]:
        rows = f"{sum(one['rollouts'].values())} rollouts, {one['rounds']} rounds, {one['steps']} steps"
        yield f"{one['month']} {verb}dropped whole: {rows}"
    for month in report["held"]:
        yield f"{month} is over and in use: tried again with the next sweep"
    by_key = ", ".join(f"{key}: {count}" for key, count in sorted(report["rollouts"].items())) or "none"
    others = f"{report['shadows']} shadow plans, {report['dead_letters']} dead letters"
    yield f"rollouts {verb}deleted: {by_key}; other rows: {others}"
