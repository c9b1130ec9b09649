"""The first stage of a job, as a program: what it trains on is written down, so that a resumed job sees the same.

For `logged` the selected rows become a file; for the others the files that are named get their hashes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.adapters.engines.sealed import file_sha256
from gateway.core.policies.jobs import option
from gateway.errors import ConfigError
from policy.dataset.cli import add_filters, add_rules, rules_of, selection_of
from policy.dataset.export import export, summary

ROWS = "rows.parquet"
FILES = ("--data", "--prices", "--prompts")


def select(asked: Mapping[str, Any]) -> dict[str, Any]:
    """`asked`: {arguments, database_url, work}. Returns {arguments (for the trainer), inputs: {path: sha256}, report}.
    Raises as `dataset.export`, and ConfigError for a file that cannot be read."""
    arguments, work = list(asked["arguments"]), Path(asked["work"])
    if option(arguments, "--env") != "logged":
        return {"arguments": arguments, "inputs": inputs(arguments), "report": None}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_filters(parser)
    add_rules(parser)
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    rows = work / ROWS
    report = export(asked["database_url"], selection_of(options), rules_of(options), rows, split=None)
    sys.stderr.write(f"{summary(report, rows)}\n")
    return {"arguments": [*rest, "--export", str(rows)], "inputs": {str(rows): sha256(rows)}, "report": asdict(report)}


def inputs(arguments: Sequence[str]) -> dict[str, str]:
    """The files that the arguments name, with their hashes. Raises ConfigError naming one that cannot be read."""
    named = [value for name in FILES if (value := option(arguments, name))]
    return {str(Path(path).resolve()): sha256(Path(path)) for path in named}


def sha256(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that the worker can read") from None


def changed(inputs: Mapping[str, str]) -> str | None:
    """The first file that is not what it was."""
    return next((path for path, was in inputs.items() if sha256(Path(path)) != was), None)


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".partial")
    with part.open("w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
