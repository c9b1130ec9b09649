"""Show the pools and workers of the running gateway, and let a pool file that changed take their place.

Asks its admin API, found through the data directory, or the one at --url with the key in --key-file. `baton check`
says what is wrong with a pool file before a gateway reads it.
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
RELOAD_S_MAX = 60.0  # the file and the keys may lie on a slow disk, and LiteLLM may have to be loaded


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    current = actions.add_parser("show", help="every worker, the pools it is in, and the hash of it all")
    reload = actions.add_parser("reload", help="read the pool file anew, while requests go on")
    reload.add_argument("--dry-run", action="store_true", help="only say what would change")
    add_why(reload)
    revisions = actions.add_parser("revisions", help="every pool that ever served, or one of them whole")
    revisions.add_argument("hash", nargs="?", help="as a rollout's `pool_revision` names it")
    for action in (current, reload, revisions):
        add_admin(action)


def run(options: argparse.Namespace) -> int:
    """What the gateway says."""
    client = AdminClient(options.url, options.key_file, timeout_s=RELOAD_S_MAX)
    found, lines = ACTIONS[options.action](client, options)
    show(options, found, lambda _: "\n".join(lines))
    return 0


def _show(client: AdminClient, options: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    found = client.ask("GET", "/admin/pools")
    return found, [_workers(found), f"default pool: {found['default']}", f"{found['hash']} since {found['loaded_at']}"]


def _reload(client: AdminClient, options: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    found = client.ask("POST", "/admin/pools/reload", {"dry_run": options.dry_run, "why": options.why})
    if not found["changed"]:
        return found, [f"nothing changed: {found['hash']}"]
    end = f"now {found['hash']}" if found["applied"] else "not taken, as asked for"
    return found, [*found["lines"], end]


def _revisions(client: AdminClient, options: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    if options.hash is None:
        found = client.ask("GET", "/admin/pools/revisions")
        return found, [table(REVISION_COLUMNS, found["data"])]
    found = client.ask("GET", f"/admin/pools/revisions/{quote(options.hash, safe='')}")
    pool = found["pool"]
    workers = [{"name": name, **worker} for name, worker in pool["workers"].items()]
    loaded = f"first loaded {found['at']} by {found['actor']}"
    return found, [_workers({**pool, "workers": workers}), f"default pool: {pool['default']}", loaded]


def _workers(found: Mapping[str, Any]) -> str:
    pools = found["pools"]
    rows = [
        {**worker, "pools": [name for name, workers in pools.items() if worker["name"] in workers]}
        for worker in found["workers"]
    ]
    return table(COLUMNS, rows)


ACTIONS = {"show": _show, "reload": _reload, "revisions": _revisions}
