"""One line a row of the security matrix, with the number that was measured (`pytest -s` shows it)."""

from __future__ import annotations

import sys


def measured(row: str, what: str) -> None:
    """Say it on standard error."""
    sys.stderr.write(f"\n{row}: {what}\n")
