"""The size of a test, and where the rows of the fault matrix write what they measure.

TEST_SIZE: `small` in `make test`, `ci` in `make test-all` and in CI, `long` in `make faults`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Literal, TypeVar, cast

Size = Literal["small", "ci", "long"]
SIZE = cast(Size, os.environ.get("TEST_SIZE", "small"))
RESULTS = Path(__file__).resolve().parents[1] / "build" / "faults.jsonl"
T = TypeVar("T")


def sized(*, ci: T, long: T, small: T | None = None) -> T:
    """The value for the size of this run. A test that `make test` leaves out needs no `small`."""
    values: dict[Size, T] = {"small": ci if small is None else small, "ci": ci, "long": long}
    return values[SIZE]


SLACK = sized(ci=10, long=1)  # allow a busy machine this many times the promised duration


def report_row(row: str, **numbers: object) -> None:
    """Report that a row of the matrix holds, with these numbers: a line on standard output and a line in RESULTS."""
    line = {"row": row, "size": SIZE, "at_s": round(time.time()), **numbers}
    print(f"{row}: " + ", ".join(f"{name} {value}" for name, value in numbers.items()))  # noqa: T201
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
