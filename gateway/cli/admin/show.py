"""What the commands of administration share: limits as arguments, the database they work on, tables as text."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.cli.process.datadir import FACTS, DataDir
from gateway.cli.process.services import pepper_of
from gateway.config.settings import Services, Settings
from gateway.errors import ConfigError

ABSENT = argparse.SUPPRESS
MONEY = {
    "--budget-usd": "dollars in all",
    "--budget-month-usd": "dollars each calendar month (UTC)",
    "--budget-day-usd": "dollars each day (UTC)",
    "--user-budget-usd": "dollars in all of each end user",
    "--user-budget-month-usd": "dollars each month of each end user",
    "--user-budget-day-usd": "dollars each day of each end user",
}
COUNTS = {
    "--rpm": "requests a minute",
    "--tpm": "tokens a minute",
    "--concurrency": "requests at the same time",
    "--retention-days": "days after which its rollouts are deleted",
}


def add_limits(parser: argparse.ArgumentParser) -> None:
    """An argument for each limit; one that is not given is not in the options. `none` lifts a limit."""
    for name, what in MONEY.items():
        parser.add_argument(name, metavar="X", type=_or_none, default=ABSENT, help=f"{what}; none: not limited")
    for name, what in COUNTS.items():
        parser.add_argument(name, metavar="N", type=_count, default=ABSENT, help=f"{what}; none: not limited")


def given(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the named options that were given."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def services_of(settings: Settings) -> tuple[Services, DataDir]:
    """What administration needs of an installation, running or not. Raises ConfigError that says how to get one."""
    data = DataDir(settings.data_dir)
    facts = data.read(FACTS) or {}
    database_url = settings.database_url or facts.get("database_url")
    if not database_url:
        raise ConfigError(f"no gateway serves from {data.path}: start it (`make serve`), or set DATABASE_URL")
    pool_file = settings.pool or Path(facts.get("pool_file") or data.path / "arena-pool.yaml")
    return Services(database_url, redis_url="", pool_file=pool_file, pepper=pepper_of(settings, data)), data


def table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under their columns' names."""
    cells = [tuple(columns), *(tuple(_cell(row[name]) for name in columns) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _or_none(text: str) -> str | None:
    return None if text == "none" else text


def _count(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number, and not `none`") from None
