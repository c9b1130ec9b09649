"""`baton pools`: the pools and workers of a gateway, and the reload of its pool file.

`baton check` finds the mistakes of a pool file before a gateway reads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, add_why, show, table

if TYPE_CHECKING:
    from gateway.core.pool.workers import PoolFile

COLUMNS = ("name", "handle", "kind", "model", "pools")
ERRORS = {
    "false_accepts": "wrong replies accepted",
    "false_rejects": "right ones rejected",
    "accepted_wrong": "accepted ones wrong",
}
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
    prices = actions.add_parser("prices", help="compare a pool file with the vendors' list prices, without a gateway")
    prices.add_argument("file", type=Path, help="the pool file")
    prices.add_argument("--fill", action="store_true", help="print the `price` of each worker as the vendor lists it")


def run(options: argparse.Namespace) -> int:
    """One action; print a table, lines, or JSON."""
    if options.action == "prices":
        from gateway.adapters.host import poolfile  # here and below, so that `--help` does not load the adapters
        from gateway.config.settings import environment

        pool = poolfile.load(options.file, environment())
        print("\n".join(_filled(pool) if options.fill else _compared(pool)))
        return 0
    client = AdminClient(options.url, options.key_file, timeout_s=RELOAD_S_MAX)
    reply, lines = ACTIONS[options.action](client, options)
    show(options, reply, lambda _: "\n".join(lines))
    return 0


def _show(client: AdminClient, options: argparse.Namespace) -> tuple[Mapping[str, Any], list[str]]:
    workers = client.ask("GET", "/admin/workers")
    checks, at = workers.get("checks", []), workers.get("checks_at")
    reply = {**client.ask("GET", "/admin/pools"), "checks": checks, "checks_at": at}
    loaded = f"{reply['hash']} since {reply['loaded_at']}"
    return reply, [
        _workers(reply),
        *map(_errs, checks),
        *([f"checkers counted at {at}"] if checks else []),
        f"default pool: {reply['default']}",
        loaded,
    ]


def _errs(check: Mapping[str, Any]) -> str:
    """How often a checker errs, in one line; unknown where there are too few cases."""
    shares = (f"{ERRORS[name]} {_share(check[name])}" for name in ERRORS)
    return f"checker {check['checker']}: {', '.join(shares)}"


def _share(share: Mapping[str, Any]) -> str:
    if share["low"] is None:
        return f"unknown ({share['n']} judged)"
    return f"{share['k']} of {share['n']} ({share['low'] * 100:.0f} to {share['high'] * 100:.0f} %)"


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


def _compared(pool: PoolFile) -> Iterator[str]:
    """A line for each worker whose prices are the vendor's, a warning for each amount that is not."""
    from gateway.adapters.host.listprices import differences, list_price
    from gateway.core.pool.workers import MODEL_KINDS

    for worker in pool.workers:
        list_entry = list_price(worker) if worker.kind in MODEL_KINDS else None
        if list_entry is None:
            yield f"--   {worker.name}: no list price"
            continue
        source = f"{list_entry.vendor} {list_entry.model}" + (f" since {list_entry.since}" if list_entry.since else "")
        wrong = differences(worker, list_entry)
        if not wrong:
            yield f"ok   {worker.name}: as {source}"
        for one in wrong:
            state = "is older than the vendor's" if one.is_old else "is not the vendor's"
            amount = "is not in the file" if one.in_file is None else f"{one.in_file.normalize():f} {state}"
            yield f"warn {worker.name}: {one.name}: {amount}; {source} asks {one.listed.normalize():f}"


def _filled(pool: PoolFile) -> Iterator[str]:
    """The list price of each worker, to paste into the pool file."""
    from gateway.adapters.host.listprices import list_price
    from gateway.core.pool.workers import MODEL_KINDS

    for worker in pool.workers:
        if worker.kind in MODEL_KINDS and (list_entry := list_price(worker)) is not None:
            (_, first), *longer = list_entry.tiers
            tiers = ", ".join(f"{{prompt_tokens: {start}, {_amounts(amounts)}}}" for start, amounts in longer)
            yield f"# {worker.name}: {list_entry.vendor} {list_entry.model}"
            yield f"price: {{{_amounts(first)}{f', above: [{tiers}]' if tiers else ''}}}"


def _amounts(amounts: Mapping[str, Decimal]) -> str:
    return ", ".join(f"{name}: {usd.normalize():f}" for name, usd in amounts.items())


def _workers(reply: Mapping[str, Any]) -> str:
    pools = reply["pools"]
    rows = [
        {**worker, "pools": [name for name, workers in pools.items() if worker["name"] in workers]}
        for worker in reply["workers"]
    ]
    return table(COLUMNS, rows)


ACTIONS = {"show": _show, "reload": _reload, "revisions": _revisions}
