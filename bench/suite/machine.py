"""The machine that figures were measured on, without its name and paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("uvicorn", "uvloop", "httptools", "aiohttp", "redis", "hiredis", "msgspec", "psycopg", "fastapi")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, and versions of what Baton runs on."""
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    return {
        "processor": first(r"model name\s*:\s*(.+)", cpu) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else 0,
        "kernel": f"{platform.system()} {first(r'([0-9]+[.][0-9]+([.][0-9]+)?)', platform.release())}",
        "python": platform.python_version(),
        "baton": version("baton"),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def commit() -> str:
    """The commit of the code, with `+` behind it where code differs from it; empty outside a repository."""
    root = Path(__file__).resolve().parents[2]
    head = _git(root, "rev-parse", "--short=10", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "gateway", "bench")
    return head + ("+" if head and changed else "")


def load() -> float:
    """The load average over the last minute."""
    return round(os.getloadavg()[0], 1)


def first(pattern: str, text: str) -> str:
    """The first group of the first match, without space around it; empty where there is none."""
    found = re.search(pattern, text)
    return found[1].strip() if found else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
