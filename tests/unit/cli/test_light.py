"""`--help` of every command loads no database, no web framework, no model: it answers at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gateway import cli

ROOT = Path(__file__).resolve().parents[3]
HEAVY = (
    *("sqlalchemy", "alembic", "psycopg", "redis", "fastapi", "starlette", "httpx", "aiohttp", "uvloop", "numpy"),
    *("litellm", "torch", "transformers", "onnxruntime", "policy"),
)
SCRIPT = """
import contextlib, io, sys
from gateway import cli
for name in cli.COMMANDS:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        cli.parser([name]).parse_args([name, "--help"])
    print(name, [heavy for heavy in {heavy!r} if heavy in sys.modules])
"""


def test_the_help_of_a_command_loads_nothing_heavy() -> None:
    """All commands in one process, so a module that one loads is counted against the next ones, too."""
    script = SCRIPT.format(heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [f"{name} []" for name in cli.COMMANDS]
