"""`baton workers`: how workers do, which rest, what is known about those that changed, and their quarantine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, add_why, show, table

COLUMNS = ("name", "kind", "pools", "calls", "errors", "rest", "why")
FACT_COLUMNS = ("at", "worker", "version", "what", "data")
QUARANTINE_COLUMNS = ("worker", "version", "at", "by", "probes", "probes_nano", "why")
IDENTITY_COLUMNS = ("worker", "version", "model", "fingerprint", "first_at", "last_at")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all workers: their calls of the last hour, and which rest")
    drift = actions.add_parser("drift", help="workers in quarantine, flags, and who the workers say they are")
    put = actions.add_parser("quarantine", help="keep a worker out of plans")
    release = actions.add_parser("release", help="plan with it again")
    release.add_argument("--anew", action="store_true", help="what it does from now on is usual")
    for action in (put, release):
        action.add_argument("worker", help="its name in the pool file")
        add_why(action)
    for action in (listing, drift, put, release):
        add_admin(action)


def run(options: argparse.Namespace) -> int:
    """One action; print tables, a line, or JSON."""
    client = AdminClient(options.url, options.key_file)
    if options.action == "list":
        show(options, client.ask("GET", "/admin/workers"), lambda reply: table(COLUMNS, list(map(_row, reply["data"]))))
        return 0
    if options.action == "drift":
        show(options, client.ask("GET", "/admin/drift"), _report)
        return 0
    body = {"why": options.why} | ({"anew": True} if options.action == "release" and options.anew else {})
    path = f"/admin/workers/{quote(options.worker, safe='')}/{options.action}"
    show(options, client.ask("POST", path, body), _line)
    return 0


def _row(worker: Mapping[str, Any]) -> dict[str, Any]:
    """One worker, as a row of COLUMNS."""
    rest, recent = worker["rest"] or {}, worker["recent"]
    until = {"resting": f"until {rest.get('until')}", "due": "to be tried"}.get(str(rest.get("state")), "")
    row = {"name": worker["name"], "kind": worker["kind"], "pools": ", ".join(worker["pools"])}
    return row | {"calls": recent["calls"], "errors": recent["errors"], "rest": until, "why": rest.get("why", "")}


def _report(reply: Mapping[str, Any]) -> str:
    parts = [
        ("in quarantine", QUARANTINE_COLUMNS, reply["quarantines"]),
        ("what happened", FACT_COLUMNS, reply["facts"]),
        ("who they say they are", IDENTITY_COLUMNS, reply["identities"]),
    ]
    return "\n\n".join(f"{title}:\n{table(columns, rows) if rows else 'nothing'}" for title, columns, rows in parts)


def _line(reply: Mapping[str, Any]) -> str:
    where = "is in quarantine" if reply["ended_at"] is None else "is planned with again"
    return f"worker {reply['worker']} (version {reply['version']}) {where}"
