"""An S3 server on loopback (moto's) in a process of its own, with one bucket."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from urllib.request import Request, urlopen

SERVER = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[str]:
    """Yield the URL of the bucket; credentials and endpoint are in the environment meanwhile."""
    command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            with urlopen(Request(f"{endpoint}/baton", method="PUT")):  # noqa: S310 - loopback
                pass
            with patch.dict(os.environ, {**KEYS, "AWS_ENDPOINT_URL": endpoint}):
                yield "s3://baton"
        finally:
            process.kill()
