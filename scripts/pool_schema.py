"""Writes docs/pool.schema.json from the pool file's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.core.pool.workers import PoolFile

PAGE = Path(__file__).resolve().parent.parent / "docs" / "pool.schema.json"


def schema() -> dict[str, Any]:
    """The JSON schema of pool.yaml (draft 2020-12)."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Baton pool file"}
    described = PoolFile.model_json_schema()
    described["$defs"]["WorkerSpec"]["required"].remove("handle")  # the reader derives one
    return {**described, **head}


def render() -> str:
    """Return the text of the file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False, sort_keys=True) + "\n"
