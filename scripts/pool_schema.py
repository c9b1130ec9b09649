"""Writes docs/pool.schema.json from the pool file's models. `--check` fails where the file is not current."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gateway.core.pool import PoolFile

TARGET = Path(__file__).resolve().parent.parent / "docs" / "pool.schema.json"


def schema() -> dict[str, Any]:
    """The JSON schema of pool.yaml (draft 2020-12)."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Baton pool file"}
    return {**PoolFile.model_json_schema(), **head}


def rendered() -> str:
    """The schema as the file holds it."""
    return json.dumps(schema(), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> int:
    """0 where the file is current (now)."""
    if "--check" in sys.argv:
        current = TARGET.exists() and TARGET.read_text() == rendered()
        print("current" if current else f"{TARGET} is stale; run scripts/pool_schema.py")
        return 0 if current else 1
    TARGET.write_text(rendered())
    print(TARGET)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
