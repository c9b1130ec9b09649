"""`baton pools`: the pools and workers of a gateway, and the reload of its pool file.

`baton check` finds the mistakes of a pool file before a gateway reads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, add_why, show, table

COLUMNS = ("name", "handle", "kind", "model", "pools")
REVISION_COLUMNS = ("hash", "at", "actor", "in_use", "why")
RELOAD_S_MAX = 60.0  # disks may be slow, and LiteLLM may have to be loaded


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    current = actions.add_parser("show", help="every worker, the pools it is in, and the hash of it all")
    reload = actions.add_parser("reload", help="read the pool file again, while requests go on")
    reload.add_argument("--dry-run", action="store_true", help="only say what would change")
    add_why(reload)
    revisions = actions.add_parser("revisions", help="every pool that ever served, or one of them")
    revisions.add_argument("hash", nargs="?", help="as a rollout's `pool_revision` names it")
    for action in (current, reload, revisions):
        add_admin(action)


def run(options: argparse.Namespace) -> int:
    """One action; print a table, lines, or JSON."""
    client = AdminClient(options.url, options.key_file, timeout_s=RELOAD_S_MAX)
    reply, lines = ACTIONS[options.action](client, options)
    show(options, reply, lambda _: "\n".join(lines))
    return 0


def _show(client: AdminClient, options: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    reply = client.ask("GET", "/admin/pools")
    return reply, [_workers(reply), f"default pool: {reply['default']}", f"{reply['hash']} since {reply['loaded_at']}"]


def _reload(client: AdminClient, options: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    reply = client.ask("POST", "/admin/pools/reload", {"dry_run": options.dry_run, "why": options.why})
    if not reply["changed"]:
        return reply, [f"nothing changed: {reply['hash']}"]
    end = f"now {reply['hash']}" if reply["applied"] else "dry run: nothing was changed"
    return reply, [*reply["lines"], end]


def _revisions(client: AdminClient, options: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    if options.hash is None:
        reply = client.ask("GET", "/admin/pools/revisions")
        return reply, [table(REVISION_COLUMNS, reply["data"])]
    reply = client.ask("GET", f"/admin/pools/revisions/{quote(options.hash, safe='')}")
    pool = reply["pool"]
    workers = [{"name": name, **worker} for name, worker in pool["workers"].items()]
    loaded = f"first loaded {reply['at']} by {reply['actor']}"
    return reply, [_workers({**pool, "workers": workers}), f"default pool: {pool['default']}", loaded]


def _workers(reply: Mapping[str, Any]) -> str:
    pools = reply["pools"]
    rows = [
        {**worker, "pools": [name for name, workers in pools.items() if worker["name"] in workers]}
        for worker in reply["workers"]
    ]
    return table(COLUMNS, rows)


ACTIONS = {"show": _show, "reload": _reload, "revisions": _revisions}
