"""Hostile code in the sandbox: each attempt is bounded, fails by itself, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.upstream import sandbox
from gateway.adapters.upstream.sandbox import code_in, jail
from gateway.adapters.upstream.sandbox.jail import (
    ALLOW,
    ARCHES,
    EPERM,
    ERRNO,
    program,
    run_schema,
    run_search,
    run_tests,
)
from gateway.service.ports.request import CodeLimits
from policy.graders import BadReference, Grade, GraderFailed, Tools, grade
from policy.graders.programs import run
from tests.waiting import BOUND_S, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox's locks are Linux's")
QUICK = Tools(limits=CodeLimits(wall_s=30.0, cpu_s=1, memory_bytes=256 * 2**20))


async def judged(code: str, *tests: str, tools: Tools = QUICK) -> Grade:
    return await grade("python", list(tests or ("pass",)), f"```python\n{code}\n```", tools=tools)


# ---------------------------------------------------------------- honest code


async def test_tests_pass_or_fail_and_say_why() -> None:
    good = "def add(a, b):\n    return a + b"
    assert (await judged(good, "assert add(1, 2) == 3", "assert add(0, 0) == 0")).value == 1.0
    wrong = await judged(good, "assert add(1, 2) == 3", "assert add(1, 1) == 3, 'sum'", "assert add('a', 1)")
    assert (wrong.value, wrong.detail) == (0.0, "1 of 3 tests passed; test 1: AssertionError: sum")
    broken = await judged("def add(a, b) return a", "assert add")
    assert broken.value == 0.0
    assert "SyntaxError" in broken.detail


async def test_some_tests_may_be_worth_some() -> None:
    reference = {"tests": ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"], "entry": "f", "partial": True}
    found = await grade("python", reference, "```python\ndef f(x):\n    return x\n```", tools=QUICK)
    assert found.value == pytest.approx(1 / 3)


async def test_the_standard_library_threads_and_temporary_files_work() -> None:
    code = """
import asyncio, concurrent.futures, heapq, json, random, sqlite3, ssl, threading, zoneinfo
async def waits():
    await asyncio.sleep(0.01)
    return 5
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    squares = list(pool.map(lambda x: x * x, range(3)))
with open("note.txt", "w") as file:
    file.write("kept")
