"""`baton keys`: make, change, rotate, list and revoke API keys."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from gateway.cli.admin.client import AdminClient
from gateway.cli.admin.show import ABSENT, add_admin, add_limits, add_why, given, show, table
from gateway.service.admin.keys import CHANGEABLE, CREATABLE, GRACE_S

ROUTE = "/admin/keys"
COLUMNS = ("id", "class", "role", "name", "org", "pools", "budget_usd", "rpm", "revoked_at")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: one action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a key; its secret is shown this once")
    create.add_argument("--name", required=True, help="what it is for")
    create.add_argument("--class", dest="key_class", choices=("data", "admin"), default="data")
    create.add_argument("--org", default="default", help="its organisation, whose limits it shares")
    update = actions.add_parser("update", help="change a key; it counts within a second")
    update.add_argument("--name", default=ABSENT, help="what it is for")
    for action in (create, update):
        action.add_argument(
            "--role",
            choices=("admin", "operator", "auditor"),
            default=ABSENT,
            help="of an admin key: operator (all but admin keys), auditor (reads only), admin",
        )
        add_limits(action)
        _add_rights(action)
    update.add_argument(
        "--train", dest="train", action="store_true", default=ABSENT, help="training exports may hold its traffic"
    )
    update.add_argument("--judges", dest="judges", action="store_true", default=ABSENT, help="its outcomes are taken")
    update.add_argument(
        "--signals", dest="signals", action="store_true", default=ABSENT, help="the judge and signals judge its traffic"
    )
    rotate = actions.add_parser("rotate", help="give a key a new secret, shown this once")
    rotate.add_argument(
        "--grace-s", type=int, default=GRACE_S, metavar="N", help="seconds for which the old secret works (a day)"
    )
    revoke = actions.add_parser("revoke", help="end a key; it stops working within a second")
    one = actions.add_parser("show", help="one key")
    for action in (update, rotate, revoke, one):
        action.add_argument("id", type=_public_id, help="the 12 characters in the middle of the key, or the whole key")
    for action in (create, update, rotate, revoke):
        add_why(action)
    every = actions.add_parser("list", help="every key, revoked ones too, newest first")
    every.add_argument("--text", default="", help="only keys with it in their id, name or organisation")
    for action in (create, update, rotate, revoke, one, every):
        add_admin(action)


def _add_rights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pools",
        type=_names,
        default=ABSENT,
        metavar="A,B",
        help="pools it may use; none: the default one; '*': all of them",
    )
    parser.add_argument(
        "--workers", type=_names, default=ABSENT, metavar="A,B", help="workers it may use; none: all of them"
    )
    parser.add_argument("--caps", type=_object, default=ABSENT, metavar="JSON", help='lower caps, e.g. {"rounds": 1}')
    parser.add_argument(
        "--worth",
        type=_object,
        default=ABSENT,
        metavar="JSON",
        help='what a right answer is worth, e.g. {"usd": 0.05, "seconds": 60}',
    )
    parser.add_argument("--log-mode", choices=("full", "redacted", "metadata"), default=ABSENT)
    parser.add_argument(
        "--no-train", dest="train", action="store_false", default=ABSENT, help="no training export holds its traffic"
    )
    parser.add_argument(
        "--no-judges", dest="judges", action="store_false", default=ABSENT, help="its outcomes are refused"
    )
    parser.add_argument(
        "--no-signals", dest="signals", action="store_false", default=ABSENT, help="only posted outcomes judge it"
    )


def run(options: argparse.Namespace) -> int:
    """One action; print a line, a table, or JSON."""
    reply = _ask(AdminClient(options.url, options.key_file), options)
    show(options, reply, partial(_text, options.action))
    return 0


def _ask(admin: AdminClient, options: argparse.Namespace) -> Any:
    if options.action == "list":
        return list(_pages(admin, options.text))
    if options.action == "create":
        return admin.ask("POST", ROUTE, {**given(options, CREATABLE), "why": options.why})
    path = f"{ROUTE}/{quote(options.id, safe='')}"
    match options.action:
        case "update":
            return admin.ask("PATCH", path, {**given(options, CHANGEABLE), "why": options.why})
        case "rotate":
            return admin.ask("POST", f"{path}/rotate", {"grace_s": options.grace_s, "why": options.why})
        case "revoke":
            return admin.ask("DELETE", f"{path}?{urlencode({'why': options.why})}")
        case _:
            return admin.ask("GET", path)


def _pages(admin: AdminClient, text: str) -> Iterator[Any]:
    query = {"q": text} if text else {}
    while True:
        page = admin.ask("GET", f"{ROUTE}?{urlencode(query)}")
        yield from page["data"]
        if page["next"] is None:
            return
        query["before"] = page["next"]


def _text(action: str, reply: Any) -> str:
    if action == "list":
        return table(COLUMNS, reply)
    if action in ("create", "rotate"):
        until = f"; the old one works until {reply['previous_until']}" if action == "rotate" else ""
        notice = f"({reply['class']}, `{reply['name']}`); the secret is shown this once{until}"
        return f"{reply['key']}\nkey {reply['id']} {notice}"
    if action == "revoke":
        return f"key {reply['id']} was revoked at {reply['revoked_at']}"
    return json.dumps(reply, indent=2)


def _public_id(text: str) -> str:
    return text.split("_")[2] if text.count("_") == 3 else text


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"`{text}` is not a JSON object")
    return value
