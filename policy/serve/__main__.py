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

from policy.serve.engine import Engine, Job
from policy.serve.manifest import read_manifest
from policy.serve.runtime import Runtime
from policy.serve.server import create_app
from policy.serve.shape import ModelError
from policy.serve.tokens import Tokens

BACKLOG = 512
SHUTDOWN_S = 5


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
    return parser.parse_args(arguments)


def load(directory: Path, threads: int, queue_max: int) -> tuple[Engine, dict[str, object]]:
    """A warm engine and what its manifest tells. Raises ModelError."""
    about = read_manifest(directory).public()
    runtime = Runtime(directory)
    engine = Engine(runtime, Tokens(directory, runtime.shape), threads, queue_max)
    probe = Job(engine.tokens.encode_chat([{"role": "user", "content": "."}]), {"type": "object"}, 0.0, 1.0, 0, 4)
    for _ in engine.decode(probe):
        pass
    return engine, about


def main(arguments: list[str]) -> int:
    """Load, listen, say so, serve until a signal; 0, or 2 when the model cannot be served."""
    options = parse(arguments)
    try:
        engine, about = load(options.model, options.threads, options.queue)
    except ModelError as error:
        sys.stderr.write(f"conductor: {options.model}/{error}\n")
        return 2
    listener = socket.create_server((options.host, options.port), backlog=BACKLOG)
    config = uvicorn.Config(
        create_app(options.served_model_name, engine, about),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    if options.port_file:
        _announce(options.port_file, listener.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listener])
    engine.close()
    return 0


def _announce(path: Path, port: int) -> None:
    """Write the port in one step, so that no reader sees half of it. The socket listens already."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(f"{port}\n")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
