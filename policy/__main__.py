"""`python -m policy COMMAND …`: the learning loop by hand. Each command is a module with `add` (arguments) and `run`.

Exit status: 0 done · 1 could not · 2 wrong arguments or input · 4 the gate refused · 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from gateway.errors import BadRequest, BatonError

# Modules by name, imported when called: none of them pays for what another one loads.
COMMANDS = {
    "traces": "policy.dataset.cli",
    "record": "policy.record.command",
    "evaluate": "policy.evaluate.command",
    "train": "policy.train.run.command",
    "engines": "policy.train.engines.cli",
    "alternatives": "policy.engines.alternatives",
    "gate": "policy.gate.command",
    "jobs": "policy.jobs.command",
    "seal": "policy.start.pretrained.seal",
    "import": "policy.start.pretrained.packaged",
}
USAGE = (
    f"usage: python -m policy COMMAND …; COMMAND is one of: {', '.join(COMMANDS)}; each explains itself with --help\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors raised on purpose are one line on standard error."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    if name not in COMMANDS:
        asked = name in ("-h", "--help")
        (sys.stdout if asked else sys.stderr).write(USAGE)
        return 0 if asked else 2
    module = import_module(COMMANDS[name])
    parser = argparse.ArgumentParser(prog=f"python -m policy {name}", description=(module.__doc__ or "").split("\n")[0])
    module.add(parser)
    try:
        status: int = module.run(parser.parse_args(rest))
        return status
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2 if isinstance(error, BadRequest) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
