"""Write the generated pages under docs/ and the chart's copies of deploy/, or with --check name those that are not
current (exit 1). A chart can only use files of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

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
DEPLOY = Path(__file__).parents[1] / "deploy"
COPIED = ("vllm.sh", "prometheus/alerts.yaml")


def _files() -> Iterator[tuple[Path, str]]:
    """Each generated file, and what it should hold."""
    yield from ((page.PAGE, page.render()) for page in PAGES)
    for name in COPIED:
        yield DEPLOY / "helm" / "files" / Path(name).name, (DEPLOY / name).read_text(encoding="utf-8")


def main() -> int:
    """Return 0 if every file is current, else 1."""
    stale = 0
    for path, text in _files():
        if "--check" not in sys.argv[1:]:
            write_atomic(path, text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is not current; run `make docs`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