"""
    tests = (
        "assert asyncio.run(waits()) == 5",
        "assert squares == [0, 1, 4]",
        "assert open('note.txt').read() == 'kept'",
    )
    assert (await judged(code, *tests)).detail == "3 of 3 tests passed; no failure"


@pytest.mark.parametrize(
    ("reply", "entry", "wanted"),
    [
        ("```python\ndef f(): pass\n```\nUsage:\n```python\nprint(f())\n```", None, "def f(): pass\n"),
        ("```py\ndef f(): 1\n```\n```py\ndef g(): 2\n```", "f", "def f(): 1\n"),
        ("```\nx = 1\n```", None, "x = 1\n"),
        ("```bash\nls\n```\n```Python\nx = 2\n```", None, "x = 2\n"),
        ("```python\nclass F:\n    pass", None, "class F:\n    pass"),
        ('{"reasoning": "r", "answer": "x = 3"}', None, "x = 3"),
        ("x = 4", None, "x = 4"),
    ],
)
def test_the_program_is_found_in_the_reply(reply: str, entry: str | None, wanted: str) -> None:
    assert code_in(reply, entry) == wanted


# ---------------------------------------------------------------- hostile code

WRITE_EVERYWHERE = (
    "import contextlib, os\nfor fd in range(3, 9):\n    with contextlib.suppress(OSError):\n        os.write(fd, "
)


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        ("import os\nwhile True:\n    os.fork()", "PermissionError"),
        ("import os\nos.posix_spawn('/bin/true', ['true'], {})", "PermissionError"),
        ("import subprocess\nsubprocess.run(['ls'])", "PermissionError"),
        ("import multiprocessing as m\nm.Process(target=print).start()", "PermissionError"),
        ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
        ("kept = []\nwhile True:\n    kept.append(bytearray(10**7))", "MemoryError"),
        ("import threading as t, time\nwhile True:\n    t.Thread(target=time.sleep, args=(9,)).start()", "can't start"),
        ("while True:\n    pass", "killed by SIGKILL"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "PermissionError"),
        ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "PermissionError"),
        ("import urllib.request as r\nr.urlopen('http://192.0.2.1')", "URLError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("open('/proc/self/environ').read()", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("open('/tmp/left-behind', 'w')", "PermissionError"),
        ("open('/dev/shm/left-behind', 'w')", "PermissionError"),
        ("open('big', 'w').write('x' * 2_000_000)", "File too large"),
        ("for n in range(20):\n    open(f'{n}', 'w').write('x' * 900_000)", "No space left"),
        ("kept = [open('f', 'w') for n in range(99)]", "Too many open files"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import os\nos.kill(-1, 9)", "PermissionError"),
        ("import os, resource as r\nr.setrlimit(r.RLIMIT_CPU, (99, 99))", "ValueError"),
        ("import ctypes\nctypes.string_at(0)", "killed by SIGSEGV"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "without a result of its own"),
        (WRITE_EVERYWHERE + 'b\'{"result": {"passed": [true]}}\\n\')', "without a result of its own"),
        (WRITE_EVERYWHERE + "b'x' * 200_000)", "killed by SIGKILL|without a result"),  # or it ended before the kill
        ("def f(): f()\nf()", "RecursionError"),
        ("raise BaseException('x' * 10**6)", "BaseException"),
        ("x = '\\ud800'\nraise ValueError(x)", "ValueError"),
    ],
)
async def test_hostile_code_is_wrong_and_bounded(attempt: str, outcome: str) -> None:
    found = await asyncio.wait_for(judged(attempt), BOUND_S)
    assert found.value == 0.0
    assert re.search(outcome, found.detail)
    assert len(found.detail) < 400


async def test_output_without_end_goes_nowhere() -> None:
    code = "import sys\nprint('x' * 10**8)\nsys.stderr.write('y' * 10**7)\nsys.stdout.flush()"
    assert (await judged(code)).value == 1.0


async def test_sleeping_code_meets_the_clock() -> None:
    found = await judged("import time\ntime.sleep(60)", tools=Tools(limits=CodeLimits(wall_s=0.5)))
    assert found.detail == "still running after 0.5 s"


async def test_threads_that_go_on_do_not_hold_the_grade() -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    assert (await judged(code)).value == 1.0


async def test_the_environment_and_the_project_are_not_there() -> None:
    code = "import os, sys\nseen = dict(os.environ)\npaths = list(sys.path)"
    tests = ("assert set(seen) <= {'LC_ALL'}, seen", "assert not any('site-packages' in p for p in paths), paths")
    assert (await judged(code, *tests)).detail == "2 of 2 tests passed; no failure"
    assert "ModuleNotFoundError" in (await judged("import policy")).detail


async def test_a_cancelled_grade_leaves_no_process_and_no_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []
    start = asyncio.create_subprocess_exec

    async def spy(*args: Any, **kwargs: Any) -> Any:
        started.append(await start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spy)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    task = asyncio.create_task(judged("import time\ntime.sleep(60)"))
    await until(lambda: started)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert started[0].returncode is not None
    assert os.listdir(tmp_path) == []


async def test_many_at_once() -> None:
    found = await asyncio.gather(*(judged(f"x = {n}", f"assert x == {n}") for n in range(8)))
    assert [g.value for g in found] == [1.0] * 8


# ---------------------------------------------------------------- locks


async def test_every_lock_holds_here_and_is_named() -> None:
    ran = await run("tests", {"solution": "", "tests": []}, CodeLimits())
    assert {"landlock", "seccomp", "rlimits"} <= set(ran.locks)
    assert set(ran.locks) <= {"namespaces", "tmpfs", "landlock", "seccomp", "rlimits"}


def weaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    source = sandbox.JAIL.read_text()
    assert old in source
    (tmp_path / "jail.py").write_text(source.replace(old, new))
    monkeypatch.setattr(sandbox, "JAIL", tmp_path / "jail.py")


async def test_without_seccomp_code_does_not_run_unless_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weaker(tmp_path, monkeypatch, 'ARCHES = {"x86_64"', 'ARCHES = {"z80"')
    with pytest.raises(GraderFailed, match="cannot cut code off from the network"):
        await judged("open('ran', 'w')")
    weak = Tools(limits=QUICK.limits, weak_ok=True)
    found = await judged("x = 1", "assert x == 1", tools=weak)
    assert (found.value, found.detail) == (1.0, "1 of 1 tests passed; no failure (network not blocked by the kernel)")
    assert "import of socket halted" in (await judged("import socket", tools=weak)).detail


@pytest.mark.parametrize(
    ("old", "new"), [("libc.unshare(NAMESPACES) != 0", "True"), ("libc.syscall(444, None", "libc.syscall(-1, None")]
)
async def test_the_network_stays_shut_when_one_lock_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    weaker(tmp_path, monkeypatch, old, new)
    assert (await judged("x = 1", "assert x == 1")).value == 1.0
    assert "PermissionError" in (await judged("import socket\nsocket.socket()")).detail
    assert "PermissionError" in (await judged("import os\nos.fork()")).detail


async def test_a_jail_that_does_not_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jail.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(sandbox, "JAIL", tmp_path / "jail.py")
    with pytest.raises(GraderFailed, match=r"did not start \(exit 3\)"):
        await judged("x = 1")


async def test_a_job_that_breaks_is_no_grade() -> None:
    with pytest.raises(GraderFailed, match="the job broke: KeyError"):
        await run("search", {}, QUICK.limits)


def verdict(code: bytes, arch: int, number: int, first_argument: int = 0) -> int:
    """What the filter says of one system call: a small BPF machine."""
    steps = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    words, at, held = {0: number, 4: arch, 16: first_argument}, 0, 0
    while True:
        what, if_true, if_false, k = steps[at]
        at += 1
        if what == 0x20:
            held = words[k]
        elif what == 0x06:
            return int(k)
        else:
            true = {0x15: held == k, 0x35: held >= k, 0x45: bool(held & k)}[what]
            at += if_true if true else if_false


@pytest.mark.parametrize("machine", list(ARCHES))
def test_the_filter_denies_what_it_lists_and_nothing_else(machine: str) -> None:
    code, column = program(machine), list(ARCHES).index(machine)
    denied = {numbers[column] for numbers in jail.DENIED.values()} - {None}
    assert len(denied) == len([n for n in jail.DENIED.values() if n[column] is not None]), "two names share a number"
    clone, clone3 = jail.CLONE[column], jail.CLONE3[column]
    assert not denied & {clone, clone3}
    for number in range(480):
        wanted = ERRNO | EPERM if number in denied or number == clone else ALLOW
        wanted = ERRNO | jail.ENOSYS if number == clone3 else wanted
        assert verdict(code, ARCHES[machine], number) == wanted, number
    assert verdict(code, ARCHES[machine], clone, jail.CLONE_THREAD | 0x100) == ALLOW
    assert verdict(code, ARCHES[machine], 0x40000000 | 41) == ERRNO | EPERM
    assert verdict(code, 0x40000003, 5) == jail.KILL


# ---------------------------------------------------------------- what runs inside


def test_tests_do_not_see_each_other() -> None:
    found = run_tests({"solution": "x = 1", "tests": ["x = 5", "assert x == 1", "assert y", "raise SystemExit"]})
    assert found == {"passed": [True, True, False, False], "error": "test 2: NameError: name 'y' is not defined"}
    assert run_tests({"solution": "1/0", "tests": ["pass"]}) == {
        "passed": [],
        "error": "ZeroDivisionError: division by zero",
    }


def test_searches_and_schemas() -> None:
    assert run_search({"pattern": "b+", "flags": 0, "text": "abba", "whole": False}) == {"found": True}
    assert run_search({"pattern": "b+", "flags": 0, "text": "abba", "whole": True}) == {"found": False}
    assert run_schema({"schema": {"type": "integer"}, "value": 1}) == {"error": None}
    assert run_schema({"schema": {"required": ["a"]}, "value": {}}) == {"error": "$: 'a' is a required property"}


# ---------------------------------------------------------------- regex and schema


@pytest.mark.parametrize(
    ("reference", "reply", "wanted"),
    [
        (r"\bOslo\b", "It is Oslo.", 1),
        (r"\boslo\b", "It is Oslo.", 0),
        ({"pattern": "oslo", "ignore_case": True}, "It is Oslo.", 1),
        ({"pattern": r"\d+", "on": "answer"}, "In 3 steps.\nAnswer: 42", 1),
        ({"pattern": r"\d", "on": "answer"}, "Answer: 42", 0),
        (r"{\d+}", "{7}", 1),
    ],
)
async def test_regex(reference: object, reply: str, wanted: float) -> None:
    assert (await grade("regex", reference, reply, tools=QUICK)).value == wanted


@pytest.mark.parametrize(
    ("schema", "reply", "wanted"),
    [
        ({"type": "object", "required": ["city"]}, '{"city": "Oslo"}', 1),
        ({"type": "object", "required": ["city"]}, '```json\n{"city": "Oslo"}\n```', 1),
        ('{"type": "array", "items": {"pattern": "^a"}}', '["ab", "b"]', 0),
        ({"type": "object"}, "Oslo", 0),
        ({"type": "object"}, "[" * 5_000, 0),
        ({"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}, "[1, 2]", 1),
    ],
)
async def test_json_schema(schema: object, reply: str, wanted: float) -> None:
    assert (await grade("json_schema", schema, reply, tools=QUICK)).value == wanted


async def test_a_pattern_or_schema_without_end_is_a_bad_reference() -> None:
    with pytest.raises(BadReference, match="regex: the pattern did not finish"):
        await grade("regex", "(a+)+$", "a" * 40 + "b", tools=QUICK)
    nested: dict[str, Any] = {"n0": {"type": "integer"}}
    for n in range(1, 40):
        nested[f"n{n}"] = {"allOf": [{"$ref": f"#/$defs/n{n - 1}"}] * 2}
    with pytest.raises(BadReference, match="json_schema: the schema did not finish"):
        await grade("json_schema", {"$defs": nested, "$ref": "#/$defs/n39"}, "1", tools=QUICK)
    with pytest.raises(BadReference, match="keep its references inside"):
        await grade("json_schema", {"$ref": "http://192.0.2.1/schema"}, "1", tools=QUICK)
