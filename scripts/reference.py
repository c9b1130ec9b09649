"""Write the generated pages under docs/, or with --check name those that are not current (exit 1)."""

from __future__ import annotations

import sys

from gateway.files import write_atomic
from scripts import (
    api_reference,
    config_reference,
    job_schema,
    metrics_reference,
    pool_schema,
    responses_reference,
    training_reference,
)

PAGES = (
    config_reference,
    pool_schema,
    job_schema,
    api_reference,
    metrics_reference,
    responses_reference,
    training_reference,
)


def main() -> int:
    """Return 0 if every page is current, else 1."""
    stale = 0
    for page in PAGES:
        if "--check" not in sys.argv[1:]:
            write_atomic(page.PAGE, page.render())
        elif not page.PAGE.exists() or page.PAGE.read_text(encoding="utf-8") != page.render():
            print(f"{page.PAGE.name} is not current; run `make docs`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
