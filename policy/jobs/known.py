"""What the gate of a job needs to ask real workers, as the gateway on the data directory gives it: its URL, the pool
file, a key, and a cap in dollars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.files import write_atomic

KEY = "gate.key"  # beside the facts; another directory of a job may be copied elsewhere


def known(facts: Path | None, usd_max: str) -> dict[str, str]:
    """Arguments of the gate by name; none of those that are not known. `facts`: the file that says where the gateway
    serves. The key of the facts goes into a file that only this user can read."""
    found: dict[str, str] = {"usd_max": usd_max} if usd_max else {}
    try:
        served: Any = json.loads(facts.read_text(encoding="utf-8")) if facts is not None else {}
        names = {"base_url": "url", "pool_file": "pool_file"}
        found |= {flag: str(served[name]) for name, flag in names.items() if served.get(name)}
        if facts is not None and served.get("data_key"):
            write_atomic(facts.parent / KEY, str(served["data_key"]), mode=0o600)
            found["key_file"] = str(facts.parent / KEY)
    except (OSError, ValueError, AttributeError):
        return found  # no gateway serves here; the job has to name the rest
    return found
