"""The rows of the fault matrix at their long sizes: `python -m scripts.faults [--size ci] [--again] [ROW …]`.

Each row prints one line with the number that held, and build/faults.json keeps it. Rows that held at this commit are
not run again, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gateway.files import write_atomic

ROOT = Path(__file__).resolve().parents[1]
LINES, SUMMARY = ROOT / "build" / "faults.jsonl", ROOT / "build" / "faults.json"
FAULTS = "tests/faults"
ROWS: dict[str, tuple[str, ...]] = {
    "L1": (f"{FAULTS}/test_load.py::test_l1_single_steps_under_budgets_of_four_scopes",),
    "L2": (f"{FAULTS}/test_latency.py",),
    "L3": (f"{FAULTS}/test_load.py::test_l3_single_steps_through_litellm",),
    "L4": (f"{FAULTS}/test_load.py::test_l4_a_plan_of_three_steps_and_a_merge",),
    "L5": (f"{FAULTS}/test_load.py::test_l5_open_streams_lose_and_reorder_nothing",),
    "L6": (f"{FAULTS}/test_overload.py",),
    "L7": (f"{FAULTS}/test_money.py::test_l7_a_hot_budget_is_exact_over_three_gateway_processes",),
    "L7 holds": (f"{FAULTS}/test_money.py::test_l7_a_hot_budget_is_exact_over_three_clients_of_redis",),
    "L8": (f"{FAULTS}/test_soak.py",),
    "L9": (f"{FAULTS}/test_outage.py",),
    "L10": (f"{FAULTS}/test_slow_senders.py",),
    "F1": (f"{FAULTS}/test_crash.py::test_f1_a_gateway_killed_anywhere_loses_doubles_and_overspends_nothing",),
    "F2": (
        f"{FAULTS}/test_crash.py::test_f2_a_rolling_restart_fails_no_request_and_loses_no_row",
        f"{FAULTS}/test_crash.py::test_f2_a_balancer_that_never_retries_fails_no_request_either",
    ),
    "F3": (f"{FAULTS}/test_postgres.py",),
    "F4": (f"{FAULTS}/test_money.py::test_f4_redis_breaks_in_seven_ways_and_nobody_overspends",),
    "F5": (f"{FAULTS}/test_money.py::test_f5_without_redis_at_the_start_a_gateway_waits_and_serves_once_it_is_there",),
    "F6": (f"{FAULTS}/test_partition.py",),
    "F7": (f"{FAULTS}/test_conductor.py",),
    "F8": (f"{FAULTS}/test_workers.py", "tests/integration/test_worker_failures.py"),
    "F9": (f"{FAULTS}/test_clients.py",),
    "F10": ("tests/service/test_recover.py",),
    "F11": (f"{FAULTS}/test_disk.py", "tests/integration/test_spool_faults.py", "tests/integration/test_shipper.py"),
    "F12": ("tests/acceptance/test_policy_versions.py", "tests/contract/test_policy_engine.py"),
    "F13": ("tests/integration/test_idempotency.py",),
    "F14": (f"{FAULTS}/test_mcp.py",),
    "F15": (f"{FAULTS}/test_summaries.py",),
    "F16": (f"{FAULTS}/test_rests.py",),
    "B1": ("tests/security/test_schema.py",),
    "B3": ("tests/contract/test_budgets_model.py",),
    "B4": ("tests/unit/loop/test_plan.py",),
}


def main() -> int:
    """Run the rows; return 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--size", choices=("ci", "long"), default="long")
    parser.add_argument("--again", action="store_true", help="also what has held at this commit")
    options = parser.parse_args()
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"no such row: {', '.join(unknown)}")
    summary, commit = _read(), _commit()
    for row in options.rows or ROWS:
        before = summary.get(row, {})
        if not options.again and before.get("held") and (before["commit"], before["size"]) == (commit, options.size):
            print(f"{row}: held at this commit already")
            continue
        summary[row] = {**_run(row, options.size), "commit": commit, "size": options.size}
        write_atomic(SUMMARY, json.dumps(summary, indent=2, sort_keys=True) + "\n")
    return 0 if all(summary[row]["held"] for row in options.rows or ROWS) else 1


def _run(row: str, size: str) -> dict[str, Any]:
    """Run the tests of one row; return their measurements."""
    LINES.parent.mkdir(exist_ok=True)
    offset = LINES.stat().st_size if LINES.exists() else 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "5400", *ROWS[row]]
    began_s = time.monotonic()
    process = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TEST_SIZE": size}, capture_output=True, text=True, check=False
    )
    numbers: dict[str, Any] = {}
    if LINES.exists():
        with LINES.open(encoding="utf-8") as file:
            file.seek(offset)
            for line in file:
                measured = json.loads(line)
                numbers |= {name: value for name, value in measured.items() if name not in ("row", "size", "at_s")}
    passed, took_s = process.returncode == 0, round(time.monotonic() - began_s)
    figures = ", ".join(f"{name} {value}" for name, value in numbers.items()) or _last_line(process.stdout)
    print(f"{row}: {'held' if passed else 'BROKEN'} in {took_s} s: {figures}", flush=True)
    if not passed:
        print(process.stdout[-3000:], file=sys.stderr)
    return {"held": passed, "took_s": took_s, "numbers": numbers}


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it said nothing"])[-1]


def _read() -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads(SUMMARY.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary


def _commit() -> str:
    """Return the commit of the code under test; a tree with changes counts as another commit."""
    git = ("git", "-C", str(ROOT))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return f"{head}+{time.time():.0f}" if changed else head


if __name__ == "__main__":
    raise SystemExit(main())
