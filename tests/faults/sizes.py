"""How long the tests of this folder run, and where they write what they have measured."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Literal, cast

SIZE = cast(Literal["ci", "long"], os.environ.get("FAULTS", "ci"))  # `make faults` sets long
RESULTS = Path(__file__).resolve().parents[2] / "build" / "faults.jsonl"


def held(row: str, **numbers: object) -> None:
    """A row of the matrix held, with these numbers. One line on standard output, and one in the file."""
    line = {"row": row, "size": SIZE, "at_s": round(time.time()), **numbers}
    print(f"{row}: " + ", ".join(f"{name} {value}" for name, value in numbers.items()))  # noqa: T201
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
