"""List, publish, shadow, canary, promote and roll back policy versions.

Asks the admin API of the running gateway, found through the data directory, or the one at --url with the key in
--key-file. Every change is written to the audit with that key's id and --why.
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
TIMEOUT_S = 600.0  # a large directory is copied and checked meanwhile
REPORT_BYTES_MAX = 16 << 20
EXIT_GATE_REFUSED = 4
COLUMNS = ("version", "state", "percent", "parent", "rollouts", "gated", "held", "changed_at")
SHOWN_EVENTS = 10


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = [actions.add_parser("list", help="every version, the comparison under way, the latest events")]
    for name, told in (
        ("show", "one version: its manifest, gate report, shadow plans and events"),
        ("publish", "copy a policy directory in, as a candidate"),
        ("shadow", "let a candidate plan beside the live version, without effect"),
        ("canary", "give it a share of requests"),
        ("promote", "make the canary live"),
        ("retire", "take a candidate, a shadow or a canary out"),
        ("rollback", "take back the canary, else the live version: the one before it is live again"),
    ):
        made.append(actions.add_parser(name, help=told))
        if name == "publish":
            made[-1].add_argument("directory", type=Path, help="on the gateway's host")
            made[-1].add_argument("--gate", type=Path, metavar="FILE", help="the gate's report, JSON")
            made[-1].add_argument("--force", action="store_true", help="what the gate refused; needs --why")
        else:
            optional = {"nargs": "?", "default": "conductor"} if name == "rollback" else {}
            made[-1].add_argument("version", metavar="NAME@N", **optional)  # type: ignore[arg-type]
        if name == "canary":
            made[-1].add_argument("percent", type=int, choices=(1, 5, 25, 100))
        if name != "show":
            add_why(made[-1])
    for action in made:
        add_admin(action)


def run(options: argparse.Namespace) -> int:
    """One action; what it prints is a table, a line, or JSON. 4 where the gate refused what was to be published."""
    try:
        found = ACTIONS.get(options.action, _move)(
            AdminClient(options.url, options.key_file, timeout_s=TIMEOUT_S), options
        )
    except BatonError as error:
        if error.code != "gate_refused":
            raise
        print(error.message, file=sys.stderr)
        return EXIT_GATE_REFUSED
    show(options, found, partial(_text, options.action))
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
            raise BadRequest(f"{options.gate}: not a gate's report (it is no JSON)") from None
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


def _text(action: str, found: Any) -> str:
    if action == "show":
        return json.dumps(found, indent=2)
    if action != "list":
        share = f" of {found['percent']} %" if found["percent"] else ""
        return f"{found['version']} is {found['state']}{share}"
    lines = [table(COLUMNS, found["data"])]
    lines += [_compared(one) for one in found["compared"]]
    events = [
        (one["at"][:19], one["version"], one["what"], one["who"], one["why"] + " (forced)" * one["forced"])
        for one in found["events"][:SHOWN_EVENTS]
    ]
    return "\n".join([*lines, "", aligned(events)]) if events else lines[0]


def _compared(one: Mapping[str, Any]) -> str:
    rates = {"validity": one["validity"], "outcome": one["outcome_mean"]}
    told = [f"{name} {value:.3f}" for name, value in rates.items() if value is not None]
    if one["cost_nano_mean"] is not None:
        told.append(f"${one['cost_nano_mean'] / 1e9:.6f} a request")
    return f"  {one['version']}: {one['requests']} requests, {one['judged']} judged; {', '.join(told) or 'nothing yet'}"
