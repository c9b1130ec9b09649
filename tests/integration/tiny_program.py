"""A program as `EmbeddedProgram` expects one: `--port`, `--port-file`, `/health`; `GET /die` ends it with status 9.

`--refuse`: will not start. `--mute`: listens and never answers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/die":
            os._exit(9)
        self.send_response(200)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--mute", action="store_true")
    options = parser.parse_args()
    if options.refuse:
        sys.exit("tiny: I would rather not")
    server = HTTPServer(("127.0.0.1", options.port), Handler)
    options.port_file.write_text(str(server.server_address[1]))
    while options.mute:
        time.sleep(60)
    server.serve_forever()


if __name__ == "__main__":
    main()
