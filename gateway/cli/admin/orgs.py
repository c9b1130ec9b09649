"""`baton orgs` and `baton credits`: the limits of organisations, and money that is given back."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import add_admin, add_limits, add_why, given, show, table
from gateway.core.money.ledger import WINDOWS
from gateway.service.admin.limits import FIELDS

ORGS = "/admin/orgs"
CREDITS = "/admin/credits"
UNCERTAIN = "/admin/uncertain"
UNCERTAIN_COLUMNS = ("charge", "at", "usd", "credited_usd", "left_usd", "rollout_id", "scopes")
ORG_COLUMNS = ("name", "budget_usd", "budget_month_usd", "budget_day_usd", "rpm", "retention_days", "closed_at")
CREDIT_COLUMNS = ("id", "at", "usd", "charge", "scopes", "by", "why")
ACTIONS = {
    "create": "make an organisation",
    "list": "every organisation, closed ones too",
    "show": "one organisation",
    "update": "change its limits; they count within a second",
    "close": "end it for good: its keys stop working within a second",
}


def add_orgs(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baton orgs`: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary)
        if name != "list":
            action.add_argument("name", help="letters, digits, dots, dashes and underscores")
        if name in ("create", "update"):
            add_limits(action)
        if name in ("create", "update", "close"):
            add_why(action)
        add_admin(action)


def run_orgs(options: argparse.Namespace) -> int:
    """One action on organisations; print a line, a table, or JSON."""
    reply = _ask(AdminClient(options.url, options.key_file), options)
    show(options, reply, partial(_org_text, options.action))
    return 0


def _ask(admin: AdminClient, options: argparse.Namespace) -> Any:
    if options.action == "list":
        return admin.ask("GET", ORGS)["data"]
    path = f"{ORGS}/{quote(options.name, safe='')}"
    match options.action:
        case "create":
            return admin.ask("POST", ORGS, {"name": options.name, **given(options, FIELDS), "why": options.why})
        case "update":
            return admin.ask("PATCH", path, {**given(options, FIELDS), "why": options.why})
        case "close":
            return admin.ask("POST", f"{path}/close?{urlencode({'why': options.why})}")
        case _:
            return admin.ask("GET", path)


def _org_text(action: str, reply: Any) -> str:
    if action == "list":
        return table(ORG_COLUMNS, reply)
    if action == "close":
        return f"organisation {reply['name']} was closed at {reply['closed_at']}"
    return json.dumps(reply, indent=2)


def add_credits(parser: argparse.ArgumentParser) -> None:
    """Arguments of `baton credits`: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    give = actions.add_parser("give", help="give a charge back, or top a budget up")
    what = give.add_mutually_exclusive_group(required=True)
    what.add_argument("--charge", metavar="ID", help="of a rollout, completion or hold: give it back")
    what.add_argument("--key", metavar="ID", help="top up the budget of a key")
    what.add_argument("--org", metavar="NAME", help="top up the budget of an organisation")
    give.add_argument("--usd", metavar="X", help="dollars; default, for a charge: all that is left of it")
    give.add_argument("--window", choices=WINDOWS, help="the budget to top up: in all (life), this month, today")
    give.add_argument("--once", metavar="NAME", help="a credit of this name is given once, however often it is sent")
    give.add_argument("--why", default="", help="the reason, written to the ledger and to the audit")
    back = actions.add_parser("give-back", help="give all of an uncertain charge back, once")
    back.add_argument("charge", help="the hold, as `baton credits uncertain` shows it")
    back.add_argument("--why", default="", help="the reason, written to the ledger and to the audit")
    uncertain = actions.add_parser("uncertain", help="charges that no reply confirmed")
    for action in (give, back, uncertain, actions.add_parser("list", help="the latest credits")):
        add_admin(action)


def run_credits(options: argparse.Namespace) -> int:
    """One action on credits; print a line, a table, or JSON."""
    admin = AdminClient(options.url, options.key_file)
    if options.action == "list":
        show(options, admin.ask("GET", CREDITS)["data"], partial(table, CREDIT_COLUMNS))
        return 0
    if options.action == "uncertain":
        show(options, admin.ask("GET", UNCERTAIN)["data"], partial(table, UNCERTAIN_COLUMNS))
        return 0
    if options.action == "give-back":
        path = f"{UNCERTAIN}/{quote(options.charge, safe='')}/credit"
        show(options, admin.ask("POST", path, {"why": options.why}), _credit_text)
        return 0
    names = ("charge", "key", "org", "usd", "window", "why")
    body = {name: getattr(options, name) for name in names if getattr(options, name)}
    headers = {"idempotency-key": options.once} if options.once else {}
    show(options, admin.ask("POST", CREDITS, body, headers), _credit_text)
    return 0


def _credit_text(reply: dict[str, Any]) -> str:
    when = "" if reply["created"] else " before"
    scopes = ", ".join(reply["scopes"])
    return f"credit {reply['id']}: ${reply['usd']} was given{when} to {scopes}; counts {reply['counts']}"
