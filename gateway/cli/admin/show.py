"""What the commands of administration share: their common arguments, and tables as text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def add_admin(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that asks the admin API: where it is, and how to print its reply."""
    parser.add_argument("--url", help="the admin API; default: of the gateway on the data directory")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="a file with an admin key; --url needs it")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_why(parser: argparse.ArgumentParser) -> None:
    """The reason of a change."""
    parser.add_argument("--why", default="", help="the reason, written to the audit")


def add_limits(parser: argparse.ArgumentParser) -> None:
    """An argument for each limit; one that is not given is not in the options. `none` lifts a limit."""
    for name, what in MONEY.items():
        parser.add_argument(name, metavar="X", type=_or_none, default=ABSENT, help=f"{what}; none: not limited")
    for name, what in COUNTS.items():
        parser.add_argument(name, metavar="N", type=_count, default=ABSENT, help=f"{what}; none: not limited")


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the named options that were given."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def show(options: argparse.Namespace, reply: Any, text: Callable[[Any], str]) -> None:
    """Print a reply: as JSON where the options say so, else as text for people."""
    print(json.dumps(reply) if options.json else text(reply), flush=True)


def table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """The named columns of the rows, under their names."""
    return aligned([columns, *([_cell(row[name]) for name in columns] for row in rows)])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return "-" if value in (None, "") else str(value)


def _or_none(text: str) -> str | None:
    return None if text == "none" else text


def _count(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is neither a whole number nor `none`") from None
