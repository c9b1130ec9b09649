"""The command line: one module per command, each with `add` (its arguments) and `run` (returns the exit status).

Exit status: 0 done · 1 could not · 2 wrong arguments, settings or pool file · 3 already running there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gateway.cli.admin import audit, credits, keys, orgs, policy, pools, retention
from gateway.cli.learn import evaluate, replay, traces, train
from gateway.cli.process import check, serve, worker
from gateway.errors import BadRequest, BatonError

COMMANDS = {
    "serve": serve,
    "check": check,
    "keys": keys,
    "orgs": orgs,
    "credits": credits,
    "pools": pools,
    "audit": audit,
    "retention": retention,
    "policy": policy,
    "replay-workers": replay,
    "traces": traces,
    "evaluate": evaluate,
    "train": train,
    "worker": worker,
}


def parser() -> argparse.ArgumentParser:
    """All commands; each module adds its own arguments."""
    top = argparse.ArgumentParser(prog="baton", description="An OpenAI-compatible gateway with a trained conductor.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        module.add(commands.add_parser(name, help=summary, description=summary))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors that Baton raises on purpose are lines on standard error, not tracebacks."""
    options = parser().parse_args(arguments)
    try:
        status: int = COMMANDS[options.command].run(options)
        return status
    except BatonError as error:
        print(error.message, file=sys.stderr)
        return 2 if isinstance(error, BadRequest) else 1
    except KeyboardInterrupt:
        return 130
