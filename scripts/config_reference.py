"""Write docs/configuration.md from the settings themselves."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from gateway.config.settings import SECTIONS, variable

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration

<!-- Written by scripts/config_reference.py (`make docs`); change the fields in gateway/config/ instead. -->

Every setting is an environment variable. A `BATON_*` variable that is not in this list stops the start with the
nearest known name; `baton check` says the same without starting. `DATABASE_URL` and `REDIS_URL` are read too, after
their prefixed forms. Units are in the names: `_s` seconds, `_ms` milliseconds, `_usd` dollars, `_bytes` bytes.
"""


def limits(field_metadata: list[object]) -> str:
    """Return the bounds of a field in mathematical notation: `0 < x ≤ 86400`."""
    bounds: dict[str, str] = {}
    for item in field_metadata:
        bounds |= {name: str(getattr(item, name)) for name in ("gt", "ge", "lt", "le") if hasattr(item, name)}
    low = f"{bounds['gt']} < " if "gt" in bounds else f"{bounds['ge']} ≤ " if "ge" in bounds else ""
    high = f" < {bounds['lt']}" if "lt" in bounds else f" ≤ {bounds['le']}" if "le" in bounds else ""
    return f"{low}x{high}" if low or high else ""


def default(value: object) -> str:
    """Return a default as the environment holds it; an empty text for None."""
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def section(model: type[BaseModel]) -> str:
    """One heading and its table."""
    lines = [f"\n## {model.__doc__}\n", "| variable | default | range | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        choices = re.findall(r"'([^']+)'", str(field.annotation)) if "Literal" in str(field.annotation) else []
        span = " ".join(f"`{choice}`" for choice in choices) or limits(list(field.metadata))
        lines.append(f"| `{variable(name)}` | {default(field.default)} | {span} | {field.description} |")
    return "\n".join(lines) + "\n"


def render() -> str:
    """Return the page."""
    return HEAD + "".join(section(model) for model in SECTIONS)
