"""The command line of Baton.

Exit status: 0 done · 1 could not · 2 wrong arguments, settings or pool file · 3 already running there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from gateway import __version__
from gateway.cli.process import arguments as arguments_of
from gateway.cli.process.arguments import lazy
from gateway.errors import BadRequest, BatonError

if TYPE_CHECKING:
    from gateway.cli.admin import alerts, audit, backup, journal, keys, orgs, rollouts, sessions, status
    from gateway.cli.learn import experience, programs, train
    from gateway.cli.pool import pools, workers
    from gateway.cli.process import check, doctor, serve, worker
else:  # a command loads its own module only, at its first use

    def _lazy(name: str) -> ModuleType:
        return lazy(f"gateway.cli.{name}")

    audit, keys = _lazy("admin.audit"), _lazy("admin.keys")
    orgs, status = _lazy("admin.orgs"), _lazy("admin.status")
    sessions, rollouts = _lazy("admin.sessions"), _lazy("admin.rollouts")
    experience, programs, train = (_lazy(f"learn.{n}") for n in ("experience", "programs", "train"))
    check, doctor, serve, worker = map(_lazy, [f"process.{n}" for n in ("check", "doctor", "serve", "worker")])
    pools, workers = _lazy("pool.pools"), _lazy("pool.workers")
    alerts, backup, journal = (_lazy(f"admin.{n}") for n in ("alerts", "backup", "journal"))

EXIT_PIPE = 141  # what a shell reports of a program that SIGPIPE ended


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its summary for `--help`, its arguments, and what it does, which returns the exit status."""

    summary: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS = {
    "serve": Command(
        "Start a gateway with everything it needs, and serve until Ctrl-C.",
        arguments_of.serve,
        lambda options: serve.run(options),
    ),
    "check": Command(
        "Check settings, pool file and conductor without starting anything.",
        arguments_of.check,
        lambda options: check.run(options),
    ),
    "doctor": Command(
        "Say what is wrong with an installation, and what to do.",
        arguments_of.doctor,
        lambda options: doctor.run(options),
    ),
    "status": Command(
        "Show how a gateway does: parts, requests, money, versions, jobs.",
        lambda parser: status.add(parser),
        lambda options: status.run(options),
    ),
    "rollouts": Command(
        "List requests, show one, and explain it.",
        lambda parser: rollouts.add(parser),
        lambda options: rollouts.run(options),
    ),
    "explain": Command(
        "Say why a request went where it went.",
        lambda parser: rollouts.add_explain(parser),
        lambda options: rollouts.run(options),
    ),
    "spend": Command(
        "Sum what requests cost, by key, policy or worker.",
        lambda parser: status.add_spend(parser),
        lambda options: status.run_spend(options),
    ),
    "migrate": Command(
        "Migrate the database to the schema of this version, and end.",
        arguments_of.migrate,
        lambda options: check.run_migrate(options),
    ),
    "backup": Command(
        "Write an installation to one file, while it serves or not.",
        arguments_of.backup,
        lambda options: backup.run_backup(options),
    ),
    "restore": Command(
        "Lay an installation back from such a file.",
        arguments_of.restore,
        lambda options: backup.run_restore(options),
    ),
    "journal": Command(
        "Store what is whole in damaged segments of the journal.",
        arguments_of.journal,
        lambda options: journal.run(options),
    ),
    "keys": Command(
        "Create, change, rotate, list and revoke API keys.",
        lambda parser: keys.add(parser),
        lambda options: keys.run(options),
    ),
    "orgs": Command(
        "Create, list, show, limit and close organisations.",
        lambda parser: orgs.add_orgs(parser),
        lambda options: orgs.run_orgs(options),
    ),
    "credits": Command(
        "Give a charge back, top a budget up, and list what was given.",
        lambda parser: orgs.add_credits(parser),
        lambda options: orgs.run_credits(options),
    ),
    "sessions": Command(
        "List, raise, freeze, thaw and kill the budgets of runs.",
        lambda parser: sessions.add(parser),
        lambda options: sessions.run(options),
    ),
    "pools": Command(
        "Show the pools of a gateway, and reload its pool file.",
        lambda parser: pools.add(parser),
        lambda options: pools.run(options),
    ),
    "workers": Command(
        "Show which workers changed, and keep one out of plans or release it.",
        lambda parser: workers.add(parser),
        lambda options: workers.run(options),
    ),
    "alerts": Command(
        "Send an alert by hand to the webhook, and say what came back.",
        arguments_of.alerts,
        lambda options: alerts.run(options),
    ),
    "audit": Command(
        "List and verify the audit of every change.",
        lambda parser: audit.add_audit(parser),
        lambda options: audit.run_audit(options),
    ),
    "retention": Command(
        "Delete rollouts that are over their time.",
        lambda parser: audit.add_retention(parser),
        lambda options: audit.run_retention(options),
    ),
    "experience": Command(
        "Count outcomes again, and compare judges with people.",
        lambda parser: experience.add(parser),
        lambda options: experience.run(options),
    ),
    "policy": Command(
        "List, publish, shadow, canary, promote and roll back policy versions.",
        lambda parser: programs.add_policy(parser),
        lambda options: programs.run_policy(options),
    ),
    "replay-workers": Command(
        "Serve recorded answers as workers.",
        lambda parser: programs.add_replay(parser),
        lambda options: programs.run_replay(options),
    ),
    "traces": Command(
        "Export the log as training data.",
        lambda parser: programs.add_traces(parser),
        lambda options: programs.run_traces(options),
    ),
    "record": Command(
        "Record what workers answer, as a replay file.",
        lambda parser: programs.pass_on(parser),
        lambda options: programs.run_record(options),
    ),
    "evaluate": Command(
        "Compare policies on recorded questions or the arena.",
        lambda parser: programs.pass_on(parser),
        lambda options: programs.run_evaluate(options),
    ),
    "gate": Command(
        "Judge a candidate version before it serves.",
        lambda parser: programs.pass_on(parser),
        lambda options: programs.run_gate(options),
    ),
    "train": Command(
        "Train a conductor, here or as a job.",
        lambda parser: programs.pass_on(parser),
        lambda options: train.run(options),
    ),
    "worker": Command("Carry out jobs and grade replies.", arguments_of.worker, lambda options: worker.run(options)),
}


