"""List and verify the audit of everything that was changed.

Works on the database of the running gateway (found through the data directory) or on DATABASE_URL; verifies against
the anchors in the data directory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from gateway.cli.admin.show import services_of, table
from gateway.cli.process.keyring import administration
from gateway.config import settings as config
from gateway.service.admin.audit import describe_entry

COLUMNS = ("seq", "at", "actor", "act", "target", "why")
EXIT_FAULTY = 1
TOLD = {
    "changed": "its content is not what was written",
    "missing": "the entry before it is gone, or entries were swapped",
    "unlinked": "it does not follow the entry before it",
    "cut": "it was there once: the end was cut off",
    "forged": "it had another hash once: the chain was made anew",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="the latest entries, newest first")
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="how many")
    listed.add_argument("--before", type=int, metavar="SEQ", help="entries before that number")
    listed.add_argument("--target", help="of one key (key:ID), organisation (org:NAME) or version only")
    verify = actions.add_parser("verify", help="walk the chain; exit status 1 where something is wrong")
    for action in (listed, verify):
        action.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """One action; 1 where the chain is not whole."""
    services, data = services_of(config.load())
    found = asyncio.run(_done(services.database_url, data.path, options))
    print(json.dumps(found) if options.json else _text(options.action, found))
    return EXIT_FAULTY if options.action == "verify" and not found["ok"] else 0


async def _done(database_url: str, data: Any, options: argparse.Namespace) -> Any:
    async with administration(database_url) as office:
        auditor = office.auditor(data)
        if options.action == "verify":
            return await auditor.verify()
        found = await auditor.latest(max(1, options.limit), options.before, options.target)
        return [describe_entry(link) for link in found]


def _text(action: str, found: Any) -> str:
    if action == "list":
        return table(COLUMNS, found)
    lines = [f"entry {fault['seq']}: {fault['wrong']}: {TOLD[fault['wrong']]}" for fault in found["faults"]]
    state = "whole" if found["ok"] else f"NOT whole: {len(lines)} faults"
    return "\n".join([*lines, f"{found['entries']} entries, anchored up to {found['anchored']}; the audit is {state}"])
