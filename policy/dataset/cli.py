"""The log as training data: `traces export` writes it as Parquet, or in the shapes of verl and ART."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from gateway.core.pool.workers import PoolFile
from gateway.errors import ConfigError
from policy.dataset.export import FORMATS, export, summary
from policy.dataset.rules import Rules
from policy.dataset.select import PLANNERS, Selection, parse_labels, parse_tags, parse_time
from policy.reward import RewardSettings
from policy.spec import first_of

POOL_FILE_BYTES_MAX = 2**20
URL_CHARS_MAX = 4096


def add(parser: argparse.ArgumentParser) -> None:
    """Arguments: the action, what is selected, the rules, the file."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    one = actions.add_parser("export", help="planning calls with tokens, log-probs, steps and outcomes, as a file")
    one.add_argument("--out", type=Path, required=True, metavar="FILE", help="written whole, or not at all")
    one.add_argument(
        "--format", choices=FORMATS, default="parquet", help="default parquet; hf is Parquet; others JSONL"
    )
    one.add_argument("--json", action="store_true", help="print the report for programs")
    add_source(one)
    add_filters(one)
    add_rules(one)
    one.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a weight of the reward, for every format but parquet: cost_per_usd, missed_penalty, …; may be repeated",
    )
    one.add_argument("--split", choices=("train", "validation"), help="write only this side (default: both, marked)")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Where the log is."""
    parser.add_argument(
        "--database-url", required=True, metavar="URL", help="postgresql://…, or - to read it from standard input"
    )


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Arguments that become a Selection; those that may be repeated match any of what is given."""
    group = parser.add_argument_group("selection")
    group.add_argument("--since", metavar="TIME", help="ISO 8601; UTC unless it says otherwise")
    group.add_argument("--until", metavar="TIME", help="before this time")
    for name, example in (("policy-version", "conductor@7"), ("pool", "NAME"), ("key", "ID"), ("planner", "NAME")):
        group.add_argument(f"--{name}", action="append", default=[], metavar=example, help="may be repeated")
    group.add_argument("--tag", action="append", default=[], metavar="KEY=VALUE", help="all of them must match")
    group.add_argument(
        "--outcome-source", action="append", default=[], metavar="NAME", help="only these count, the first decides"
    )
    group.add_argument(
        "--label", action="append", default=[], metavar="NAME=X", help="outcomes with it count as X; or `standard`"
    )
    group.add_argument("--min-outcomes", type=int, default=1, metavar="N", help="default 1; 0 keeps unjudged ones")


def add_rules(parser: argparse.ArgumentParser) -> None:
    """Arguments that become Rules."""
    group = parser.add_argument_group("rules")
    group.add_argument("--key-share", type=float, metavar="X", help="rows one key may hold; from 20 keys on 0.05")
    group.add_argument("--validation-share", type=float, default=0.0, metavar="X", help="the latest X of the rows")
    group.add_argument("--split-at", metavar="TIME", help="what began from then on validates")
    group.add_argument("--pool-file", type=Path, metavar="FILE", help="today's pool: other worker versions are stale")
    group.add_argument("--keep-stale", action="store_true", help="whatever the pool file says")
    group.add_argument("--without-tokens", action="store_true", help="keep rows that can be read but not reweighted")


def selection_of(options: argparse.Namespace) -> Selection:
    """Raises ConfigError naming the flag."""
    return Selection(
        since=parse_time(options.since, "--since") if options.since else None,
        until=parse_time(options.until, "--until") if options.until else None,
        policy_versions=tuple(options.policy_version),
        pools=tuple(options.pool),
        keys=tuple(options.key),
        tags=parse_tags(options.tag),
        planners=tuple(options.planner) or PLANNERS,
        outcome_sources=tuple(options.outcome_source),
        min_outcomes=options.min_outcomes,
        labels=parse_labels(options.label),
    )


def rules_of(options: argparse.Namespace) -> Rules:
    """Raises ConfigError naming the flag, or the line of the pool file."""
    return Rules(
        tokens_required=not options.without_tokens,
        versions=versions_of(options.pool_file) if options.pool_file and not options.keep_stale else None,
        key_share_max=options.key_share,
        validation_share=options.validation_share,
        split_at=parse_time(options.split_at, "--split-at") if options.split_at else None,
    )


def reward_given(pairs: Sequence[str]) -> RewardSettings:
    """The weights of the reward. Raises ConfigError naming the flag."""
    names = [one.name for one in fields(RewardSettings)]
    values: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in names or not value:
            raise ConfigError(f"--reward {pair}: write NAME=VALUE; names are {', '.join(names)}", param="--reward")
        values[name] = value
    try:
        values = {name: yaml.safe_load(value) for name, value in values.items()}
        return TypeAdapter(RewardSettings).validate_python(values)
    except (ValidationError, yaml.YAMLError) as error:
        reason = first_of(error) if isinstance(error, ValidationError) else "no number"
        raise ConfigError(f"--reward {' '.join(pairs)}: {reason}", param="--reward") from None


def versions_of(pool_file: Path) -> Mapping[str, str]:
    """Worker → version of a pool file. Raises ConfigError as `pool_file_of`."""
    return {worker.name: worker.version for worker in pool_file_of(pool_file).workers}


def pool_file_of(pool_file: Path) -> PoolFile:
    """The pool file, without a look at its secrets. Raises ConfigError on one that cannot be read."""
    try:
        with pool_file.open("rb") as file:
            return PoolFile.model_validate(yaml.safe_load(file.read(POOL_FILE_BYTES_MAX)))
    except OSError as error:
        raise ConfigError(f"--pool-file {pool_file}: {error.strerror}", param="--pool-file") from None
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(
            f"--pool-file {pool_file}: no pool file ({str(error).splitlines()[0]}); `baton check` says more"
        ) from None


def database_url_of(options: argparse.Namespace) -> str:
    """As given, or the first line of standard input, where other users of the machine cannot see it."""
    return options.database_url if options.database_url != "-" else sys.stdin.readline(URL_CHARS_MAX).strip()


def run(options: argparse.Namespace) -> int:
    """Export; 0."""
    report = export(
        database_url_of(options),
        selection_of(options),
        rules_of(options),
        options.out,
        options.format,
        split=options.split,
        reward=reward_given(options.reward),
        progress=sys.stderr,
    )
    for warning in report.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    output = json.dumps(asdict(report) | {"out": str(options.out)}) if options.json else summary(report, options.out)
    sys.stdout.write(f"{output}\n")
    return 0
