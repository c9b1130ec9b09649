"""Runs a job in the jail (`jail.py`) and says how it ended. Bounded in time, memory, files and output.

The jail is a fresh isolated interpreter with an empty environment in a temporary directory; what it may do is said
there. This side keeps the clock, reads at most `result_bytes`, and kills what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from policy.graders.base import GraderFailed, Limits

JAIL = Path(__file__).with_name("jail.py")
SYSTEM_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
ENVIRONMENT = {"LC_ALL": "C.UTF-8"}

Ended = Literal["done", "time", "killed", "silent"]


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a job ended. `result` only where it is "done": "time" is the wall clock, "killed" a signal (CPU time or
    memory used up, a crash), "silent" an end without a signed result."""

    ended: Ended
    result: Mapping[str, Any] | None
    detail: str
    locks: tuple[str, ...]


async def run(
    job: str, data: Mapping[str, Any], limits: Limits, *, weak_ok: bool = False, site: Sequence[str] = ()
) -> SandboxResult:
    """Run one job of `jail.JOBS`. Raises GraderFailed where the jail does not start, a job breaks, or the kernel has no
    seccomp and `weak_ok` is not given."""
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="baton-grade-", ignore_cleanup_errors=True) as directory:
        order = {
            "nonce": nonce,
            "job": job,
            "data": data,
            "limits": asdict(limits),
            "directory": directory,
            "readable": [os.path.dirname(os.__file__), *SYSTEM_READABLE, f"{sys.base_prefix}/lib", *site],
            "site": list(site),
            "weak_ok": weak_ok,
        }
        said, code = await _talk(json.dumps(order).encode(), directory, limits)
    return _understood(said, code, nonce, limits, weak_ok)


async def _talk(order: bytes, directory: str, limits: Limits) -> tuple[bytes, int | None]:
    """What the jail wrote, and its exit code; None where the clock ran out."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        str(JAIL),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=directory,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    said = bytearray()
    try:
        async with asyncio.timeout(limits.wall_s):
            await _exchange(process, order, said, limits.result_bytes)
            return bytes(said), await process.wait()
    except TimeoutError:
        return bytes(said), None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _exchange(process: asyncio.subprocess.Process, order: bytes, said: bytearray, bytes_max: int) -> None:
    assert process.stdin is not None  # noqa: S101 (asked for above)
    assert process.stdout is not None  # noqa: S101
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(order)
        await process.stdin.drain()
    process.stdin.close()
    while len(said) <= bytes_max:
        part = await process.stdout.read(bytes_max)
        if not part:
            return
        said += part
    process.kill()


def _understood(said: bytes, code: int | None, nonce: str, limits: Limits, weak_ok: bool) -> SandboxResult:
    lines = [_object(line) for line in said.split(b"\n") if line]
    if not lines or not isinstance(lines[0].get("locks"), list):
        raise GraderFailed(f"the sandbox did not start (exit {code}); run `{sys.executable} -I -S {JAIL}` to see why")
    locks = tuple(lines[0]["locks"])
    if "seccomp" not in locks and not weak_ok:
        raise GraderFailed(
            "this kernel cannot cut code off from the network (no seccomp); grade on Linux x86_64 or arm64"
        )
    if code is None:
        return SandboxResult("time", None, f"still running after {limits.wall_s:g} s", locks)
    if code < 0:
        return SandboxResult(
            "killed", None, f"killed by {signal.Signals(-code).name} (CPU time, memory or a crash)", locks
        )
    if len(lines) != 2 or lines[1].get("nonce") != nonce:
        return SandboxResult("silent", None, "ended without a result of its own", locks)
    result = lines[1]["result"]
    if "failed" in result:
        raise GraderFailed(f"the grader broke on this reply: {result['failed']}")
    return SandboxResult("done", result, "", locks)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
