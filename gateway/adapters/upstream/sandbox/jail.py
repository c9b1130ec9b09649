"""The program inside the sandbox: lock this process down, then run one job on untrusted code.

Started by `sandbox/__init__.py` as `python -I -S jail.py` with one JSON object on stdin; writes one line with the locks
in force and one with the result, signed with a nonce the code is not handed (code that goes looking for it through the
interpreter's frames can find it: this keeps out accidents and `os._exit(0)`, not an adversary who knows this file).
Standard library only, no import of this project.

Locks, each where the kernel has it, none needing privileges: resource limits; own user, network, IPC and mount
namespaces with a small tmpfs as the only writable place; Landlock (files: the standard library and shared objects to
read, the temporary directory to write, nothing else); a seccomp filter (no sockets, no new process, no signals to
others, no kernel keys, no tracing; threads stay). A child process cannot exist, so killing this one ends everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
READ, WRITE_FILE, ALL_RIGHTS = 0b1100, 0b0110, ((1 << 13) - 1, 1 << 13, 1 << 14, 0, 1 << 15)  # Landlock, by ABI
NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x00020000  # user, network, IPC, mount
MOUNT_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
MOUNT_FLAGS = 2 | 4 | 8  # MS_NOSUID | MS_NODEV | MS_NOEXEC
CLONE_THREAD = 0x00010000
EPERM, ENOSYS = 1, 38
ERRNO, ALLOW, KILL = 0x00050000, 0x7FFF0000, 0x80000000
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {  # name: number on x86_64, on aarch64; None where it does not exist
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
}
CLONE, CLONE3 = (56, 220), (435, 435)


def limit(limits: dict[int, int]) -> None:
    """Resource limits, soft and hard alike, as far as this system knows them and lets them fall."""
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        lowered = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(name, (lowered, lowered))


def limits_of(bounds: Json) -> dict[int, int]:
    """The bounds as resource limits."""
    return {
        resource.RLIMIT_CPU: bounds["cpu_s"],
        resource.RLIMIT_AS: bounds["memory_bytes"],
        resource.RLIMIT_FSIZE: bounds["file_bytes"],
        resource.RLIMIT_NOFILE: bounds["files_max"],
        resource.RLIMIT_CORE: 0,
    }


def separate(libc: Any, directory: str, disk_bytes: int) -> list[str]:
    """Own namespaces, and a tmpfs of `disk_bytes` over the temporary directory."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NAMESPACES) != 0:
        return []
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except OSError:
        return ["namespaces"]
    libc.mount(None, b"/", None, ctypes.c_ulong(MOUNT_PRIVATE), None)
    options = f"size={disk_bytes},nr_inodes=256,mode=700".encode()
    status = libc.mount(b"tmpfs", directory.encode(), b"tmpfs", ctypes.c_ulong(MOUNT_FLAGS), options)
    return ["namespaces", "tmpfs"] if status == 0 else ["namespaces"]


