"""`baton status`: how a gateway does, on one screen: its parts, the last hour's requests, money, versions and jobs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, show, table
from gateway.core.money.amounts import nano_to_usd
from gateway.errors import BatonError

WINDOW_S = 3_600
WORKER_COLUMNS = ("worker", "calls", "errors", "retries", "p95_ms", "usd")
EXIT_NOT_READY = 1
SPENDERS = ("key", "policy", "worker")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    parser.add_argument("--window-s", type=int, default=WINDOW_S, metavar="S", help="the time that is summed up")
    add_admin(parser)


def run(options: argparse.Namespace) -> int:
    """Print it; 1 where the gateway is not ready."""
    client = AdminClient(options.url, options.key_file)
    health = client.health()
    report = {
        "ready": health,
        "overview": client.ask("GET", f"/admin/overview?window_s={options.window_s}"),
        "policies": _optional(client, "/admin/policies"),
        "jobs": _optional(client, "/admin/jobs?limit=20"),
    }
    show(options, report, _text)
    return 0 if health["status"] == "ready" else EXIT_NOT_READY


def add_spend(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baton spend`."""
    parser.add_argument("--window-s", type=int, default=WINDOW_S, metavar="S", help="the time that is summed up")
    parser.add_argument("--by", choices=SPENDERS, default="key", help="whose spending; default key")
    add_admin(parser)


def run_spend(options: argparse.Namespace) -> int:
    """Print what requests of the window cost."""
    client = AdminClient(options.url, options.key_file)
    overview = client.ask("GET", f"/admin/overview?window_s={options.window_s}")
    spend = {name: overview[name] for name in ("since", "until", "truncated")}
    spend |= {"by": options.by, "total_usd": nano_to_usd(overview["totals"]["cost_nano"])}
    rows = overview[f"by_{options.by}"]
    spend["data"] = [
        {
            options.by: row.get("key_name") or row.get("key_id") or row.get(options.by),
            "calls" if options.by == "worker" else "requests": row.get("requests", row.get("calls")),
            "usd": nano_to_usd(row["cost_nano"]),
        }
        for row in rows
    ]
    show(options, spend, _spend)
    return 0


def _spend(spend: Mapping[str, Any]) -> str:
    columns = (spend["by"], "calls" if spend["by"] == "worker" else "requests", "usd")
    part = " (of the latest requests only)" if spend["truncated"] else ""
    return f"{table(columns, spend['data'])}\n${spend['total_usd']} since {spend['since']}{part}"


def _optional(client: AdminClient, path: str) -> list[Any]:
    """A list of the admin API; empty for a gateway without it."""
    try:
        return list(client.ask("GET", path)["data"])
    except BatonError:
        return []


def _text(report: Mapping[str, Any]) -> str:
    totals, parts = report["overview"]["totals"], report["ready"]["parts"]
    away = [name for name, state in parts.items() if state != "ok"]
    first, *others = report["overview"]["planners"]
    lines = [
        first["line"],
        *(f"{each['pool']}: {each['line']}" for each in others if each["outcomes"]),
        f"{report['ready']['status']}" + (f"; away: {', '.join(away)}" if away else f": {', '.join(parts)}"),
        f"{totals['requests']} requests, {totals['errors']} failed, {totals['fallbacks']} fallbacks, "
        f"{totals['capped']} capped, ${nano_to_usd(totals['cost_nano'])}, p95 {_ms(totals['latency_p95_ms'])}",
    ]
    serving = [
        f"{each['version']} ({each['state']})" for each in report["policies"] if each["state"] in ("live", "canary")
    ]
    running = [f"{each['id']} ({each['state']})" for each in report["jobs"] if each["state"] in ("queued", "running")]
    lines += [f"versions: {', '.join(serving) or 'none'}", f"jobs: {', '.join(running) or 'none under way'}"]
    workers = [
        {**row, "p95_ms": _ms(row["latency_p95_ms"]), "usd": nano_to_usd(row["cost_nano"])}
        for row in report["overview"]["by_worker"]
    ]
    return "\n".join([*lines, *([table(WORKER_COLUMNS, workers)] if workers else [])])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
