"""`baton sessions`: the budgets of runs. List and show them, raise their limits, freeze, thaw and kill them."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import ABSENT, add_admin, add_why, given, show, table
from gateway.core.money.sessions import LIMITS

ROUTE = "/admin/sessions"
COLUMNS = ("key", "id", "state", "usd", "calls", "minutes", "ends_at")
STATE_OF = {"freeze": "frozen", "thaw": "open", "kill": "killed"}
LIMIT_HELP = {"usd": "dollars", "calls": "worker calls", "minutes": "minutes from its first use"}
ACTIONS = {
    "list": "the latest sessions, of all keys or of one",
    "show": "one session, with what is left of it",
    "raise": "set its limits; they count from its next request on",
    "freeze": "let no further request run in it",
    "thaw": "let requests run in it again",
    "kill": "end it for good, and cancel its requests under way",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary)
        if name == "list":
            action.add_argument("--key", metavar="ID", help="of this key alone")
        else:
            action.add_argument("key", help="the key's id, as `baton keys list` shows it")
            action.add_argument("id", help="the session's id, as its client sends it")
        if name == "raise":
            for limit in LIMITS:
                text = f"{LIMIT_HELP[limit]} in all; none: not limited"
                action.add_argument(f"--{limit}", metavar="N", type=_limit, default=ABSENT, help=text)
        if name not in ("list", "show"):
            add_why(action)
        add_admin(action)


def run(options: argparse.Namespace) -> int:
    """One action; print a line, a table, or JSON."""
    reply = _ask(AdminClient(options.url, options.key_file), options)
    show(options, reply, partial(_text, options.action))
    return 0


def _ask(admin: AdminClient, options: argparse.Namespace) -> Any:
    if options.action == "list":
        query = f"?{urlencode({'key': options.key})}" if options.key else ""
        return admin.ask("GET", f"{ROUTE}{query}")["data"]
    path = f"{ROUTE}/{quote(options.key, safe='')}/{quote(options.id, safe='')}"
    if options.action == "show":
        return admin.ask("GET", path)
    change = given(options, LIMITS) if options.action == "raise" else {"state": STATE_OF[options.action]}
    return admin.ask("PATCH", path, {**change, "why": options.why})


def _text(action: str, reply: Any) -> str:
    if action == "list":
        return table(COLUMNS, [row | {name: _left(row[name]) for name in LIMITS} for row in reply])
    if action == "show":
        return json.dumps(reply, indent=2)
    left = ", ".join(f"{name} {_left(reply[name])}" for name in LIMITS)
    return f"session {reply['id']} of key {reply['key']} is {reply['state']}; {left}"


def _left(used: dict[str, Any]) -> str:
    """`0.94 of 1 left`, or what was spent where there is no limit."""
    return f"{used['spent']} spent" if used["limit"] is None else f"{used['left']} of {used['limit']} left"


def _limit(text: str) -> Any:
    if text == "none":
        return None
    return int(text) if text.isdigit() else text
