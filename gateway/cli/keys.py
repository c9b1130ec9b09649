"""Create, list and revoke API keys.

Works on the database of the running gateway (found through the data directory) or on DATABASE_URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from gateway import config
from gateway.cli.datadir import FACTS, DataDir
from gateway.cli.keyring import key_admin
from gateway.cli.services import pepper_of
from gateway.config import Services, Settings
from gateway.errors import ConfigError
from gateway.service.admin import describe

COLUMNS = ("id", "class", "name", "pools", "budget_usd", "rpm", "revoked_at")


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: one action each for create, list and revoke."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a key; its secret is shown this once")
    create.add_argument("--name", required=True, help="what it is for")
    create.add_argument("--class", dest="key_class", choices=("data", "admin"), default="data")
    create.add_argument("--budget-usd", metavar="X", help="dollars in all; none: not limited")
    create.add_argument("--rpm", type=int, metavar="N", help="requests a minute")
    create.add_argument("--tpm", type=int, metavar="N", help="tokens a minute")
    create.add_argument("--concurrency", type=int, metavar="N", help="requests at the same time")
    create.add_argument(
        "--pools", type=_names, default=(), metavar="A,B", help="pools it may use; none: the default one"
    )
    create.add_argument(
        "--workers", type=_names, default=(), metavar="A,B", help="workers it may use; none: all of them"
    )
    create.add_argument("--caps", type=_object, metavar="JSON", help='lower caps, e.g. {"rounds": 1}')
    create.add_argument("--org", default="default", help="the organisation its spending is counted under")
    create.add_argument("--log-mode", choices=("full", "redacted", "metadata"), default="full")
    create.add_argument("--no-train", dest="train", action="store_false", help="its traffic is in no training export")
    revoke = actions.add_parser("revoke", help="end a key; it stops working within a second")
    revoke.add_argument("id", help="the 12 characters in the middle of the key, or the whole key")
    for action in (create, revoke, actions.add_parser("list", help="every key, revoked ones too")):
        action.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """One action; what it prints is a line, a table, or JSON."""
    found = asyncio.run(ACTIONS[options.action](_services(config.load()), options))
    print(json.dumps(found) if options.json else _text(options.action, found))
    return 0


async def _create(services: Services, options: argparse.Namespace) -> dict[str, Any]:
    names = ("budget_usd", "rpm", "tpm", "concurrency", "pools", "workers", "caps", "org", "log_mode", "train")
    async with key_admin(services) as (admin, _):
        row, secret = await admin.create_key(
            options.name, options.key_class, **{name: getattr(options, name) for name in names}
        )
    return {**describe(row), "key": secret}


async def _list(services: Services, options: argparse.Namespace) -> list[dict[str, Any]]:
    async with key_admin(services) as (admin, _):
        return [describe(row) for row in await admin.list_keys()]


async def _revoke(services: Services, options: argparse.Namespace) -> dict[str, Any]:
    public_id = options.id.split("_")[2] if options.id.count("_") == 3 else options.id
    async with key_admin(services) as (admin, _):
        return describe(await admin.revoke_key(public_id))


ACTIONS = {"create": _create, "list": _list, "revoke": _revoke}


def _services(settings: Settings) -> Services:
    """What key management needs of an installation, running or not. Raises ConfigError that says how to get one."""
    data = DataDir(settings.data_dir)
    facts = data.read(FACTS) or {}
    database_url = settings.database_url or facts.get("database_url")
    if not database_url:
        raise ConfigError(f"no gateway serves from {data.path}: start it (`make serve`), or set DATABASE_URL")
    pool_file = settings.pool or Path(facts.get("pool_file") or data.path / "arena-pool.yaml")
    return Services(database_url, redis_url="", pool_file=pool_file, pepper=pepper_of(settings, data))


def _text(action: str, found: Any) -> str:
    if action == "create":
        return f"{found['key']}\nkey {found['id']} ({found['class']}, `{found['name']}`); the secret is shown this once"
    if action == "revoke":
        return f"key {found['id']} was revoked at {found['revoked_at']}"
    rows = [COLUMNS, *(tuple(_cell(key[name]) for name in COLUMNS) for key in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value) or "-"
    return "-" if value is None else str(value)


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
