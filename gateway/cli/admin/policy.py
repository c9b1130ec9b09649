"""`baton policy`: the versions of a policy, from candidate to live.

The audit has every change, with the admin key that made it and --why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, add_why, aligned, show, table
from gateway.errors import BadRequest, BatonError, ConfigError

ROUTES = "/admin/policies"
TIMEOUT_S = 600.0  # publishing copies and checks a directory, which may be large
REPORT_BYTES_MAX = 16 << 20
EXIT_GATE_REFUSED = 4
COLUMNS = ("version", "state", "percent", "parent", "rollouts", "gated", "held", "changed_at")
SHOWN_EVENTS = 10
SUMMARIES = {
    "list": "every version, the comparison in progress, the latest events",
    "show": "one version: its manifest, gate report, shadow plans and events",
    "publish": "copy a policy directory in, as a candidate",
    "shadow": "let a candidate plan beside the live version, without effect",
    "canary": "give a version a share of requests",
    "promote": "make the canary live",
    "retire": "retire a candidate, a shadow or a canary",
    "rollback": "roll back the canary, else the live version: the one before it is live again",
}


def add(parser: argparse.ArgumentParser) -> Any:
    """Arguments: one action each. Returns the group that further actions are added to."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in SUMMARIES.items():
        action = actions.add_parser(name, help=summary)
        if name == "publish":
            action.add_argument("directory", type=Path, help="a directory on the gateway's host")
            action.add_argument("--gate", type=Path, metavar="FILE", help="the gate's report, JSON")
            action.add_argument("--force", action="store_true", help="publish what the gate refused; needs --why")
        elif name == "rollback":
            action.add_argument("version", metavar="NAME@N", nargs="?", default="conductor")
        elif name != "list":
            action.add_argument("version", metavar="NAME@N")
        if name == "canary":
            action.add_argument("percent", type=int, choices=(1, 5, 25, 100))
        if name not in ("list", "show"):
            add_why(action)
        add_admin(action)
    return actions


def run(options: argparse.Namespace) -> int:
    """One action; print a table, a line, or JSON. 4 where the gate refused the version."""
    try:
        reply = ACTIONS.get(options.action, _move)(
            AdminClient(options.url, options.key_file, timeout_s=TIMEOUT_S), options
        )
    except BatonError as error:
        if error.code != "gate_refused":
            raise
        print(error.message, file=sys.stderr)
        return EXIT_GATE_REFUSED
    show(options, reply, partial(_text, options.action))
    return 0


def _list(admin: AdminClient, options: argparse.Namespace) -> Any:
    return admin.ask("GET", ROUTES)


def _show(admin: AdminClient, options: argparse.Namespace) -> Any:
    return admin.ask("GET", f"{ROUTES}/{options.version}")


def _publish(admin: AdminClient, options: argparse.Namespace) -> Any:
    body = {"directory": str(options.directory.resolve()), "force": options.force, "why": options.why}
    if options.gate is not None:
        try:
            body["gate"] = json.loads(_read(options.gate, REPORT_BYTES_MAX))
        except ValueError:
            raise BadRequest(f"{options.gate}: not a gate's report: it is not JSON") from None
    return admin.ask("POST", ROUTES, body)


def _move(admin: AdminClient, options: argparse.Namespace) -> Any:
    body = {"why": options.why} | ({"percent": options.percent} if options.action == "canary" else {})
    return admin.ask("POST", f"{ROUTES}/{options.version}/{options.action}", body)


ACTIONS: dict[str, Callable[[AdminClient, argparse.Namespace], Any]] = {
    "list": _list,
    "show": _show,
    "publish": _publish,
}


def _read(path: Path, bytes_max: int) -> str:
    try:
        if path.stat().st_size > bytes_max:
            raise ConfigError(f"{path}: over {bytes_max} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: {what}") from None


def _text(action: str, reply: Any) -> str:
    if action == "show":
        return json.dumps(reply, indent=2)
    if action != "list":
        share = f" of {reply['percent']} %" if reply["percent"] else ""
        return f"{reply['version']} is {reply['state']}{share}"
    lines = [table(COLUMNS, reply["data"])]
    lines += [_compared(one) for one in reply["compared"]]
    events = [
        (one["at"][:19], one["version"], one["what"], one["who"], one["why"] + " (forced)" * one["forced"])
        for one in reply["events"][:SHOWN_EVENTS]
    ]
    return "\n".join([*lines, "", aligned(events)]) if events else lines[0]


def _compared(one: Mapping[str, Any]) -> str:
    rates = {"validity": one["validity"], "outcome": one["outcome_mean"]}
    figures = [f"{name} {value:.3f}" for name, value in rates.items() if value is not None]
    if one["cost_nano_mean"] is not None:
        figures.append(f"${one['cost_nano_mean'] / 1e9:.6f} a request")
    counts = f"{one['requests']} requests, {one['judged']} judged"
    return f"  {one['version']}: {counts}; {', '.join(figures) or 'nothing yet'}"
