"""Serve a conductor: `python -m policy.serve --model DIR --port 0 --port-file PATH`.

The port file is written once the model is loaded, warm and listening. A model that cannot be served ends the program
with one line on standard error and status 2.
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

import uvicorn

from gateway.errors import BatonError, ConfigError
from gateway.files import write_atomic
from policy.serve.engine import Slots
from policy.serve.server import create_app
from policy.serve.versions import VERSIONS_MAX, Versions

BACKLOG = 512
SHUTDOWN_S = 5
ADMIN_KEY_CHARS_MIN = 16


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m policy.serve", description="Serve a conductor over HTTP.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model directory with a manifest.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--port-file", type=Path, metavar="PATH", help="where the port is written when ready")
    parser.add_argument("--served-model-name", default="conductor", metavar="NAME")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="plans decoded at the same time")
    parser.add_argument("--queue", type=int, default=64, metavar="N", help="plans that may wait; more get a 503")
    parser.add_argument("--versions", type=int, default=VERSIONS_MAX, metavar="N", help="models held at once, at most")
    parser.add_argument(
        "--base", type=Path, action="append", default=[], metavar="DIR", help="of an adapter; repeatable"
    )
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        metavar="PATH",
        help="the key of the routes that load and unload; none: no routes",
    )
    return parser.parse_args(arguments)


def admin_key(path: Path | None) -> str | None:
    """The key in the file, None where none was given. Raises ConfigError."""
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if len(key) < ADMIN_KEY_CHARS_MIN:
        raise ConfigError(f"{path}: an admin key needs {ADMIN_KEY_CHARS_MIN} characters")
    return key


def main(arguments: list[str]) -> int:
    """Load, listen, say so, serve until a signal; 0, or 2 when the model cannot be served."""
    options = parse(arguments)
    try:
        key = admin_key(options.admin_key_file)
        versions = Versions(Slots(options.threads, options.queue), options.versions, bases=options.base)
        versions.start_with(options.served_model_name, options.model.resolve())
    except BatonError as error:
        sys.stderr.write(f"conductor: {error.message}\n")
        return 2
    listener = socket.create_server((options.host, options.port), backlog=BACKLOG)
    config = uvicorn.Config(
        create_app(versions, key),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    if options.port_file:
        write_atomic(options.port_file, f"{listener.getsockname()[1]}\n")  # the socket listens already
    uvicorn.Server(config).run(sockets=[listener])
    versions.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
