"""Runs untrusted code in the jail, and `builtin:python`, the worker that answers with what a program did.

The jail is `jail.py` in a fresh isolated interpreter, with an empty environment in a temporary directory; `jail.py`
says what it may do. This side keeps the clock, reads at most `result_bytes`, and kills what is left.

`builtin:python` runs one program for each step: the `program` of its `params`, else the Python of the step's task, else
the request's own tests on the code of the last reply that the step sees, else the code in these replies, the last one
first. It finds the files of its `params` and of the task, or the request, each reply as `reply_N.txt`, and the code of
the last one as `candidate.py`. It answers with one JSON object: `exit_status`, `stdout`, `files` (those that it wrote)
and `error`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from gateway.core.loop.compose import request_texts, task_of
from gateway.core.loop.replies.agreement import NO_VERDICTS, Verdicts, majority
from gateway.core.loop.replies.answers import extract_answer
from gateway.core.loop.replies.code import PARSED
from gateway.core.loop.replies.kinds import read_text
from gateway.core.loop.replies.testing import named_files, program_of_files, tests_among
from gateway.core.loop.replies.trial import by_returns, returns_of, shared_calls, trial_program
from gateway.errors import UpstreamError, UpstreamRefused
from gateway.service.ports.request import CodeLimits, WorkerCall

JAIL = Path(__file__).with_name("jail.py")
SYSTEM_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
ENVIRONMENT = {"LC_ALL": "C.UTF-8"}
STDOUT_CHARS_MAX = 16_384
FILES_CHARS_MAX = 16_384  # of all files that a program wrote, together
TRIAL_S, TRIAL_CPU_S = 10.0, 2  # that a program may take for all calls of a trial: wall clock, and computing
CPU_SHARE = 0.8  # of the wall clock that a program may compute
_FENCED = re.compile(r"```([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_PROSE = re.compile(r"[\w'-]+[?.!]?")  # one word of a language is Python, too

Ended = Literal["done", "time", "killed", "silent"]


class SandboxFailed(Exception):
    """The jail did not start, or its job broke. It says nothing of the code."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a job ended. `result` only where it is "done": "time" is the wall clock, "killed" a signal (CPU time or
    memory used up, a crash), "silent" an end without a signed result."""

    ended: Ended
    result: Mapping[str, Any] | None
    detail: str
    locks: tuple[str, ...]


async def run(
    job: str, data: Mapping[str, Any], limits: CodeLimits, *, weak_ok: bool = False, site: Sequence[str] = ()
) -> SandboxResult:
    """Run one job of `jail.JOBS`. Raises SandboxFailed where the jail does not start, a job breaks, or the kernel
    has no seccomp and `weak_ok` is not given."""
    nonce = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="baton-jail-", ignore_cleanup_errors=True) as directory:
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
        output, code = await _talk(json.dumps(order).encode(), directory, limits)
    return _read_output(output, code, nonce, limits, weak_ok)


async def _talk(order: bytes, directory: str, limits: CodeLimits) -> tuple[bytes, int | None]:
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
    output = bytearray()
    try:
        async with asyncio.timeout(limits.wall_s):
            await _exchange(process, order, output, limits.result_bytes)
            return bytes(output), await process.wait()
    except TimeoutError:
        return bytes(output), None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _exchange(process: asyncio.subprocess.Process, order: bytes, output: bytearray, bytes_max: int) -> None:
    assert process.stdin is not None  # noqa: S101 (asked for above)
    assert process.stdout is not None  # noqa: S101
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(order)
        await process.stdin.drain()
    process.stdin.close()
    while len(output) <= bytes_max:
        part = await process.stdout.read(bytes_max)
        if not part:
            return
        output += part
    process.kill()


def _read_output(output: bytes, code: int | None, nonce: str, limits: CodeLimits, weak_ok: bool) -> SandboxResult:
    lines = [_object(line) for line in output.split(b"\n") if line]
    if not lines or not isinstance(lines[0].get("locks"), list):
        raise SandboxFailed(f"the sandbox did not start (exit {code}); run `{sys.executable} -I -S {JAIL}` to see why")
    locks = tuple(lines[0]["locks"])
    if "seccomp" not in locks and not weak_ok:
        raise SandboxFailed(
            "this kernel cannot cut code off from the network (no seccomp); run it on Linux x86_64 or arm64"
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
        raise SandboxFailed(f"the job broke: {result['failed']}")
    return SandboxResult("done", result, "", locks)


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- builtin:python


def code_in(reply: str, entry: str | None = None) -> str:
    """The program a reply gives: of its fenced blocks the last that defines `entry` (any function or class where None),
    else the last; without a fence its tagged or JSON answer, else the whole reply."""
    blocks = [text for tag, text in _FENCED.findall(reply) if tag.lower() in _PYTHON]
    name = re.escape(entry) if entry else r"\w+"
    defining = [text for text in blocks if re.search(rf"^\s*(?:async\s+)?(?:def|class)\s+{name}\b", text, re.MULTILINE)]
    if blocks:
        return str((defining or blocks)[-1])
    return extract_answer(reply) if '"answer"' in reply or "</answer>" in reply else reply


async def trial_verdicts(texts: Sequence[str], timeout_s: float) -> Verdicts:
    """What a run on shared arguments says of the agreement of Python programs, by the indices of their replies. Nothing
    where fewer than two define a common function, or where this host cannot run code safely."""
    codes = {index: code_in(text) for index, text in enumerate(texts) if read_text(text).kind == "code"}
    calls = shared_calls(list(codes.values())) if len(codes) > 1 else []
    if not calls:
        return NO_VERDICTS
    limits = CodeLimits(wall_s=max(0.1, min(TRIAL_S, timeout_s / len(codes))), cpu_s=TRIAL_CPU_S)
    returned: dict[int, list[Any]] = {}
    for index, code in codes.items():
        files = {"candidate.py": code, "calls.json": json.dumps(calls)}
        data = {"program": trial_program(), "files": files, "chars_max": [STDOUT_CHARS_MAX, 0]}
        try:
            ran = await run("program", data, limits)
        except SandboxFailed:
            return NO_VERDICTS
        returned[index] = returns_of(str((ran.result or {}).get("stdout", "")))
    return {(a, b): by_returns(returned[a], returned[b]) for a, b in combinations(sorted(codes), 2)}


async def run_vote(call: WorkerCall) -> str:
    """The first of the seen replies that give the most common answer. With `run_code` in its `params`, programs that
    return the same give the same. Raises UpstreamRefused without any reply."""
    if not call.saw:
        raise UpstreamRefused("vote sees no replies; let its step see at least one", dispatched=False)
    replies = [reply for _, _, reply in call.saw]
    runs = call.worker.params.get("run_code") is True
    return replies[majority(replies, await trial_verdicts(replies, call.timeout_s) if runs else NO_VERDICTS)]


async def run_python(call: WorkerCall) -> str:
    """What a step's program did, as the JSON text of a reply. Raises UpstreamRefused where there is nothing to run,
    UpstreamError where this host cannot run it safely."""
    wall_s = max(0.1, call.timeout_s)
    limits = CodeLimits(wall_s=wall_s, cpu_s=max(1, int(wall_s * CPU_SHARE)))
    messages = call.body.get("messages") or ()
    task = task_of(messages)
    files = named_files(request_texts(messages) if task is None else [task])
    replies = [reply for _, _, reply in call.saw]
    data = {
        "program": _program(call, task, tests_among(files) if task is None else (), replies),
        "files": _files(call, files, replies),
        "chars_max": [STDOUT_CHARS_MAX, FILES_CHARS_MAX],
    }
    try:
        ran = await run("program", data, limits)
    except SandboxFailed as failed:
        raise UpstreamError(f"worker {call.worker.name}: {failed}", dispatched=False) from None
    if ran.result is None:
        status = 124 if ran.ended == "time" else 137
        return json.dumps({"exit_status": status, "stdout": "", "files": {}, "error": ran.detail})
    return json.dumps(ran.result, ensure_ascii=False)


def _program(call: WorkerCall, task: str | None, tests: Sequence[str], replies: Sequence[str]) -> str:
    """The program of a step; `tests` are the request's own. Raises UpstreamRefused where there is none."""
    own = call.worker.params.get("program")
    if isinstance(own, str):
        return own
    blocks = [text for tag, text in _FENCED.findall(task or "") if tag.lower() in _PYTHON]
    if task and (blocks or _is_python(task)):
        return "\n".join(blocks) or task
    if not replies:
        raise UpstreamRefused("python sees no code; give its step a program, or a reply to see", dispatched=False)
    if tests:
        return program_of_files(tests)
    earlier = [code_in(reply) for reply in replies[:-1] if "```" in reply]
    return "\n\n".join([code_in(replies[-1]), *earlier])


def _is_python(text: str) -> bool:
    try:
        ast.parse(text, PARSED)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not _PROSE.fullmatch(text.strip())


def _files(call: WorkerCall, own_files: Mapping[str, str], replies: Sequence[str]) -> dict[str, str]:
    """The files that the program finds, by name; `own_files` are those of the task or the request."""
    own = call.worker.params.get("files")
    files = {str(name): str(text) for name, text in own.items()} if isinstance(own, Mapping) else {}
    files |= own_files
    files |= {f"reply_{number}.txt": reply for number, reply in enumerate(replies)}
    if replies:
        files["candidate.py"] = code_in(replies[-1])
    return {os.path.basename(name): text for name, text in files.items() if os.path.basename(name)}