def fence(libc: Any, readable: list[str], writable: str) -> list[str]:
    """Landlock: only these paths exist for open(2)."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return []
    rights = sum(ALL_RIGHTS[: min(version, len(ALL_RIGHTS))])
    ruleset = libc.syscall(444, struct.pack("=Q", rights), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return []
    for path, allowed in [*((path, READ) for path in readable), (writable, rights), ("/dev/null", WRITE_FILE)]:
        if os.path.exists(path):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            libc.syscall(445, ruleset, 1, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
    status = libc.syscall(446, ruleset, 0)
    os.close(ruleset)
    return ["landlock"] if status == 0 else []


def program(machine: str) -> bytes:
    """The seccomp filter as BPF for x86_64 or aarch64: each denied call gives EPERM, clone3 ENOSYS (glibc then uses
    clone, whose flags a filter can read), clone without CLONE_THREAD EPERM, a foreign architecture kills."""
    column = list(ARCHES).index(machine)
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, ARCHES[machine]), (give, 0, 0, KILL), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, ERRNO | EPERM)]
    denied = [numbers[column] for numbers in DENIED.values()]
    for number, error in [*((number, EPERM) for number in denied if number is not None), (CLONE3[column], ENOSYS)]:
        code += [(equal, 0, 1, number), (give, 0, 0, ERRNO | error)]
    code += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (any_bit, 1, 0, CLONE_THREAD)]
    code += [(give, 0, 0, ERRNO | EPERM), (give, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def silence(libc: Any) -> list[str]:
    """Seccomp, for this process and every thread it will start."""
    if platform.machine() not in ARCHES:
        return []
    code = ctypes.create_string_buffer(program(platform.machine()))
    packed = struct.pack("HxxxxxxP", (len(code) - 1) // 8, ctypes.addressof(code))
    return ["seccomp"] if libc.prctl(22, 2, ctypes.c_char_p(packed), 0, 0) == 0 else []


def lock(bounds: Json, directory: str, readable: list[str]) -> list[str]:
    """Every lock that can be had here, by name. NPROC counts a user's processes everywhere, so it is set only where
    they are counted apart or nothing else would stop a fork; it never binds root."""
    linux, processes = sys.platform.startswith("linux"), {resource.RLIMIT_NPROC: bounds["processes_max"]}
    libc: Any = ctypes.CDLL(None, use_errno=True) if linux else None
    held = separate(libc, directory, bounds["disk_bytes"]) if linux else []
    os.chdir(directory)
    limit(limits_of(bounds) | (processes if held else {}))
    if linux:
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which Landlock and seccomp ask for
        held += fence(libc, readable, directory) + silence(libc)
    if "seccomp" not in held:
        limit(processes)
    return [*held, "rlimits"]


def run_tests(data: Json) -> Json:
    """Run `solution`, then each of `tests` on what it defined: {"passed": [bool, …], "error": the first or null}."""
    space: Json = {"__name__": "solution"}
    passed, error = [], _fails(data["solution"], "solution", space)
    for number, test in enumerate(data["tests"] if error is None else ()):
        wrong = _fails(test, f"test {number}", dict(space))
        passed.append(wrong is None)
        error = error or (wrong and f"test {number}: {wrong}")
    return {"passed": passed, "error": error}


def _fails(source: str, name: str, space: Json) -> str | None:
    try:
        exec(compile(source, name, "exec"), space)  # noqa: S102 (what this process exists for)
    except BaseException as error:  # boundary: the code may raise anything, SystemExit too; all of it means "failed"
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


class _Text:
    """Collects what a program prints, up to a number of characters."""

    def __init__(self, chars_max: int) -> None:
        self.text, self._left = "", chars_max

    def write(self, text: str) -> int:
        self.text += text[: self._left]
        self._left = max(0, self._left - len(text))
        return len(text)

    def flush(self) -> None:
        """Nothing waits anywhere."""


def run_program(data: Json) -> Json:
    """Run one program among `files`: {"exit_status", "stdout", "files": those it wrote, "error"}."""
    out_max, files_max = data["chars_max"]
    for name, text in data["files"].items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    out, status, error = _Text(out_max), 0, ""
    sys.path.insert(0, "")
    sys.stdout = sys.stderr = out
    try:
        exec(compile(data["program"], "program", "exec"), {"__name__": "__main__"})  # noqa: S102 (as above)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        error = "" if left.code is None or isinstance(left.code, int) else str(left.code)[:200]
    except BaseException as raised:  # boundary: the code may raise anything
        status, error = 1, f"{type(raised).__name__}: {str(raised)[:200]}"
    return {"exit_status": status, "stdout": out.text, "files": _written(data["files"], files_max), "error": error}


def _written(value: Json, chars_max: int) -> Json:
    """The text files that are new or changed, by name, cut where they are over `chars_max` together."""
    files: Json = {}
    for name in sorted(os.listdir(".")):
        with contextlib.suppress(OSError, UnicodeDecodeError), open(name, encoding="utf-8") as file:
            text = file.read(chars_max + 1)
            if value.get(name) != text:
                files[name] = text[:chars_max]
                chars_max -= len(files[name])
    return files


def run_search(data: Json) -> Json:
    """{"found": bool} for a pattern in a text."""
    compiled = re.compile(data["pattern"], data["flags"])
    match = compiled.fullmatch(data["text"]) if data["whole"] else compiled.search(data["text"])
    return {"found": match is not None}


def run_schema(data: Json) -> Json:
    """{"error": first violation or null} of a JSON value against a schema; references outside it do not resolve."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    validator = validator_for(data["schema"])(data["schema"], registry=Registry())
    error = next(iter(validator.iter_errors(data["value"])), None)
    return {"error": None if error is None else f"{error.json_path}: {error.message[:200]}"}


JOBS: dict[str, Callable[[Json], Json]] = {
    "tests": run_tests,
    "program": run_program,
    "search": run_search,
    "schema": run_schema,
}


def main() -> None:
    """Read the job, lock, run, report."""
    order = json.loads(sys.stdin.buffer.read())
    nonce, out = order.pop("nonce"), os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(quiet, standard)
    sys.path += order["site"]
    if order["job"] == "schema":
        import jsonschema.validators  # noqa: F401 (while files can still be read)
    held = lock(order["limits"], order["directory"], order["readable"])
    os.write(out, json.dumps({"locks": held}).encode() + b"\n")
    if "seccomp" not in held:
        if not order["weak_ok"]:
            os._exit(0)
        sys.modules["socket"] = sys.modules["_socket"] = None  # type: ignore[assignment]
    try:
        result = JOBS[order["job"]](order["data"])
    except Exception as error:  # boundary: reported; the parent decides what it means for the grade
        result = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    os.write(out, json.dumps({"nonce": nonce, "result": result}).encode() + b"\n")
    os._exit(0)  # threads the code left behind are not waited for


if __name__ == "__main__":
    main()
