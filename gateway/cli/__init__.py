"""The command line of Baton.

Exit status: 0 done · 1 could not · 2 wrong arguments, settings or pool file · 3 already running there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.cli.admin import audit, keys, orgs, pools
from gateway.cli.learn import programs, train
from gateway.cli.process import check, serve, worker
from gateway.errors import BadRequest, BatonError


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its summary for `--help`, its arguments, and what it does, which returns the exit status."""

    summary: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "serve": Command("Start a gateway with everything it needs, and serve until Ctrl-C.", serve.add, serve.run),
    "check": Command("Check settings, pool file and conductor without starting anything.", check.add, check.run),
    "keys": Command("Create, change, rotate, list and revoke API keys.", keys.add, keys.run),
    "orgs": Command("Create, list, show, limit and close organisations.", orgs.add_orgs, orgs.run_orgs),
    "credits": Command(
        "Give a charge back, top a budget up, and list what was given.", orgs.add_credits, orgs.run_credits
    ),
    "pools": Command("Show the pools of a gateway, and reload its pool file.", pools.add, pools.run),
    "audit": Command("List and verify the audit of every change.", audit.add_audit, audit.run_audit),
    "retention": Command("Delete rollouts that are over their time.", audit.add_retention, audit.run_retention),
    "policy": Command(
        "List, publish, shadow, canary, promote and roll back policy versions.",
        programs.add_policy,
        programs.run_policy,
    ),
    "replay-workers": Command("Serve recorded answers as workers.", programs.add_replay, programs.run_replay),
    "traces": Command("Export the log as training data.", programs.add_traces, programs.run_traces),
    "record": Command("Record what workers answer, as a replay file.", programs.pass_on, programs.run_record),
    "evaluate": Command(
        "Compare policies on recorded questions or the arena.", programs.pass_on, programs.run_evaluate
    ),
    "gate": Command("Judge a candidate version before it serves.", programs.pass_on, programs.run_gate),
    "train": Command("Train a conductor, here or as a job.", programs.pass_on, train.run),
    "worker": Command("Carry out jobs and grade replies.", worker.add, worker.run),
}


def parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    top = argparse.ArgumentParser(prog="baton", description="An OpenAI-compatible gateway with a trained conductor.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, help=command.summary, description=command.summary))
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