GROUPS = {
    "Start": ("serve", "check", "doctor", "worker"),
    "Look": ("status", "rollouts", "explain", "spend", "audit"),
    "Give and limit": ("keys", "orgs", "credits", "sessions", "pools", "workers", "alerts"),
    "Learn": ("policy", "experience", "record", "evaluate", "train", "gate", "traces", "replay-workers"),
    "Keep": ("migrate", "backup", "restore", "journal", "retention"),
}


def overview() -> str:
    """All commands in their groups, a line each."""
    width = max(map(len, COMMANDS))
    blocks = (
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {COMMANDS[name].summary}" for name in names)])
        for title, names in GROUPS.items()
    )
    return "\n\n".join([*blocks, "`baton COMMAND --help` says more."])


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of these arguments: with all commands, and the arguments of the command that they name."""
    top = argparse.ArgumentParser(
        prog="baton",
        description="An OpenAI-compatible gateway with a trained conductor.",
        epilog=overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, description=command.summary)
        if name in arguments[:1]:
            command.add(added)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors that Baton raises on purpose are lines on standard error, not tracebacks."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser(words).print_help(sys.stderr)
        return 2
    options = parser(words).parse_args(words)
    try:
        status: int = COMMANDS[options.command].run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads the output, such as `head`, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except BatonError as error:
        print(error.message, file=sys.stderr)
        return 2 if isinstance(error, BadRequest) else 1
    except KeyboardInterrupt:
        return 130
