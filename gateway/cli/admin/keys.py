"""Create, change, rotate, list and revoke API keys.

Works on the database of the running gateway (found through the data directory) or on DATABASE_URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from gateway.cli.admin.show import ABSENT, add_limits, given, services_of, table
from gateway.cli.process.keyring import key_admin, person
from gateway.config import settings as config
from gateway.config.settings import Services
from gateway.service.admin.keys import CHANGEABLE, CREATABLE, GRACE_S, describe

COLUMNS = ("id", "class", "name", "org", "pools", "budget_usd", "rpm", "revoked_at")


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
        add_limits(action)
        _add_rights(action)
    update.add_argument(
        "--train", dest="train", action="store_true", default=ABSENT, help="its traffic may be in training exports"
    )
    rotate = actions.add_parser("rotate", help="give a key a new secret, shown this once")
    rotate.add_argument(
        "--grace-s", type=int, default=GRACE_S, metavar="N", help="seconds for which the old secret works (a day)"
    )
    revoke = actions.add_parser("revoke", help="end a key; it stops working within a second")
    show = actions.add_parser("show", help="one key")
    for action in (update, rotate, revoke, show):
        action.add_argument("id", help="the 12 characters in the middle of the key, or the whole key")
    for action in (create, update, rotate, revoke):
        action.add_argument("--why", default="", help="kept in the audit")
    for action in (
        create,
        update,
        rotate,
        revoke,
        show,
        actions.add_parser("list", help="every key, revoked ones too"),
    ):
        action.add_argument("--json", action="store_true", help="for programs")


def _add_rights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pools", type=_names, default=ABSENT, metavar="A,B", help="pools it may use; none: the default one"
    )
    parser.add_argument(
        "--workers", type=_names, default=ABSENT, metavar="A,B", help="workers it may use; none: all of them"
    )
    parser.add_argument("--caps", type=_object, default=ABSENT, metavar="JSON", help='lower caps, e.g. {"rounds": 1}')
    parser.add_argument("--log-mode", choices=("full", "redacted", "metadata"), default=ABSENT)
    parser.add_argument(
        "--no-train", dest="train", action="store_false", default=ABSENT, help="its traffic is in no training export"
    )


def run(options: argparse.Namespace) -> int:
    """One action; what it prints is a line, a table, or JSON."""
    services, _ = services_of(config.load())
    found = asyncio.run(ACTIONS[options.action](services, options))
    print(json.dumps(found) if options.json else _text(options.action, found))
    return 0


async def _create(services: Services, options: argparse.Namespace) -> dict[str, Any]:
    fields = given(options, sorted(CREATABLE - {"name", "key_class"}))
    async with key_admin(services) as (admin, _):
        row, secret = await admin.create_key(options.name, options.key_class, act=person(options.why), **fields)
    return {**describe(row), "key": secret}


async def _update(services: Services, options: argparse.Namespace) -> dict[str, Any]:
    async with key_admin(services) as (admin, _):
        fields = given(options, sorted(CHANGEABLE))
        return describe(await admin.update_key(_public_id(options.id), fields, person(options.why)))


async def _rotate(services: Services, options: argparse.Namespace) -> dict[str, Any]:
    async with key_admin(services) as (admin, _):
        row, secret = await admin.rotate_key(_public_id(options.id), options.grace_s, person(options.why))
    return {**describe(row), "key": secret}


async def _list(services: Services, options: argparse.Namespace) -> list[dict[str, Any]]:
    async with key_admin(services) as (admin, _):
        return [describe(row) for row in await admin.list_keys()]


async def _show(services: Services, options: argparse.Namespace) -> dict[str, Any]:
    async with key_admin(services) as (admin, _):
        return describe(await admin.get_key(_public_id(options.id)))


async def _revoke(services: Services, options: argparse.Namespace) -> dict[str, Any]:
    async with key_admin(services) as (admin, _):
        return describe(await admin.revoke_key(_public_id(options.id), person(options.why)))


ACTIONS = {"create": _create, "update": _update, "rotate": _rotate, "list": _list, "show": _show, "revoke": _revoke}


def _public_id(text: str) -> str:
    return text.split("_")[2] if text.count("_") == 3 else text


def _text(action: str, found: Any) -> str:
    if action == "list":
        return table(COLUMNS, found)
    if action in ("create", "rotate"):
        until = f"; the old one works until {found['previous_until']}" if action == "rotate" else ""
        shown = f"({found['class']}, `{found['name']}`); the secret is shown this once{until}"
        return f"{found['key']}\nkey {found['id']} {shown}"
    if action == "revoke":
        return f"key {found['id']} was revoked at {found['revoked_at']}"
    return json.dumps(found, indent=2)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"`{text}` is not a JSON object")
    return found
